"""A certificate says what the ledger says and nothing stronger; any change of it, and any other maker, is found."""

from __future__ import annotations

import base64
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.console.release_facts import model_of
from coordinator.explanations import LEVELS
from coordinator.reports.catalog import make, snapshot
from coordinator.reports.dp_registry import entry as registered
from coordinator.reports.model_cards import card
from coordinator.reports.sp800_226 import checklist
from policies.accounting.claims import KAnonymous, SubsampledGaussian
from policies.accounting.rdp import cost, epsilon_nano, epsilon_of
from policies.audit import certificate, certificate_check
from policies.audit.certificate import PAYLOAD, Certificate, ProvenEntry, read
from policies.audit.verifier_archive import archive
from policies.audit.verify import main, verify
from policies.ledger.entries import Admitted, Reserved, RoundClosed, decode, encode
from policies.ledger.export import Export, ExportError
from policies.ledger.merkle import Checkpoint, CompactRange, MerkleTree, leaf_hash, sign_checkpoint
from policies.ledger.store import AppendRequest
from policies.ledger_service import digest
from policies.statements import claim_json
from protos.artifacts.arrays import pack_vector
from protos.common.canonical_json import canonical
from protos.common.dsse import seal
from tests.support.ledger_world import COMPONENTS, DP, Hospital
from tests.support.report_world import NOW, Stage, stage


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage(tmp_path_factory.mktemp("hub")) as shown:
        yield shown


