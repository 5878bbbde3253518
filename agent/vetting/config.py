"""``[vetting]``: the networks that compare synthetic images with patients' images, and the thresholds.

A distillation names its verifiers among its networks; a k-anonymous release names them here, and may leave the table
out. Either way each file is pinned by its SHA-256. A mechanism whose claim a vetting would void does not accept this
table, and says why.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

from agent.models.recognition.verifier import verifier_from
from agent.models.weights import Provenance, WeightsError
from agent.toml_config import names_files
from agent.vetting.reference import Vetting

VERIFIERS: Final = ("verifier", "unseen")
VOUCH: Final = "if they show no patient, put their SHA-256 into site.toml's public_components"
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_NOISE: Final = (
    "what it makes is (epsilon, delta)-DP, and a look at the patients afterwards would void that (P7); leave the "
    "table out. Vetted against public images is distill-dp"
)
UNVETTED: Final[Mapping[str, str]] = MappingProxyType(  # by mechanism: why it takes no such table
    {
        "privimage": _NOISE,
        "centroids": _NOISE,
        "remodel": "its heads are patients' own, and what it states is an attack of its own on them; leave it out",
    }
)


class Files(Protocol):
    """The folder of a configuration; :class:`agent.mechanisms.common.config.Shelf` is one."""

    def file(self, name: str) -> bytes:
        """A network file."""

    def believed(self, raw: bytes) -> Provenance:
        """What it counts as: the site's word."""


class PinnedFiles(Protocol):
    """A table that names network files, and what each must be."""

    def pinned(self, part: str) -> str:
        """The digest that a file must have."""


@dataclass(frozen=True, slots=True)
class VettingTable:
    """``[vetting]``: whom a sample is compared with closely, and how often an innocent one may be dropped."""

    top: int = 10  # the nearest patients whose images the verifier compares it with
    false_matches: float = 0.01  # the chance that a sample like nobody is dropped, by all checks together

    def __post_init__(self) -> None:
        """Refuse what compares with nobody, or drops by no rule."""
        if not (1 <= self.top <= 1000 and 0.0 < self.false_matches <= 0.5):
            raise ValueError("top: 1 to 1000 patients; false_matches: a share above 0, and at most a half")


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgesTable(VettingTable):
    """The same table of a k-anonymous release, whose other networks do not vet: with both verifiers."""

    verifier: str  # of `train verifier`: the one that drops
    verifier_sha256: str  # of that file, as `train` printed it
    unseen: str  # of `train verifier --second`: the one that measures, and drops nothing
    unseen_sha256: str  # of that file

    def __post_init__(self) -> None:
        """Refuse what names no file or no digest, and one file as two opinions."""
        VettingTable.__post_init__(self)
        for part in VERIFIERS:
            names_files(**{part: getattr(self, part)})
            demand_digest(part, self.pinned(part), "verifier" if part == "verifier" else "verifier --second")
        if self.verifier_sha256 == self.unseen_sha256:
            raise ValueError(
                "verifier and unseen are the same file: the verifier that measures must not be the one that chose"
            )

    def pinned(self, part: str) -> str:
        """The digest that a file must have."""
        return str(getattr(self, f"{part}_sha256"))


def demand_digest(part: str, digest: str, trained: str) -> None:
    """Refuse what is no digest of a file that ``train`` made.

    Raises:
        ValueError: it is none.
    """
    if not _DIGEST.fullmatch(digest):
        told = f"as `train {trained}` printed it, and sha256sum does"
        raise ValueError(f"{part}_sha256: the file's SHA-256, 64 hexadecimal digits in lower case, {told}")


def refuse_others(table: PinnedFiles, found: Mapping[str, str]) -> None:
    """Refuse a network whose file is not the pinned one, before a byte of it is made into a network.

    Args:
        table: what is pinned.
        found: the SHA-256 of each part's file.
    Raises:
        WeightsError: one is another file, or several are: all of them.
    """
    wrong = [
        f"{getattr(table, part)} is not the pinned {part}: its SHA-256 is {digest}, and {part}_sha256 is "
        f"{table.pinned(part)}"
        for part, digest in found.items()
        if digest != table.pinned(part)
    ]
    if wrong:
        raise WeightsError(
            f"{'; '.join(wrong)}. Compare with what `lazaret-agent train` printed when the file was made; "
            "enter another one only if you know who made it"
        )


def vetting_of(table: JudgesTable, files: Files, device: str) -> Vetting:
    """Both verifiers, each the pinned one, vouched for, and none that knows too little to be asked.

    A verifier trained on the cohort would take strangers for the patients that it knows, so the thresholds rest on
    people whom it has never seen.

    Raises:
        WeightsError: a file cannot be read, is another one than was pinned, or nobody vouches for it.
        RecogniserError: a verifier's own judgement forbids its use.
    """
    raw = {part: files.file(getattr(table, part)) for part in VERIFIERS}
    refuse_others(table, {part: hashlib.sha256(data).hexdigest() for part, data in raw.items()})
    verifier, unseen = (verifier_from(data, files.believed(data)) for data in raw.values())
    judges = dict(zip(VERIFIERS, (verifier, unseen), strict=True))
    gone = [getattr(table, part) for part, judge in judges.items() if judge.origin.component != "public"]
    if gone:
        raise WeightsError(f"not yet vouched for: {', '.join(gone)}: {VOUCH}")
    for judge in judges.values():
        judge.demand()
    return Vetting(verifier, unseen, table.top, table.false_matches, device)
