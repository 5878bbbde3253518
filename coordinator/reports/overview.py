"""The overview: one page for the entire ledger, the stored releases, and their evaluations.

It shows what the entries say and nothing stronger. Before anything is shown, the entries are folded and hashed
again: they must lead to the root that the signed checkpoint names. Budgets and refusals are the sections of their
own reports.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from coordinator.claim_descriptions import figures, is_kanonymous, release_in, without_epsilon
from coordinator.explanations import KINDS, LEVELS, QUARANTINE, count, epsilon_text, format_rounded_up, utc
from coordinator.pools.atomic_directory import digest_of
from coordinator.reports.budgets import burn_down
from coordinator.reports.certificates import as_document
from coordinator.reports.document import (
    Block,
    Curve,
    Document,
    FactList,
    Images,
    Line,
    ReportTable,
    Section,
    Text,
    UnsoundReportError,
)
from coordinator.reports.refusals import denied
from coordinator.reports.report_inputs import Item, ReportInputs
from policies.accounting.claims import UNIT
from policies.audit.display import as_json, whose, words
from policies.ledger.entries import kind_of
from policies.ledger.merkle import CompactRange, leaf_hash
from protos.artifacts.arrays import ArtifactFormatError, unpack_images

SHOWN: Final = 60  # thumbnails of one release; the rest is counted
THUMBNAIL: Final = 96  # pixels; larger images are made smaller
# in a certificate and in its entry alike
_STATED: Final = ("release", "site", "mechanism", "level", "claim")
_PROOF: Final = {"artifact_sha256": "artifact", "statement_sha256": "envelope"}  # certificate -> entry
_OF_RUN: Final = ("mechanism", "claim", "envelope")  # a run's model names its dearest update's
_ACCURACY: Final = (
    ("private", "accuracy"),
    ("public_start", "the public start, before the first round"),
    ("non_private", "the same network without privacy"),
    ("chance", "guessing"),
)
_CHECK: Final = (
    "This page is a picture of the ledger, not the proof. The proof is the exported ledger, checked offline on your "
    "own machine: lazaret-verify ledger.export --key FINGERPRINT. FINGERPRINT is the SHA-256 of the ledger's key, "
    "all 64 digits. Take it from the ledger's owner, or from a hospital that takes part (lazaret-agent ledger "
    "fingerprint --coordinator), never from this page or the export. Without it the answer is CONSISTENT, which any "
    "ledger can be.",
    "The answer must be SOUND, with the size and the root below. A newer export has more entries. Keep its signed "
    "checkpoint: next time, add --from CHECKPOINT to show that no history was rewritten in between.",
)
_JsonMap = Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class ReleaseView:
    """A release as the report shows it."""

    id: str
    certificate: _JsonMap  # as coordinator.storage.release_store.certificate gives it
    images: NDArray[np.uint8] | None = None  # (m, h, w[, 3]), or None where the artifact is a model
    labels: tuple[str, ...] = ()  # m

    def __post_init__(self) -> None:
        """Images are grey bytes with one label each."""
        if self.images is None:
            return
        if self.images.ndim not in (3, 4) or self.images.dtype != np.uint8 or not self.images.size:
            raise UnsoundReportError(f"release {self.id}: images must be a non-empty (m, h, w[, 3]) uint8 array")
        if len(self.labels) != len(self.images):
            raise UnsoundReportError(f"release {self.id}: one label for each image")


ARTIFACTS: Final = (
    "images.tar",
    "volumes.tar",
    "model.safetensors",
    "artifact.hpke",
)  # what a release's folder holds


def _pictures(archive: Path) -> tuple[NDArray[np.uint8] | None, tuple[str, ...]]:
    """The images of a set of PNG; of another form, or too many to show at once: none."""
    try:
        return unpack_images(archive.read_bytes())
    except ArtifactFormatError:
        return None, ()


def _as_stated(sealed: Path, facts: _JsonMap) -> bool:
    """Are the figures of a vetting in a certificate those of the statement whose digest it bears? Or has it none?"""
    names = ("reid_rate", "vetting_power")
    if not any(name in facts for name in names):
        return True
    if not sealed.exists() or digest_of(sealed) != facts.get("statement_sha256"):
        return False
    said = figures(release_in(sealed.read_bytes()))
    return all(facts.get(name) == said.get(name) for name in names)


def views(shelf: Path) -> list[ReleaseView]:
    """The releases in a shelf's directory, by name.

    Raises:
        UnsoundReportError: an artifact on disk is not the one in its certificate, or its figures are not its
        statement's. OSError, ValueError: a certificate or an artifact cannot be read.
    """
    out = []
    for path in sorted(shelf.glob("[!.]*/certificate.json")):
        facts = json.loads(path.read_bytes())
        there = [path.with_name(name) for name in ARTIFACTS if path.with_name(name).exists()]
        if len(there) != 1 or digest_of(there[0]) != facts.get("artifact_sha256"):
            raise UnsoundReportError(f"release {path.parent.name}: the artifact is not the one in its certificate")
        if not _as_stated(path.with_name("envelope.json"), facts):
            raise UnsoundReportError(
                f"release {path.parent.name}: its certificate has other figures than its statement"
            )
        shown = there[0].name == ARTIFACTS[0]  # not those that are encrypted, nor volumes, nor models
        images, labels = _pictures(there[0]) if shown else (None, ())
        out.append(ReleaseView(path.parent.name, facts, images, labels))
    return out


def _checked(inputs: ReportInputs) -> dict[str, Any]:
    """The ledger as JSON, folded from entries that hash to the root that the checkpoint signs.

    Raises:
        UnsoundReportError: they hash to another root, are another number, or break the rules of a ledger.
    """
    tree = CompactRange()
    for entry in inputs.export.entries:
        tree.append(leaf_hash(entry))
    if (len(inputs.export.entries), tree.root().hex()) != (inputs.source.size, inputs.source.root):
        raise UnsoundReportError("the ledger's entries do not lead to the root that its checkpoint signs")
    try:
        return as_json(inputs.source.origin, inputs.records)
    except ValueError as error:
        raise UnsoundReportError(f"the ledger's entries do not fold: {type(error).__name__}") from None


def _in_ledger(certificate: _JsonMap, ledger: _JsonMap) -> str:
    """Where the ledger says what the certificate says, as a sentence; empty if it does not say so."""
    facts = {_PROOF.get(k, k): certificate.get(k) for k in (*_STATED, *_PROOF)}
    if certificate.get("meaning") != LEVELS.get(str(facts["level"]), ("", ""))[1]:
        return ""
    for e in ledger["entries"]:
        if e["type"] == "admitted" and not e["run"] and all(e[k] == v for k, v in facts.items()):
            return f"entry {e['seq']} says the same"
        if e["type"] == "round-closed" and (e["run"], e["model"]) == (facts["release"], facts["artifact"]):
            mine = [a for a in ledger["entries"] if a["type"] == "admitted" and a["run"] == e["run"]]
            worst = max(a["used"] for a in mine)
            named = [a for a in mine if a["used"] == worst and all(a[k] == facts[k] for k in _OF_RUN)]
            if named and facts["level"] == max(a["level"] for a in mine):  # the weakest of A < B < C
                return f"the model of entry {e['seq']}, round {e['round']}"
    return ""


def _png(image: NDArray[np.uint8]) -> bytes:
    picture, out = Image.fromarray(image), io.BytesIO()
    if max(picture.size) > THUMBNAIL:
        picture.thumbnail((THUMBNAIL, THUMBNAIL))
    picture.save(out, "PNG", optimize=True)
    return out.getvalue()


def _contents(view: ReleaseView) -> Iterator[Block]:
    """The first images of a set, and how many of which label it has."""
    if view.images is None:
        return
    total, size = len(view.images), f"{view.images.shape[2]} × {view.images.shape[1]}"
    labels = ", ".join(f"{label or 'without a label'} ({n})" for label, n in sorted(Counter(view.labels).items()))
    yield FactList((("Contents", f"{count(total, 'synthetic image')} of {size} pixels: {labels}"),))
    shown = tuple((label, _png(image)) for label, image in zip(view.labels, view.images[:SHOWN], strict=False))
    yield Images(f"Images of {view.id}", shown)
    if total > len(shown):
        yield Text(f"The first {len(shown)} of {total} images are shown.", "note")


def _looks(view: ReleaseView) -> Iterator[Block]:
    """How good a run's model was in each look, and which one the run ended with; nothing without looks."""
    found, rows = _part(view.certificate, "evaluation"), []
    for look in _items(found, "looks"):
        for name, figure in _part(look, "figures").items():
            value, low, high = (_number(_part({name: figure}, name).get(k), -1.0) for k in ("value", "low", "high"))
            if low is not None and high is not None:
                told = "cannot be told" if value is None else f"{value:.3f}"
                rows.append((str(look.get("after_round")), str(name), told, f"{low:.3f} to {high:.3f}"))
    if not rows:
        return
    head = ("After round", "Figure", "Value", "95 % interval")
    yield ReportTable("How good it was on held-out patients, from sums with noise", head, tuple(rows), frozenset({2}))
    yield Text(
        "The intervals cover the noise and the choice of patients. The run ended with the model after round "
        f"{_part(found, 'chosen').get('after_round')}, which looked best. The ledger holds that the looks were "
        "paid for; the figures are the coordinator's.",
        "note",
    )