@pytest.fixture(scope="module")
def files(world: Stage, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of a release and of a run's model, in both forms; the ledger's export; what they are about."""
    folder = tmp_path_factory.mktemp("files")
    for name, subject in (("set", world.names["eleven"]), ("model", world.run)):
        for form in ("json", "pdf"):
            (folder / f"{name}.{form}").write_bytes(make(world.home, "certificate", form, subject, NOW).body)
    (folder / "ledger.export").write_bytes(snapshot(world.home, NOW)[0])
    return folder


@pytest.fixture(scope="module")
def key(world: Stage) -> str:
    return snapshot(world.home, NOW)[1].source.key


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    try:
        code = main([str(a) for a in arguments])
    except SystemExit as stopped:
        code = int(str(stopped.code))
    printed = capsys.readouterr()
    return code, printed.out + printed.err


@pytest.mark.parametrize("name", ["set.json", "set.pdf", "model.json", "model.pdf"])
def test_a_certificate_is_sound_under_the_ledgers_key_and_against_its_export(
    name: str, files: Path, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = ("--from", files / "ledger.export")
    for pinned in (("--key", key), ("--key", key.upper()), ("--key", key, *ledger)):
        code, text = told(capsys, files / name, *pinned)
        assert (code, text.startswith("SOUND: certificate of ")) == (0, True), text
    assert "the export of the ledger holds all of it" in text


def test_what_it_prints_has_its_level_and_every_epsilon_with_unit_relation_delta_and_order(
    files: Path, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, model = told(capsys, files / "model.pdf", "--key", key)
    assert "level A: (epsilon, delta)-differential privacy for each patient" in model
    assert model.count("at delta 4e-06 per patient, add-or-remove-one; Renyi filter of order 4") == 2
    _, crowd = told(capsys, files / "set.pdf", "--key", key)
    assert "k = 11; there is no epsilon, and it is not 0" in crowd
    assert "anonymous" not in crowd.replace("k-anonymous", "")


@pytest.mark.parametrize("name", ["set.json", "model.pdf"])
def test_whose_it_is_cannot_be_told_without_a_key_from_elsewhere(
    name: str, files: Path, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also not by the export, which whoever made the certificate may have made, too."""
    for words in ((), ("--from", files / "ledger.export")):
        code, text = told(capsys, files / name, *words)
        assert (code, text.startswith("CONSISTENT: certificate of ")) == (3, True), text
        assert f"consistent with itself; signed by {key}, which you have not named" in text
        code, text = told(capsys, files / name, *words, "--json")
        document = json.loads(text)
        assert (code, document["verdict"], document["sound"], document["anchors"]) == (3, "CONSISTENT", False, [])


@pytest.mark.parametrize("name", ["set.json", "model.pdf"])
def test_any_changed_byte_is_found(name: str, files: Path) -> None:
    raw, dice = (files / name).read_bytes(), random.Random(name)
    for at in {*dice.sample(range(len(raw)), 200), 0, len(raw) - 1, len(raw) - 2}:
        changed = bytearray(raw)
        changed[at] ^= 1 << dice.randrange(8)
        with pytest.raises(ExportError):
            certificate_check.check(read(bytes(changed)))
    for cut in (raw[:-2], raw[: len(raw) // 2], raw + b"x", raw + raw):
        with pytest.raises(ExportError):
            certificate_check.check(read(cut))


def test_another_page_around_a_true_certificate_is_found(files: Path, key: str, tmp_path: Path) -> None:
    """The attachment is sound; what is printed around it says something else."""
    forged = b"%PDF-1.4\n(level A for everything)\n" + (files / "set.json").read_bytes()
    last = (files / "set.pdf").read_bytes().splitlines(keepends=True)[-1]
    with pytest.raises(ExportError, match="was changed"):
        read(forged + b"\n" + last)
    with pytest.raises(ExportError, match="last line is no signature"):
        read(forged)


def test_a_true_signature_over_two_attachments_is_refused(world: Stage, files: Path) -> None:
    key = world.home.ledger_key()
    both = b"%PDF-1.4\n" + (files / "set.json").read_bytes() + (files / "model.json").read_bytes()
    signed = both + certificate.pdf_signature(key.sign(certificate.pae("application/pdf", both)))
    with pytest.raises(ExportError, match="exactly one"):
        read(signed)


def resigned(world: Stage, found: Certificate, **changes: Any) -> Certificate:
    """The same with changes, under the ledger's own key: what a lying operator could do."""
    return read(seal(replace(found, **changes).encode(), PAYLOAD, world.home.ledger_key()))


@pytest.mark.parametrize(
    "lie",
    [
        {"level": "A"},
        {"meaning": "anonymous"},
        {"sites": ["south"]},
        {"subject": "release-of-nobody"},
        {"artifact_sha256": "00" * 32},
        {"assumption": "none"},
        {"extra": 1},
    ],
)
def test_the_ledgers_own_key_cannot_say_more_than_its_entries(world: Stage, files: Path, lie: dict[str, Any]) -> None:
    found = read((files / "set.json").read_bytes())
    with pytest.raises(ExportError):
        certificate_check.check(resigned(world, found, facts={**found.facts, **lie}))


def test_a_smaller_epsilon_or_a_larger_k_is_found_whoever_signed(world: Stage, files: Path) -> None:
    model, crowd = read((files / "model.json").read_bytes()), read((files / "set.json").read_bytes())
    for found, part, value in ((model, "epsilon", None), (crowd, "claim", {"k": 12})):
        first, *rest = found.facts["parts"]
        worse = {**first, part: value if value is None else {**first[part], **value}}
        with pytest.raises(ExportError, match="something else than the entries"):
            certificate_check.check(resigned(world, found, facts={**found.facts, "parts": [worse, *rest]}))


def test_nothing_that_it_rests_on_can_be_left_out_or_put_in(world: Stage, files: Path) -> None:
    model, crowd = read((files / "model.json").read_bytes()), read((files / "set.json").read_bytes())
    for i in range(len(model.shown)):
        with pytest.raises(ExportError):
            certificate_check.check(resigned(world, model, shown=(*model.shown[:i], *model.shown[i + 1 :])))
    for odd in ({"envelopes": ()}, {"envelopes": (*crowd.envelopes, *model.envelopes)}):
        with pytest.raises(ExportError, match="statement"):
            certificate_check.check(resigned(world, crowd, **odd))
    with pytest.raises(ExportError, match="order"):
        certificate_check.check(resigned(world, crowd, shown=(*crowd.shown, crowd.shown[-1])))
    with pytest.raises(ExportError, match="rest on"):
        certificate_check.check(
            resigned(world, crowd, shown=tuple(sorted({*crowd.shown, *model.shown}, key=lambda s: s.seq)))
        )


def remade(world: Stage, subject: str, change: Any) -> Certificate:
    """A certificate from a tree of the operator's own, under the ledger's key: entries are changed or dropped."""
    _, ledger = snapshot(world.home, NOW)
    records = [r for r in (change(decode(raw)) for raw in ledger.export.entries) if r is not None]
    entries, tree, key = [encode(r) for r in records], MerkleTree(), world.home.ledger_key()
    for raw in entries:
        tree.append(leaf_hash(raw))
    wanted = certificate_check.supporting_entries(subject, list(enumerate(records)))
    shown = tuple(ProvenEntry(seq, entries[seq], tuple(tree.inclusion_proof(seq, tree.size))) for seq, _ in wanted)
    envelopes = tuple(ledger.behind(wanted))
    note = sign_checkpoint(Checkpoint(ledger.source.origin, tree.size, tree.root()), key)
    return Certificate(ledger.source.origin, ledger.export.public, note, shown, envelopes, {"subject": subject}, {})


def test_a_level_that_the_sites_own_statement_does_not_give_is_found_without_the_ledger(world: Stage) -> None:
    """The ledger's owner signs a tree of their own, in which a release that was only tested has level B."""
    subject = world.names["taught"]

    def better(record: Any) -> Any:
        of = isinstance(record.entry, Admitted) and record.entry.release == subject
        return replace(record, entry=replace(record.entry, level="B")) if of else record

    made = remade(world, subject, better)
    with pytest.raises(ExportError, match="the entry says level B, and the site's statement makes it C"):
        certificate_check.check(made)


def test_a_round_that_is_left_out_is_found_without_the_ledger(world: Stage) -> None:
    def fewer(record: Any) -> Any:
        entry = record.entry
        return None if isinstance(entry, RoundClosed) and (entry.run, entry.round) == (world.run, 1) else record

    made = remade(world, world.run, fewer)
    with pytest.raises(ExportError, match="leaves out"):
        certificate_check.check(made)


# a run in which one site was granted its part twice: refused today, held by older ledgers


TEN = SubsampledGaussian(DP.sampling_rate, DP.noise_multiplier, 10)


def twice(shown: Stage, run: str = "twice") -> float:
    """What an older ledger may hold of a run; the epsilon that both grants of site north cost together."""
    shown.run, register, n, s = run, shown.intake.register, shown.north, shown.south
    opened = shown.store.state.accounts["north/rdp"].opened

    def update(site: Hospital, grant: str, number: int) -> None:
        facts = {"mechanism": "federated", "artifact_type": "update", "claim": TEN, "run": run, "round": number}
        facts |= {"epsilon_nano": epsilon_nano(TEN, float(opened.delta), opened.order), "delta": opened.delta}
        facts["components"] = COMPONENTS["federated"]
        assert shown.submit(site, grant, pack_vector(np.full(4, number, np.float32)), **facts)

    assert shown.reserve(n, "w1", TEN, "federated", run)
    assert shown.reserve(s, "w1s", TEN, "federated", run)
    update(n, "w1", 1)
    update(s, "w1s", 1)
    register.close_round(run, 1, ["north", "south"], bytes(32))
    register.close("w1", "released")
    asked = n.reservation("w2", TEN, "federated", run)
    price, envelope = cost(TEN, opened.order), n.seal(asked)
    assert [f.rule for f in register.reserve("reserve-w2", asked, envelope).findings] == ["run_spent"]
    envelope = n.seal(replace(asked, grant="w3"))
    granted = Reserved(
        "w3", "north", run, "federated", "north/rdp", price, canonical(claim_json(TEN)), digest(envelope)
    )
    shown.store.append("as it was written before", AppendRequest((granted,), (envelope,)))
    update(n, "w3", 2)
    register.close_round(run, 2, ["north"], b"\1" * 32)
    return epsilon_of(2 * price, float(opened.delta), opened.order)


def test_two_grants_of_a_site_in_one_run_add_up_wherever_the_model_is_described(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with stage(tmp_path / "hub") as shown:
        both, run = twice(shown), shown.run
        export, ledger = snapshot(shown.home, NOW)
        (tmp_path / "ledger.export").write_bytes(export)
        for form in ("json", "pdf"):
            (tmp_path / f"model.{form}").write_bytes(make(shown.home, "certificate", form, run, NOW).body)
    found = verify(export)
    assert found.granted_twice == ["north, run twice: grant w3"], "it was paid for: told, and no reason to doubt"
    named = ("--key", ledger.source.key)
    code, text = told(capsys, tmp_path / "ledger.export", *named)
    assert (code, "GRANTED AGAIN in one run, which is refused today: north, run twice" in text) == (0, True)
    for form in ("json", "pdf"):
        code, text = told(capsys, tmp_path / f"model.{form}", "--from", tmp_path / "ledger.export", *named)
        assert (code, text.count("north: epsilon ")) == (0, 1), text
        assert "order 4; 2 grants of this run together" in text
    item = ledger.item(run)
    assert [(p["site"], p["epsilon"].get("grants")) for p in item.parts] == [
        ("north", 2),
        ("south", None),
        ("north", 2),
    ]
    assert item.dearest["site"] == "north"
    assert both <= float(item.dearest["epsilon"]["value"]) < both + 1e-8
    assert item.claim.startswith("2 uses of the same patients, under a grant each: (1) 10 steps")
    assert "(2 grants together)" in item.epsilon
    entry = registered(ledger, item)["deployment"]["privacy_loss"]
    assert entry["privacy_parameters"]["epsilon"] >= both
    assert entry["privacy_parameters_details"].count("north: ") == 1
    page = model_of(ledger.state, [a for a in ledger.state.releases.values() if a.run == run], bytes(32), "{}")
    assert page is not None
    assert [(part.site, part.epsilon.split()[1]) for part in page.parts] == [("north", "4.44"), ("south", "3.92")]
    assert page.facts.epsilon == page.parts[0].epsilon
    assert page.facts.promise.count("10 steps") == 2
    priced = {i["release"]: i["epsilon"] for i in checklist(ledger).data["items"]}
    assert float(priced[run]["value"]) >= both
    assert float(card(ledger, run).data["facts"]["parts"][0]["epsilon"]["value"]) >= both


def test_a_certificate_that_counts_one_of_two_grants_only_is_not_the_ledgers(tmp_path: Path) -> None:
    with stage(tmp_path / "hub") as shown:
        twice(shown)
        _, ledger = snapshot(shown.home, NOW)
        made = read(make(shown.home, "certificate", "json", shown.run, NOW).body)

        def fewer(record: Any) -> Any:
            entry = record.entry
            return None if isinstance(entry, Admitted) and entry.grant == "w1" else record

        cheaper = remade(shown, shown.run, fewer)
    certificate_check.check_against_export(made, ledger.export)
    records = [r for r in certificate_check.lines(made.shown) if getattr(r[1].entry, "grant", "") != "w1"]
    kept = {seq for seq, _ in records}
    less = replace(made, shown=tuple(s for s in made.shown if s.seq in kept))
    with pytest.raises(ExportError, match="leaves out entries"):
        certificate_check.check_against_export(less, ledger.export)
    with pytest.raises(ExportError):
        certificate_check.check_against_export(cheaper, ledger.export)


def test_where_one_of_two_grants_has_no_epsilon_none_of_the_sites_parts_has() -> None:
    epsilon = {"value": "1.000000000", "delta": "4e-06", "unit": "patient", "relation": "x", "order": 4}
    one = {"site": "north", "epsilon": dict(epsilon), "claim": claim_json(TEN)}
    parts = [one, {**one, "epsilon": None}, {**one, "site": "south"}]
    certificate_check._compose(parts)
    assert [p["epsilon"] for p in parts] == [None, None, epsilon]
    with pytest.raises(ExportError, match="do not add up"):
        certificate_check._compose([{**one, "epsilon": epsilon}, {**one, "epsilon": {**epsilon, "order": 5}}])


def test_an_entry_that_the_ledger_does_not_hold_is_found(world: Stage, files: Path) -> None:
    found = read((files / "set.json").read_bytes())
    other = read((files / "model.json").read_bytes()).shown[0]
    moved = replace(found.shown[-1], proof=other.proof)
    with pytest.raises(ExportError, match="proof does not lead"):
        certificate_check.check(resigned(world, found, shown=(*found.shown[:-1], moved)))


def test_a_ledger_of_somebodys_own_making_is_told_by_its_key(
    world: Stage, files: Path, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The true entries under a false key: sound in itself, and nobody's."""
    false, true = Ed25519PrivateKey.generate(), read((files / "set.json").read_bytes())
    _, ledger = snapshot(world.home, NOW)
    tree = CompactRange()
    for entry in ledger.export.entries:
        tree.append(leaf_hash(entry))
    note = sign_checkpoint(Checkpoint(true.origin, tree.size, tree.root()), false)
    made = replace(true, public=false.public_key().public_bytes_raw(), checkpoint=note)
    (tmp_path / "false.json").write_bytes(seal(made.encode(), PAYLOAD, false))
    certificate_check.check(read((tmp_path / "false.json").read_bytes()))
    for pinned in (("--key", key), ("--from", files / "ledger.export")):
        code, text = told(capsys, tmp_path / "false.json", *pinned)
        assert (code, "another key" in text) == (1, True)
    mine = Export(made.public, ledger.export.entries, ledger.export.envelopes, note)
    (tmp_path / "false.export").write_bytes(mine.encode())
    code, text = told(capsys, tmp_path / "false.json", "--from", tmp_path / "false.export")
    assert (code, text.startswith("CONSISTENT: ")) == (3, True), "whoever made one made the other, too"


def test_it_stays_sound_as_the_ledger_grows_and_is_not_taken_for_an_older_one(
    world: Stage, files: Path, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older = files / "ledger.export"
    assert not world.reserve(world.north, "g-later", _k(2))
    (tmp_path / "newer.export").write_bytes(snapshot(world.home, NOW)[0])
    (tmp_path / "newer.json").write_bytes(make(world.home, "certificate", "json", world.run, NOW).body)
    named = ("--from", tmp_path / "newer.export", "--key", key)
    assert told(capsys, files / "model.json", *named)[0] == 0
    assert told(capsys, tmp_path / "newer.json", *named)[0] == 0
    code, text = told(capsys, tmp_path / "newer.json", "--from", older)
    assert (code, "take a newer one" in text) == (1, True)


def _k(k: int) -> Any:
    return KAnonymous(k=k, l_diversity=2, releases_per_patient=1)


def test_it_says_whether_it_is_about_the_file_at_hand(
    world: Stage, files: Path, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = world.home.releases / world.names["eleven"] / "images.tar"
    code, text = told(capsys, files / "set.pdf", "--key", key, "--artifact", artifact)
    assert (code, "it is about the file that was given" in text) == (0, True)
    (tmp_path / "other").write_bytes(artifact.read_bytes() + b"\0")
    code, text = told(capsys, files / "set.pdf", "--key", key, "--artifact", tmp_path / "other")
    assert (code, "about another file" in text) == (1, True)
    assert told(capsys, files / "set.pdf", "--key", key, "--artifact", tmp_path / "missing")[0] == 2
    assert told(capsys, files / "ledger.export", "--artifact", artifact)[0] == 2


def test_machines_get_the_facts_and_the_words(files: Path, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = told(capsys, files / "model.json", "--key", key, "--json")
    document = json.loads(text)
    assert (code, document["sound"], document["certificate"]["level"], document["key"]) == (0, True, "A", key)
    assert [part["site"] for part in document["certificate"]["parts"]] == ["south", "north"]
    assert document["words"]["meaning"] == LEVELS["A"][1]


@pytest.mark.parametrize(
    "raw", [b"{", b"{}", b"%PDF-", b"%PDF-1.4\n%lazaret-certificate \n", b'{"payload":1}', b"{" * 5000, b"[]"]
)
def test_what_is_no_certificate_is_refused_with_a_sentence(raw: bytes, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "x").write_bytes(raw)
    code, text = told(capsys, tmp_path / "x", "--key", "0" * 64)
    assert (code, text.startswith("NOT SOUND: ")) == (1, True)
    assert "Traceback" not in text


def test_a_payload_that_is_not_in_its_one_form_is_refused(world: Stage, files: Path) -> None:
    key = world.home.ledger_key()
    payload = read((files / "set.json").read_bytes()).encode()
    body = json.loads(payload)
    for odd in (payload + b" ", canonical({**body, "form": "lazaret-certificate/3"}), canonical({**body, "more": 1})):
        with pytest.raises(ExportError):
            read(seal(odd, PAYLOAD, key))
    with pytest.raises(ExportError, match="another type of payload"):
        read(seal(payload, "application/vnd.in-toto+json", key))
    outer = json.loads(seal(payload, PAYLOAD, key))
    outer["payload"] = base64.b64encode(payload.replace(b"north", b"south")).decode()
    with pytest.raises(ExportError):
        read(canonical(outer))


def test_the_meaning_of_each_level_is_the_one_that_people_read() -> None:
    assert {level: meaning for level, (_, meaning, _) in LEVELS.items()} == dict(certificate_check.MEANINGS)


def test_the_auditors_one_file_checks_it_with_nothing_of_ours(files: Path, key: str, tmp_path: Path) -> None:
    (tmp_path / "lazaret-verify.pyz").write_bytes(archive())
    command = [sys.executable, "-I", str(tmp_path / "lazaret-verify.pyz"), str(files / "model.pdf"), "--key", key]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.startswith("SOUND: certificate of model trial")) == (0, True), done.stderr
