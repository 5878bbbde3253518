"""Many real agents at once: nothing refused, nothing lost, nothing doubled; and a storm of handshakes.

The long form, with what it measures: ``python -m tests.scale load --agents 200 --seconds 30``.
"""

from __future__ import annotations

import datetime as dt
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from coordinator.storage import directory as coordinator_home
from tests.scale import load
from tests.scale.load import POLICY, Load


def sound(found: dict[str, Any]) -> None:
    """What has to hold however slow the machine is."""
    assert found["unexpected"] == {}
    assert found["disagreements"] == []
    assert found["coordinator"]["exit"] == 0
    assert all(not row["not_ok"] for row in found["calls"].values())


@pytest.mark.slow
def test_twenty_agents_at_once_are_served_and_the_books_agree_with_each_of_them(tmp_path: Path) -> None:
    found = load.run(tmp_path, Load(agents=20, seconds=3.0, pause_s=3.0))
    sound(found)
    assert found["calls"].keys() == {"Hello", "Reserve", "Offer", "Upload", "Submit", "Settle", "Fleet"}
    assert found["grants"] == {"spent": found["calls"]["Reserve"]["calls"]}
    assert found["calls"]["Submit"]["calls"] >= 20


@pytest.mark.slow
def test_two_hundred_agents_at_once_are_served_and_the_books_agree_with_each_of_them(tmp_path: Path) -> None:
    found = load.run(tmp_path, Load(agents=200, seconds=30.0, pause_s=10.0))
    sound(found)
    assert found["calls"]["Submit"]["calls"] >= 200


def test_what_the_books_do_not_say_is_found(tmp_path: Path) -> None:
    entry = {"type": "reserved", "grant": "g"}
    ledger = {"entries": [entry, entry], "grants": [], "accounts": []}
    told = {"g": {"reserved": True, "released": True, "settled": True, "release": "r"}}
    report = {"agents": {"site": {"told": told}}}
    wrong = " ".join(load.disagreements(ledger, [report]))
    for words in ("reserved 2 times", "granted, and not", "admitted, and 0 times", "settled, and not expired"):
        assert words in wrong
    spent = {"grant": "other", "account": "a", "amount": 1, "used": 1, "state": "spent"}
    ledger = {"entries": [], "grants": [spent], "accounts": [{"account": "a", "held": 0, "spent": 2}]}
    assert [line.split(":")[0] for line in load.disagreements(ledger, [])] == ["other", "a"]


def test_a_storm_of_handshakes_does_not_end_the_coordinator(tmp_path: Path) -> None:
    """gRPC frees the certificate that it had when it is given one again, under the feet of other handshakes."""
    now = dt.datetime.now(dt.UTC)
    home = coordinator_home.create(tmp_path / "coordinator", 'listen = "127.0.0.1:0"\n', POLICY, now)
    key, chain = coordinator_home.operator_certificate(home, now)
    for name, body in (("key", key), ("chain", chain)):
        (tmp_path / name).write_bytes(body)
    context = ssl.create_default_context(cadata=home.root_crt().decode())
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(tmp_path / "chain", tmp_path / "key")
    done: list[int] = []
    with load.coordinator(tmp_path) as (process, port):
        until, limit = time.monotonic() + 5.0, time.monotonic() + 200.0

        def knock() -> None:
            while process.poll() is None and (
                time.monotonic() < until or (len(done) < 100 and time.monotonic() < limit)
            ):
                try:
                    with socket.create_connection(("127.0.0.1", port), 10) as raw:
                        context.wrap_socket(raw, server_hostname="127.0.0.1").close()
                    done.append(1)
                except OSError:
                    time.sleep(0.01)  # it did not keep up, or it is gone: the test asks which

        threads = [threading.Thread(target=knock) for _ in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert process.poll() is None, "the coordinator ended"
    assert process.returncode == 0
    assert len(done) >= 100
