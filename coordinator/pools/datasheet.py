"""The descriptions of a pool: Croissant for machines, a datasheet for people. Pure.

Croissant 1.0 (MLCommons, docs.mlcommons.org/croissant/docs/croissant-spec.html) is JSON-LD over schema.org. The
``mlcroissant`` library is not used to write it: it needs pandas, scipy and rdflib to write one dictionary, and checks
addresses on the network. It reads what is written here (see the tests). ``webdataset`` is not used either: its writer
records the time and the user, so the same pool would have two digests. It reads USTAR archives whose members share a
stem, and the shards are such archives.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from coordinator.claim_descriptions import describe_claim, evidence, is_kanonymous, without_epsilon
from coordinator.explanations import LEVELS, MECHANISMS, count, utc
from coordinator.pools.selection import AdmittedRelease, LeftOut, PoolBudget, PoolCost, PoolRefusedError, WorstCase
from policies.accounting.claims import RELATION, UNIT
from policies.accounting.rounding import epsilon_text, format_rounded_up
from policies.statements import claim_json
from protos.common.text import printable

CONFORMS_TO: Final = "http://mlcommons.org/croissant/1.0"
CONTEXT: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "@language": "en",
        "@vocab": "https://schema.org/",
        "citeAs": "cr:citeAs",
        "column": "cr:column",
        "conformsTo": "dct:conformsTo",
        "cr": "http://mlcommons.org/croissant/",
        "rai": "http://mlcommons.org/croissant/RAI/",
        "data": {"@id": "cr:data", "@type": "@json"},
        "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
        "dct": "http://purl.org/dc/terms/",
        "equivalentProperty": "cr:equivalentProperty",
        "examples": {"@id": "cr:examples", "@type": "@json"},
        "extract": "cr:extract",
        "field": "cr:field",
        "fileProperty": "cr:fileProperty",
        "fileObject": "cr:fileObject",
        "fileSet": "cr:fileSet",
        "format": "cr:format",
        "includes": "cr:includes",
        "isLiveDataset": "cr:isLiveDataset",
        "jsonPath": "cr:jsonPath",
        "key": "cr:key",
        "md5": "cr:md5",
        "parentField": "cr:parentField",
        "path": "cr:path",
        "recordSet": "cr:recordSet",
        "references": "cr:references",
        "regex": "cr:regex",
        "repeated": "cr:repeated",
        "replace": "cr:replace",
        "samplingRate": "cr:samplingRate",
        "sc": "https://schema.org/",
        "separator": "cr:separator",
        "source": "cr:source",
        "subField": "cr:subField",
        "transform": "cr:transform",
    }
)
STEM: Final = r"^([^/.]+)"  # the sample's key in its file's name
_COLUMNS: Final = (
    ("label", "sc:Text", "The label that the hospitals gave the image."),
    ("cls", "sc:Integer", "The label's number; classes.json lists them."),
    ("site", "sc:Text", "The hospital whose file is used."),
    ("release", "sc:Text", "The admitted release that the file is of."),
    ("mechanism", "sc:Text", "How the image was made."),
    ("level", "sc:Text", "Claim level: the weakest of all releases that hold this image."),
    ("modality", "sc:Text", "DICOM modality of the images that it was made of."),
)
_NAME: Final = re.compile(r"[^\x00-\x1f\x7f-\x9f]{1,200}")
_DATE: Final = re.compile(r"\d{4}-\d{2}-\d{2}")
_VERSION: Final = re.compile(r"\d+\.\d+\.\d+")
OVERLAP: Final = (
    "The same patient may have been in two hospitals, and nobody can tell from here. The hospitals' budgets ADD "
    "for such a patient: the epsilons and the deltas of each kind are summed. k-anonymity does not compose across "
    "sites: a patient known to be in several of these sets may be found by comparing them, whatever k is."
)


@dataclass(frozen=True, slots=True)
class Card:
    """The operator's description of a pool; none of it follows from the ledger."""

    name: str = "lazaret-pool"
    description: str = "Synthetic medical images of several hospitals, each admitted by a ledger of privacy budgets."
    license: str = ""
    cite_as: str = ""
    url: str = ""
    creator: str = ""
    version: str = "1.0.0"
    published: str = ""  # YYYY-MM-DD

    def __post_init__(self) -> None:
        """One line each, without control characters."""
        texts = (self.name, self.description, self.license, self.cite_as, self.url, self.creator)
        if not self.name or not all(not t or _NAME.fullmatch(t) for t in texts):
            raise PoolRefusedError(
                "name, description, license, citation, url and creator: one line of at most 200 each"
            )
        if not _VERSION.fullmatch(self.version) or (self.published and not _DATE.fullmatch(self.published)):
            raise PoolRefusedError("the version is written as 1.0.0, the date of publication as 2026-01-31")