def _release(view: ReleaseView, ledger: _JsonMap, items: Mapping[str, Item], inputs: ReportInputs) -> Section:
    """A release whose certificate the ledger bears out, as its certificate says it; of any other only that."""
    proof = _in_ledger(view.certificate, ledger) if view.id == view.certificate.get("release") else ""
    item = items.get(view.id)
    if not proof or item is None or view.certificate["claim"] not in [part["claim"] for part in item.parts]:
        warning = Text("✕ the ledger does not say this; do not use it", "warn")
        return Section(f"Release {view.id}", (warning,))
    digests = ((name, f"sha256 {view.certificate[f'{name.lower()}_sha256']}") for name in ("Artifact", "Statement"))
    blocks = (*as_document(inputs, item).sections[0].blocks, *_looks(view), *_contents(view))
    where = (("Ledger", f"✓ in the ledger: {proof}"), ("Method", item.method), ("Hospital", item.sites), *digests)
    return Section(f"Release {view.id}", (FactList(where), *blocks))


def _part(of: object, name: str) -> Mapping[str, Any]:
    """A part of what was measured; empty if it is missing or something else."""
    part = of.get(name) if isinstance(of, Mapping) else None
    return part if isinstance(part, Mapping) else {}


def _items(of: object, name: str) -> list[Mapping[str, Any]]:
    part = of.get(name) if isinstance(of, Mapping) else None
    return [item for item in part if isinstance(item, Mapping)] if isinstance(part, list | tuple) else []


