"""Bundles for tests: real in every respect, but thin: what they need besides us is borrowed from the tests."""

from __future__ import annotations

import base64
import hashlib
import os
import pwd
import site
import subprocess
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from deploy.bundle.writing import Contents, key_fingerprint, pack, write

BARE = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "PIP_NO_COMPILE": "1"}


@dataclass(frozen=True)
class Bundle:
    """A bundle that was written, and whose it is."""

    folder: Path
    tar: Path
    key: Ed25519PrivateKey
    fingerprint: str


def borrowing(into: Path) -> Path:
    """A wheel that lends an installation the packages of the running tests."""
    about = "borrowed-1.0.dist-info"
    lines = "\n".join({sysconfig.get_paths()["purelib"], *site.getsitepackages()})
    members = {
        "borrowed.pth": f"{lines}\n",
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: borrowed\nVersion: 1.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digest = {
        n: base64.urlsafe_b64encode(hashlib.sha256(b.encode()).digest()).rstrip(b"=") for n, b in members.items()
    }
    record = "".join(f"{n},sha256={digest[n].decode()},{len(b)}\n" for n, b in members.items())
    path = into / "borrowed-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as packed:
        for name, body in {**members, f"{about}/RECORD": f"{record}{about}/RECORD,,\n"}.items():
            packed.writestr(name, body)
    return path


def bundle(side: str, wheels: tuple[Path, ...], into: Path) -> Bundle:
    """Write and pack one, under a publisher's key of its own."""
    key = Ed25519PrivateKey.generate()
    folder = into / f"lazaret-{side}-0.1.0"
    write(Contents(side, wheels, key), folder)
    pack(folder, into / f"{folder.name}.tar")
    return Bundle(folder, into / f"{folder.name}.tar", key, key_fingerprint(key))


def install(folder: Path, fingerprint: str, place: Path, *more: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a bundle's install.sh for this very user, into ``place``: in a bare environment, no unit but there."""
    whoami = pwd.getpwuid(os.getuid()).pw_name
    where = ["--prefix", f"{place}/opt", "--state", f"{place}/var", "--units", f"{place}/units", "--user", whoami]
    command = [*more, str(folder / "install.sh"), "--fingerprint", fingerprint, *where]
    return subprocess.run(command, check=False, capture_output=True, text=True, env={**BARE, **env}, cwd=place)
