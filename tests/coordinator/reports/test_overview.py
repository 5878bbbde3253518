"""The report says what the ledger says: numbers, refusals, certificates; and nothing in it can run or load."""

from __future__ import annotations

import ast
import base64
import copy
import hashlib
import io
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from PIL import Image

from agent.deidentify.errors import REASONS
from coordinator import explanations
from coordinator.admission import AdmissionService, RequestRejectedError
from coordinator.reports.certificates import as_document
from coordinator.reports.document import ReportTable, Text
from coordinator.reports.html_renderer import as_html
from coordinator.reports.ledger_view import LedgerView
from coordinator.reports.overview import ReleaseView, UnsoundReportError, _looks, overview, views
from coordinator.storage.release_store import WORDING, ReleaseStore
from coordinator.storage.uploads import Uploads
from policies.accounting.accountant import cost, epsilon_nano, epsilon_of
from policies.accounting.claims import KAnonymous, SubsampledGaussian
from policies.audit.display import as_json
from policies.audit.verify import verify
from policies.ledger.backends.sqlite import export_file, open_sqlite
from policies.ledger.entries import Refused, Spent, decode, encode
from policies.ledger.merkle import CompactRange, leaf_hash
from policies.ledger.store import Store
from policies.review.policy import parse as parse_policy
from policies.statements import Settlement, release_id
from protos.artifacts.arrays import pack_images, pack_vector
from tests.support.coordinator_runs import signed
from tests.support.html_pages import HtmlPage
from tests.support.ledger_world import BOTH, DP, K5, Clock, Hospital, policy
from tests.support.report_world import books_of_store, page_of
from tests.support.upload_server import staged

SOURCE = Path(__file__).parents[3]
EVIL = "\"><script>alert(1)</script><img src=x onerror=alert(1)>{{ 7*7 }}'\u202e"


