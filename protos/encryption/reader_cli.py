"""``lazaret-reader``: make a key pair, and decrypt releases that are encrypted to it.

lazaret-reader make FOLDER NAME          NAME.key stays here, NAME.pub goes to the hospitals
lazaret-reader open KEY SEALED OUT       after comparing the SHA-256 of SEALED with the signed statement
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from protos.encryption.hpke import (
    ReaderKeyError,
    SealedFileError,
    open_sealed_artifact,
    read_reader_private,
    write_reader,
)
from protos.identity.key_files import KeyFileError


def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0 done, 1 refused, 2 usage."""
    os.umask(0o077)
    parser = argparse.ArgumentParser(prog="lazaret-reader", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="what", required=True, metavar="COMMAND")
    make = commands.add_parser("make", help="make a key pair")
    make.add_argument("folder", type=Path, help="0700")
    make.add_argument("name")
    opening = commands.add_parser("open", help="decrypt an artifact that was encrypted to a key")
    for name in ("key", "sealed", "out"):
        opening.add_argument(name, type=Path)
    arguments = parser.parse_args(argv)
    try:
        if arguments.what == "make":
            name = write_reader(arguments.folder, arguments.name)
            said = f"fingerprint, for the hospitals' policies (readers): {name}"
        else:
            open_sealed_artifact(read_reader_private(arguments.key), arguments.sealed, arguments.out)
            with arguments.sealed.open("rb") as raw:
                said = f"decrypted; SHA-256 of the content: {hashlib.file_digest(raw, 'sha256').hexdigest()}"
    except (ReaderKeyError, SealedFileError, KeyFileError) as error:
        sys.stderr.write(f"refused: {error}\n")
        return 1
    except OSError as error:
        sys.stderr.write(f"refused: {error.strerror}: {Path(str(error.filename or '')).name}\n")
        return 1
    sys.stdout.write(said + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
