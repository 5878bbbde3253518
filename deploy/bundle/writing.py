"""A bundle's folder and its archive: what lies in it, what is signed, and that it comes out the same every time."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from packaging.utils import canonicalize_name

from deploy.bundle.closure import BundleError, Pin
from deploy.bundle.sbom import metadata, sbom
from deploy.docs import site
from deploy.verifier import archive
from protos.identity.certificates import fingerprint

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = ("agent", "coordinator", "policies", "protos")
# of the folder deploy; grafana's board and alerts are Prometheus' side of what both sides tell
ALONG: Final = ("systemd", "containers", "compose", "helm", "grafana")
_UNSIGNED: Final = frozenset({"SHA256SUMS", "SHA256SUMS.sig"})
_NAME: Final = re.compile(r"[A-Za-z0-9._+/-]+")  # of a file: install.sh refuses every other
_EPOCH: Final = 315_532_800  # 1980-01-01 UTC: as old as a zip archive can say


@dataclass(frozen=True, slots=True)
class Contents:
    """What one bundle is made of."""

    side: str  # "agent" or "coordinator"
    wheels: tuple[Path, ...]  # ours, and everything that it needs
    key: Ed25519PrivateKey  # the publisher's

    def __post_init__(self) -> None:
        """Exactly one wheel of ours, and no package twice."""
        names = [canonicalize_name(str(metadata(wheel)["Name"])) for wheel in self.wheels]
        if self.side not in ("agent", "coordinator") or "lazaret" not in names or len(set(names)) != len(names):
            raise BundleError("a bundle is of one side, with a wheel of ours, and each package once")


def own_wheel(into: Path) -> Path:
    """Build our own wheel from a copy of the sources: building in the repository would leave its traces there.

    Raises:
        BundleError: it cannot be built.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        for name in PACKAGES:
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        for name in ("pyproject.toml", "README.md"):
            shutil.copy2(ROOT / name, source / name)
        _pip(["wheel", "--no-deps", "--wheel-dir", str(into), str(source)])
    (found,) = into.glob("lazaret-*.whl")
    return found


def fetch(pins: Sequence[Pin], into: Path) -> None:
    """Get or build the wheels of exactly these packages, from wherever this machine's pip gets its own.

    Raises:
        BundleError: one cannot be had.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as wanted:
        wanted.write("".join(f"{pin}\n" for pin in pins))
        wanted.flush()
        _pip(["wheel", "--no-deps", "--wheel-dir", str(into), "--requirement", wanted.name])


def _pip(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(_EPOCH)}
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)  # noqa: S603 - pip
    if done.returncode:
        raise BundleError(f"pip did not give what was asked:\n{done.stderr[-2000:]}")


def version() -> str:
    """Ours, of pyproject.toml."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def public_pem(key: Ed25519PrivateKey) -> bytes:
    """The publisher's public key, as openssl reads it."""
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def key_fingerprint(key: Ed25519PrivateKey) -> str:
    """What is told by telephone, and typed after ``--fingerprint``: of the public key's DER."""
    return fingerprint(key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))


def write(contents: Contents, folder: Path) -> None:
    """Lay out a bundle in a folder that does not exist yet, and sign it.

    Raises:
        BundleError: a wheel says too little of itself, or a file has a name that no installation would take.
        OSError: it cannot be written.
    """
    (folder / "wheels").mkdir(parents=True)
    for wheel in contents.wheels:
        shutil.copyfile(wheel, folder / "wheels" / wheel.name)
    for name in ALONG:
        if (ROOT / "deploy" / name).is_dir():
            shutil.copytree(ROOT / "deploy" / name, folder / name, ignore=shutil.ignore_patterns("render"))
    _docs(folder / "docs")
    shutil.copyfile(ROOT / "deploy" / "bundle" / "install.sh", folder / "install.sh")
    (folder / "lazaret-verify.pyz").write_bytes(archive())
    for name in ("install.sh", "lazaret-verify.pyz"):
        (folder / name).chmod(0o755)
    (folder / "requirements.txt").write_text(_requirements(contents.wheels))
    when = dt.datetime.fromtimestamp(_EPOCH, dt.UTC)
    (folder / "sbom.cdx.json").write_text(sbom(sorted(contents.wheels), canonicalize_name("lazaret"), when))
    (folder / "bundle.json").write_text(_facts(contents.side))
    (folder / "release.pub").write_bytes(public_pem(contents.key))
    odd = [path.name for path in files(folder) if not _NAME.fullmatch(path.relative_to(folder).as_posix())]
    if odd:
        raise BundleError(f"names of files have A-Z a-z 0-9 . _ + - alone: {', '.join(map(repr, odd))}")
    sums = "".join(f"{_sha256(path)}  {path.relative_to(folder).as_posix()}\n" for path in files(folder))
    (folder / "SHA256SUMS").write_text(sums)
    (folder / "SHA256SUMS.sig").write_bytes(contents.key.sign(sums.encode()))


def _docs(into: Path) -> None:
    """The pages as they are printed, the examples that they name, and all of it as a site to click through."""
    into.mkdir()
    for page in (ROOT / "deploy" / "docs").iterdir():
        if page.suffix in (".md", ".toml"):
            shutil.copyfile(page, into / page.name)
    try:
        site.build(into / "site")
    except site.SiteError as error:
        raise BundleError(str(error)) from None


def _facts(side: str) -> str:
    """What a machine must be, for install.sh: one field on each line."""
    here = {"side": side, "version": version(), "python": "{}.{}".format(*sys.version_info[:2])}
    return json.dumps({**here, "machine": platform.machine()}, indent=1) + "\n"


def _requirements(wheels: Sequence[Path]) -> str:
    """Each package with the digest of its one wheel: pip takes nothing else."""
    of = {canonicalize_name(str(m["Name"])): (m["Version"], wheel) for wheel in wheels for m in [metadata(wheel)]}
    return "".join(f"{name}=={of[name][0]} --hash=sha256:{_sha256(of[name][1])}\n" for name in sorted(of))


def _sha256(path: Path) -> str:
    with path.open("rb") as body:
        return hashlib.file_digest(body, "sha256").hexdigest()


def files(folder: Path) -> list[Path]:
    """Every file that is signed, in one order."""
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.relative_to(folder).as_posix() not in _UNSIGNED)


def pack(folder: Path, out: Path) -> None:
    """One archive, the same bytes for the same files: wheels are compressed already."""
    with tarfile.open(out, "w", format=tarfile.PAX_FORMAT) as packed:
        for path in sorted([*files(folder), *(folder / name for name in _UNSIGNED)]):
            member = tarfile.TarInfo(f"{folder.name}/{path.relative_to(folder).as_posix()}")
            member.size, member.mtime = path.stat().st_size, _EPOCH
            member.mode = 0o755 if path.suffix in (".sh", ".pyz") else 0o644
            with path.open("rb") as body:
                packed.addfile(member, body)
