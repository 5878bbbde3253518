"""Programs of Debian that tests use as peers: what a test wants, or the reason why it is skipped.

Where CI runs every peer must be there, but for the packages that this Debian does not have: ``.ci/run`` leaves those
out and names them in ``LAZARET_LEFT_OUT``. Elsewhere a missing peer skips the test. The end of a run counts both.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

LEFT_OUT: Final = "LAZARET_LEFT_OUT"  # Debian packages, divided by spaces, that .ci/run could not install
PLUGIN: Final = "/usr/share/orthanc/plugins/libOrthancDicomWeb.so"
HEAD: Final = "/usr/share/mricron/templates/ch2.nii.gz"  # the one real head
# A program, or a file, and the Debian package that has it.
PACKAGES: Final[Mapping[str, str]] = {
    **{PLUGIN: "orthanc-dicomweb", HEAD: "mricron-data", "Orthanc": "orthanc"},
    **{"chromium": "chromium", "curl": "curl", "dciodvfy": "dicom3tools", "dcm2niix": "dcm2niix"},
    **{"docker-compose": "docker-compose", "gcc": "gcc", "gdcmconv": "libgdcm-tools", "go": "golang-go"},
    **{"initdb": "postgresql", "openssl": "openssl", "pdftotext": "poppler-utils", "prometheus": "prometheus"},
    **{"promtool": "prometheus", "spin": "spin", "strace": "strace", "systemd-analyze": "systemd"},
    **{"tesseract": "tesseract-ocr"},
    **dict.fromkeys(("dcm2pnm", "dcmconv", "dcmcrle", "dcmdjpeg", "dcmdjpls", "dcmdrle"), "dcmtk"),
    **dict.fromkeys(("echoscu", "storescp", "storescu"), "dcmtk"),
}
PREFIX: Final = "peer:"  # of every reason, so that the end of the run can count them


def missing(program: str, path: str | None = None) -> str:
    """Why a test that wants ``program`` cannot run; empty if it can."""
    found = Path(program).exists() if program.startswith("/") else shutil.which(program, path=path)
    if found:
        return ""
    package = PACKAGES[program]
    if package in os.environ.get(LEFT_OUT, "").split():
        return f"{PREFIX} this Debian has no package {package} ({program})"
    return f"{PREFIX} {program} is not installed (apt install {package})"


def lacking(*programs: str, path: str | None = None) -> list[str]:
    """The reasons why some of ``programs`` cannot run; empty if all can.

    Raises:
        pytest.fail.Exception: one is missing where CI runs, although its package can be had.
    """
    reasons = [reason for program in programs if (reason := missing(program, path))]
    if os.environ.get("CI") and any("is not installed" in reason for reason in reasons):
        pytest.fail("; ".join(reasons), pytrace=False)
    return reasons


def need(*programs: str, path: str | None = None) -> None:
    """Go on only where all ``programs`` are there.

    Raises:
        pytest.skip.Exception: one is missing, and this is no CI, or this Debian has no package of it.
        pytest.fail.Exception: one is missing where CI runs, although its package can be had.
    """
    if reasons := lacking(*programs, path=path):
        pytest.skip("; ".join(reasons))