def _number(value: object, low: float = 0.0, high: float = 1e12) -> float | None:
    """A finite number in [low, high], or None: nothing is drawn of what is not a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if low <= value <= high else None


def _percent(share: float | None) -> str:
    return "not measured" if share is None else f"{100 * share:.1f} %"


def _accuracy(measured: _JsonMap) -> Section:
    """Accuracy against epsilon, round by round; no curve without a single point."""
    accuracy = {k: _number(_part(measured, "accuracy").get(k), 0, 1) for k, _ in _ACCURACY}
    images = _number(_part(measured, "accuracy").get("test_images"))
    read = {k: _number(v) for k, v in _part(measured, "epsilon").items()}
    epsilon = {k: v for k, v in read.items() if v is not None}
    rounds = [
        (f"round {r.get('round')}", r.get("epsilon"), r.get("accuracy"), ", ".join(map(str, r.get("sites") or ())))
        for r in _items(measured, "rounds")
    ]
    rounds = rounds or [("final", epsilon.get("filter"), accuracy.get("private"), "")]
    numbers = [(name, _number(e), _number(a, 0, 1), sites) for name, e, a, sites in rounds]
    points = [(name, e, a, sites) for name, e, a, sites in numbers if e is not None and a is not None]
    on = f"{images:.0f} test images" if images is not None else "test images"
    rows = [(text, _percent(accuracy[k])) for k, text in _ACCURACY if accuracy.get(k) is not None]
    if (record := epsilon.get("filter")) is not None:
        at = f" at delta {format_rounded_up(epsilon['delta'])}" if "delta" in epsilon else ""
        order = f", by the Rényi filter of order {format_rounded_up(epsilon['order'])}" if "order" in epsilon else ""
        rows.append(("Its epsilon of record", f"epsilon {epsilon_text(record)}{at} per {UNIT}{order}"))
    if (tight := epsilon.get("tight")) is not None:
        words = (
            "by a tighter accountant, valid only because everything was fixed before the start; never in the ledger"
        )
        rows.append(("For comparison", f"epsilon {epsilon_text(tight)} {words}"))
    rows += _network(measured)
    if not points and accuracy.get("private") is None:
        return Section("What privacy cost in accuracy", (_missing("Accuracy was"),))
    blocks: list[Block] = [FactList((("Measured on", on), *rows))]
    if points:
        drawn = tuple((e, 100 * a) for _, e, a, _ in points)
        flat = [(text, accuracy.get(k)) for k, text in _ACCURACY[1:]]
        lines = [Line("accuracy", drawn), *(Line(t, ((0.0, 100 * a),)) for t, a in flat if a is not None)]
        ends = ("0", f"epsilon {epsilon_text(max(e for e, _ in drawn))}")
        blocks.append(Curve("Accuracy against epsilon", f"% of {on}", tuple(lines), ends=ends))
        table = tuple((name, epsilon_text(e), _percent(a), sites or "–") for name, e, a, sites in points)
        head = ("Point", "epsilon", "accuracy", "hospitals")
        blocks.append(ReportTable("Accuracy after each round", head, table, frozenset({1, 2})))
    return Section("What privacy cost in accuracy", tuple(blocks))


def _network(measured: _JsonMap) -> Iterator[tuple[str, str]]:
    """What was trained, and what the hospitals' own noisy sums say of it; nothing of what was not measured."""
    network, look = _part(measured, "network"), _part(measured, "evaluation")
    if (parameters := _number(network.get("parameters"))) is not None:
        yield (
            "Network",
            f"{network.get('name')}, trained part: {network.get('trained')}, {parameters:,.0f} trained parameters",
        )
    value, low, high = (_number(look.get(key), 0, 1) for key in ("value", "low", "high"))
    held_out, noise = _number(look.get("held_out")), _number(look.get("noise"))
    if None not in (low, high, held_out, noise):
        yield (
            "Private evaluation",
            f"{look.get('figure')} {'cannot be told' if value is None else _percent(value)}, 95 % interval "
            f"{_percent(low)} to {_percent(high)}: of the model after round {look.get('after_round')}, on the "
            f"{held_out:g} % of each hospital's patients that were never trained on, from sums with noise of "
            f"standard deviation {noise:g} at each; the epsilon of record covers it",
        )


