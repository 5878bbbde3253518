#!/bin/bash
# Type an older commit's commands, from nothing to a release that waits, and pack what they leave.
#
#   write_typed.sh OLDER OUT    OLDER: the commit's tree; OUT: a folder that is not there yet
set -eu
tree=$(realpath "$1") && mkdir "$2" && cd "$2"
export PYTHONPATH=$tree
agent() { python -m agent --home site-a "$@"; }
coordinator() { python -m coordinator --home coordinator "$@"; }
press() { agent release ksame --basis hospital/basis.safetensors --modality OT --k 5 "$@"; }

# both sides: a policy that lets a patient be in three releases; the hospital's wants the compliance officer's approval
python -m deploy.demo.folder hospital --patients 12 > basis.sha256
rm -r hospital/dicom/scanner hospital/dicom/broken
mkdir later && find hospital/dicom -mindepth 1 -maxdepth 1 -type d | sort | tail -6 | xargs mv -t later
sed 's/^max_releases_per_patient = 1/max_releases_per_patient = 3/' "$tree/policies/presets/internal.toml" > federation.toml
sed 's/^approvals = \[\]/approvals = ["compliance"]/' federation.toml > hospital.toml
coordinator init --listen 127.0.0.1:17443 --policy federation.toml
mkdir -m 700 persons
coordinator ledger person persons/officer.key > officer.pub
coordinator ledger person persons/physician.key > physician.pub
coordinator ledger appoint officer-1 compliance "$(cat officer.pub)"
coordinator ledger appoint physician-1 hospital "$(cat physician.pub)"
python -m coordinator --home coordinator serve > serve.log 2>&1 &
serving=$!
trap 'kill $serving' EXIT

# the hospital joins
agent init --site site-a --coordinator 127.0.0.1:17443 --policy hospital.toml --input ../hospital/dicom \
    --modality OT --secondary-capture-modality OT --public-component "$(cat basis.sha256)"
until coordinator enrolments > /dev/null 2>&1; do sleep 1; done
coordinator invite site-a --out invitation --token-file token > invited
root=$(sed -n 's/.* root: //p' invited)
agent enrol invitation --token-file token --fingerprint "$root" || true
digest=$(coordinator enrolments --json | sed -n 's/.*"digest": "\([0-9a-f]*\)".*/\1/p')
for name in officer physician; do
    coordinator ledger sign enrol site-a "$digest" --serial join-a --person $name-1 --key persons/$name.key --out $name.json
done
coordinator approve site-a officer.json physician.json --serial join-a
agent enrol --wait 20
agent ingest
agent project create study-1
agent ledger person persons/dpo.key > dpo.pub
agent ledger appoint dpo-1 compliance "$(cat dpo.pub)"

# one set is approved and admitted, the next one waits for its approval
waiting() { press | tr -d '\n' | grep -oE "sign release release-[0-9a-f]{32} ?[0-9a-f]{64}" | sed 's/sign release //'; }
read -r release artifact <<< "$(waiting)"
agent ledger sign release "$release" "$artifact" --serial "$release" --person dpo-1 --key persons/dpo.key --out approval.json
agent ledger approve approval.json
agent release send "$release"
mv later/* hospital/dicom
agent ingest
waiting > waits || true

# both sides stop; what an auditor and a restore need
kill $serving && wait $serving || true
trap - EXIT
coordinator ledger export coordinator.export
agent ledger export site-a.export
coordinator ledger fingerprint > coordinator.fingerprint
agent ledger fingerprint > site-a.fingerprint
coordinator report --release "$release" certificate certificate.json
agent backup site-a.backup
coordinator backup coordinator.backup

# what a test needs, small: what the machine or the process left beside it goes
rm -rf coordinator/flower site-a/agent.log coordinator/coordinator.log
find . \( -name "*-shm" -o -name "*.part" \) -delete  # the write-ahead logs stay: what was killed has entries in them
tar --sort=name --owner=0 --group=0 --numeric-owner --mtime=@0 -cJf ../typed.tar.xz coordinator coordinator.* \
    site-a.export site-a.fingerprint certificate.json
