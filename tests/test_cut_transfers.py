"""A line that is cut in a round costs the rest of a transfer and not the round: real processes, TLS and Flower."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.flower.federation import ADD, FlowerFederation
from tests.support.tcp_proxy import TcpProxy, wait_until

SIZE = 1_500_000
BYTES = 4 * SIZE
WEST = "west"
PLAN: dict[str, Any] = {
    **{"sites": [WEST], "rounds": 1, "min_sites": 1, "size": SIZE, "seconds": 3_600},
    **{"round_timeout_s": 390.0, "node_wait_s": 200.0},  # on a machine that may be busy
}
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture
def line(tmp_path: Path) -> Iterator[tuple[FlowerFederation, TcpProxy]]:
    """A coordinator, and one agent behind a line that the test cuts."""
    federation = FlowerFederation(tmp_path)
    try:
        with TcpProxy(f"127.0.0.1:{federation.ready['port']}") as proxy:
            federation.start_agent(WEST, target=proxy.address).wait_for("online")
            yield federation, proxy
            federation.agents[WEST].stop()
    finally:
        federation.close()


def cut_twice(federation: FlowerFederation, proxy: TcpProxy, seconds: float, **plan: Any) -> dict[str, Any]:
    """One round with a cut on the way there and one on the way back; what crossed the line stands in ``carried``."""
    before = proxy.carried
    proxy.bytes_per_s = 2e6
    config = {"add": ADD, "random": True, "sleep": {WEST: 1.0}}
    federation.coordinator.tell(do="conduct", run="cut", config=config, **{**PLAN, **plan})
    for share in (0.5, 1.5):  # of one transfer: the first is half there, then the second is
        reached = wait_until(lambda share=share: proxy.carried - before > share * BYTES, 390.0)  # type: ignore[misc]
        assert reached, (share, (proxy.carried - before) / BYTES)
        proxy.cut()
        time.sleep(seconds)
        proxy.forward()
    report: dict[str, Any] = json.loads(federation.coordinator.hear(400.0))
    return {**report, "carried": proxy.carried - before}


def test_a_transfer_goes_on_at_the_piece_at_which_it_was_cut(line: tuple[FlowerFederation, TcpProxy]) -> None:
    report = cut_twice(*line, seconds=3.0)
    assert report.get("used") == [[WEST]], report
    assert report["carried"] < 1.3 * 2 * BYTES  # begun anew it would be 1.5, and more


@pytest.mark.slow
def test_so_it_does_after_a_cut_that_is_longer_than_every_timeout(line: tuple[FlowerFederation, TcpProxy]) -> None:
    """Flower drops what is half sent after 180 seconds, and a call is repeated for 60."""
    federation, proxy = line
    report = cut_twice(federation, proxy, 200.0, wait_seconds=600, round_timeout_s=1500.0)
    assert report.get("used") == [[WEST]], report
    assert report["carried"] < 1.3 * 2 * BYTES
    assert federation.conduct("after", sites=[WEST], rounds=1, min_sites=1)["used"] == [[WEST]]
