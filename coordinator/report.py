"""The report: one HTML file from a ledger, the releases on the shelf and what was measured beside them.

It shows what the books say and nothing stronger. The ledger's JSON is turned back into records, folded and
hashed again, so no page is made of books that do not add up. The page needs no script and no network: jinja2
escapes every value, and a content security policy forbids the rest.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import jinja2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from coordinator.promises import crowded, evidence, figures, others, promise, release_in
from coordinator.wording import (
    KINDS,
    LEVELS,
    MECHANISMS,
    QUARANTINE,
    STAGES,
    count,
    epsilon_text,
    explain,
    never_less,
    rounded_up,
    stated,
    told,
    utc,
)
from policies import cbor
from policies.claims import UnsupportedClaim
from policies.entries import KINDS as ENTRIES
from policies.entries import Record, decode
from policies.merkle import CompactRange, leaf_hash
from policies.rdp import epsilon_nano, epsilon_of
from policies.statement import canonical, claim_from
from policies.view import as_json
from protos.artifact import BadArtifact, unpack_images

SHOWN: Final = 60  # thumbnails of one release; the rest is counted
THUMBNAIL: Final = 96  # pixels; larger images are made smaller
FRAME: Final = (58.0, 22.0, 622.0, 268.0)  # left, top, right, bottom of the plot's axes, of 640 x 320
# what is bytes in an entry, and hexadecimal in its JSON
_HEX: Final = {f.name for cls in ENTRIES.values() for f in fields(cls) if f.type == "bytes" and f.name != "claim"}
_TOLD: Final = ("release", "site", "mechanism", "level", "claim")  # in a certificate and in its entry alike
_PROOF: Final = {"artifact_sha256": "artifact", "statement_sha256": "envelope"}  # certificate -> entry
_OF_RUN: Final = ("mechanism", "claim", "envelope")  # a run's model names its dearest update's
_JsonMap = Mapping[str, Any]


class UnsoundReport(ValueError):
    """What the report would show contradicts itself; no page is made of it."""


@dataclass(frozen=True, slots=True, eq=False)
class ReleaseView:
    """A release as the report shows it."""

    id: str
    certificate: _JsonMap  # as coordinator.edges.shelf.certificate gives it
    images: NDArray[np.uint8] | None = None  # (m, h, w[, 3]), or None where the artifact is a model
    labels: tuple[str, ...] = ()  # m

    def __post_init__(self) -> None:
        """Images are grey bytes with one label each."""
        if self.images is None:
            return
        if self.images.ndim not in (3, 4) or self.images.dtype != np.uint8 or not self.images.size:
            raise UnsoundReport(f"release {self.id}: images must be a non-empty (m, h, w[, 3]) uint8 array")
        if len(self.labels) != len(self.images):
            raise UnsoundReport(f"release {self.id}: one label for each image")


ARTIFACTS: Final = (
    "images.tar",
    "volumes.tar",
    "model.safetensors",
    "artifact.hpke",
)  # what a release's folder holds


def _sha256(path: Path) -> str:
    with path.open("rb") as raw:
        return hashlib.file_digest(raw, "sha256").hexdigest()


def _pictures(archive: Path) -> tuple[NDArray[np.uint8] | None, tuple[str, ...]]:
    """The images of a set of PNG; of another form, or too many to show at once: none."""
    try:
        return unpack_images(archive.read_bytes())
    except BadArtifact:
        return None, ()


def _tested(facts: _JsonMap) -> str:
    return evidence(facts.get("reid_rate"), facts.get("vetting_power"), facts.get("mechanism"))


def _as_stated(sealed: Path, facts: _JsonMap) -> bool:
    """Are the figures of a vetting in a certificate those of the statement whose digest it bears? Or has it none?"""
    names = ("reid_rate", "vetting_power")
    if not any(name in facts for name in names):
        return True
    if not sealed.exists() or _sha256(sealed) != facts.get("statement_sha256"):
        return False
    said = figures(release_in(sealed.read_bytes()))
    return all(facts.get(name) == said.get(name) for name in names)


def views(shelf: Path) -> list[ReleaseView]:
    """The releases in a shelf's directory, by name.

    Raises:
        UnsoundReport: an artifact on disk is not the one in its certificate, or its figures are not its statement's.
        OSError, ValueError: a certificate or an artifact cannot be read.
    """
    out = []
    for path in sorted(shelf.glob("[!.]*/certificate.json")):
        facts = json.loads(path.read_bytes())
        there = [path.with_name(name) for name in ARTIFACTS if path.with_name(name).exists()]
        if len(there) != 1 or _sha256(there[0]) != facts["artifact_sha256"]:
            raise UnsoundReport(f"release {path.parent.name}: the artifact is not the one in its certificate")
        if not _as_stated(path.with_name("envelope.json"), facts):
            raise UnsoundReport(f"release {path.parent.name}: its certificate has other figures than its statement")
        shown = there[0].name == ARTIFACTS[0]  # not those that are encrypted, nor volumes, nor models
        images, labels = _pictures(there[0]) if shown else (None, ())
        out.append(ReleaseView(path.parent.name, facts, images, labels))
    return out


def _root(ledger: _JsonMap) -> str:
    """The Merkle root, in hex, over the records that the JSON stands for: the one that the checkpoint signs.

    Raises:
        UnsoundReport: the records cannot be made again, or do not fold to the balances beside them.
    """
    tree = CompactRange()
    records: list[Record] = []
    try:
        for line in ledger["entries"]:
            body = {k: v for k, v in line.items() if k not in ("seq", "at", "key", "type")}
            body = {k: bytes.fromhex(v) if k in _HEX else v for k, v in body.items()}
            body = {k: canonical(v) if k == "claim" else v for k, v in body.items()}
            outer = {"at": line["at"], "key": line["key"], "type": line["type"], "body": body}
            raw = cbor.encode(outer)
            records.append(decode(raw))
            tree.append(leaf_hash(raw))
        if as_json(ledger["origin"], records) == ledger:
            return tree.root().hex()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnsoundReport(f"the ledger's JSON is not one: {type(error).__name__}") from None
    raise UnsoundReport("the ledger's balances do not follow from its entries")


def _epsilon(certificate: _JsonMap, ledger: _JsonMap) -> str:
    """The epsilon of a certificate's claim, as the accounts of its sites price it, the largest; "" without one.

    Nor has a Gaussian claim one at another level than A or A*: vetting voids it, or a component does (P6, P7).
    """
    if certificate.get("level") not in ("A", "A*"):
        return ""
    accounts = {a["account"]: a for a in ledger["accounts"]}
    paid = [accounts.get(f"{site}/rdp") for site in str(certificate.get("site")).split(", ")]
    try:
        claim = claim_from(certificate.get("claim"))
        priced = [(epsilon_nano(claim, float(a["delta"]), a["order"]), a) for a in paid if a is not None]
    except UnsupportedClaim:
        return ""
    if not priced or len(priced) != len(paid):
        return ""
    nano, dearest = max(priced, key=lambda pair: pair[0])
    return stated(nano / 1e9, dearest, ledger)


def _budget(account: _JsonMap, ledger: _JsonMap) -> dict[str, Any]:
    """One account as a bar. What is spent or held is rounded up, what is left is rounded down."""
    limit, spent, held = account["limit"], account["spent"], account["held"]
    left = limit - spent - held
    share = {name: 100 * part / limit if limit else 0.0 for name, part in (("spent", spent), ("held", held))}
    out: dict[str, Any] = {
        "site": account["site"],
        "kind": account["kind"],
        "spent": rounded_up(share["spent"], 1),
        "held": rounded_up(share["held"], 1),
        "left": max(0.0, math.floor((100 - share["spent"] - share["held"]) * 10 + 1e-6) / 10) if limit else 0.0,
        "counts": {"limit": limit, "spent": spent, "held": held, "left": left},
    }
    if account["kind"] != "rdp":
        return out
    epsilon, delta, order = float(account["epsilon"]), float(account["delta"]), account["order"]
    out["statement"] = stated(epsilon, account, ledger)
    out |= {"epsilon": epsilon, "delta": delta, "order": order}
    out |= {"epsilon_spent": epsilon_of(spent, delta, order) if spent else None}
    out |= {"epsilon_bound": epsilon_of(spent + held, delta, order) if held else None}
    return out


def _refusals(ledger: _JsonMap) -> list[dict[str, Any]]:
    """Refused entries, newest last, each reason with its sentence."""
    return [
        {
            "seq": e["seq"],
            "when": utc(e["at"]),
            "site": e["site"],
            "what": MECHANISMS.get(e["mechanism"], e["mechanism"] or "a call"),
            "stage": STAGES.get(e["stage"], e["stage"]),
            "given_up": e["stage"] == "expired",
            "reasons": [(rule, *explain(rule)) for rule in e["findings"]],
        }
        for e in ledger["entries"]
        if e["type"] == "refused"
    ]


def _png(image: NDArray[np.uint8]) -> str:
    picture, out = Image.fromarray(image), io.BytesIO()
    if max(picture.size) > THUMBNAIL:
        picture.thumbnail((THUMBNAIL, THUMBNAIL))
    picture.save(out, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def _in_ledger(certificate: _JsonMap, ledger: _JsonMap) -> str:
    """Where the ledger says what the certificate says, as a sentence; empty if it does not say so."""
    facts = {_PROOF.get(k, k): certificate.get(k) for k in (*_TOLD, *_PROOF)}
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


def _release(view: ReleaseView, ledger: _JsonMap) -> dict[str, Any]:
    facts = view.certificate
    level = str(facts.get("level", ""))
    title, meaning, plain = LEVELS.get(level, ("Unknown level", "no promise", "This report knows no such level."))
    proof = _in_ledger(facts, ledger) if view.id == facts.get("release") else ""
    images = view.images if view.images is not None else np.zeros((0, 1, 1), np.uint8)
    return {
        "id": view.id,
        "site": str(facts.get("site", "")),
        "digests": [(name, str(facts.get(f"{name}_sha256", "not stated"))) for name in ("artifact", "statement")],
        "level": level,
        "level_title": title,
        "meaning": meaning,
        "level_plain": plain,
        "tested": _tested(facts) if level == "C" else "",
        "method": MECHANISMS.get(method := str(facts.get("mechanism", "")), method),
        "promise": promise(facts.get("claim")),
        "tried": ", ".join(str(k) for k in facts.get("k_tried") or () if type(k) is int),
        "proof": proof,
        "epsilon": _epsilon(facts, ledger) if proof else "",
        "thumbnails": [(_png(image), label) for image, label in zip(images[:SHOWN], view.labels, strict=False)],
        "total": len(images),
        "size": f"{images.shape[2]} × {images.shape[1]}",
        "labels": sorted(Counter(view.labels).items()),
    }


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


def _step(top: float) -> float:
    """A round distance between ticks, for about five of them up to ``top``."""
    rough = top / 5
    unit: float = 10.0 ** math.floor(math.log10(rough))
    return next(unit * f for f in (1, 2, 2.5, 5, 10) if unit * f >= rough)


def _plot(measured: object, budget: float | None) -> dict[str, Any] | None:
    """Accuracy against epsilon, round by round, in the plot's coordinates; None without a single point."""
    accuracy = {k: _number(v, 0, 1) for k, v in _part(measured, "accuracy").items()}
    rounds: list[dict[str, Any]] = [
        {
            "name": f"round {r.get('round')}",
            "epsilon": _number(r.get("epsilon")),
            "accuracy": _number(r.get("accuracy"), 0, 1),
            "sites": ", ".join(map(str, r.get("sites") or ())),
        }
        for r in _items(measured, "rounds")
    ]
    final = _number(_part(measured, "epsilon").get("filter"))
    last = {"name": "final", "epsilon": final, "accuracy": accuracy.get("private"), "sites": ""}
    points = [p for p in rounds or [last] if p["epsilon"] is not None and p["accuracy"] is not None]
    if not points:
        return None
    left, top, right, bottom = FRAME
    widest: float = max(0.1, budget or 0.0, *(p["epsilon"] for p in points))
    step = _step(widest)
    end = step * math.ceil(widest / step * 1.02)

    def x(epsilon: float) -> float:
        return round(left + (right - left) * epsilon / end, 1)

    def y(share: float) -> float:
        return round(bottom - (bottom - top) * share, 1)

    for p in points:
        p |= {"x": x(p["epsilon"]), "y": y(p["accuracy"])}
    lines = (("non_private", "same training without noise"), ("chance", "guessing"))
    drawn = [(name, accuracy.get(name), text) for name, text in lines]
    return {
        "frame": {"left": left, "top": top, "right": right, "bottom": bottom},
        "points": points,
        "x_ticks": [(x(step * i), f"{step * i:g}") for i in range(round(end / step) + 1)],
        "y_ticks": [(y(i / 5), f"{20 * i} %") for i in range(6)],
        "lines": [{"name": n, "y": y(v), "share": v, "text": t} for n, v, t in drawn if v is not None],
        "budget": {"x": x(budget), "epsilon": budget} if budget else None,
    }