@dataclass(frozen=True, slots=True)
class File:
    """One file of an export."""

    name: str
    size: int
    sha256: str
    samples: int = 0


@dataclass(frozen=True, slots=True)
class SourceSummary:
    """One source, and the fate of its images."""

    source: AdmittedRelease
    pictures: int  # in the release
    shared: int  # of them, those that stand in another place of the pool too


@dataclass(frozen=True, slots=True)
class PoolReport:
    """A pool as it was exported: every figure that stands in its datasheet."""

    out: str
    seed: int
    level: str  # the weakest
    samples: int
    duplicates: int
    contradictions: int
    classes: dict[str, int]  # label -> samples
    modalities: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]  # height, width; and 3 for colours
    near: dict[str, tuple[int, int]]  # site -> look-alikes within, across
    parts: tuple[SourceSummary, ...]
    left_out: tuple[LeftOut, ...]
    budgets: tuple[PoolBudget, ...]  # all together first, then one for each modality where there are several
    shards: tuple[File, ...]


def _dataset(card: Card, promised: str, distribution: list[Any], records: list[Any]) -> dict[str, Any]:
    """A Croissant 1.0 dataset: what the operator says of it, what is promised to patients, its files and records."""
    texts = {"license": card.license, "citeAs": card.cite_as, "url": card.url, "datePublished": card.published}
    return {
        "@context": dict(CONTEXT),
        "@type": "sc:Dataset",
        "conformsTo": CONFORMS_TO,
        "name": card.name,
        "description": card.description,
        "version": card.version,
        **{name: text for name, text in texts.items() if text},
        **({"creator": {"@type": "sc:Organization", "name": card.creator}} if card.creator else {}),
        "rai:personalSensitiveInformation": promised,
        "distribution": distribution,
        "recordSet": records,
    }


def croissant(report: PoolReport, card: Card, index: File) -> dict[str, Any]:
    """The pool as a Croissant 1.0 dataset: shards, the images in them, the index, and records of both joined."""
    images = {
        "@type": "cr:FileSet",
        "@id": "images",
        "name": "images",
        "description": "The images inside the shards.",
        "containedIn": [{"@id": shard.name} for shard in report.shards],
        "encodingFormat": "image/png",
        "includes": "*.png",
    }
    shards = [file_object(shard, "application/x-tar") for shard in report.shards]
    distribution = [*shards, images, file_object(index, "application/jsonlines")]
    return _dataset(card, OVERLAP, distribution, [_records(index)])


def croissant_of_set(card: Card, archive: File, promised: str) -> dict[str, Any]:
    """One admitted set of images as a Croissant 1.0 dataset: the shard, and in it each image and its label.

    Args:
        card: what the operator says of it.
        archive: the artifact itself.
        promised: what is promised to the patients, in the words of its level.
    """

    def inside(name: str, includes: str, encoding: str, text: str) -> dict[str, Any]:
        names = {"@type": "cr:FileSet", "@id": name, "name": name, "description": text}
        return {**names, "containedIn": {"@id": archive.name}, "encodingFormat": encoding, "includes": includes}

    def records(name: str, what: str, kind: str, text: str) -> dict[str, Any]:
        def field(part: str, data: str, words: str, source: Mapping[str, Any]) -> dict[str, Any]:
            names = {"@type": "cr:Field", "@id": f"{name}/{part}", "name": part, "description": words}
            return {**names, "dataType": data, "source": {"fileSet": {"@id": name}, **source}}

        stem = {"extract": {"fileProperty": "filename"}, "transform": {"regex": STEM}}
        fields = [
            field("key", "sc:Text", "The sample's number.", stem),
            field(what, kind, text, {"extract": {"fileProperty": "content"}}),
        ]
        names = {"@type": "cr:RecordSet", "@id": f"{name}-records", "name": f"{name}-records"}
        return {**names, "key": {"@id": f"{name}/key"}, "field": fields}

    labels = records("labels", "label", "sc:Text", "The label that the hospital gave the image of the same number.")
    images = records("images", "image", "sc:ImageObject", "A synthetic image, 8 bits a channel.")
    images["field"][0]["references"] = {"field": {"@id": "labels/key"}}
    distribution = [
        file_object(archive, "application/x-tar"),
        inside("images", "*.png", "image/png", "The images."),
        inside("labels", "*.txt", "text/plain", "The label of each."),
    ]
    return _dataset(card, promised, distribution, [images, labels])