class Page(HtmlPage):
    """The same, with what is in its tables."""

    def __init__(self, text: str) -> None:
        self.tables: list[list[list[str]]] = []
        super().__init__(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        super().handle_starttag(tag, attrs)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_data(self, data: str) -> None:
        super().handle_data(data)
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data

    def table(self, heading: str) -> list[list[str]]:
        """The body rows of the table that has this column."""
        found = [t for t in self.tables if heading in t[0]]
        assert len(found) == 1
        return [[" ".join(cell.split()) for cell in row] for row in found[0][1:]]

    def all(self, tag: str) -> Iterator[dict[str, str | None]]:
        return (attrs for name, attrs in self.tags if name == tag)


@dataclass
class World:
    """A coordinator with two hospitals, and what happened there."""

    folder: Path
    key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    store: Store = field(init=False)
    intake: AdmissionService = field(init=False)
    shelf: ReleaseStore = field(init=False)
    uploads: Uploads = field(init=False)

    def __post_init__(self) -> None:
        self.store = Store(open_sqlite(self.folder / "ledger.sqlite"), "lazaret/test", self.key, Clock())
        self.intake = AdmissionService.over(self.store, parse_policy(policy(), "federation"))
        self.shelf = ReleaseStore(self.folder / "releases", self.store)
        self.uploads = Uploads(self.shelf.staging, lambda: 0.0, keep_free=0)
        self.north, self.south = Hospital("north"), Hospital("south")
        for hospital in (self.north, self.south):
            self.intake.enrol(hospital.enrolment()[1])

    def reserve(self, hospital: Hospital, grant: str, claim: Any = K5, run: str = "") -> bool:
        reservation = hospital.reservation(grant, claim, "federated" if run else "ksame", run)
        return self.intake.reserve(hospital.name, f"r-{grant}", hospital.seal(reservation)).admitted

    def submit(self, hospital: Hospital, grant: str, body: bytes, **changes: Any) -> bool:
        digest = hashlib.sha256(body).hexdigest()
        values = {"artifact_sha256": digest, "artifact_bytes": len(body), **changes}
        release = hospital.release(grant, **values)
        path = staged(self.uploads, hospital.name, body)
        envelope = hospital.seal(release)
        key = f"s-{release.release[:20]}"
        verdict = self.intake.admit(hospital.name, key, envelope, release, signed(release, body))
        self.shelf.settle(path, release, envelope, verdict)
        self.uploads.drop(hospital.name, digest)
        return verdict.admitted

    def update(self, hospital: Hospital, grant: str, number: int, steps: int) -> bool:
        account = self.store.state.accounts[f"{hospital.name}/rdp"]
        claim = SubsampledGaussian(DP.sampling_rate, DP.noise_multiplier, steps)
        nano = epsilon_nano(claim, float(account.opened.delta), account.opened.order)
        facts = {"mechanism": "federated", "artifact_type": "update", "claim": claim, "run": "trial", "round": number}
        facts |= {"epsilon_nano": nano, "delta": account.opened.delta}
        facts |= {"components": {"centre": "public", "initial": "public"}}
        body = pack_vector(np.full(4, number, np.float32))
        return self.submit(hospital, grant, body, **facts)

    def ledger(self) -> dict[str, Any]:
        records = [self.store.line(i).record for i in range(self.store.state.size)]
        ledger = as_json("lazaret/test", records)
        assert json.loads(json.dumps(ledger)) == ledger
        return ledger


def pictures(count: int = 6) -> bytes:
    ramp = np.arange(16, dtype=np.uint8).reshape(4, 4) * 16
    images = np.stack([np.roll(ramp, i) for i in range(count)])
    return pack_images(images, tuple("effusion" if i % 2 else "clear" for i in range(count)))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Admitted: one image set, three updates. Refused: two at the price, one at the door, one call."""
    w = World(tmp_path)
    assert w.reserve(w.north, "g-set")
    assert w.submit(w.north, "g-set", pictures())
    assert not w.reserve(w.north, "g-again")  # every patient was in one set already
    assert not w.reserve(w.south, "g-small", KAnonymous(k=2, l_diversity=2, releases_per_patient=1))
    assert w.reserve(w.north, "g-north", DP, "trial")
    assert w.reserve(w.south, "g-south", DP, "trial")
    assert w.update(w.north, "g-north", 1, 30)
    assert w.update(w.south, "g-south", 1, 30)
    w.intake.register.close_round("trial", 1, ["north", "south"], hashlib.sha256(b"model").digest())
    assert w.update(w.north, "g-north", 2, 60)
    w.intake.register.close("g-north", "released")
    assert w.reserve(w.south, "g-bad")
    assert not w.submit(w.south, "g-bad", pictures(), artifact_sha256="cd" * 32)
    with pytest.raises(RequestRejectedError):
        w.intake.reserve("stranger", "x", w.north.seal(w.north.reservation("g-x")))
    yield w
    w.store.close()


MEASURED: dict[str, Any] = {
    "title": "A trial of two hospitals",
    "steps": [{"name": "ingest", "seconds": 3.25}, {"name": "rounds", "seconds": 12.5}],
    "ingest": {"north": {"kept": 310, "duplicates": 4, "quarantined": {"burned_in_risk": 7, "not_dicom": 2}}},
    "network": {"name": "small-cnn", "trained": "bias-and-norms", "parameters": 1458},
    "accuracy": {"private": 0.71, "public_start": 0.66, "non_private": 0.83, "chance": 0.1, "test_images": 1000},
    "evaluation": {
        "figure": "accuracy",
        "value": 0.69,
        "low": 0.55,
        "high": 0.8,
        "after_round": 2,
        "held_out": 20,
        "noise": 4.0,
    },
    "epsilon": {"filter": 5.5, "tight": 4.25, "delta": 4e-6, "order": 4},
    "rounds": [
        {"round": 1, "epsilon": 4.5, "accuracy": 0.4, "sites": ["north", "south"]},
        {"round": 2, "epsilon": 5.5, "accuracy": 0.71, "sites": ["north"]},
    ],
}


def test_the_headline_counts_what_the_ledger_holds(world: World) -> None:
    page = Page(page_of(world.store, views(world.shelf.root), MEASURED))
    assert "4 releases admitted, 4 refused, 2 hospitals." in page.text
    assert "ε covers 3 of 4 releases. Of the others, 1 is k-anonymous." in page.text
    assert "promise nothing" not in page.text
    assert "promises nothing" not in page.text
    assert "1 release of one hospital, 3 training updates" in page.text


def test_a_budget_is_printed_with_unit_relation_and_order_and_never_looks_fuller_than_it_is(world: World) -> None:
    ledger = world.ledger()
    page = Page(page_of(world.store, (), None))
    assert (
        "epsilon 8 at delta 4e-06 per patient, neighbours differ by one patient added or removed; "
        "Rényi filter of order 4"
    ) in page.text
    shown = dict(re.findall(r"Budgets: (\w+): differential privacy Budget (.*?) What it was used for", page.text))
    assert set(shown) == {"north", "south"}
    for account in (a for a in ledger["accounts"] if a["kind"] == "rdp"):
        spent, held, left = (float(x) for x in re.findall(r"(?:Spent|Held|Left) ([\d.]+) %", shown[account["site"]]))
        truth = [100 * account[part] / account["limit"] for part in ("spent", "held")]
        assert truth[0] - 1e-6 <= spent <= truth[0] + 0.1001
        assert truth[1] - 1e-6 <= held <= truth[1] + 0.1001
        assert 100 - sum(truth) - 0.1001 <= left <= 100 - sum(truth) + 1e-6
        assert (spent > 0, held > 0) == (account["site"] == "north", account["site"] == "south")
    worth = epsilon_of(cost(DP, 4), 4e-6, 4)
    printed = re.search(r"Spent [\d.]+ %: epsilon ([\d.]+) at delta 4e-06", page.text)
    assert printed is not None
    assert worth - 1e-6 <= float(printed[1]) <= worth + 0.01


def test_an_empty_ledger_and_missing_measurements_are_said_to_be_so(tmp_path: Path) -> None:
    store = Store(open_sqlite(tmp_path / "empty.sqlite"), "lazaret/test", Ed25519PrivateKey.generate(), Clock())
    page = Page(page_of(store))
    store.close()
    assert "0 releases admitted, 0 refused, 0 hospitals." in page.text
    assert "Covered by ε 0 of 0; no release is without one" in page.text
    for what in ("Accuracy was", "Files were", "Times were"):
        assert f"{what} not measured for this report." in page.text
    assert not list(page.all("path"))


def test_sets_of_patients_have_counts_and_no_epsilon(world: World) -> None:
    page = Page(page_of(world.store, views(world.shelf.root), None))
    for site in ("north", "south"):
        budget = "Budget a patient may be in 1 release without an epsilon, ever Spent 1 Held 0 Left 0"
        assert f"Budgets: {site}: releases without an epsilon {budget}" in page.text
    assert not re.search(r"(epsilon|ε)\s*(=|of|:)?\s*0(?![.\d]*[1-9])", page.text)
    assert not re.search(r"(?<!k-)\banonym(ous|ised|ized)\b", page.text)


def test_every_refusal_is_explained_with_what_to_do(world: World) -> None:
    ledger = world.ledger()
    page = Page(page_of(world.store, (), None))
    refused = [e for e in ledger["entries"] if e["type"] == "refused"]
    assert [e["findings"] for e in refused] == [["budget"], ["min_k"], ["artifact_changed"], ["unknown_site"]]
    for entry in refused:
        for rule in entry["findings"]:
            why, todo = explanations.RULES[rule]
            assert why in page.text
            assert [why, todo] in [row[1:3] for row in page.table("What to do")]


def test_a_grant_that_a_site_gives_up_is_not_counted_as_refused(world: World) -> None:
    word = Settlement("g-south", "south", "trial", "federated", "expired", "restart", 0)
    world.intake.settle("south", "settle-g-south", world.south.seal(word))
    page = Page(page_of(world.store, (), None))
    assert "4 releases admitted, 4 refused, 2 hospitals." in page.text
    assert "1 given up" in page.text
    assert explanations.RULES["restart"][0] in page.text


def _rules(path: Path) -> set[str]:
    """The literal rules of every Finding, settlement, error with a rule and _no(rule, ...) in a file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            places = {"Finding": 0, "expire_grant": 2, "settlement": 2, "UploadError": 0, "CallRejectedError": 2}
            at = places.get(node.func.id)
            if node.func.id == "_no" and len(node.args) == 2:
                at = 0
            if at is not None and len(node.args) > at and isinstance(node.args[at], ast.Constant):
                found.add(node.args[at].value)  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize(
    ("file", "least"),
    [
        ("policies/review/rules.py", 25),
        ("policies/ledger_service.py", 1),
        ("coordinator/admission.py", 7),
        ("coordinator/federation/run_controller.py", 1),
        ("coordinator/gateway/service.py", 1),
        ("coordinator/storage/uploads.py", 5),
        ("coordinator/gateway/guard.py", 1),
        ("agent/release/pipeline.py", 2),
        ("agent/release/release_record.py", 1),
        ("agent/release/approval.py", 1),
        ("agent/federation/participant.py", 5),
        ("agent/federation/secure_aggregation.py", 1),
        ("agent/release/recovery.py", 0),
        ("agent/gateway/client.py", 1),
    ],
)
def test_every_rule_in_the_source_has_its_sentence(file: str, least: int) -> None:
    rules = _rules(SOURCE / file)
    assert len(rules) >= least
    assert rules - set(explanations.RULES) == set()


def test_every_quarantine_reason_and_claim_level_has_its_words() -> None:
    assert set(explanations.QUARANTINE) == set(REASONS)
    assert {level: meaning for level, (_, meaning, _) in explanations.LEVELS.items()} == WORDING


def test_an_unknown_rule_is_shown_as_it_is() -> None:
    assert "moon_phase" in explanations.explain("moon_phase")[0]


def test_a_release_is_shown_with_its_certificate_and_its_place_in_the_ledger(world: World) -> None:
    shown = views(world.shelf.root)
    ledger = world.ledger()
    page = Page(page_of(world.store, shown, None))
    entry = next(e for e in ledger["entries"] if e["type"] == "admitted")
    assert f"✓ in the ledger: entry {entry['seq']} says the same" in page.text
    assert WORDING["B"] in page.text
    assert "at least 5 different patients behind every image" in page.text
    assert entry["artifact"] in page.text
    thumbnails = [i for i in page.all("img")]
    assert [i["alt"] for i in thumbnails] == [
        f"synthetic image {n + 1}, label {label}" for n, label in enumerate(shown[0].labels)
    ]


def test_thumbnails_are_the_images_themselves(world: World) -> None:
    (view,) = views(world.shelf.root)
    page = Page(page_of(world.store, [view], None))
    for attrs, image in zip(page.all("img"), view.images, strict=True):  # type: ignore[arg-type]
        raw = base64.b64decode(str(attrs["src"]).removeprefix("data:image/png;base64,"), validate=True)
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(raw))), image)


