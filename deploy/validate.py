"""Are the units, the container files, the compose files and the chart what they claim? One command, no network.

    python -m deploy.validate

Units: ``systemd-analyze verify``, and its figure for exposure. Compose: compose's own reading. The chart: its values
against their schema; rendered by helm, or by ``helm/render`` where Debian's Go and sprig are; each document against
Kubernetes' schemas, strictly, and against the restricted Pod Security Standard. Besides, of every container: not
root, nothing to write on, no privilege, limits into which a job fits; it is asked whether it is well, and comes back.
A tool that is missing is a failure: nobody has looked then.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jsonschema
import kubernetes_validate
import yaml

from agent.service.job_rules import SERVICE_GIB
from protos.common.errors import ConfigError

HERE: Final = Path(__file__).resolve().parent
CHART: Final = HERE / "helm" / "lazaret"
EXPOSURE: Final = 25  # tenths of systemd's figure, 0 (sealed) to 10 (anything goes); a bare service has 9.6
KUBERNETES: Final = ("1.29", "1.34")  # the oldest and the newest that we say; each has schemas of its own
_GOPATH: Final = "/usr/share/gocode"  # where Debian puts Go libraries
_SIDES: Final = ("agent", "coordinator")
_PROBES: Final = ("startupProbe", "livenessProbe")
_TMP_GIB: Final = 1  # of memory, for a container's /tmp
Problems = list[str]
Table = Mapping[str, Any]


class ToolMissingError(ConfigError, RuntimeError):
    """A tool that a check wants is not on this machine; the text says which Debian package brings it."""


def _run(command: Sequence[str], **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*command], check=False, capture_output=True, text=True, **more)  # noqa: S603 - fixed programs


def _tool(name: str, package: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise ToolMissingError(f"{name} is not here (apt install {package})")
    return found


def unit(path: Path) -> Problems:
    """What systemd itself finds wrong with a unit, and how much the service could do."""
    analyze = _tool("systemd-analyze", "systemd")
    with tempfile.TemporaryDirectory() as folder:
        # only the program is not there yet: everything else of the unit is looked at as it is
        looked_at = Path(folder) / path.name
        looked_at.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", path.read_text(), flags=re.M))
        verified = _run([analyze, "verify", "--man=no", str(looked_at)])
        said = [line for line in verified.stderr.splitlines() if path.name in line]
        threshold = [f"--threshold={EXPOSURE}", "--offline=true", "--no-pager"]
        exposed = _run([analyze, "security", *threshold, str(looked_at)])
    if verified.returncode and not said:
        said = [f"systemd-analyze verify failed: {verified.stderr[-300:]}"]
    if exposed.returncode:
        found = re.search(r"exposure level for \S+: ([\d.]+)", exposed.stdout)
        said.append(f"exposure {found[1] if found else 'unknown'}, more than {EXPOSURE / 10}")
    said += [
        f"{name} is missing"
        for name in (
            "User=",
            "MemoryMax=",
            "ReadWritePaths=",
            "WatchdogSec=",
            "OOMPolicy=continue",
            "Restart=on-failure",
        )
        if f"\n{name}" not in path.read_text()
    ]
    return said


def containerfile(path: Path) -> Problems:
    """Not root, nothing from a network, and no shell that reads what somebody typed."""
    said = []
    text = path.read_text().replace("\\\n", " ")
    lines = [line.split(None, 1) for line in text.splitlines() if line.strip() and not line.startswith("#")]
    of = [(word.upper(), *rest) for word, *rest in lines]
    last = max(at for at, (word, *_) in enumerate(of) if word == "FROM")
    users = [rest[0] for word, *rest in of[last:] if word == "USER"]
    if not users or not re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1]):
        said.append("the last stage runs as root, or as a user without a number")
    if any(word == "RUN" for word, *_ in of[last:]):
        said.append("the last stage runs something: what it installs nobody signed")
    said += [
        f"{word} brings in what is not of the bundle"
        for word, *rest in of
        if word == "ADD" or "://" in " ".join(rest)
    ]
    said += ["ENTRYPOINT is no list"] if not any(w == "ENTRYPOINT" and r[0].startswith("[") for w, *r in of) else []
    return said


def compose(path: Path) -> Problems:
    """What compose finds wrong with a file, and what its services could do."""
    plugin = _run(["docker", "compose", "version"]) if shutil.which("docker") else None
    reads = ["docker", "compose"] if plugin and not plugin.returncode else [_tool("docker-compose", "docker-compose")]
    read = _run([*reads, "--file", str(path), "config"], cwd=path.parent)
    if read.returncode:
        return [read.stderr.strip()[-500:]]
    services = yaml.safe_load(read.stdout)["services"]
    said = [line for name, of in services.items() for line in _service(name, of)]
    jobs = path.parent / "jobs.toml"
    return said + (_jobs_fit(jobs.read_text(), _bytes(services["agent"]["mem_limit"])) if jobs.exists() else [])


def _jobs_fit(jobs: str, limit: int) -> Problems:
    """What a job, the service and ``/tmp`` take, beside the bytes that a container may take.

    A job is two processes while it makes a set, each of which may take ``memory_gib`` (limits.md).
    """
    most = tomllib.loads(jobs).get("memory_gib", 0.0)
    taken = 2 * most + SERVICE_GIB + _TMP_GIB
    if not most > 0:
        return ["jobs.toml bounds no job's memory: the kernel would end the container, or a job at any point"]
    has = limit / 2**30
    return [] if taken <= has else [f"a job of twice {most:g} GiB and the service do not fit into {has:g} GiB"]


def _service(name: str, of: Table) -> Iterator[str]:
    wanted = {
        "its file system can be written": of.get("read_only") is True,
        "it has capabilities": of.get("cap_drop") == ["ALL"] and not of.get("cap_add"),
        "it may gain privileges": "no-new-privileges:true" in of.get("security_opt", []),
        "it runs as root, or as a user without a number": re.fullmatch(r"[1-9]\d*:[1-9]\d*", str(of.get("user"))),
        "its memory has no limit": of.get("mem_limit") or of.get("deploy", {}).get("resources", {}).get("limits"),
        "its processes have no limit": of.get("pids_limit"),
        "it is privileged, or shares the machine's network": not of.get("privileged") and not of.get("network_mode"),
        "it mounts the engine's socket": "docker.sock" not in str(of.get("volumes")),
        "it does not come back after a reboot": of.get("restart") in ("always", "unless-stopped"),
        "nobody asks it whether it is well": name not in _SIDES
        or _asks(of.get("healthcheck", {}).get("test", []), name),
    }
    yield from (f"{name}: {what}" for what, fits in wanted.items() if not fits)


def renderer(folder: Path) -> list[str]:
    """The command that renders a chart: helm's, or our own built in ``folder``.

    Raises:
        ToolMissingError: there is neither.
    """
    if shutil.which("helm"):
        return ["helm", "template"]
    go = _tool("go", "golang-go golang-github-masterminds-sprig-dev")
    program = folder / "render"
    # a cache of its own beside the program: this builds where the user has no home
    environment = {**os.environ, "GO111MODULE": "off", "GOPATH": _GOPATH, "GOCACHE": str(folder / "cache")}
    built = _run([go, "build", "-o", str(program), str(HERE / "helm" / "render" / "render.go")], env=environment)
    if built.returncode:
        raise ToolMissingError(f"helm/render cannot be built: {built.stderr[-500:]}")
    return [str(program)]


def render(how: Sequence[str], chart: Path, values: Path) -> list[dict[str, Any]]:
    """The documents of a chart for one values file.

    Raises:
        ValueError: it does not render; the text is the chart's own sentence.
    """
    if how[-1] == "template":
        done = _run([*how, "demo", str(chart), "--namespace", "demo", "--values", str(values)])
    else:
        done = _run([*how, str(chart), "demo", "demo", str(values)])
    if done.returncode:
        raise ValueError(done.stderr.strip()[-500:])
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def chart(how: Sequence[str], place: Path, values: Path) -> Problems:
    """What is wrong with a chart under one values file: values, rendering, schemas, what its pods could do."""
    schema = json.loads((place / "values.schema.json").read_text())
    whole = _over(yaml.safe_load((place / "values.yaml").read_text()), yaml.safe_load(values.read_text()))
    said = [
        f"{'.'.join(map(str, e.path))}: {e.message[:200]}"
        for e in jsonschema.Draft7Validator(schema).iter_errors(whole)
    ]
    if said:
        return said
    try:
        documents = render(how, place, values)
    except ValueError as error:
        return [str(error)]
    for document in documents:
        for version in KUBERNETES:
            try:
                kubernetes_validate.validate(document, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                said.append(f"{document['kind']}, Kubernetes {version}: {error.message[:200]}")
        said += list(_pod(document["spec"]["template"]["spec"])) if document["kind"] == "StatefulSet" else []
        if document["kind"] == "ConfigMap" and whole["side"] == "agent":
            said += _jobs_fit(
                document.get("data", {}).get("jobs.toml", ""), _bytes(whole["resources"]["limits"]["memory"])
            )
    kinds = {document["kind"] for document in documents}
    said += [f"no {kind}" for kind in sorted({"NetworkPolicy", "StatefulSet", "Service", "ConfigMap"} - kinds)]
    return said


def _pod(of: Table) -> Iterator[str]:
    """Kubernetes' Pod Security Standards, restricted; and what we want besides."""
    pod = of.get("securityContext", {})
    wanted = {
        "it may run as root": pod.get("runAsNonRoot") is True and pod.get("runAsUser", 0) > 0,
        "its system calls are not filtered": pod.get("seccompProfile", {}).get("type") == "RuntimeDefault",
        "it holds a token of the cluster": of.get("automountServiceAccountToken") is False,
        "it shares the node": not any(of.get(name) for name in ("hostNetwork", "hostPID", "hostIPC")),
        "it mounts the node": not any("hostPath" in volume for volume in of.get("volumes", [])),
        "every start would open the keys to the group": pod.get("fsGroupChangePolicy") == "OnRootMismatch",
    }
    yield from (f"pod: {what}" for what, fits in wanted.items() if not fits)
    for one in [*of.get("initContainers", []), *of["containers"]]:
        context = one.get("securityContext", {})
        wanted = {
            "it may gain privileges": context.get("allowPrivilegeEscalation") is False,
            "its file system can be written": context.get("readOnlyRootFilesystem") is True,
            "it has capabilities": context.get("capabilities") == {"drop": ["ALL"]},
            "its memory has no limit": one.get("resources", {}).get("limits", {}).get("memory"),
            "nobody asks it whether it is well": one["name"] not in _SIDES
            or all(_asks(one.get(p, {}).get("exec", {}).get("command", []), one["name"]) for p in _PROBES),
        }
        yield from (f"{one['name']}: {what}" for what, fits in wanted.items() if not fits)


