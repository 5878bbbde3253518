"""The torture set through the product's own ingest: the reader process, with rules that let in all they can."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from agent.deidentify.admission_rules import AdmissionRules
from agent.deidentify.deidentifier import Deidentifier
from agent.deidentify.errors import FileRejectedError
from agent.deidentify.record import Record
from agent.ingest.ocr import Ocr, OcrSettings
from agent.ingest.parser_process import ParserLimits, ParserProcess
from tests.torture.plants import Made

WHO: Final = Deidentifier(b"\7" * 32, "TORTURE")
RULES: Final = AdmissionRules(
    modalities=frozenset({"CR", "CT", "MR", "OT", "US"}),
    secondary_capture_modalities=frozenset({"OT"}),
    colour_modalities=frozenset({"OT", "US"}),
    image_types=frozenset({("ORIGINAL", "PRIMARY")}),
)
DIGEST: Final = "0" * 32


@dataclass(slots=True)
class Passed:
    """What became of the files."""

    records: dict[str, Record] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)  # file -> code
    cpu_seconds: float = 0.0  # of the worker, without its start

    @property
    def outputs(self) -> dict[str, bytes]:
        """The files that came out."""
        return {name: record.payload for name, record in self.records.items()}


def _cpu(pid: int | None) -> float:
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100  # PS: user and system time in clock ticks of 10 ms


def through(made: Iterable[Made], rules: AdmissionRules = RULES, who: Deidentifier = WHO) -> Passed:
    """Every file through one reader process."""
    passed = Passed()
    with ParserProcess(rules, who, ParserLimits()) as reader:
        for file in made:
            before, pid = _cpu(reader.pid), reader.pid
            try:
                patient = "PX84629173" if file.name.startswith("volume") else None
                record = reader.read(file.data, DIGEST, patient)
                if record.text:
                    raise FileRejectedError(
                        "burned_in_text"
                    )  # as the agent's ``Intake`` does, which also holds the study
                passed.records[file.name] = record
            except FileRejectedError as refusal:
                passed.refused[file.name] = refusal.code
            if pid is not None and reader.pid == pid:
                passed.cpu_seconds += _cpu(pid) - before
    return passed


def look(passed: Passed) -> None:
    """Read every picture that came out, as the agent reads a sample; those with an alert are refused.

    Raises:
        OcrMissingError: tesseract is not installed.
    """
    ocr = Ocr(OcrSettings(every=1), b"\3" * 32)
    for name, record in list(passed.records.items()):
        code = ocr.alarm(record)
        if code is not None:
            passed.refused[name] = code
            del passed.records[name]
