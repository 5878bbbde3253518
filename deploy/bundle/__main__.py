"""Make a signed bundle from which a hospital, or a federation's coordinator, installs without a network.

It takes the packages of this environment at their versions here, which must be those of constraints.txt, for this
machine's kind and this Python: a bundle fits what made it. Where the packages come from is pip's own configuration's
business; what came stands with its digest in the bundle, which the publisher's key signs.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from deploy.bundle.closure import BundleError, closure
from deploy.bundle.writing import ROOT, Contents, fetch, key_fingerprint, own_wheel, pack, version, write
from protos.identity.key_files import KeyFileError, pem, signing_key, write_private


def _key(arguments: argparse.Namespace) -> int:
    key = Ed25519PrivateKey.generate()
    write_private(arguments.file, pem(key))
    sys.stdout.write(f"wrote {arguments.file.name}: keep it offline\nfingerprint: {key_fingerprint(key)}\n")
    return 0


def _make(arguments: argparse.Namespace) -> int:
    key = signing_key(arguments.key)
    name = f"lazaret-{arguments.side}-{version()}"
    folder, wheels = arguments.out / name, arguments.out / f"{name}.wheels"
    pinned = closure(ROOT, arguments.side)
    for old in (folder, wheels):
        shutil.rmtree(old, ignore_errors=True)
    wheels.mkdir(parents=True)
    fetch(pinned, wheels)
    own_wheel(wheels)
    write(Contents(arguments.side, tuple(sorted(wheels.iterdir())), key), folder)
    pack(folder, arguments.out / f"{name}.tar")
    shutil.rmtree(wheels)
    with (arguments.out / f"{name}.tar").open("rb") as body:
        digest = hashlib.file_digest(body, "sha256").hexdigest()
    sys.stdout.write(f"{digest}  {name}.tar\n{len(pinned) + 1} packages, signed by {key_fingerprint(key)}\n")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0 done, 1 refused, 2 usage."""
    parser = argparse.ArgumentParser(prog="python -m deploy.bundle", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    fresh = commands.add_parser("key", help="make a publisher's key, once")
    fresh.add_argument("file", type=Path)
    fresh.set_defaults(act=_key)
    make = commands.add_parser("make", help="make a bundle: a folder and a .tar of it")
    make.add_argument("side", choices=("agent", "coordinator"))
    make.add_argument("--key", type=Path, required=True, help="the publisher's, of `key`")
    make.add_argument("--out", type=Path, default=Path("build"), help="a folder; build unless it says otherwise")
    make.set_defaults(act=_make)
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.act(arguments))
    except (BundleError, KeyFileError, OSError) as error:
        sys.stderr.write(f"refused: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