def _ingest(measured: object) -> list[dict[str, Any]]:
    """Files by hospital: kept, duplicates, and those in quarantine with their reasons."""
    out = []
    for site in (ingest := _part(measured, "ingest")):
        counts = _part(ingest, site)
        reasons = {k: _number(v) for k, v in _part(counts, "quarantined").items()}
        known = [(k, QUARANTINE.get(k, k), int(v)) for k, v in reasons.items() if v is not None]
        kept, twice = (_number(counts.get(name)) for name in ("kept", "duplicates"))
        why = sorted(known, key=lambda item: -item[2])
        total = sum(v for *_, v in known)
        out.append({"site": site, "kept": kept, "duplicates": twice, "quarantined": total, "reasons": why})
    return out


def _steps(measured: object) -> list[dict[str, Any]]:
    timed = [(s.get("name", ""), _number(s.get("seconds"))) for s in _items(measured, "steps")]
    longest = max((t for _, t in timed if t is not None), default=0.0) or 1.0
    return [{"name": n, "seconds": t, "share": round(100 * (t or 0.0) / longest, 1)} for n, t in timed]


def _lines(ledger: _JsonMap) -> list[dict[str, Any]]:
    grants = {g["grant"]: g for g in ledger["grants"]}
    accounts = {a["account"]: a for a in ledger["accounts"]}
    out = []
    for e in ledger["entries"]:
        who, text = told(e, grants, accounts)
        kind = KINDS.get(e["type"], e["type"])
        out.append({"seq": e["seq"], "when": utc(e["at"]), "type": e["type"], "kind": kind, "who": who, "text": text})
    return out


