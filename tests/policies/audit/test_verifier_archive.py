"""The auditor's one file: the same bytes each time, and it runs where nothing of ours is installed."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from deploy.verifier import ForeignImportError, archive, main, modules_needed
from policies.accounting.rdp import cost, epsilon_nano
from policies.ledger.backends.sqlite import export_file
from policies.ledger.entries import Reserved
from policies.ledger.store import AppendRequest
from policies.ledger_service import ArtifactFindings, digest
from policies.statements import claim_json
from protos.common.canonical_json import canonical
from tests.support.ledger_world import BOTH, DP, Hospital, open_register

PACKAGES = ("cryptography", "cffi", "_cffi_backend", "pycparser")


@dataclass(frozen=True)
class Auditor:
    """A machine with Python and cryptography, where the one file was copied to."""

    python: Path
    folder: Path

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        clean = {"PATH": os.defpath, "LC_ALL": "C"}
        command = [str(self.python), "-I", "-B", *arguments]
        return subprocess.run(command, cwd=self.folder, env=clean, capture_output=True, text=True, check=False)

    def verify(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run("lazaret-verify.pyz", *arguments)


def _link_packages(site: Path) -> None:
    """The running interpreter's cryptography and what it stands on, and nothing else."""
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            continue  # pycparser is needed to build bindings only, and newer cffi may do without
        origin = Path(spec.origin)
        origin = origin.parent if origin.name == "__init__.py" else origin
        for path in (origin, *origin.parent.glob(f"{name}.libs")):
            (site / path.name).symlink_to(path)


@pytest.fixture(scope="module")
def auditor(tmp_path_factory: pytest.TempPathFactory) -> Auditor:
    folder = tmp_path_factory.mktemp("auditor")
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder / "env")
    python = folder / "env" / "bin" / "python"
    (site,) = (folder / "env" / "lib").glob("python*/site-packages")
    _link_packages(site)
    (folder / "elsewhere").mkdir()
    assert main([str(folder / "elsewhere" / "lazaret-verify.pyz")]) == 0
    return Auditor(python, folder / "elsewhere")


@pytest.fixture(scope="module")
def ledger(auditor: Auditor, tmp_path_factory: pytest.TempPathFactory) -> Auditor:
    """An export with a grant, a release and a refusal, and a checkpoint from before the last entries."""
    path = tmp_path_factory.mktemp("books") / "ledger.db"
    key, a = Ed25519PrivateKey.generate(), Hospital("site-a")
    register = open_register(path, a, key=key)
    for grant, claim, run in (("grant-dp", DP, "run"), ("grant-k", None, "")):
        asked = a.reservation(grant, claim, "federated", run) if claim else a.reservation(grant)
        assert register.reserve(f"reserve-{grant}", asked, a.seal(asked)).admitted
    older = register.store.checkpoint()
    release = a.release("grant-k")
    assert register.admit("submit", release, a.seal(release), ArtifactFindings()).admitted
    again = a.reservation("grant-again")
    assert not register.reserve("reserve-again", again, a.seal(again)).admitted
    several = a.reservation("grant-several", BOTH, "privimage")
    assert register.reserve("reserve-several", several, a.seal(several)).admitted
    account = register.store.state.accounts["site-a/rdp"].opened
    nano = epsilon_nano(BOTH, float(account.delta), account.order)
    made = a.release(
        "grant-several", mechanism="privimage", claim=BOTH, epsilon_nano=nano, delta=account.delta,
        components=dict(several.components),
    )  # fmt: skip
    assert register.admit("submit-several", made, a.seal(made), ArtifactFindings()).admitted
    register.store.close()
    raw = export_file(path, "lazaret/test", key)
    (auditor.folder / "sound.export").write_bytes(raw)
    public = key.public_key().public_bytes_raw()
    (auditor.folder / "key.txt").write_text(hashlib.sha256(public).hexdigest())
    (auditor.folder / "older.checkpoint").write_text(older)
    at = raw.index(b"\nenvelopes ") + 200
    (auditor.folder / "changed.export").write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
    forged = open_register(path.with_name("forged.db"), a, key=key)
    for n in range(8):
        asked = a.reservation(f"other-{n}", DP if n else a.reservation("x").claim, *(("federated", "r") if n else ()))
        forged.reserve(f"k{n}", asked, a.seal(asked))
    forged.store.close()
    cheaper = open_register(path.with_name("cheaper.db"), a, key=key)
    sealed, less = a.seal(several), cost(BOTH, account.order) - 1
    cheap = Reserved(
        "grant-several", "site-a", "", "privimage", "site-a/rdp", less, canonical(claim_json(BOTH)), digest(sealed)
    )
    cheaper.store.append("sneaked", AppendRequest((cheap,), (sealed,)))
    cheaper.store.close()
    (auditor.folder / "cheaper.export").write_bytes(export_file(path.with_name("cheaper.db"), "lazaret/test", key))
    (auditor.folder / "rewritten.export").write_bytes(export_file(path.with_name("forged.db"), "lazaret/test", key))
    return auditor


