"""A coordinator that lies: the site's own books, and what it has seen, stand against it. See also test_watch.py."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.domain import Update
from agent.errors import LedgerForkError, ReviewRejectedError
from agent.federation.participant import Participant
from agent.mechanisms.federated.mechanism import Federated
from agent.runtime import AgentRuntime, open_runtime, sync_with_coordinator
from coordinator.admission import AdmissionService
from policies.ledger.backends.sqlite import backup_file
from policies.ledger.entries import Refused as RefusedEntry
from policies.ledger.store import AppendRequest
from policies.review.rules import Verdict
from tests.attacks.ground import Ground
from tests.support.federation_world import Site
from tests.support.ledger_world import policy
from tests.support.rolled_back_ledgers import marked_as_it_is
from tests.support.small_tasks import classification

TASK = classification(("0", "1"), rounds=4, clip=1.0, images_per_patient=1, public_patients=40, learning_rate=0.1)
MECHANISM = Federated(TASK, 130, noise_multiplier=1.8)


@contextmanager
def working(site: Site) -> Iterator[AgentRuntime]:
    """The agent's own desk, as its commands open it, turned to where the coordinator listens now."""
    path = site.home.root / "site.toml"
    port = site.federation.port
    path.write_text(re.sub(r'coordinator = ".*"', f'coordinator = "127.0.0.1:{port}"', path.read_text()))
    with open_runtime(site.home.root, lambda *_: None) as opened:
        yield opened


def participant(runtime: AgentRuntime, monkeypatch: pytest.MonkeyPatch) -> tuple[Participant, list[str]]:
    """The agent's part in a run, and what of its images was asked for."""
    read: list[str] = []

    def look(*_: Any) -> Any:
        read.append("an image")
        raise AssertionError("an image would have been read")

    monkeypatch.setattr(type(runtime.vault), "cohort", look)
    return Participant(replace(runtime.site, examples=look), "OT", _no_entropy), read  # type: ignore[arg-type]


def _no_entropy(_count: int) -> bytes:
    raise AssertionError("noise would have been drawn")


def start() -> Update:
    return Update(np.zeros(2 * 64 + 2, np.float32))


def bring_back(site: Site, copy: Path) -> None:
    """The coordinator stops, and serves again from a copy."""
    federation = site.federation
    federation.__exit__(None, None, None)
    for path in federation.home.root.glob("ledger.db*"):
        path.unlink()
    shutil.copy(copy, federation.home.ledger)
    marked_as_it_is(federation.home.ledger)  # its mark and what the sites cosigned are of then, too
    shutil.rmtree(federation.home.witnesses, ignore_errors=True)
    federation.__enter__()


def grow(site: Site, text: str) -> None:
    entry = RefusedEntry("x", "site-a", "", "call", [text], b"")
    site.federation.store.append(text, AppendRequest((entry,)))


@pytest.mark.parametrize("how", ["rewound", "forked"])
def test_a_ledger_that_was_rewound_or_forked_is_refused_for_good_and_nothing_is_trained(
    ground: Ground, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    backup_file(ground.federation.home.ledger, tmp_path / "copy.db")
    grow(site, "seen")
    with working(site) as runtime:
        sync_with_coordinator(runtime)
        bring_back(site, tmp_path / "copy.db")
        for i in range(3 if how == "forked" else 0):
            grow(site, f"another-past-{i}")
    with working(site) as runtime:
        part, read = participant(runtime, monkeypatch)
        part.join("run-2", MECHANISM)
        for _ in range(2):
            with pytest.raises(LedgerForkError):
                part.train("run-2", 1, start())
        with pytest.raises(LedgerForkError):
            runtime.gateway.reserve("reserve-x", site.seal(site.hospital.reservation("x")))
        assert read == []
    kept = {path.name.split("-")[0] for path in (site.home.root / "watch").iterdir()}
    assert "fork" in kept, "both signed heads are kept as the proof"


def test_a_run_that_the_coordinators_ledger_never_granted_is_not_trained_for(
    ground: Ground, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    with working(site) as runtime:
        sync_with_coordinator(runtime)
        part, read = participant(runtime, monkeypatch)
        part.join("run-1", MECHANISM)
        with ground.refused(), pytest.raises(ReviewRejectedError) as caught:
            part.train("run-1", 1, start())
        assert [f.rule for f in caught.value.verdict.findings] == ["not_granted"]
        assert (read, part.rounds_trained) == ([], 0)


def test_a_yes_without_an_entry_or_with_another_sites_entry_trains_nothing(
    ground: Ground, site: Site, other: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers yes; then it shows a real entry of its real ledger, about another site's reservation."""
    with working(other) as theirs:
        sync_with_coordinator(theirs)
        envelope = Participant(theirs.site, "OT", _no_entropy).join("run-1", MECHANISM)  # type: ignore[arg-type]
    assert ground.federation.intake.reserve_run("run-1", {"site-b": envelope}, 1)["site-b"].admitted
    seq = ground.federation.store.state.size - 1
    with working(site) as runtime:
        sync_with_coordinator(runtime)
        part, read = participant(runtime, monkeypatch)
        part.join("run-1", MECHANISM)
        for shown in (-1, 0, seq):
            monkeypatch.setattr(AdmissionService, "outcome", lambda *_, shown=shown: (Verdict(()), shown))
            with pytest.raises(LedgerForkError, match="cannot prove it"):
                part.train("run-1", 1, start())
        assert (read, part.rounds_trained, part.granted) == ([], 0, False)


def test_a_coordinator_grants_nothing_beyond_the_sites_own_policy(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator would say yes; the site's ledger is the hard gate, and says no before anything is sent."""
    poor = ground.federation.join("site-p", policy(epsilon="0.5"))
    monkeypatch.setattr(AdmissionService, "reserve", lambda *_: Verdict(()))
    with working(poor) as runtime:
        sync_with_coordinator(runtime)
        part, read = participant(runtime, monkeypatch)
        before = len(ground.federation.recorder.messages)
        with pytest.raises(ReviewRejectedError) as caught:
            part.join("run-1", MECHANISM)
        assert caught.value.where == "site"
        assert [f.rule for f in caught.value.verdict.findings] == ["budget"]
        sent = ground.federation.recorder.messages[before:]
        assert read == []
        sealed = [message for message in sent if b"payload" in message]
        assert all(b"settle-" in message for message in sealed), "no price is asked; only that it was declined"
    assert ground.federation.store.state.accounts["site-p/rdp"].held == 0


def test_rounds_of_another_run_beyond_the_grant_or_under_another_configuration_are_refused(
    ground: Ground, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    with working(site) as runtime:
        sync_with_coordinator(runtime)
        part, read = participant(runtime, monkeypatch)
        envelope = part.join("run-1", MECHANISM)
        assert ground.federation.intake.reserve_run("run-1", {"site-a": envelope}, 1)["site-a"].admitted
        for run, number in (("run-2", 1), ("run-1", 0), ("run-1", -1)):
            with pytest.raises(ReviewRejectedError):
                part.train(run, number, start())
        dearer = replace(MECHANISM, noise_multiplier=0.4)
        with pytest.raises(ReviewRejectedError):
            part.join("run-1", dearer)
        assert read == []
    digest = hashlib.sha256(envelope).digest()
    grants = [g.reserved.envelope for g in ground.federation.store.state.grants.values()]
    assert grants == [digest]
    assert MECHANISM.rounds == 4