def _headline(ledger: _JsonMap, refusals: Sequence[_JsonMap]) -> dict[str, Any]:
    """The counts of the first screen, each a plain number from the entries."""
    admitted = [e for e in ledger["entries"] if e["type"] == "admitted"]
    sites = sum(e["type"] == "enrolled" for e in ledger["entries"])
    with_epsilon = sum(e["level"] in ("A", "A*") for e in admitted)  # at another level a Gaussian claim is void (P7)
    crowds = sum(crowded(e["level"], e["claim"]) for e in admitted)
    nothing = len(admitted) - with_epsilon - crowds
    refused = sum(not r["given_up"] for r in refusals)
    sentence = f"{count(len(admitted), 'release')} admitted, {refused} refused, {count(sites, 'hospital')}."
    return {
        "sentence": sentence,
        "admitted": len(admitted),
        "updates": sum(bool(e["run"]) for e in admitted),
        "alone": sum(not e["run"] for e in admitted),
        "refused": refused,
        "given_up": len(refusals) - refused,
        "sites": sites,
        "with_epsilon": with_epsilon,
        "crowds": crowds,
        "nothing": nothing,
        "others": others(crowds, nothing),
        "open": sum(g["state"] == "held" for g in ledger["grants"]),
    }


def _printable(value: Any) -> Any:
    """A text without control or direction marks, which could make a page read otherwise than it is."""
    return (
        "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in value) if type(value) is str else value
    )