@pytest.mark.parametrize(
    "change",
    [{"level": "A"}, {"site": "south"}, {"artifact_sha256": "00" * 32}, {"claim": {}}, {"meaning": "anonymous"}],
)
def test_a_certificate_that_the_ledger_does_not_bear_out_is_marked(world: World, change: dict[str, Any]) -> None:
    (view,) = views(world.shelf.root)
    forged = ReleaseView(view.id, {**view.certificate, **change}, view.images, view.labels)
    page = Page(page_of(world.store, [forged], None))
    assert "✕ the ledger does not say this; do not use it" in page.text
    assert "✓ in the ledger" not in page.text


def test_a_model_is_recognised_by_the_round_that_made_it(world: World) -> None:
    ledger = world.ledger()
    dearest = next(e for e in ledger["entries"] if e.get("release") == release_id("north", "g-north", 2))
    facts = {"release": "trial", "site": "north, south", "mechanism": "federated", "level": "A"}
    facts |= {"meaning": WORDING["A"], "artifact_sha256": hashlib.sha256(b"model").hexdigest()}
    facts |= {"statement_sha256": dearest["envelope"], "claim": dearest["claim"]}
    early = Page(page_of(world.store, [ReleaseView("trial", facts)], None))
    assert "✓ in the ledger" not in early.text  # the closed round does not count that update
    world.intake.register.close_round("trial", 2, ["north"], hashlib.sha256(b"model").digest())
    good = Page(page_of(world.store, [ReleaseView("trial", facts)], None))
    assert "✓ in the ledger: the model of entry" in good.text
    nano = epsilon_nano(DP, 4e-6, 4)
    stated = re.findall(r"Strength epsilon ([\d.]+) at delta 4e-06 per patient, neighbours differ by one", good.text)
    assert [nano / 1e9 <= float(x) < nano / 1e9 + 0.01 for x in stated] == [True]
    cheaper = next(e for e in ledger["entries"] if e.get("release") == release_id("north", "g-north", 1))
    for change in ({"artifact_sha256": "11" * 32}, {"claim": cheaper["claim"]}, {"level": "B"}):
        bad = Page(page_of(world.store, [ReleaseView("trial", {**facts, **change})], None))
        assert "✓ in the ledger" not in bad.text


