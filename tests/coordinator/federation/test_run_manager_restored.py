"""Runs of a coordinator that came back from a backup: they go on with the grants that it holds, or say why not.

Real books and agents, no Flower. Where nothing else is said, the backup is taken while a round is trained.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Message

from agent.release.recovery import present
from coordinator.federation import run_controller
from coordinator.federation.events import RunEvent
from coordinator.round_codes import explain_code
from policies.audit.verify import verify
from policies.ledger.backends.snapshots import consistent_snapshot
from policies.ledger.backends.sqlite import export_file, open_sqlite
from policies.ledger.entries import Admitted, Reserved, Sent, decode
from policies.ledger.export import Export
from policies.ledger.store import Store
from tests.support.coordinator_runs import SITES, Federation, agents, conduct_here, job
from tests.support.ledger_world import Clock

pytestmark = agents
ORIGIN, NONCE = "lazaret/coordinator", "ab" * 16


@pytest.fixture(autouse=True)
def _no_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_controller, "conduct", conduct_here)
    monkeypatch.setattr(run_controller, "NODE_WAIT_S", 0.0)
    monkeypatch.setattr(run_controller, "_PAUSES_S", (0.1, 0.2))


@pytest.fixture
def fed(tmp_path: Path) -> Iterator[Federation]:
    made = Federation(tmp_path)
    yield made
    made.host.stopping.set()
    for feed in made.runs._feeds.values():
        list(feed.follow())
    made.store.close()


def backup(fed: Federation) -> None:
    """What `coordinator.operations.backup` takes of runs and the ledger."""
    (fed.folder / "backup").mkdir()
    consistent_snapshot([(fed.folder / "hub.db", fed.folder / "backup" / "hub.db")])
    shutil.copytree(fed.folder / "runs", fed.folder / "backup" / "runs")


def disturb(fed: Federation, backup_in: tuple[str, int], stop_in: int = 0) -> None:
    """Take a backup when the sites are asked for something, and let the operator stop the run in a round.

    ``backup_in``: the kind of message, and the round; ``stop_in``: the round; 0: none.
    """

    def before(site: str, message: Message) -> Message:
        kind, number = message.metadata.message_type, int(message.metadata.group_id) + 1
        if (kind, number) == backup_in and not (fed.folder / "backup").exists():
            backup(fed)
        if kind == "train" and number == stop_in:
            fed.runs.stop("run-1")
        return message

    fed.grid.before = before


def restored(fed: Federation) -> None:
    """The coordinator is lost with all that it wrote since; the backup comes back in the ledger's next epoch."""
    fed.grid.before = lambda _site, message: message
    fed.host.stopping.set()
    for feed in fed.runs._feeds.values():
        list(feed.follow())
    fed.store.close()
    shutil.rmtree(fed.folder / "runs")
    shutil.rmtree(fed.folder / "releases", ignore_errors=True)
    for path in fed.folder.glob("hub.*"):
        path.unlink()
    shutil.copy(fed.folder / "backup" / "hub.db", fed.folder / "hub.db")
    shutil.copytree(fed.folder / "backup" / "runs", fed.folder / "runs")
    disk = open_sqlite(fed.folder / "hub.db")
    disk.brought_back()
    with closing(Store(disk, ORIGIN, fed.key, Clock())) as store:
        store.restore(NONCE)
    fed.open()
    for ward in fed.wards.values():
        ward.intake = ward.gateway.intake = fed.intake
    fed.start()


def receipts(fed: Federation) -> list[int]:
    """Each site shows what the ledger has lost."""
    return [present(ward.part.participant.site, ORIGIN, NONCE) for ward in fed.wards.values()]


def gone_on(fed: Federation) -> list[RunEvent]:
    """What a start of the coordinator, or the operator's `round resume`, leads to."""
    if fed.state() == "stopped":
        return list(fed.runs.resume("run-1"))
    fed.runs.resume_all()
    return list(fed.runs.watch("run-1"))


