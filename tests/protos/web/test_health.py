"""Metrics and health over real HTTP, as Prometheus and Kubernetes ask for them."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx
import pytest

from protos.operations.metrics import CONTENT_TYPE, MetricsPage
from protos.web.health import Health, watched_over
from protos.web.settings import ConsoleSettings

SETTINGS = ConsoleSettings(metrics="127.0.0.1:0")


def test_the_page_and_both_answers_change_with_what_is_wrong() -> None:
    wrong: list[str | None] = [None, None, None]
    page = MetricsPage("agent", "1", (), {})
    with watched_over(SETTINGS, page, Health(lambda: wrong[0], lambda: wrong[1], lambda: wrong[2])) as port:
        there = f"http://127.0.0.1:{port}"
        found = httpx.get(f"{there}/metrics")
        assert (found.status_code, found.headers["content-type"]) == (200, CONTENT_TYPE)
        assert "lazaret_build_info" in found.text
        assert (httpx.get(f"{there}/healthz").text, httpx.get(f"{there}/readyz").text) == ("well\n", "well\n")
        wrong[1] = "the disk is full"
        assert httpx.get(f"{there}/healthz").status_code == 200
        assert (httpx.get(f"{there}/readyz").status_code, httpx.get(f"{there}/readyz").text) == (
            503,
            "the disk is full\n",
        )
        wrong[2] = "north is missing"
        assert (httpx.get(f"{there}/healthz").status_code, httpx.get(f"{there}/joinedz").status_code) == (200, 503)
        assert httpx.get(f"{there}/healthz").text == "well\nnorth is missing\n"
        wrong[0] = "the ledger is stopped"
        assert httpx.get(f"{there}/healthz").status_code == 503


def test_a_fault_of_the_question_itself_is_not_healthy_and_says_nothing() -> None:
    def broken() -> str | None:
        raise RuntimeError("SECRET-7")

    with watched_over(SETTINGS, MetricsPage("agent", "1", (), {}), Health(broken, broken)) as port:
        found = httpx.get(f"http://127.0.0.1:{port}/healthz")
    assert found.status_code == 500
    assert "SECRET" not in found.text


@pytest.mark.parametrize("settings", [None, ConsoleSettings()])
def test_without_a_port_in_console_toml_systemd_alone_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: ConsoleSettings | None
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as there:
        there.bind(str(tmp_path / "s"))
        there.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "s"))
        with watched_over(settings, lambda: b"", Health(lambda: None, lambda: None)) as port:
            assert port == 0
            assert there.recv(100) == b"READY=1"
        assert there.recv(100) == b"STOPPING=1"
