"""Runs one Python anonymiser over a folder, inside that tool's own virtual environment: no import of ours.

``python peer_runner.py NAME IN OUT``; the last line says ``CPU_SECONDS FILES`` of the work without imports.
"""
# mypy: ignore-errors

from __future__ import annotations

import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path


def dicom_anonymizer(dictionary: str) -> Callable[[Path, Path], None]:
    """dicom-anonymizer with the rules of one edition of the table."""
    from dicomanonymizer.simpledicomanonymizer import anonymize_dicom_file, initialize_actions

    def one(source: Path, target: Path) -> None:
        anonymize_dicom_file(str(source), str(target), base_rules_gen=lambda: initialize_actions(dictionary))

    return one


def dicognito() -> Callable[[Path, Path], None]:
    """dicognito as its documentation shows: one anonymizer for all files."""
    import pydicom
    from dicognito.anonymizer import Anonymizer

    anonymizer = Anonymizer(seed="torture")

    def one(source: Path, target: Path) -> None:
        with pydicom.dcmread(source) as dataset:
            anonymizer.anonymize(dataset)
            dataset.save_as(target)

    return one


def deid() -> Callable[[Path, Path], None]:
    """deid with its default recipe, private attributes removed."""
    from deid.dicom import replace_identifiers

    def one(source: Path, target: Path) -> None:
        (dataset,) = replace_identifiers(str(source), remove_private=True, save=False)
        dataset.save_as(target)

    return one


def main() -> int:
    """The command."""
    name, source, target = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    warnings.simplefilter("ignore")
    makers = {
        "dicom-anonymizer": lambda: dicom_anonymizer("dicomfields_2023"),
        "dicom-anonymizer-2026c": lambda: dicom_anonymizer("dicomfields_2026c"),
        "dicognito": dicognito,
        "deid": deid,
    }
    one = makers[name]()
    files, start = sorted(source.iterdir()), time.process_time()
    for path in files:
        try:
            one(path, target / path.name)
        except BaseException:  # noqa: BLE001 - a file that a tool cannot read is refused by it
            (target / path.name).unlink(missing_ok=True)
            print(path.name, traceback.format_exc()[-300:], file=sys.stderr)
    print(time.process_time() - start, len(files))
    return 0


if __name__ == "__main__":
    sys.exit(main())