def entries(fed: Federation, kind: type) -> list[tuple[str, int]]:
    """(site, round) of the coordinator's entries of a kind; the ledger verifies."""
    fed.store.close()
    raw = export_file(fed.folder / "hub.db", ORIGIN, fed.key)
    verify(raw)
    fed.open()
    found = [decode(one).entry for one in Export.parse(raw).entries]
    return sorted((one.site, getattr(one, "round", 0)) for one in found if type(one) is kind)  # type: ignore[union-attr]


def sent(fed: Federation, site: str) -> list[int]:
    """The rounds whose updates have left a site, in its own ledger's order."""
    state = fed.wards[site].part.participant.site.ledger.store.state
    return [one.round for one in state.sent.values() if isinstance(one, Sent)]


def of_one_run(fed: Federation, rounds: int) -> None:
    """Every round was trained once at each site, under one grant that both ledgers paid once."""
    assert [ward.vault.reads for ward in fed.wards.values()] == [rounds] * 3, "no round was trained twice"
    accounts = {site: fed.store.state.accounts[f"{site}/rdp"] for site in SITES}
    for site, ward in fed.wards.items():
        (grant,) = ward.part.participant.site.ledger.store.state.grants.values()
        ward.part.participant.leave_run()  # as it does when it hears that the run is over
        assert sent(fed, site) == list(range(1, rounds + 1))
        assert ward.account() == (accounts[site].held, accounts[site].spent) == (0, grant.reserved.amount)
    assert entries(fed, Reserved) == [(site, 0) for site in SITES]
    assert entries(fed, Admitted) == [(site, n + 1) for site in SITES for n in range(rounds)]


def test_a_run_that_was_stopped_after_its_first_round_goes_on_at_the_restored_coordinator(fed: Federation) -> None:
    disturb(fed, ("train", 9), stop_in=1)
    assert list(fed.runs.launch(job()))[-1].state == "stopped"
    backup(fed)
    restored(fed)
    assert (fed.state(), fed.grants()) == ("stopped", ["held"] * 3)
    assert receipts(fed) == [0, 0, 0], "the backup has every grant"
    events = gone_on(fed)
    assert [e.round for e in events if e.state == "closed"] == [2, 3]
    assert events[-1].state == "finished"
    of_one_run(fed, 3)


def test_a_round_that_the_backup_had_open_is_sent_again_and_not_trained_again(fed: Federation) -> None:
    """The sites have sent their second round, the lost coordinator closed it, and the restored one knows nothing."""
    disturb(fed, ("train", 2), stop_in=2)
    list(fed.runs.launch(job()))
    restored(fed)
    receipts(fed)
    assert gone_on(fed)[-1].state == "finished"
    of_one_run(fed, 3)


def test_a_ledger_that_is_two_rounds_behind_its_sites_is_refused_with_a_sentence(fed: Federation) -> None:
    disturb(fed, ("train", 1), stop_in=2)
    list(fed.runs.launch(job()))
    restored(fed)
    receipts(fed)
    events = gone_on(fed)
    assert (events[-1].state, events[-1].reason) == ("failed", "too_few_updates")
    assert {e.sites: e.reason for e in events if e.state == "refused"} == {(site,): "behind" for site in SITES}
    assert "came back from a backup of before it" in explain_code("behind")[0]
    assert [ward.vault.reads for ward in fed.wards.values()] == [2, 2, 2]
    assert fed.grants() == ["spent"] * 3, "what cannot be told is spent"
    for site, ward in fed.wards.items():
        ward.part.participant.leave_run()
        spent = fed.store.state.accounts[f"{site}/rdp"].spent
        assert 0 < ward.account()[1] < spent, "the site paid for two rounds, the coordinator counts all three"


