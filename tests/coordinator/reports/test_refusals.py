"""Every refusal is an entry of its own: from many threads at once, and whatever keys a site has used before."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from coordinator.admission import RequestRejectedError
from policies.review.rules import Finding
from tests.support.federation_world import Federation, Site
from tests.support.ledger_world import DP

THREADS, TIMES = 16, 30  # 480 refusals
SITES = ("site-a", "site-b", "site-c")


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    with Federation(tmp_path) as made:
        yield made


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns as often as Python lets them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def recorded(federation: Federation) -> Counter[str]:
    return Counter(rule for rules in federation.findings() for rule in rules)


def at_once(act: Callable[[str], object]) -> None:
    """From many threads, in the names of a few sites; an exception of any of them is raised here."""
    with ThreadPoolExecutor(THREADS) as many:
        list(many.map(act, [SITES[i % len(SITES)] for i in range(THREADS * TIMES)]))


@pytest.mark.usefixtures("hasty")
def test_of_480_refusals_at_once_480_are_written_down(federation: Federation) -> None:
    for name in SITES:
        federation.join(name)
    at_once(lambda site: federation.intake.report(site, "wrong_role"))
    assert recorded(federation) == {"wrong_role": THREADS * TIMES}
    at_once(lambda site: federation.service.guard.report(site, "node"))  # 160 each, within a site's patience
    assert recorded(federation)["node"] == THREADS * TIMES

    def unwelcome(site: str) -> None:
        with pytest.raises(RequestRejectedError, match="bad_envelope"):
            federation.intake.reserve(site, "one-key", b"{}")

    at_once(unwelcome)
    assert recorded(federation)["bad_envelope"] == THREADS * TIMES
    assert '"event": "refusal_not_recorded"' not in (federation.home.root / "coordinator.log").read_text()


def occupy(federation: Federation, site: Site, key: str) -> None:
    """The site uses an idempotency key up, with a request that is refused on its merits."""
    bad = site.hospital.reservation(key, DP, "ksame")  # another kind of claim than the mechanism's
    assert not federation.intake.reserve("site-a", key, site.seal(bad)).admitted


def test_a_site_cannot_use_up_the_keys_of_its_refusals_beforehand(federation: Federation) -> None:
    """Whatever names a refusal's entry must be no name that the site could have given to a request of its own."""
    site, first = federation.join("site-a"), federation.store.state.size
    for number in range(first + 40, first + 60):
        occupy(federation, site, f"turned-{number}")
        occupy(federation, site, f"k-unwelcome-{number}")
    assert federation.store.state.size == first + 40
    before = recorded(federation)
    for _ in range(10):
        federation.intake.report("site-a", "wrong_role")
        assert federation.intake.unwelcome("site-a", "k", Finding("bad_envelope", "")).finding.rule == "bad_envelope"
    assert recorded(federation) - before == {"wrong_role": 10, "bad_envelope": 10}
    for key in [key for key in federation.store.state.keys if "refused-" in key]:
        with pytest.raises(RequestRejectedError, match="bad_key"):
            federation.intake.reserve("site-a", key.removeprefix("site-a:"), b"{}")


def test_the_same_request_twice_is_one_entry_and_another_under_its_key_is_refused(federation: Federation) -> None:
    """What idempotency keys are for holds as before: only refusals before any review have keys of their own."""
    site = federation.join("site-a")
    occupy(federation, site, "k")
    size = federation.store.state.size
    occupy(federation, site, "k")
    assert federation.store.state.size == size
    other = site.hospital.reservation("another", DP, "ksame")
    with pytest.raises(RequestRejectedError, match="key_reused"):
        federation.intake.reserve("site-a", "k", site.seal(other))
    assert federation.store.state.size == size + 1