def test_a_set_with_several_claims_is_shown_with_one_epsilon_and_counted_as_covered(world: World) -> None:
    asked = world.south.reservation("g-private", BOTH, "privimage")
    assert world.intake.reserve("south", "r-private", world.south.seal(asked)).admitted
    nano = epsilon_nano(BOTH, 4e-6, 4)
    facts = {"mechanism": "privimage", "claim": BOTH, "components": dict(asked.components), "delta": "4e-06"}
    assert world.submit(world.south, "g-private", pictures(), epsilon_nano=nano, **facts)
    (view,) = [v for v in views(world.shelf.root) if v.certificate["mechanism"] == "privimage"]
    page = Page(page_of(world.store, [view], None))
    assert "ε covers 4 of 5 releases." in page.text
    assert "✓ in the ledger: entry" in page.text
    assert "2 uses of the same patients, paid for together: (1) one set of counts" in page.text
    assert f"epsilon {explanations.epsilon_text(nano / 1e9)} at delta 4e-06 per patient" in page.text
    assert explanations.MECHANISMS["privimage"] in page.text
    for level in ("B", "C", ""):  # P7: void at another one
        void = ReleaseView(view.id, {**view.certificate, "level": level}, view.images, view.labels)
        assert "Strength" not in Page(page_of(world.store, [void])).text


