{{- define "lazaret.name" -}}
{{ printf "%s-%s" .Release.Name .Values.side | trunc 52 | trimSuffix "-" }}
{{- end -}}

{{- define "lazaret.labels" -}}
{{ include "lazaret.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "lazaret.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: {{ .Values.side }}
{{- end -}}

{{- define "lazaret.image" -}}
{{- $repository := required "image.repository: build the image from a bundle, and name it in your own registry" .Values.image.repository -}}
{{- if .Values.image.digest -}}
{{ printf "%s@%s" $repository .Values.image.digest }}
{{- else -}}
{{ printf "%s:%s" $repository (default .Chart.AppVersion .Values.image.tag) }}
{{- end -}}
{{- end -}}

{{- define "lazaret.home" -}}
{{ printf "/var/lib/lazaret/%s" .Values.side }}
{{- end -}}

{{- /* a preset's name, or the file in which the chart's own text lies */ -}}
{{- define "lazaret.policy" -}}
{{- $policy := index .Values .Values.side "policy" -}}
{{- if contains "\n" $policy -}}/config/policy.toml{{- else -}}{{ $policy }}{{- end -}}
{{- end -}}

{{- define "lazaret.hardened" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- /* asks the service over its control socket whether its ledger can be written; console.toml is not needed for it */ -}}
{{- define "lazaret.alive" -}}
exec:
  command: [python, -m, protos.service.control_client, {{ include "lazaret.home" . }}]
timeoutSeconds: 15
periodSeconds: 30
{{- end -}}

{{- define "lazaret.mounts" -}}
- name: state
  mountPath: /var/lib/lazaret
- name: config
  mountPath: /config
  readOnly: true
- name: tmp
  mountPath: /tmp
{{- if and (eq .Values.side "coordinator") .Values.coordinator.databaseSecret }}
- name: database
  mountPath: /run/database
  readOnly: true
{{- end }}
{{- end -}}