def _missing(what: str) -> Text:
    return Text(f"{what} not measured for this report.", "note")


def _ingest(measured: object) -> Section:
    """Files by hospital: kept, duplicates, and those in quarantine with their reasons."""
    rows = []
    for site in (ingest := _part(measured, "ingest")):
        counts = _part(ingest, site)
        reasons = {k: _number(v) for k, v in _part(counts, "quarantined").items()}
        known = [(k, QUARANTINE.get(k, k), int(v)) for k, v in reasons.items() if v is not None]
        kept, twice = (_number(counts.get(name)) for name in ("kept", "duplicates"))
        shown = ("–" if v is None else f"{v:.0f}" for v in (kept, twice, sum(n for *_, n in known)))
        why = "; ".join(f"{n} × {text}" for _, text, n in sorted(known, key=lambda item: -item[2]))
        rows.append((str(site), *shown, why or "–"))
    head = ("Hospital", "kept", "duplicates", "quarantined", "why in quarantine")
    words = (
        "A file that the agent does not understand, or that might show a name, stays in quarantine at the hospital."
    )
    table = ReportTable("Files by hospital", head, tuple(rows), frozenset({1, 2, 3}))
    return Section("Files taken in", (Text(words), table) if rows else (_missing("Files were"),))


def _steps(measured: object) -> Section:
    timed = [(str(s.get("name", "")), _number(s.get("seconds"))) for s in _items(measured, "steps")]
    rows = tuple((name, "not measured" if t is None else f"{t:.1f}") for name, t in timed)
    table = ReportTable(
        "Seconds per step, on the machine that made this report", ("Step", "seconds"), rows, frozenset({1})
    )
    return Section("How long it took", (table,) if rows else (_missing("Times were"),))


def _lines(inputs: ReportInputs) -> Section:
    marks, state = {"admitted": "✓ ", "refused": "✕ "}, inputs.state
    said = [(utc(r.at), kind_of(r.entry), whose(r.entry, state), words(r.entry, state)) for r in inputs.records]
    rows = tuple((str(n), at, marks.get(kind, "") + KINDS[kind], *rest) for n, (at, kind, *rest) in enumerate(said))
    head = ("No.", "Time (UTC)", "What", "Hospital", "It says")
    table = ReportTable("All entries, oldest first", head, rows, frozenset({0}))
    size = count(state.size, "entry", "entries")
    intro = f"{size}. None can be changed or removed without a change of the root below."
    return Section("The ledger, line by line", (Text(intro), table))