def test_it_is_the_same_bytes_whenever_it_is_built(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outs = [tmp_path / name for name in ("a.pyz", "build/b.pyz")]  # a fresh clone has no build folder
    printed = []
    for out in outs:
        assert main([str(out)]) == 0
        printed.append(capsys.readouterr().out.split()[0])
    assert outs[0].read_bytes() == outs[1].read_bytes()
    assert printed[0] == printed[1]
    assert outs[0].stat().st_mode & 0o777 == 0o755


def test_it_is_the_same_bytes_when_the_sources_were_checked_out_at_another_time_and_place(tmp_path: Path) -> None:
    root = Path(main.__globals__["ROOT"])
    for source in reversed(list(modules_needed(root, "policies.audit.verify").values())):
        copy = tmp_path / source.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(source.read_bytes())
        copy.chmod(0o600)
        os.utime(copy, (1, 1))
    assert archive(tmp_path) == archive()


def test_another_source_gives_other_bytes(tmp_path: Path) -> None:
    (tmp_path / "policies" / "audit").mkdir(parents=True)
    (tmp_path / "policies" / "__init__.py").touch()
    (tmp_path / "policies" / "audit" / "__init__.py").touch()
    for text in ("x = 1\n", "x = 2\n"):
        (tmp_path / "policies" / "audit" / "verify.py").write_text(text)
        with zipfile.ZipFile(_written(tmp_path / "v.pyz", archive(tmp_path))) as packed:
            assert packed.read("policies/audit/verify.py") == text.encode()


def _written(path: Path, raw: bytes) -> Path:
    path.write_bytes(raw)
    return path


def test_a_sound_export_gives_0_and_says_what_it_found(ledger: Auditor) -> None:
    done = ledger.verify("sound.export", "--key", (ledger.folder / "key.txt").read_text())
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("SOUND: lazaret/test, ")
    assert "3 grants, 2 releases admitted, 1 refusals" in done.stdout


def test_a_changed_export_gives_1_and_a_reason(ledger: Auditor) -> None:
    done = ledger.verify("changed.export")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("NOT SOUND: ")


@pytest.mark.parametrize("arguments", [("nowhere.export",), (), ("sound.export", "--from", "nowhere"), ("--what",)])
def test_a_missing_file_or_a_wrong_call_gives_2(ledger: Auditor, arguments: tuple[str, ...]) -> None:
    done = ledger.verify(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "usage: lazaret-verify" in done.stderr


def test_json_says_the_same_for_machines(ledger: Auditor) -> None:
    named = ("--key", (ledger.folder / "key.txt").read_text(), "--json")
    sound, changed = ledger.verify("sound.export", *named), ledger.verify("changed.export", *named)
    found = json.loads(sound.stdout)
    assert (sound.returncode, found["sound"], found["grants"], found["refusals"]) == (0, True, 3, 1)
    assert found["accounts"]["site-a/k"]["spent"] == 1
    assert found["accounts"]["site-a/rdp"]["spent"] == cost(BOTH, 4)
    assert (changed.returncode, json.loads(changed.stdout)["sound"]) == (1, False)


def test_a_composed_claim_is_priced_again_from_its_parts(ledger: Auditor) -> None:
    done = ledger.verify("cheaper.export")  # one nano less than the sum of the parts, all signatures in order
    assert (done.returncode, done.stderr) == (1, "")
    assert "another price" in done.stdout


def test_an_older_checkpoint_is_extended_by_the_true_ledger_and_not_by_a_rewritten_one(ledger: Auditor) -> None:
    named = ("--key", (ledger.folder / "key.txt").read_text())
    assert ledger.verify("rewritten.export", *named).returncode == 0  # nobody can tell without the checkpoint
    assert ledger.verify("sound.export", "--from", "older.checkpoint", *named).returncode == 0
    assert ledger.verify("sound.export", "--from", "older.checkpoint").returncode == 3
    done = ledger.verify("rewritten.export", "--from", "older.checkpoint", *named)
    assert done.returncode == 1
    assert "rewritten" in done.stdout


@pytest.mark.parametrize("name", ["policies", "protos", "agent", "coordinator", "deploy", "tests", "apsw", "numpy",
                                  "dp_accounting", "structlog", "google.protobuf", "pytest"])  # fmt: skip
def test_nothing_else_is_installed_on_the_auditors_machine(auditor: Auditor, name: str) -> None:
    done = auditor.run("-c", f"import {name}")
    assert "ModuleNotFoundError" in done.stderr


def test_the_archive_holds_exactly_the_modules_that_the_command_loads(auditor: Auditor) -> None:
    code = (
        "import sys; sys.path.insert(0, 'lazaret-verify.pyz'); import policies.audit.verify; "
        "print(*sorted(sys.modules))"
    )
    done = auditor.run("-c", code)
    assert done.stderr == ""
    loaded = {name for name in done.stdout.split() if name.partition(".")[0] in {"policies", "protos"}}
    with zipfile.ZipFile(auditor.folder / "lazaret-verify.pyz") as packed:
        held = {n.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for n in packed.namelist()}
    assert held - {"__main__"} == loaded
    assert {n for n in held if n.startswith("protos")} <= {
        "protos",
        "protos.common",
        "protos.common.canonical_json",
        "protos.common.dsse",
        "protos.common.errors",
        "protos.common.text",
    }
    assert not held & {
        "policies.accounting.accountant",
        "policies.ledger_service",
        "policies.ledger.store",
        "policies.ledger.backends.sqlite",
    }
    foreign = {name.partition(".")[0] for name in done.stdout.split()} - sys.stdlib_module_names
    assert not {n for n in foreign if not n.startswith(("_", "cython"))} - {
        "policies",
        "protos",
        "sitecustomize",
        *PACKAGES,
    }


def test_a_machine_without_cryptography_is_told_so_and_nothing_is_called_unsound(ledger: Auditor) -> None:
    done = ledger.run("-S", "lazaret-verify.pyz", "sound.export")
    assert (done.returncode, done.stdout) == (2, "")
    assert "cryptography" in done.stderr


@pytest.mark.parametrize("text", ["import numpy", "from dp_accounting import pld", "import policies.helper",
                                  "from policies import helper", "from . import helper", "from .helper import x",
                                  "def f():\n    import apsw"])  # fmt: skip
def test_nothing_is_built_that_would_not_run_elsewhere(tmp_path: Path, text: str) -> None:
    package = tmp_path / "policies"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "helper.py").write_text("import structlog\n")
    (package / "verify.py").write_text(text + "\n")
    with pytest.raises(ForeignImportError, match="does not have"):
        archive(tmp_path)


def test_packages_and_modules_are_found_however_they_are_imported(tmp_path: Path) -> None:
    texts = {
        "top/__init__.py": "",
        "top/start.py": "from top import a\nfrom .b import c\nimport top.d.e\nimport json\n",
        "top/a.py": "",
        "top/b/__init__.py": "from . import c\nfrom .. import g\n",
        "top/b/c.py": "",
        "top/d/__init__.py": "",
        "top/d/e.py": "import cryptography.exceptions\n",
        "top/g.py": "",
        "top/unused.py": "import numpy\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    wanted = {"top", "top.start", "top.a", "top.b", "top.b.c", "top.d", "top.d.e", "top.g"}
    assert set(modules_needed(tmp_path, "top.start")) == wanted


def test_without_a_key_that_was_named_it_is_consistent_and_no_more(ledger: Auditor) -> None:
    done = ledger.verify("sound.export")
    key = (ledger.folder / "key.txt").read_text()
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout.startswith("CONSISTENT: lazaret/test, ")
    assert f"consistent with itself; signed by {key}, which you have not named" in done.stdout
    assert "SOUND" not in done.stdout