def test_a_release_says_which_group_sizes_were_tried(world: World) -> None:
    (view,) = [v for v in views(world.shelf.root) if v.id == release_id("north", "g-set", 0)]
    told = ReleaseView(view.id, {**view.certificate, "k_tried": [5, 8, 11]}, view.images, view.labels)
    plain = page_of(world.store, [view])
    assert "were tried" not in Page(plain).text
    assert page_of(world.store, [told]) == plain  # the signed statement alone is believed
    inputs = books_of_store(world.store)
    item = inputs.item(view.id)
    part = {**item.parts[0], "k_tried": [5, 8, 11]}
    tried = replace(item, facts={**item.facts, "parts": [part]})
    assert "chosen: 5, 8, 11" in as_html(as_document(inputs, tried))


def test_a_set_in_colour_is_shown_in_colour(world: World) -> None:
    (view,) = [v for v in views(world.shelf.root) if v.id == release_id("north", "g-set", 0)]
    colour = np.zeros((2, 4, 6, 3), np.uint8)
    colour[..., 0] = 200
    text = page_of(world.store, [ReleaseView(view.id, view.certificate, colour, ("a", "b"))], None)
    assert "6 × 4 pixels" in Page(text).text
    found = re.findall(r"data:image/png;base64,([A-Za-z0-9+/=]+)", text)
    shown = [np.asarray(Image.open(io.BytesIO(base64.b64decode(one)))) for one in found]
    assert any(image.ndim == 3 and (image[..., 0] > image[..., 1]).all() for image in shown)


def test_a_changed_file_on_the_shelf_stops_the_report(world: World) -> None:
    archive = world.shelf.root / release_id("north", "g-set", 0) / "images.tar"
    archive.write_bytes(archive.read_bytes()[:-1] + b"\1")
    with pytest.raises(UnsoundReportError, match="release-"):
        views(world.shelf.root)


