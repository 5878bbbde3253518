"""The releases: what the ledger admits and nothing else, in words by level, with files whose digest fits."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.console import releases, rounds
from coordinator.console.release_facts import attacks_of, facts_of, model_of
from coordinator.console.release_files import DigestMismatchError, ReleaseFiles
from coordinator.explanations import LEVELS
from coordinator.federation.job import Job
from coordinator.federation.run_manager import RunManager
from policies.accounting.accountant import order_for
from policies.accounting.claims import NoClaim, SubsampledGaussian
from policies.accounting.rdp import cost
from policies.ledger.entries import Admitted, Opened, Reserved
from policies.ledger.state import Account, Grant, State
from policies.statements import Release, claim_json
from protos.common.canonical_json import canonical
from tests.support.coordinator_console import Served, pictures, serving
from tests.support.coordinator_runs import agents, job
from tests.support.ledger_world import DP, K5, Hospital

EVIL = '<script>alert("1")</script>'
OPENED = Opened("north/rdp", 10**10, 4, "8.0", "4e-06")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with (
        pytest.MonkeyPatch.context() as patch,
        serving(tmp_path_factory.mktemp("hub"), patch, (rounds.add, releases.add)) as made,
    ):
        yield made


def entry(level: str, claim: object = K5, **changes: object) -> Admitted:
    said = canonical(claim_json(claim))  # type: ignore[arg-type]
    made = Admitted("release-1", "g", "north", "", 0, "ksame", level, 1, said, b"a" * 32, b"b" * 32, "")
    return replace(made, **changes)  # type: ignore[arg-type]


def statement(**changes: object) -> Release:
    return Hospital("north").release("g", **changes)


# what is said of a release


@pytest.mark.parametrize("level", ["B", "C"])
def test_nothing_but_differential_privacy_has_an_epsilon(level: str) -> None:
    facts = facts_of(entry(level, DP if level == "C" else K5), OPENED, statement())
    assert facts.epsilon == ""
    assert facts.meaning == LEVELS[level][1]


def test_an_epsilon_is_said_with_its_delta_unit_and_relation() -> None:
    facts = facts_of(entry("A", DP), OPENED, statement())
    assert re.match(r"epsilon [0-9.]+ at delta 4e-06 per patient, neighbours differ by one patient", facts.epsilon)


def test_level_c_says_what_was_tested_and_that_nothing_is_promised() -> None:
    measured = statement(reid_rate="0.0312", vetting_power="0.9501")
    facts = facts_of(entry("C", NoClaim()), OPENED, measured)
    assert "empirical only" in facts.tested
    assert [test.value for test in facts.attacks] == [3.2, 95.0]
    assert all("95 % interval" in test.says for test in facts.attacks)
    untested = facts_of(entry("C", NoClaim()), OPENED, None)
    assert "does not say what was measured" in untested.tested
    assert untested.stated is False


@pytest.mark.parametrize("share", ["nan", "1.5", "-0.1", "0.50", "", None])
def test_a_figure_that_is_no_share_is_not_drawn(share: str | None) -> None:
    assert attacks_of(share, share) == ()


# files whose digest fits


@pytest.fixture
def shelf(tmp_path: Path) -> tuple[ReleaseFiles, Path, bytes]:
    body = pictures(5)
    place = tmp_path / "release-1" / "images.tar"
    place.parent.mkdir()
    place.write_bytes(body)
    return ReleaseFiles(tmp_path), place, hashlib.sha256(body).digest()


def test_pictures_come_out_of_the_very_bytes_that_were_admitted(shelf: tuple[ReleaseFiles, Path, bytes]) -> None:
    signed, _, digest = shelf
    sheet = signed.sheet("release-1", "images.tar", digest)
    assert [place.label for place in sheet.places] == ["0", "1", "2", "0", "1"]
    assert signed.image("release-1", "images.tar", digest, 4).startswith(b"\x89PNG")
    for index in (-1, 5):
        with pytest.raises(DigestMismatchError):
            signed.image("release-1", "images.tar", digest, index)


def test_a_changed_file_is_not_shown_also_when_it_was_shown_before(shelf: tuple[ReleaseFiles, Path, bytes]) -> None:
    signed, place, digest = shelf
    signed.sheet("release-1", "images.tar", digest)
    body = bytearray(place.read_bytes())
    body[600] ^= 1  # in the first picture; same length, and the place is remembered
    place.write_bytes(body)
    with pytest.raises(DigestMismatchError, match="changed"):
        signed.image("release-1", "images.tar", digest, 0)
    with pytest.raises(DigestMismatchError, match="not the one"):
        ReleaseFiles(place.parents[1]).sheet("release-1", "images.tar", digest)
    with pytest.raises(DigestMismatchError):
        signed.open("release-1", "images.tar", digest)
    with pytest.raises(DigestMismatchError):
        signed.open("release-1", "../../secret", digest)


def test_many_readers_at_once_get_the_same_sheet(shelf: tuple[ReleaseFiles, Path, bytes]) -> None:
    signed, _, digest = shelf
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(signed.sheet("release-1", "images.tar", digest).total))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [5] * 8


# the pages


def test_every_role_sees_what_was_admitted_and_can_take_it_away(served: Served) -> None:
    release = served.hub.release("north", "g-1")
    body = (served.hub.shelf.root / release / "images.tar").read_bytes()
    for name in served.hub.persons:
        with served.as_(name) as person:
            assert release in person.text("/releases")
            page = person.text(f"/releases/{release}")
            assert "k distinct patients behind every image" in page
            assert "anonymous" not in page.replace("k-anonymous", "")
            assert person.get(f"/releases/{release}/pictures/0").headers["content-type"] == "image/png"
            assert person.get(f"/releases/{release}/artifact").content == body
            sealed = person.get(f"/releases/{release}/statement")
            assert hashlib.sha256(sealed.content).hexdigest() in page
            assert 'attachment; filename="' in sealed.headers["content-disposition"]


def test_an_unsound_file_is_neither_shown_nor_given(served: Served) -> None:
    release = served.hub.release("south", "g-2")
    place = served.hub.shelf.root / release / "images.tar"
    place.write_bytes(place.read_bytes()[:-1] + b"x")
    with served.as_("otto") as auditor:
        assert "not the one that the ledger admitted" in auditor.text(f"/releases/{release}")
        for path in (f"/releases/{release}/artifact", f"/releases/{release}/pictures/0"):
            assert auditor.get(path).status_code == 404
    place.unlink()
    with served.as_("otto") as auditor:
        assert "not in the release store" in auditor.text(f"/releases/{release}")


def test_a_folder_that_the_ledger_does_not_know_is_not_there(served: Served) -> None:
    stray = served.hub.shelf.root / "release-stray"
    stray.mkdir()
    (stray / "images.tar").write_bytes(pictures())
    with served.as_("rita") as researcher:
        assert "release-stray" not in researcher.text("/releases")
        for path in ("release-stray", "release-stray/artifact", "..%2f..%2fkeys%2fledger.key", "%2e%2e", "x" * 500):
            assert researcher.get(f"/releases/{path}").status_code == 404


def test_labels_and_filters_of_the_corpus_are_words_on_the_page(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    from protos.artifacts.arrays import pack_images, unpack_images

    images, _ = unpack_images(pictures(3))
    monkeypatch.setattr(
        "tests.support.coordinator_console.pictures", lambda *_a, **_k: pack_images(images, (EVIL, "'><b>", "&amp;"))
    )
    release = served.hub.release("west", "g-3")
    with served.as_("rita") as researcher:
        page = researcher.text(f"/releases/{release}")
        assert EVIL not in page
        assert "&lt;script&gt;" in page
        page = researcher.text("/releases", text=EVIL, site=EVIL, level='"><img src=x>', mechanism="../..")
        assert "<script>alert" not in page
        assert "<img src=x>" not in page
        assert "No release matches" in page


def test_filters_find_by_hospital_level_and_name(served: Served) -> None:
    release = next(iter(served.hub.store.state.releases))
    with served.as_("dora") as officer:
        assert release in officer.text("/releases", site="north", level="B", text=release[8:20].upper())
        assert release not in officer.text("/releases", site="west")
        assert officer.get("/releases", page="x").status_code == 400
        assert release in officer.text("/releases", page="99999")


def test_the_runs_on_the_disk_are_read_once_for_a_page_however_many_there_are(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished, reads = [(replace(job(rounds=1), run=f"gone-{n}"), "finished") for n in range(9)], list[int]()

    def known(_runs: RunManager) -> list[tuple[Job, str]]:
        reads.append(1)
        return finished

    monkeypatch.setattr(RunManager, "known", known)
    with served.as_("rita") as researcher:
        researcher.text("/releases")
    assert len(reads) == 1


@agents
def test_a_finished_runs_model_is_the_one_of_its_last_round(served: Served) -> None:
    list(served.hub.runs.launch(job(rounds=1)))
    with served.as_("rita") as researcher:
        page = researcher.text("/releases/run-1")
        assert "per patient, neighbours differ by one patient added or removed" in page
        assert all(site in page for site in ("north", "south", "west"))
        model = researcher.get("/releases/run-1/artifact").content
        digest = hashlib.sha256(model).hexdigest()
        assert digest in page
        (served.hub.shelf.root / "run-1" / "model.safetensors").write_bytes(model + b" ")
        assert researcher.get("/releases/run-1/artifact").status_code == 404
        update = next(a.release for a in served.hub.store.state.releases.values() if a.run)
        assert "a single update of a run" in researcher.text(f"/releases/{update}")
        assert researcher.get(f"/releases/{update}/artifact").status_code == 404


def test_the_dearest_part_of_a_model_is_the_one_of_the_largest_epsilon_whatever_the_orders() -> None:
    """Accounts of different orders use different amounts for the same claim: they do not compare, epsilons do."""
    claim, state = SubsampledGaussian(0.01, 1.0, 200), State()
    told = canonical(claim_json(claim))
    for site, budget in (("north", 3.0), ("south", 8.0)):
        opened = Opened(f"{site}/rdp", 10**12, order_for(budget, 1e-5), repr(budget), "1e-05")
        used, name = cost(claim, opened.order), f"release-{site}"
        state.accounts[opened.account] = Account(opened)
        state.grants[site] = Grant(Reserved(site, site, "r", "federated", opened.account, used, told, bytes(32)))
        entry = Admitted(
            name, site, site, "r", 1, "federated", "A", used, told, bytes(32), site.encode().ljust(32), ""
        )
        state.releases[name] = entry
        state.aggregated.add(("r", 1, site))
    state.rounds["r"] = 1
    model = model_of(state, list(state.releases.values()), bytes(32), '{"strategy":"fedavg"}')
    assert model is not None
    south = next(part.epsilon for part in model.parts if part.site == "south")
    assert model.facts.epsilon.startswith(south.partition(" at ")[0])
    assert model.facts.epsilon.split()[1] == "3.17"