def _asks(command: Sequence[str] | None, side: str) -> bool:
    """Does this command ask the service itself, over its control socket?"""
    return list(command or ())[-4:] == ["python", "-m", "protos.service.control_client", f"/var/lib/lazaret/{side}"]


def _bytes(quantity: str) -> int:
    """A quantity of memory, as Kubernetes and compose write them.

    Raises:
        ValueError: it is in none of these units.
    """
    found = re.fullmatch(r"(\d+)(?:([kmgt])[ib]?)?", str(quantity).lower())
    if found is None:
        raise ValueError(f"{quantity}: write memory as 16Gi")
    return int(found[1]) << {None: 0, "k": 10, "m": 20, "g": 30, "t": 40}[found[2]]


def _over(under: Table, layer: Table) -> dict[str, Any]:
    """One table of values on another, key by key, as helm does."""
    both = [
        (k, _over(under[k], v) if isinstance(v, dict) and isinstance(under.get(k), dict) else v)
        for k, v in layer.items()
    ]
    return {**under, **dict(both)}


def checks(folder: Path) -> Iterator[tuple[str, Callable[[], Problems]]]:
    """Everything there is to check, by name."""
    for path in sorted((HERE / "systemd").glob("*.service")):
        yield f"systemd/{path.name}", lambda path=path: unit(path)  # type: ignore[misc]
    for path in sorted((HERE / "containers").glob("*.Containerfile")):
        yield f"containers/{path.name}", lambda path=path: containerfile(path)  # type: ignore[misc]
    for path in sorted((HERE / "compose").glob("*/compose.yml")):
        yield f"compose/{path.parent.name}", lambda path=path: compose(path)  # type: ignore[misc]
    for path in sorted((HERE / "helm").glob("*.example.yaml")):
        yield f"helm/{path.name}", lambda path=path: chart(renderer(folder), CHART, path)  # type: ignore[misc]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0 all in order, 1 something is not, 2 usage."""
    argparse.ArgumentParser(prog="python -m deploy.validate", description=__doc__).parse_args(argv)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, check in checks(Path(folder)):
            try:
                problems = check()
            except ToolMissingError as error:
                problems = [str(error)]
            sys.stdout.write("".join(f"FAIL  {name}: {line}\n" for line in problems) or f"ok    {name}\n")
            failed += bool(problems)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