def test_an_update_of_a_model_that_is_lost_is_in_no_later_round(fed: Federation) -> None:
    """One site was away in the lost round, so the run goes on with it; what the others made is of the lost model."""

    def leave(site: str, message: Message, reply: Message) -> list[Message]:
        if (site, message.metadata.message_type, message.metadata.group_id) == ("west", "train", "0"):
            fed.wards["west"].online = False
        return [reply]

    disturb(fed, ("train", 1), stop_in=2)
    fed.grid.twist = leave
    list(fed.runs.launch(job(min_sites=1)))
    assert [sent(fed, site) for site in ("north", "west")] == [[1, 2], [1]]
    fed.grid.twist = lambda _site, _message, reply: [reply]
    fed.wards["west"].online = True
    lost = fed.model("run-1", 1)
    restored(fed)
    receipts(fed)
    events = gone_on(fed)
    assert events[-1].state == "finished"
    assert not np.array_equal(fed.model("run-1", 1), lost)
    refused = [(e.round, e.sites, e.reason) for e in events if e.state == "refused"]
    assert sorted(refused) == [(number, (site,), "behind") for number in (1, 2) for site in ("north", "south")]
    assert entries(fed, Admitted) == [("north", 3), ("south", 3), ("west", 1), ("west", 2), ("west", 3)]
    assert [fed.wards[site].vault.reads for site in ("north", "west")] == [3, 3]


def test_a_run_that_was_over_is_not_begun_again_by_an_older_ledger(fed: Federation) -> None:
    disturb(fed, ("train", 2))
    assert list(fed.runs.launch(job()))[-1].state == "finished"
    for ward in fed.wards.values():
        ward.part.participant.leave_run()
    paid = [ward.account() for ward in fed.wards.values()]
    restored(fed)
    receipts(fed)
    events = gone_on(fed)
    assert (events[-1].state, events[-1].reason) == ("failed", "too_few_grants")
    assert {e.sites: e.reason for e in events if e.state == "declined"} == {(site,): "run_spent" for site in SITES}
    assert [ward.vault.reads for ward in fed.wards.values()] == [3, 3, 3]
    assert [ward.account() for ward in fed.wards.values()] == paid
    assert (fed.grants(), entries(fed, Reserved)) == (["spent"] * 3, [(site, 0) for site in SITES])


def test_a_run_whose_grants_the_backup_lacks_waits_for_receipts_which_spend_them(fed: Federation) -> None:
    """It was asked for its price and granted after the backup: that grant was another ledger's."""
    disturb(fed, ("query.price", 1), stop_in=1)
    list(fed.runs.launch(job()))
    restored(fed)
    assert fed.grants() == []
    seen, shown = [], list[int]()
    for event in (fed.runs.resume_all(), fed.runs.watch("run-1"))[1]:
        seen.append((event.state, event.sites, event.reason))
        if event.state == "waiting" and not shown:
            assert [kind for kind, _, _ in fed.wards["west"].asked].count("price") == 1, "nobody is asked again"
            shown = receipts(fed)
    assert seen[0] == ("waiting", SITES, "frozen")
    assert shown == [1, 1, 1]
    assert (seen[-1][0], seen[-1][2]) == ("failed", "too_few_grants")
    assert fed.grants() == ["spent"] * 3
    assert [ward.vault.reads for ward in fed.wards.values()] == [1, 1, 1]


def test_a_run_that_had_not_begun_begins_once_the_sites_have_shown_their_receipts(fed: Federation) -> None:
    for ward in fed.wards.values():
        ward.online = False
    waits = next(event for event in fed.runs.launch(job()) if event.state == "waiting")
    assert waits.reason == "too_few_grants"
    backup(fed)
    restored(fed)
    for ward in fed.wards.values():
        ward.online = True
    fed.runs.resume_all()
    for event in fed.runs.watch("run-1"):
        if event.reason == "frozen":
            receipts(fed)
    assert event.state == "finished"
    of_one_run(fed, 3)
