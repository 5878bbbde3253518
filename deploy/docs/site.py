"""Build the documentation site into a folder: ``python -m deploy.docs.site FOLDER``; the same bytes every time."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from sphinx.cmd.build import build_main

HERE: Final = Path(__file__).parent
_LEFTOVERS: Final = (".buildinfo", "objects.inv")  # of Sphinx, for a next build and for other sites


class SiteError(Exception):
    """The site cannot be built; Sphinx has said why."""


def build(into: Path) -> None:
    """Write the site: HTML that needs no network.

    Raises:
        SiteError: a page, a link or an anchor is missing.
    """
    with tempfile.TemporaryDirectory() as doctrees, warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)  # of MyST, about Sphinx 11
        if build_main(["-q", "-W", "-b", "html", "-d", doctrees, str(HERE), str(into)]):
            raise SiteError("the documentation has faults: see above")
    for name in _LEFTOVERS:
        (into / name).unlink(missing_ok=True)
    for sources in into.glob("_sources"):
        shutil.rmtree(sources)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0 built, 1 a fault in a page, 2 usage."""
    parser = argparse.ArgumentParser(prog="python -m deploy.docs.site", description=__doc__)
    parser.add_argument("folder", type=Path)
    try:
        build(parser.parse_args(argv).folder)
    except SiteError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