def _spent_less(entries: list[bytes]) -> None:
    """A paid price of one less: every entry can be read, and all of them fold."""
    at, record = next((i, r) for i, r in enumerate(map(decode, entries)) if isinstance(r.entry, Spent))
    entries[at] = encode(replace(record, entry=replace(record.entry, used=record.entry.used - 1)))


def _refusal_dropped(entries: list[bytes]) -> None:
    entries[:] = [body for body in entries if not isinstance(decode(body).entry, Refused)]


def _changed_byte(entries: list[bytes]) -> None:
    entries[0] = entries[0][:-1] + b"?"


def _last_one_hidden(entries: list[bytes]) -> None:
    entries.pop()


@pytest.mark.parametrize("tamper", [_spent_less, _refusal_dropped, _changed_byte, _last_one_hidden])
def test_no_page_is_made_of_books_that_do_not_add_up(world: World, tamper: Any) -> None:
    inputs = books_of_store(world.store)
    entries = list(inputs.export.entries)
    tamper(entries)
    assert tuple(entries) != inputs.export.entries
    export = replace(inputs.export, entries=tuple(entries))
    with pytest.raises(UnsoundReportError, match="do not lead to the root"):
        overview(replace(inputs, export=export, told=LedgerView(export.entries, export.envelopes)), (), None)
    with pytest.raises(UnsoundReportError, match="do not lead to the root"):
        overview(replace(inputs, source=replace(inputs.source, root="00" * 32)), (), None)


def test_no_page_is_made_of_entries_that_do_not_fold_though_their_head_is_signed(world: World) -> None:
    inputs = books_of_store(world.store)
    entries = (*inputs.export.entries, inputs.export.entries[0])  # a hospital enrolled twice under one key
    tree = CompactRange()
    for body in entries:
        tree.append(leaf_hash(body))
    source = replace(inputs.source, size=len(entries), root=tree.root().hex())
    export = replace(inputs.export, entries=entries)
    with pytest.raises(UnsoundReportError, match="do not fold"):
        overview(replace(inputs, source=source, export=export, told=LedgerView(entries, export.envelopes)), (), None)


def test_the_root_on_the_page_is_the_one_that_the_verifier_prints(world: World) -> None:
    page = Page(page_of(world.store))
    world.store.close()
    found = verify(export_file(world.folder / "ledger.sqlite", "lazaret/test", world.key))
    assert found.root in page.text
    assert f"{found.size} entries" in page.text
    assert "lazaret-verify ledger.export --key FINGERPRINT" in page.text


def test_every_ledger_line_is_a_row(world: World) -> None:
    ledger = world.ledger()
    rows = Page(page_of(world.store, (), None)).table("It says")
    assert [int(r[0]) for r in rows] == [e["seq"] for e in ledger["entries"]]
    assert rows[0][1:4] == ["2023-11-14 22:13:21", "Hospital enrolled", "north"]
    assert all(r[3] for r in rows)
    assert sum(r[2] == "✓ Admitted" for r in rows) == 4
    assert sum(r[2] == "✕ Refused" for r in rows) == 4


def test_no_limit_and_no_delta_on_the_page_is_smaller_than_it_is(world: World) -> None:
    measured = {**MEASURED, "epsilon": {"filter": 4.0000004, "tight": 3.0000001, "delta": 1.2345644e-06}}
    page = Page(page_of(world.store, (), measured))
    assert "epsilon 4.01 at delta 1.23457e-06" in page.text
    assert "epsilon 3.01 by a tighter accountant" in page.text


def test_what_was_measured_is_plotted_and_told(world: World) -> None:
    page = Page(page_of(world.store, (), MEASURED))
    rows = page.table("accuracy")
    assert rows == [["round 1", "4.5", "40.0 %", "north, south"], ["round 2", "5.5", "71.0 %", "north"]]
    drawn = next(str(line["d"]) for line in page.all("path") if "M0" not in str(line["d"]) and "L" in str(line["d"]))
    (x1, y1), _, (x2, y2), *_ = (tuple(map(float, p.split())) for p in drawn.removeprefix("M").split("L"))
    assert x1 < x2
    assert y1 > y2  # higher on the page is more accurate
    for text in ("the same network without privacy: 83.0", "guessing: 10.0", "1000 test images", "epsilon 5.5"):
        assert text in page.text
    for text in (
        "the public start, before the first round 66.0 %",
        "Network small-cnn, trained part: bias-and-norms, 1,458 trained parameters",
        "Private evaluation accuracy 69.0 %, 95 % interval 55.0 % to 80.0 %: of the model after round 2, on the 20 %",
    ):
        assert text in page.text
    assert page.table("duplicates") == [
        ["north", "310", "4", "9", "7 × the image itself may show a name; 2 × neither DICOM nor NIfTI"]
    ]
    assert [r[:2] for r in page.table("seconds")] == [["ingest", "3.2"], ["rounds", "12.5"]]


