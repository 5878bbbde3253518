"""The long-lived stream of a site, over the real port: notices, one session a site, and an end that is told."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.gateway import notifications
from tests.support.federation_world import Federation, Site


class Listener:
    """A site's session; its notices arrive in a queue, and at last None or the status that ended it."""

    def __init__(self, site: Site) -> None:
        self.gateway = site.gateway()
        self.call = self.gateway.session("test")
        self.said: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        assert self.hear() == ("hello", "")

    def _listen(self) -> None:
        try:
            for notice in self.call:
                self.said.put((notice.kind, notice.run))
            self.said.put(None)
        except grpc.RpcError as error:
            self.said.put(error.code())

    def hear(self, seconds: float = 60.0) -> Any:
        return self.said.get(timeout=seconds)

    def close(self) -> None:
        self.call.cancel()
        self.gateway.close()


@pytest.fixture
def fed(tmp_path: Path) -> Iterator[Federation]:
    with Federation(tmp_path) as made:
        yield made


def connected(fed: Federation, *names: str) -> None:
    """Wait until these sites, and no others, have a session."""
    until = time.monotonic() + 240
    while fed.service.sessions.connected() != names and time.monotonic() < until:
        time.sleep(0.02)
    assert fed.service.sessions.connected() == names


def test_a_notice_reaches_the_sites_that_it_is_for_and_no_others(fed: Federation) -> None:
    one, two = Listener(fed.join("site-a")), Listener(fed.join("site-b"))
    connected(fed, "site-a", "site-b")
    fed.service.sessions.notify("run", "run-1", ("site-a", "site-nobody"))
    assert one.hear() == ("run", "run-1")
    fed.service.sessions.notify("over", "run-1")
    assert one.hear() == two.hear() == ("over", "run-1")
    for listener in (one, two):
        listener.close()


def test_who_is_there_and_since_when_is_told_also_after_they_have_gone(fed: Federation) -> None:
    begun, here = time.time(), fed.service.sessions
    assert here.presence() == {}, "nobody was seen yet"
    site = fed.join("site-a")
    first = Listener(site)
    connected(fed, "site-a")
    since = here.presence()["site-a"]
    assert since.online
    assert begun <= since.since <= time.time()
    second = Listener(site)  # the agent calls again: it was there all the time
    assert first.hear() is None
    assert here.presence()["site-a"] == since
    second.close()
    connected(fed)
    gone = here.presence()["site-a"]
    assert not gone.online
    assert gone.since >= since.since
    first.close()


def test_a_second_session_of_a_site_ends_the_first(fed: Federation) -> None:
    site = fed.join("site-a")
    first = Listener(site)
    second = Listener(site)
    assert first.hear() is None, "ended in an orderly way"
    connected(fed, "site-a")
    fed.service.sessions.notify("run", "run-1")
    assert second.hear() == ("run", "run-1")
    second.close()
    connected(fed)


def test_every_site_is_told_goodbye_when_the_coordinator_closes(fed: Federation) -> None:
    listener = Listener(fed.join("site-a"))
    fed.service.sessions.close()
    assert listener.hear() == ("bye", "")
    assert listener.hear() is None
    listener.close()


def test_a_session_says_that_it_lives_while_there_is_nothing_to_say(
    fed: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications, "BEAT_S", 0.05)
    listener = Listener(fed.join("site-a"))
    assert [listener.hear() for _ in range(3)] == [("beat", "")] * 3
    listener.close()


def test_a_revoked_sites_session_ends_at_once_and_no_new_one_begins(fed: Federation) -> None:
    a, b = fed.join("site-a"), fed.join("site-b")
    one, two = Listener(a), Listener(b)
    fed.authority.revoke("site-a", "", "stolen")
    fed.service.guard.close_calls("site-a")
    assert one.hear() == grpc.StatusCode.CANCELLED
    connected(fed, "site-b")
    again = a.gateway().session("test")
    with pytest.raises(grpc.RpcError) as refused:
        next(iter(again))
    assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
    fed.service.sessions.notify("run", "run-1")
    assert two.hear() == ("run", "run-1")
    two.close()
