"""The port's limits, asked for by a real connection."""

from __future__ import annotations

import time
from pathlib import Path

import grpc
import pytest

from agent.gateway import channel
from agent.gateway.credentials import Credentials
from coordinator.gateway import server as port
from tests.support.federation_world import Federation


def test_an_agent_that_pings_between_calls_keeps_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC hangs up at the sixth ping that comes too early; without our word, any between calls comes too early."""
    assert port.PINGS_MS < channel._KEEPALIVE_MS
    monkeypatch.setattr(port, "PINGS_MS", 200)
    monkeypatch.setattr(channel, "_KEEPALIVE_MS", 600)
    with Federation(tmp_path) as federation:
        held = Credentials(federation.join("site-a").home.keys)
        credentials = grpc.ssl_channel_credentials(federation.home.root_crt(), held.key(), held.chain())
        states: list[grpc.ChannelConnectivity] = []
        with channel.open_channel(f"127.0.0.1:{federation.port}", credentials) as line:
            line.subscribe(states.append, try_to_connect=True)
            grpc.channel_ready_future(line).result(60)
            time.sleep(9)  # a dozen pings, or fewer on a busy machine
            assert states[-1] == grpc.ChannelConnectivity.READY
            assert states.count(grpc.ChannelConnectivity.READY) == 1, states