def test_a_look_that_says_nothing_is_told_with_its_whole_range(world: World) -> None:
    silent = {**MEASURED["evaluation"], "value": None, "low": 0.0, "high": 1.0}
    page = Page(page_of(world.store, (), {**MEASURED, "evaluation": silent}))
    assert "Private evaluation accuracy cannot be told, 95 % interval 0.0 % to 100.0 %" in page.text


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1, "0.9", None, True, [], 10**400])
def test_what_is_not_a_number_is_never_drawn(world: World, bad: Any) -> None:
    measured = copy.deepcopy(MEASURED)
    measured["rounds"][0]["accuracy"] = measured["rounds"][1]["epsilon"] = bad
    measured["accuracy"] = dict.fromkeys(measured["accuracy"], bad)
    measured["network"]["parameters"] = measured["evaluation"]["high"] = bad
    measured["steps"][0]["seconds"] = measured["ingest"]["north"]["kept"] = bad
    page = page_of(world.store, (), measured)
    assert "<figure>" not in page.rpartition("What privacy cost")[2]
    assert "Private evaluation" not in page
    assert "nan" not in Page(page).text.lower().split()
    for junk in (bad, {"rounds": bad, "steps": bad, "ingest": bad, "accuracy": bad, "epsilon": bad}):
        Page(page_of(world.store, (), junk))


