"""The offline bundle: whole, the same every time, signed, checked before it installs, and without a network."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.cli.main import main as coordinator_main
from deploy.bundle.closure import BundleError, closure, pins
from deploy.bundle.writing import (
    PACKAGES,
    ROOT,
    Contents,
    fetch,
    files,
    key_fingerprint,
    own_wheel,
    pack,
    public_pem,
    write,
)
from tests.support.bundles import BARE, Bundle, borrowing, bundle, install
from tests.support.network_namespace import isolation, needs_namespace
from tests.support.ports import free_port

pytestmark = pytest.mark.timeout(1500)  # what is built and installed here, on a machine that may be busy
SYSTEMCTL = ROOT / "tests" / "support" / "systemctl.py"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return own_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def thin(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    place = tmp_path_factory.mktemp("thin")
    return bundle("agent", (wheel, borrowing(place)), place)


@pytest.fixture
def copy(thin: Bundle, tmp_path: Path) -> Path:
    """A bundle's folder to break."""
    return shutil.copytree(thin.folder, tmp_path / "bundle")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# what is in it


def test_the_wheel_holds_every_package_and_every_file_that_they_read(wheel: Path) -> None:
    """agent.defacing was missing once: everything ran from a checkout, and nothing where it was installed."""
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    there = {
        path.relative_to(ROOT).as_posix()
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    # what only developers read
    spoken_of = {name for name in there if name.endswith(("/README.md", ".proto"))}
    assert sorted(there - packed - spoken_of) == []
    assert sorted(packed - there) == []
    # researchers have a checkout
    assert not [name for name in packed if "reproduction" in name or "phantoms" in name]


def test_the_closure_is_what_both_sides_need_at_the_pinned_versions() -> None:
    agent, coordinator = closure(ROOT, "agent"), closure(ROOT, "coordinator")
    of = {one.name: one for one in agent}
    assert {"torch", "pydicom", "flwr", "fastapi"} <= set(of)
    assert not {"torch", "pydicom", "scikit-learn"} & {one.name for one in coordinator}
    assert "psycopg-binary" in {one.name for one in coordinator}
    assert not {"pytest", "mypy", "hypothesis", "cyclonedx-python-lib"} & set(of)
    assert all(set(one.needs) <= set(of) for one in agent)


def test_a_package_that_is_not_the_pinned_one_makes_no_bundle(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    text = (ROOT / "constraints.txt").read_text()
    (tmp_path / "constraints.txt").write_text(text.replace("numpy==", "numpy==0."))
    with pytest.raises(BundleError, match=r"numpy \S+ is installed, and constraints.txt says 0\."):
        closure(tmp_path, "coordinator")
    with pytest.raises(BundleError, match="each package stands there once"):
        pins("a==1\nA==2\n")
    with pytest.raises(BundleError, match="each package stands there once"):
        pins("a>=1\n")


def test_the_bill_of_materials_names_each_wheel_by_its_digest(thin: Bundle) -> None:
    told = json.loads((thin.folder / "sbom.cdx.json").read_text())
    assert (told["bomFormat"], told["specVersion"]) == ("CycloneDX", "1.6")
    said = {part["name"]: part["hashes"][0]["content"] for part in told["components"]}
    there = {p.name.partition("-")[0]: sha256(p) for p in thin.folder.glob("wheels/*")}
    assert said == there
    requirements = (thin.folder / "requirements.txt").read_text()
    assert all(f"sha256:{digest}" in requirements for digest in there.values())


def test_the_same_wheels_make_the_same_bundle(thin: Bundle, tmp_path: Path) -> None:
    wheels = tuple(sorted((thin.folder / "wheels").iterdir()))
    write(Contents("agent", wheels, thin.key), tmp_path / thin.folder.name)
    pack(tmp_path / thin.folder.name, tmp_path / "again.tar")
    assert (tmp_path / "again.tar").read_bytes() == thin.tar.read_bytes()


def test_everything_is_signed_and_nothing_of_the_machine_that_made_it_is_told(thin: Bundle) -> None:
    sums = (thin.folder / "SHA256SUMS").read_bytes()
    signature = (thin.folder / "SHA256SUMS.sig").read_bytes()
    thin.key.public_key().verify(signature, sums)
    with pytest.raises(InvalidSignature):
        thin.key.public_key().verify(signature, sums + b"\n")
    assert len(sums.splitlines()) == len(files(thin.folder))
    texts = (".json", ".txt", ".sh", ".service", ".html", ".js")
    written = b"".join(p.read_bytes() for p in files(thin.folder) if p.suffix in texts)
    assert str(ROOT).encode() not in written
    assert os.uname().nodename.encode() not in written


def test_the_site_is_in_it_with_every_page(thin: Bundle) -> None:
    pages = {path.stem for path in (ROOT / "deploy" / "docs").glob("*.md")}
    assert pages <= {path.stem for path in (thin.folder / "docs" / "site").glob("*.html")}
    assert pages <= {path.stem for path in (thin.folder / "docs").glob("*.md")}
    assert not [p.name for p in (thin.folder / "docs").rglob("*.py")]


# what is refused before anything is installed


def _other_file(folder: Path) -> None:
    (folder / "wheels" / "more-1.0-py3-none-any.whl").write_bytes(b"PK")


def _name_like_the_signature(folder: Path) -> None:
    """A dot in a pattern stands for any character; in a name it is a dot."""
    (folder / "SHA256SUMSxsig").write_bytes(b"evil")


def _name_of_two_lines(folder: Path) -> None:
    """Line by line it is two names that are known."""
    (folder / "SHA256SUMS\nSHA256SUMS.sig").write_bytes(b"evil")


def _name_of_a_folder(folder: Path) -> None:
    (folder / "docs" / "a b").mkdir()


def _link(folder: Path) -> None:
    (folder / "docs" / "install.md").unlink()
    (folder / "docs" / "install.md").symlink_to("/etc/hostname")


def _link_to_the_same_bytes(folder: Path) -> None:
    """Checked now, and changed afterwards by whoever owns the place that it leads to."""
    elsewhere = folder.parent / "elsewhere.md"
    shutil.move(folder / "docs" / "install.md", elsewhere)
    (folder / "docs" / "install.md").symlink_to(elsewhere)


def _pipe(folder: Path) -> None:
    os.mkfifo(folder / "docs" / "more.md")


def _changed_wheel(folder: Path) -> None:
    wheel = next((folder / "wheels").glob("lazaret-*"))
    wheel.write_bytes(wheel.read_bytes() + b"\0")


def _changed_sums(folder: Path) -> None:
    _changed_wheel(folder)
    name = next((folder / "wheels").glob("lazaret-*"))
    old = next(line for line in (folder / "SHA256SUMS").read_text().splitlines() if line.endswith(name.name))
    new = f"{sha256(name)}  wheels/{name.name}"
    (folder / "SHA256SUMS").write_text((folder / "SHA256SUMS").read_text().replace(old, new))


def _other_key(folder: Path) -> None:
    other = Ed25519PrivateKey.generate()
    (folder / "release.pub").write_bytes(public_pem(other))
    (folder / "SHA256SUMS.sig").write_bytes(other.sign((folder / "SHA256SUMS").read_bytes()))


def _missing(folder: Path) -> None:
    (folder / "sbom.cdx.json").unlink()


@pytest.mark.parametrize(
    ("breaks", "why"),
    [
        (_other_file, "nobody signed"),
        (_name_like_the_signature, "there is a file here that nobody signed"),
        (_name_of_two_lines, "other characters"),
        (_name_of_a_folder, "other characters"),
        (_link, "there is a link here"),
        (_link_to_the_same_bytes, "there is a link here"),
        (_pipe, "there is a link here"),
        (_changed_wheel, "not what was signed"),
        (_changed_sums, "signature is not good"),
        (_other_key, "another key signed"),
        (_missing, "not what was signed"),
    ],
)
def test_a_bundle_that_is_not_what_was_signed_installs_nothing(
    breaks: Callable[[Path], None], why: str, copy: Path, thin: Bundle, tmp_path: Path
) -> None:
    breaks(copy)
    done = install(copy, thin.fingerprint, tmp_path)
    assert (done.returncode, "refused: " in done.stderr, why in done.stderr) == (1, True, True), done.stderr
    assert not (tmp_path / "opt").exists()
    assert not (tmp_path / "var").exists()


def test_no_bundle_is_made_with_a_name_that_no_installation_would_take(thin: Bundle, tmp_path: Path) -> None:
    wheels = [*(thin.folder / "wheels").iterdir()]
    odd = tmp_path / "more file-1.0-py3-none-any.whl"
    shutil.copy(next(w for w in wheels if w.name.startswith("borrowed")), odd)
    ours = next(w for w in wheels if w.name.startswith("lazaret"))
    with pytest.raises(BundleError, match="more file"):
        write(Contents("agent", (ours, odd), thin.key), tmp_path / "bundle")
    assert not (tmp_path / "bundle" / "SHA256SUMS").exists()


def test_a_bundle_for_another_python_or_machine_installs_nothing(wheel: Path, thin: Bundle, tmp_path: Path) -> None:
    for field, other in (("python", "3.99"), ("machine", "vax")):
        broken = shutil.copytree(thin.folder, tmp_path / field)
        facts = json.loads((broken / "bundle.json").read_text())
        (broken / "bundle.json").write_text(json.dumps({**facts, field: other}, indent=1) + "\n")
        (broken / "SHA256SUMS").unlink()
        sums = "".join(f"{sha256(p)}  {p.relative_to(broken).as_posix()}\n" for p in files(broken))
        (broken / "SHA256SUMS").write_text(sums)
        (broken / "SHA256SUMS.sig").write_bytes(thin.key.sign(sums.encode()))
        done = install(broken, thin.fingerprint, tmp_path)
        assert (done.returncode, other in done.stderr) == (1, True), done.stderr
    assert not (tmp_path / "opt").exists()


@pytest.mark.parametrize(
    "odd",
    [("--prefix", "/usr/a b"), ("--prefix", "opt"), ("--state", "/var;rm"), ("--user", "a$b"), ("--user", "-x")],
)
def test_a_place_that_a_unit_or_a_shell_would_read_as_more_is_refused(
    odd: tuple[str, str], thin: Bundle, tmp_path: Path
) -> None:
    command = [str(thin.folder / "install.sh"), "--fingerprint", thin.fingerprint, *odd]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=BARE)
    assert (done.returncode, done.stderr.startswith("refused: ")) == (1, True), done.stderr
    bad = subprocess.run([command[0], "--nonsense"], check=False, capture_output=True, text=True, env=BARE)
    assert (bad.returncode, "--fingerprint" in bad.stderr) == (2, True)


# the page


class Operator:
    """The coordinator, and whoever sits there and approves."""

    def __init__(self, place: Path) -> None:
        self.home, self.place = place / "coordinator", place
        self.port = 0
        self._stop = threading.Event()
        (place / "persons").mkdir(mode=0o700)

    def types(self, *words: str) -> str:
        """In this process, which has everything imported; what it printed."""
        said, mask = io.StringIO(), os.umask(0o077)
        try:
            with contextlib.redirect_stdout(said), contextlib.chdir(self.place):
                assert coordinator_main(["--home", str(self.home), *words]) == 0, said.getvalue()
        finally:
            os.umask(mask)
        return said.getvalue()

    def begin(self, port: int) -> subprocess.Popen[bytes]:
        self.types("init", "--policy", "internal", "--listen", f"127.0.0.1:{port}")
        for name, role in (("officer", "compliance"), ("physician", "hospital")):
            key = self.types("ledger", "person", f"persons/{name}.key").strip()
            self.types("ledger", "appoint", name, role, key)
        command = [sys.executable, "-m", "coordinator", "--home", str(self.home), "serve"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        serving = subprocess.Popen(command, cwd=self.place, env=environment, stdout=subprocess.PIPE)
        assert serving.stdout is not None
        assert b"serving" in serving.stdout.readline()
        return serving

    def approve(self) -> None:
        """As soon as somebody asks."""
        while not self._stop.wait(0.5):
            waiting = [p for p in json.loads(self.types("enrolments", "--json")) if p["digest"]]
            if waiting:
                break
        else:
            return
        for name in ("officer", "physician"):
            who = ["--serial", "join-a", "--person", name, "--key", f"persons/{name}.key", "--out", f"{name}.json"]
            self.types("ledger", "sign", "enrol", "site-a", waiting[0]["digest"], *who)
        self.types("approve", "site-a", "officer.json", "physician.json", "--serial", "join-a")

    def leave(self) -> None:
        self._stop.set()


def blocks(page: str) -> str:
    """Every `sh` block of a page, in order."""
    return "\n".join(part.partition("\n```")[0] for part in page.split("```sh\n")[1:])


@pytest.fixture(scope="module")
def installed(thin: Bundle, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """What the page made, typed as it stands, over an installation that was interrupted; and what it printed."""
    place = tmp_path_factory.mktemp("installed")
    for folder in ("work", "shims", "run", "opt/releases/agent-0.1.0/left-over"):
        (place / folder).mkdir(parents=True)
    shutil.copy(thin.tar, place / "work")
    port = free_port()
    operator = Operator(place)
    serving = operator.begin(port)
    told = operator.types("invite", "site-a", "--out", "site-a.invitation", "--token-file", "token")
    (place / "shims" / "systemctl").write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{SYSTEMCTL}" "$@"\n')
    (place / "shims" / "systemctl").chmod(0o755)
    filled_in = {
        "PUBLISHER": thin.fingerprint,
        "COORDINATOR": f"127.0.0.1:{port}",
        "ROOT": told.split("root: ")[1].splitlines()[0],
        "INVITATION": f"{place}/site-a.invitation",
        "LAZARET_PREFIX": f"{place}/opt",
        "LAZARET_STATE": f"{place}/var",
        "LAZARET_UNITS": f"{place}/units",
        "LAZARET_USER": pwd.getpwuid(os.getuid()).pw_name,
    }
    of_systemctl = {"UNITS": f"{place}/units", "RUN": f"{place}/run", "HOME": f"{place}"}
    # what a person may have set for other programs must not send pip anywhere
    odd = {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PATH": f"{place}/shims:{BARE['PATH']}"}
    approving = threading.Thread(target=operator.approve)
    approving.start()
    try:
        done = subprocess.run(
            ["bash", "-euc", blocks((ROOT / "deploy" / "docs" / "install.md").read_text())],
            cwd=place / "work",
            env={**BARE, **filled_in, **of_systemctl, **odd},
            input=(place / "token").read_text(),
            capture_output=True,
            text=True,
            check=False,
            timeout=1000,
        )
    finally:
        operator.leave()
        approving.join()
        serving.terminate()
        for pid in (place / "run").glob("*.pid"):
            with contextlib.suppress(ProcessLookupError):  # it ended by itself: what was said tells why
                os.kill(int(pid.read_text()), signal.SIGTERM)
        serving.wait(200)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return place, done.stdout


def test_the_page_leads_from_the_bundle_to_an_enrolled_agent_with_a_green_doctor(installed: tuple[Path, str]) -> None:
    place, said = installed
    assert said.index("waiting for approval by two people") < said.index("enrolled; `doctor` checks the connection")
    assert " 0 failed" in said
    assert not [line for line in said.splitlines() if line.startswith("FAIL")]
    assert (place / "var" / "agent" / "keys" / "tls.pem").exists()


def test_a_bundle_of_somebody_else_is_not_run_however_the_page_is_typed(thin: Bundle, tmp_path: Path) -> None:
    """Pasted into a shell that goes on after a line that failed, as every interactive shell does."""
    shutil.copy(thin.tar, tmp_path)
    typed = blocks((ROOT / "deploy" / "docs" / "install.md").read_text()).partition("lazaret-agent setup")[0]
    told = {"PUBLISHER": "0000 " * 8, "LAZARET_PREFIX": f"{tmp_path}/opt", "LAZARET_STATE": f"{tmp_path}/var"}
    done = subprocess.run(
        ["bash", "-c", typed], cwd=tmp_path, env={**BARE, **told}, capture_output=True, text=True, check=False
    )
    assert "NOT INSTALLED" in done.stderr
    assert not (tmp_path / "opt").exists()


def test_unpacking_writes_nothing_beside_the_bundles_own_folder(thin: Bundle, tmp_path: Path) -> None:
    """It is done as root, before anything is known of who made the file."""
    (tmp_path / ".bashrc").write_text("mine")
    with tarfile.open(tmp_path / thin.tar.name, "w") as made:
        for name in (".bashrc", f"{thin.folder.name}/release.pub"):
            made.addfile(tarfile.TarInfo(name), io.BytesIO())
    typed = blocks((ROOT / "deploy" / "docs" / "install.md").read_text()).partition("lazaret-agent setup")[0]
    told = {"PUBLISHER": "0000 " * 8, "LAZARET_PREFIX": f"{tmp_path}/opt", "LAZARET_STATE": f"{tmp_path}/var"}
    done = subprocess.run(
        ["bash", "-c", typed], cwd=tmp_path, env={**BARE, **told}, capture_output=True, text=True, check=False
    )
    assert "NOT INSTALLED" in done.stderr
    assert (tmp_path / ".bashrc").read_text() == "mine"


def test_the_installation_is_for_the_service_and_says_where_it_is(installed: tuple[Path, str]) -> None:
    place, _ = installed
    unit = (place / "units" / "lazaret-agent.service").read_text()
    assert f"ExecStart={place / 'opt'}/current-agent/bin/lazaret-agent --home {place}/var/agent serve" in unit
    assert f"ReadWritePaths={place}/var/agent\n" in unit
    assert "/var/lib" not in unit
    assert (place / "var" / "agent").stat().st_mode & 0o777 == 0o700
    assert not list((place / "opt" / "current-agent" / "bin").glob("pip*"))


def test_what_an_interrupted_installation_left_is_not_built_upon(installed: tuple[Path, str]) -> None:
    current = installed[0] / "opt" / "current-agent"
    assert ((current / ".whole").exists(), (current / "left-over").exists()) == (True, False)


def test_typed_again_it_changes_nothing(installed: tuple[Path, str], thin: Bundle) -> None:
    whole = installed[0] / "opt" / "current-agent" / ".whole"
    before = whole.stat().st_mtime_ns
    assert install(thin.folder, thin.fingerprint, installed[0]).returncode == 0
    assert whole.stat().st_mtime_ns == before


def test_another_bundle_of_the_same_version_replaces_nothing(
    installed: tuple[Path, str], thin: Bundle, tmp_path: Path
) -> None:
    """Another key's, whose fingerprint somebody typed: the programs would stay, the papers beside them would not."""
    other, key = shutil.copytree(thin.folder, tmp_path / "other"), Ed25519PrivateKey.generate()
    (other / "docs" / "install.md").write_text("another page\n")
    (other / "release.pub").write_bytes(public_pem(key))
    sums = "".join(f"{sha256(p)}  {p.relative_to(other).as_posix()}\n" for p in files(other))
    (other / "SHA256SUMS").write_text(sums)
    (other / "SHA256SUMS.sig").write_bytes(key.sign(sums.encode()))
    opt = installed[0] / "opt"
    docs = [path for path in opt.glob("docs/**/*") if path.is_file()]
    before = {p: p.read_bytes() for p in (*docs, opt / "lazaret-verify.pyz", *opt.glob("bin/*"))}
    done = install(other, key_fingerprint(key), installed[0])
    assert (done.returncode, "from another bundle" in done.stderr) == (1, True), done.stderr
    assert {p: p.read_bytes() for p in before} == before
    assert (opt / "current-agent" / ".whole").read_bytes() == (thin.folder / "SHA256SUMS").read_bytes()


def test_the_page_is_one_page() -> None:
    """As it is printed: about seventy lines of ten points on A4."""
    text = (ROOT / "deploy" / "docs" / "install.md").read_text()
    assert len(text.splitlines()) <= 120
    assert tomllib.loads(text.split("```toml\n")[1].partition("```")[0])["listen"] == "0.0.0.0:8743"


@needs_namespace
@pytest.mark.timeout(1500)
@pytest.mark.slow
def test_a_coordinator_installs_from_its_bundle_where_there_is_no_network(wheel: Path, tmp_path: Path) -> None:
    made = _whole("coordinator", wheel, tmp_path)
    done = install(made.folder, made.fingerprint, tmp_path, *isolation())
    assert done.returncode == 0, done.stderr
    absent = "import importlib.util as u; assert not any(map(u.find_spec, ('torch', 'sklearn', 'pydicom', 'pip')))"
    python = tmp_path / "opt" / "current-coordinator" / "bin" / "python"
    subprocess.run([python, "-c", absent], check=True, env=BARE)
    command = [*isolation(), str(tmp_path / "opt" / "bin" / "lazaret-coordinator")]
    subprocess.run([*command, "init", "--policy", "controlled"], check=True, env=BARE, cwd=tmp_path)
    subprocess.run([*command, "ledger", "export", "ledger.export"], check=True, env=BARE, cwd=tmp_path)
    verify = tmp_path / "opt" / "bin" / "lazaret-verify"
    asked = [*command, "ledger", "fingerprint"]
    told = subprocess.run(asked, check=True, env=BARE, cwd=tmp_path, capture_output=True, text=True).stdout.strip()
    checked = [*isolation(), verify, "ledger.export", "--key", told]
    subprocess.run(checked, check=True, env=BARE, cwd=tmp_path)
    again = subprocess.run([*command, "init"], check=False, capture_output=True, text=True, env=BARE, cwd=tmp_path)
    assert (again.returncode, "nothing was written" in again.stderr) == (1, True)
    assert subprocess.run([*command, "nonsense"], check=False, capture_output=True, env=BARE).returncode == 2
    serving = (
        "import pathlib, protos.federation.flower_environment as q; q.configure_environment(pathlib.Path('quiet')); "
        "import coordinator.console.app"
    )
    subprocess.run([python, "-c", serving], check=True, env=BARE, cwd=tmp_path)


@needs_namespace
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_agent_installs_from_its_bundle_where_there_is_no_network(wheel: Path, tmp_path: Path) -> None:
    made = _whole("agent", wheel, tmp_path)
    done = install(made.folder, made.fingerprint, tmp_path, *isolation())
    assert done.returncode == 0, done.stderr
    command = [*isolation(), str(tmp_path / "opt" / "bin" / "lazaret-agent")]
    init = ["init", "--site", "site-a", "--policy", "controlled", "--modality", "CT"]
    subprocess.run([*command, *init], check=True, env=BARE, cwd=tmp_path)
    subprocess.run([*command, "audit"], check=True, env=BARE, cwd=tmp_path)
    python = tmp_path / "opt" / "current-agent" / "bin" / "python"
    loads = "import agent.cli.rounds, agent.cli.release, agent.cli.ingest, agent.cli.train, agent.cli.deface"
    subprocess.run([python, "-c", loads], check=True, env=BARE, cwd=tmp_path)


def _whole(side: str, wheel: Path, place: Path) -> Bundle:
    wheels = place / "wheels"
    wheels.mkdir()
    fetch(closure(ROOT, side), wheels)
    shutil.copy(wheel, wheels)
    return bundle(side, tuple(sorted(wheels.iterdir())), place)