def render(ledger: _JsonMap, releases: Sequence[ReleaseView], measured: Mapping[str, Any] | None) -> str:
    """One self-contained HTML page.

    Args:
        ledger: exactly what :func:`policies.view.as_json` gives.
        releases: what stands on the shelf; each is compared with the ledger.
        measured: what was measured beside the ledger: title, steps, ingest, accuracy, epsilon, rounds. A part that
            is missing, or a number that is not finite, is said to be missing; it is never drawn as something.
    Raises:
        UnsoundReport: the ledger's balances do not follow from its entries.
    """
    root = _root(ledger)
    measured = measured if isinstance(measured, Mapping) else {}
    refusals = _refusals(ledger)
    budgets = [_budget(a, ledger) for a in ledger["accounts"]]
    limits = {b["epsilon"] for b in budgets if "epsilon" in b}
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_printable,
    )
    environment.filters["never_less"] = never_less
    accuracy = _part(measured, "accuracy")
    epsilon = _part(measured, "epsilon")
    return environment.get_template("report.html").render(
        title=str(measured.get("title") or "What left the hospitals, and what it cost"),
        head=_headline(ledger, refusals),
        ledger=ledger,
        root=root,
        until=utc(ledger["entries"][-1]["at"]) if ledger["entries"] else "",
        budgets={kind: [b for b in budgets if b["kind"] == kind] for kind in ("rdp", "k")},
        refusals=refusals,
        releases=[_release(view, ledger) for view in releases],
        plot=_plot(measured, min(limits) if limits else None),
        accuracy={k: _number(accuracy.get(k), 0, 1) for k in ("private", "non_private", "chance")},
        test_images=_number(accuracy.get("test_images")),
        epsilon={k: _number(epsilon.get(k)) for k in ("filter", "tight", "delta", "order")},
        ingest=_ingest(measured),
        steps=_steps(measured),
        lines=_lines(ledger),
        count=count,
        epsilon_text=epsilon_text,
    )