def file_object(file: File, encoding: str) -> dict[str, Any]:
    """A file of a Croissant dataset."""
    return {
        "@type": "cr:FileObject",
        "@id": file.name,
        "name": file.name,
        "contentUrl": file.name,
        "contentSize": f"{file.size} B",
        "encodingFormat": encoding,
        "sha256": file.sha256,
    }


def _records(index: File) -> dict[str, Any]:
    """An image by its file, and what the index says of the same key."""

    def field(name: str, kind: str, text: str, source: Mapping[str, Any]) -> dict[str, Any]:
        names = {"@type": "cr:Field", "@id": f"samples/{name}", "name": name, "description": text}
        return {**names, "dataType": kind, "source": dict(source)}

    def column(name: str) -> dict[str, Any]:
        return {"fileObject": {"@id": index.name}, "extract": {"column": name}}

    def inside(what: str) -> dict[str, Any]:
        return {"fileSet": {"@id": "images"}, "extract": {"fileProperty": what}}

    key = field("key", "sc:Text", "The sample's name.", {**inside("filename"), "transform": {"regex": STEM}})
    image = field("image", "sc:ImageObject", "A synthetic image, 8 bits a channel.", inside("content"))
    return {
        "@type": "cr:RecordSet",
        "@id": "samples",
        "name": "samples",
        "description": "One record for each distinct image.",
        "key": {"@id": "samples/key"},
        "field": [
            {**key, "references": column("key")},
            image,
            *(field(name, kind, text, column(name)) for name, kind, text in _COLUMNS),
        ],
    }


def size_of(shape: tuple[int, ...]) -> str:
    """An image's size as people write it: width first."""
    height, width, *colours = shape
    return f"{width} x {height} pixels, 8-bit {'colour' if colours else 'grey'}"


def as_plain(value: AdmittedRelease) -> dict[str, Any]:
    """What a sample's JSON says of one of its sources."""
    weak = {"reid_rate": value.reid_rate, "vetting_power": value.vetting_power} if value.level == "C" else {}
    return {
        **weak,
        "claim": claim_json(value.claim),
        "k": value.k,
        "level": value.level,
        "mechanism": value.mechanism,
        "modality": value.modality,
        "release": value.release,
        "site": value.site,
    }


def readme(report: PoolReport, card: Card) -> str:
    """The datasheet: the contents, the guarantee of each source, and the worst-case privacy cost for patients."""
    total = count(report.samples, "distinct image")
    lines = [
        f"# {_plain(card.name)}",
        "",
        _plain(card.description),
        "",
        f"{total} from {count(len(report.parts), 'release')} of "
        f"{count(len({p.source.site for p in report.parts}), 'hospital')}; {', '.join(report.modalities)}; "
        f"{', '.join(map(size_of, report.shapes))}. The weakest claim level is "
        f"**{report.level}**: nothing stronger may be said of the pool as a whole.",
        "",
        f"No image {'is meant to show' if report.level == 'C' else 'shows'} a patient; each was made by a mechanism "
        "named below, and every promise is the mechanism's.",
        "",
        "## Labels",
        "",
        *(f"- `{_code(label)}`: {number}" for label, number in report.classes.items()),
        "",
        "## Sources",
        "",
        *(line for part in report.parts for line in _part(part)),
        *_words(report),
        "## What it cost",
        "",
        OVERLAP,
        "",
        *(line for budget in report.budgets for line in _budget(budget)),
        *_hygiene(report),
        *_use(report, card),
    ]
    return "\n".join(lines) + "\n"


def _part(part: SourceSummary) -> list[str]:
    source = part.source
    title, meaning, plain = LEVELS[source.level]
    lines = [
        f"**{source.site}**, `{source.release}`",
        "",
        f"- {MECHANISMS.get(source.mechanism, source.mechanism)} ({source.modality}), admitted {utc(source.at)} UTC; "
        f"{count(part.pictures, 'image')}, {part.shared} of them also elsewhere in the pool",
        f"- level **{source.level}**, {title}: {meaning}. {plain}",
        f"- claim: {describe_claim(claim_json(source.claim))}",
    ]
    if source.level == "C":
        lines.append(f"- {evidence(source.reid_rate, source.vetting_power)}")
    if source.epsilon is not None and source.delta is not None:
        lines.append(
            f"- epsilon {epsilon_text(source.epsilon)} at delta {format_rounded_up(source.delta)} for this release "
            f"alone, per {UNIT}, {RELATION}; Rényi filter of order {source.order}"
        )
    if source.k is not None:
        lines.append(f"- k = {source.k}: there is no epsilon, and it is not 0")
    return [*lines, f"- artifact `{source.artifact}`, statement `{source.envelope}`", ""]