def _poisoned(value: Any) -> Any:
    """Every text in a value, keys too, with the attack in it."""
    if isinstance(value, dict):
        return {k if k in _KNOWN else k + EVIL: _poisoned(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_poisoned(v) for v in value]
    return value + EVIL if isinstance(value, str) else value


_KNOWN = {*MEASURED, *MEASURED["rounds"][0], *MEASURED["steps"][0], *MEASURED["accuracy"], *MEASURED["epsilon"]}
_KNOWN |= {*MEASURED["network"], *MEASURED["evaluation"]}
_KNOWN |= {"kept", "duplicates", "quarantined", "release", "site", "mechanism", "level", "meaning", "claim"}
_KNOWN |= {"artifact_sha256", "statement_sha256", "kind", "k", "l_diversity", "releases_per_patient"}


def test_hostile_texts_change_nothing_but_words(world: World) -> None:
    (view,) = views(world.shelf.root)
    plain = Page(page_of(world.store, [view], MEASURED))
    labels = tuple(label + EVIL for label in view.labels)
    forged = ReleaseView(view.id + EVIL, _poisoned(dict(view.certificate)), view.images, labels)
    labelled = ReleaseView(view.id, view.certificate, view.images, labels)
    text = page_of(world.store, [forged, labelled], _poisoned(MEASURED))
    evil = Page(text)

    assert evil.text.count("alert(1)") > 20
    assert {tag for tag, _ in evil.tags} <= {tag for tag, _ in plain.tags}
    names = {name for _, attrs in evil.tags for name in attrs}
    assert not {n for n in names if n.startswith("on")}
    assert names <= {name for _, attrs in plain.tags for name in attrs}
    assert "\u202e" not in text
    assert "{{ 7*7 }}" in evil.text  # shown, not computed


def test_hostile_texts_in_the_ledger_change_nothing_but_words(world: World) -> None:
    with pytest.raises(RequestRejectedError):
        world.intake.reserve("x" + EVIL, "k" + EVIL, b"{}")
    page = Page(page_of(world.store, (), None))
    assert not list(page.all("script"))
    assert not list(page.all("img"))
    assert "{{ 7*7 }}" in page.text


def test_the_page_loads_nothing_and_runs_nothing(world: World) -> None:
    text = page_of(world.store, views(world.shelf.root), MEASURED)
    page = Page(text)
    policy_tag = next(m for m in page.all("meta") if m.get("http-equiv") == "Content-Security-Policy")
    assert policy_tag["content"] == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    assert not {"script", "link", "iframe", "object", "embed", "form", "base"} & {tag for tag, _ in page.tags}
    assert "@import" not in text
    assert "@font-face" not in text
    assert not re.search(r"https?:", text)
    assert set(re.findall(r"url\(([^)]*)\)", text)) == set()
    assert all(str(i["src"]).startswith("data:image/png;base64,") for i in page.all("img"))


def test_the_page_can_be_read_without_seeing_it(world: World) -> None:
    page = Page(page_of(world.store, views(world.shelf.root), MEASURED))
    assert next(page.all("html"))["lang"] == "en"
    count = {
        tag: sum(1 for _ in page.all(tag)) for tag in ("main", "h1", "header", "nav", "footer", "table", "caption")
    }
    assert [count[tag] for tag in ("main", "h1", "header", "nav", "footer")] == [1, 1, 1, 1, 1]
    assert count["table"] == count["caption"] == len(page.tables)
    assert all(th.get("scope") in ("row", "col") for th in page.all("th"))
    assert all(i.get("alt") for i in page.all("img"))
    ids = [str(attrs["id"]) for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    targets = [str(a["href"]) for a in page.all("a")]
    targets += [f"#{i}" for _, attrs in page.tags for i in str(attrs.get("aria-labelledby") or "").split()]
    assert targets
    assert all(t.removeprefix("#") in ids for t in targets)
    for svg in page.all("svg"):
        labelled = svg.get("aria-label") or svg.get("aria-labelledby")
        assert (svg.get("role") == "img" and labelled) or svg.get("aria-hidden") == "true" or svg["class"] == "time"
    scrolled = [d for d in page.all("div") if d.get("class") == "scroll"]
    assert scrolled
    assert all(d.get("tabindex") == "0" and d.get("role") == "region" and d.get("aria-label") for d in scrolled)


def test_images_must_be_bytes_with_one_label_each() -> None:
    with pytest.raises(UnsoundReportError):
        ReleaseView("r", {}, np.zeros((2, 4, 4), np.uint8), ("one",))
    with pytest.raises(UnsoundReportError):
        ReleaseView("r", {}, np.zeros((1, 4, 4)), ("one",))  # type: ignore[arg-type]


def test_large_sets_are_shown_in_part_and_counted_whole(world: World) -> None:
    images = np.zeros((75, 200, 100), np.uint8)
    (shown,) = views(world.shelf.root)
    view = ReleaseView(shown.id, shown.certificate, images, ("x",) * 75)
    page = Page(page_of(world.store, [view], None))
    assert sum(1 for _ in page.all("img")) == 60
    assert "The first 60 of 75 images are shown." in page.text
    assert "75 synthetic images of 100 × 200 pixels" in page.text


def test_looks_at_a_model_are_shown_with_their_intervals_and_nonsense_is_not() -> None:
    figures = {
        "accuracy": {"value": 0.93, "low": 0.88, "high": 0.97}, "auc": {"value": None, "low": 0.0, "high": 1.0},
        "odd": {"value": "1", "low": math.nan, "high": 1.0}, "odder": 3,
    }  # fmt: skip
    found = {"looks": [{"after_round": 4, "figures": figures}, 7], "chosen": {"after_round": 4}}
    table, note = _looks(ReleaseView("run-1", {"evaluation": found}))
    assert isinstance(table, ReportTable)
    assert table.rows == (
        ("4", "accuracy", "0.930", "0.880 to 0.970"),
        ("4", "auc", "cannot be told", "0.000 to 1.000"),
    )
    assert isinstance(note, Text)
    assert "after round 4, which looked best" in note.text
    for nothing in ({}, {"evaluation": None}, {"evaluation": {"looks": []}}, {"evaluation": {"looks": "x"}}):
        assert list(_looks(ReleaseView("run-1", nothing))) == []
