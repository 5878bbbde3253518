"""Agents and coordinators of other versions, over the real port: who is let in, and what the others are told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from agent.errors import CoordinatorUnreachableError
from agent.gateway import channel
from agent.gateway import client as gateway
from agent.runtime import open_runtime
from agent.service.making import begin_making
from coordinator.gateway import guard
from protos.artifacts.png import pack_earlier_png, pack_png
from protos.protocol_version import NEWEST, OURS, VersionRange, agree
from tests.support.federation_world import Federation, Site
from tests.support.image_sets import shard_of


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with Federation(tmp_path_factory.mktemp("federation")) as made:
        made.site = made.join("site-a")  # type: ignore[attr-defined]
        yield made


def says(monkeypatch: pytest.MonkeyPatch, spoken: VersionRange | None) -> None:
    """An agent of another version; None: one from before versions were announced."""
    agent = f"lazaret-protocol/{spoken}" if spoken else "lazaret-agent"
    monkeypatch.setattr(channel, "USER_AGENT", agent)
    theirs = spoken or VersionRange(1, 1)
    monkeypatch.setattr(gateway, "agree", lambda other, they: agree(other, they, theirs))


def is_of(monkeypatch: pytest.MonkeyPatch, spoken: VersionRange) -> None:
    """A coordinator of another version."""
    monkeypatch.setattr(guard, "OURS", spoken)
    monkeypatch.setattr(guard, "agree", lambda other, they: agree(other, they, spoken))


def hello(federation: Federation) -> str:
    site: Site = federation.site  # type: ignore[attr-defined]
    opened = site.gateway()
    try:
        return opened.hello()
    finally:
        opened.close()


@pytest.mark.parametrize("agent", [VersionRange(NEWEST - 1, NEWEST - 1), OURS, VersionRange(NEWEST, NEWEST + 1)])
def test_an_agent_one_version_before_or_after_is_served(
    federation: Federation, monkeypatch: pytest.MonkeyPatch, agent: VersionRange
) -> None:
    says(monkeypatch, agent)
    assert "k_min" in hello(federation)


@pytest.mark.parametrize(
    ("coordinator", "agent", "words"),
    [
        (OURS, VersionRange(NEWEST + 1, NEWEST + 2), "the agent is too new.*upgrade the coordinator first"),
        (OURS, VersionRange(NEWEST + 1, NEWEST + 1), "the agent is too new.*upgrade the coordinator first"),
        (OURS, None, "the agent is too old.*upgrade the agent"),
        (VersionRange(NEWEST, NEWEST + 1), None, "the agent is too old.*upgrade the agent"),
        (VersionRange(NEWEST + 1, NEWEST + 2), OURS, "the agent is too old.*upgrade the agent"),
    ],
)
def test_an_agent_further_away_is_refused_in_a_sentence_and_nothing_is_written_into_the_ledger(
    federation: Federation,
    monkeypatch: pytest.MonkeyPatch,
    coordinator: VersionRange,
    agent: VersionRange | None,
    words: str,
) -> None:
    is_of(monkeypatch, coordinator)
    says(monkeypatch, agent)
    before = federation.store.state.size
    with pytest.raises(CoordinatorUnreachableError, match=words):
        hello(federation)
    site: Site = federation.site  # type: ignore[attr-defined]
    refused = site.gateway().reserve
    with pytest.raises(CoordinatorUnreachableError, match=words):  # every call, not only the first
        refused("reserve-x", site.seal(site.hospital.reservation("x")))
    assert federation.store.state.size == before


def test_an_agent_refuses_a_coordinator_that_answers_in_a_protocol_it_does_not_speak(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "agree", lambda _theirs, _they: NEWEST)  # a coordinator that lets everybody in
    monkeypatch.setattr(guard, "OURS", VersionRange(NEWEST + 5, NEWEST + 6))
    with pytest.raises(CoordinatorUnreachableError, match=r"the coordinator is too new.*upgrade the agent"):
        hello(federation)


def test_a_coordinator_from_before_versions_were_announced_is_taken_for_the_first(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "_speaks", lambda _context: None)
    with pytest.raises(CoordinatorUnreachableError, match="the coordinator is too old"):
        hello(federation)
    monkeypatch.setattr(gateway, "agree", lambda other, they: agree(other, they, VersionRange(1, 2)))
    assert "k_min" in hello(federation)


def submitted(federation: Federation, grant: str, artifact: bytes) -> set[str]:
    """The rules by which a set is refused; none: it is admitted."""
    site: Site = federation.site  # type: ignore[attr-defined]
    site.reserved(grant)
    release = site.release(grant, artifact)
    opened = site.gateway()
    try:
        verdict = opened.submit(f"submit-{release.release}", site.seal(release), artifact)
    finally:
        opened.close()
    return {finding.rule for finding in verdict.findings}


@pytest.mark.parametrize(
    ("agent", "form", "rules"),
    [
        (VersionRange(1, 2), "plain", set()),
        (VersionRange(1, 2), "compressed", {"artifact_malformed"}),
        (OURS, "compressed", set()),
        (OURS, "plain", {"artifact_malformed"}),
        (VersionRange(2, 4), "plain", {"artifact_malformed"}),
    ],
)
def test_each_side_of_the_change_has_one_form_of_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: VersionRange, form: str, rules: set[str]
) -> None:
    """Else whether a set is compressed would be one more thing that a set can say."""
    image = np.arange(64 * 64, dtype=np.uint8).reshape(64, 64) // 16
    plain, today = pack_earlier_png(image), pack_png(image)
    assert len(today) < len(plain)
    artifact = shard_of([plain if form == "plain" else today])
    with Federation(tmp_path) as made:
        made.site = made.join("site-a")  # type: ignore[attr-defined]
        says(monkeypatch, agent)
        assert submitted(made, "g-1", artifact) == rules


def test_what_waited_since_before_is_handed_in_in_the_protocol_of_then(tmp_path: Path) -> None:
    """By an agent of today, and its next call is of today again."""
    image = np.arange(64 * 64, dtype=np.uint8).reshape(64, 64) // 16
    with Federation(tmp_path) as made:
        site = made.join("site-a")
        site.reserved("g-1")
        artifact = shard_of([pack_earlier_png(image)])
        release, opened = site.release("g-1", artifact), site.gateway()
        verdict = opened.submit_earlier(f"submit-{release.release}", site.seal(release), artifact)
        opened.hello()
        opened.close()
        assert (verdict.admitted, opened.protocol) == (True, NEWEST)


def test_a_site_makes_no_set_for_a_coordinator_that_knows_no_compressed_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(guard, "OURS", VersionRange(1, 2))
    with Federation(tmp_path) as made:
        site = made.join("site-a")
        before = made.store.state.size
        with (
            open_runtime(site.home.root, lambda *_: None) as runtime,
            pytest.raises(CoordinatorUnreachableError, match="too old for compr"),
        ):
            begin_making(runtime, anew=False)
        assert made.store.state.size == before
    capsys.readouterr()