def _under(title: str, document: Document) -> Iterator[Section]:
    """The sections of another report, under its name."""
    return (replace(section, title=f"{title}: {section.title}") for section in document.sections)


def _headline(ledger: _JsonMap) -> dict[str, Any]:
    """The counts of the first screen, each a plain number from the entries."""
    admitted = [e for e in ledger["entries"] if e["type"] == "admitted"]
    refused = [e for e in ledger["entries"] if e["type"] == "refused"]
    given_up = sum(e["stage"] == "expired" for e in refused)
    with_epsilon = sum(e["level"] in ("A", "A*") for e in admitted)  # at another level a Gaussian claim is void (P7)
    crowds = sum(is_kanonymous(e["level"], e["claim"]) for e in admitted)
    return {
        "admitted": len(admitted),
        "updates": sum(bool(e["run"]) for e in admitted),
        "refused": len(refused) - given_up,
        "given_up": given_up,
        "sites": sum(e["type"] == "enrolled" for e in ledger["entries"]),
        "with_epsilon": with_epsilon,
        "crowds": crowds,
        "nothing": len(admitted) - with_epsilon - crowds,
        "open": sum(g["state"] == "held" for g in ledger["grants"]),
    }


def _glance(head: Mapping[str, int]) -> Section:
    """The headline as facts, and what epsilon covers."""
    without = without_epsilon(head["crowds"], head["nothing"])
    alone = f"{count(head['admitted'] - head['updates'], 'release')} of one hospital"
    refused = "each with its reason, below" if head["refused"] else "nothing was refused"
    facts = FactList(
        (
            ("Admitted", f"{head['admitted']}: {alone}, {count(head['updates'], 'training update')}"),
            ("Refused", f"{head['refused']}: {refused}"),
            ("Given up by hospitals", f"{head['given_up']} given up"),
            ("Hospitals", f"{head['sites']}, each enrolled with a key and a policy of its own"),
            (
                "Covered by ε",
                f"{head['with_epsilon']} of {head['admitted']}; {without or 'no release is without one'}",
            ),
        )
    )
    said = [f"ε covers {head['with_epsilon']} of {count(head['admitted'], 'release')}."]
    said += [f"Of the others, {without}."] if without else []
    said += (
        ["k-anonymity is another kind of promise: a number of patients behind each image."] if head["crowds"] else []
    )
    said += ["What promises nothing was tested, and no more."] if head["nothing"] else []
    said += (
        [f"{count(head['open'], 'grant is', 'grants are')} still held, without an end yet."] if head["open"] else []
    )
    return Section("At a glance", (facts, Text(" ".join(said))))


def overview(inputs: ReportInputs, releases: Sequence[ReleaseView], measured: Mapping[str, Any] | None) -> Document:
    """The page of everything.

    Args:
        inputs: the ledger as of one signed head.
        releases: what stands on the shelf; each is compared with the ledger.
        measured: what was measured beside the ledger: title, steps, ingest, network, accuracy, evaluation, epsilon,
            rounds. A part that is missing, or a number that is not finite, is reported as missing; it is never drawn
            as something.
    Raises:
        UnsoundReportError: the entries do not lead to the signed root, or do not fold.
        ReportError: the ledger holds a release that its own statement contradicts.
    """
    ledger = _checked(inputs)
    measured = measured if isinstance(measured, Mapping) else {}
    head = _headline(ledger)
    items = {item.name: item for item in inputs.items()}
    released = [_release(view, ledger, items, inputs) for view in releases]
    sections = (
        _glance(head),
        *_under("Budgets", burn_down(inputs)),
        *_under("Refusals", denied(inputs)),
        *(released or [Section("Releases", (Text("No release is stored.", "note"),))]),
        _accuracy(measured),
        _ingest(measured),
        _steps(measured),
        _lines(inputs),
        Section("Verify it yourself", tuple(map(Text, _CHECK))),
    )
    sentence = f"{count(head['admitted'], 'release')} admitted, {head['refused']} refused, "
    title = str(measured.get("title") or "What left the hospitals, and what it cost")
    summary = f"{sentence}{count(head['sites'], 'hospital')}."
    return Document(
        "overview", title, summary, sections, inputs.source, {"counts": head, "accounts": ledger["accounts"]}
    )