def _words(report: PoolReport) -> list[str]:
    """What the figures mean, for the kinds that are there."""
    kinds = {part.source.kind for part in report.parts}
    of = sum(part.source.kind == "rdp" for part in report.parts)
    crowds = sum(is_kanonymous(part.source.level, claim_json(part.source.claim)) for part in report.parts)
    nothing = len(report.parts) - of - crowds
    lines = ["## What the figures mean", ""]
    if "k" in kinds:
        lines += [
            "- **k**: every image stands for at least so many different patients of one hospital, none of whom is "
            "told apart from the others by it. It limits what one set says, not what two sets say together."
        ]
    if "rdp" in kinds:
        lines += [
            "- **epsilon, delta**: whatever is learned from the release is at most e^epsilon times as likely with a "
            "patient as without, but for a chance of delta. Smaller is stronger; releases add up."
        ]
    if nothing:
        lines += ["- Some releases promise nothing: what was tested stands with each of them, and there is no bound."]
    covers = f"- epsilon covers {of} of {len(report.parts)} releases"
    return [
        *lines,
        "; ".join(filter(None, (covers, without_epsilon(crowds, nothing), "kinds are never added up."))),
        "",
    ]


def _budget(budget: PoolBudget) -> list[str]:
    title = f"{budget.modality} alone" if budget.modality else "All of the pool"
    rows = ["| hospital | kind | releases | in the worst case, for one patient |", "|---|---|---|---|"]
    rows += [f"| {c.site} | {_KINDS[c.kind]} | {c.releases} | {_figure(c)} |" for c in budget.costs]
    rows += [
        f"| **in all of: {', '.join(w.sites)}** | {_KINDS[w.kind]} | {w.releases} | **{_figure(w)}** |"
        for w in budget.worst
        if len(w.sites) > 1
    ]
    return [f"### {title}", "", *rows, ""]


_KINDS: Final[Mapping[str, str]] = MappingProxyType(
    {"rdp": "differential privacy", "k": "k-anonymity", "none": "no promise"}
)


def _figure(cost: PoolCost | WorstCase) -> str:
    """What one row of a budget comes to; upwards, and never a figure that there is not."""
    if cost.kind == "k" and cost.sets is not None:
        return f"{count(cost.sets, 'released group')}" + (" (does not compose)" if cost.sets > 1 else "")
    if cost.epsilon is not None and cost.delta is not None:
        return f"epsilon {epsilon_text(cost.epsilon)} at delta {format_rounded_up(cost.delta)}"
    return "no bound"


def _hygiene(report: PoolReport) -> list[str]:
    lines = [
        "## Twice, alike, left out",
        "",
        f"- {count(report.duplicates, 'exact duplicate')} merged; each sample's JSON names all of its sources",
        f"- {count(report.contradictions, 'image')} left out because hospitals label the same pixels differently",
    ]
    for site, (within, across) in sorted(report.near.items()):
        lines.append(
            f"- {site}: {within} of its images look like another one of its own, {across} like one of another "
            "hospital (perceptual hash; kept, and silence proves nothing)"
        )
    lines += [f"- `{left.release}` is not in the pool ({left.rule}): {_plain(left.why)}" for left in report.left_out]
    return [*lines, ""]


def _use(report: PoolReport, card: Card) -> list[str]:
    terms = [("license", card.license), ("citation", card.cite_as), ("by", card.creator), ("see", card.url)]
    return [
        "## Use",
        "",
        f"{count(len(report.shards), 'shard')} in the WebDataset form, shuffled by the public seed {report.seed}: "
        "`KEY.png`, `KEY.cls` (the label's number, see `classes.json`), `KEY.json` (sources and their claims). "
        "`index.jsonl` lists all samples, `croissant.json` describes the pool to machines, `sha256sum -c SHA256SUMS` "
        "checks it.",
        "",
        *(f"- {name}: {_plain(text)}" for name, text in terms if text),
        *([] if card.license else ["- no license is stated: ask before you share it"]),
    ]


def _plain(text: str) -> str:
    """A text that is no markup and no control character."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", printable(text))


def _code(text: str) -> str:
    return json.dumps(text)[1:-1].replace("`", "'")
