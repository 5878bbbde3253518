"""A site whose line was dead when its run ended hears of it later; else its grant would stay held there."""

from __future__ import annotations

from pathlib import Path

from tests.support.federation_world import Federation, Site
from tests.support.ledger_world import DP


def heard(site: Site) -> list[tuple[str, str]]:
    """The notices with which a session begins, up to the first beat or two of them."""
    gateway = site.gateway()
    stream = gateway.session("test")
    try:
        said: list[tuple[str, str]] = []
        for notice in stream:
            if notice.kind == "probe":
                return said
            said.append((notice.kind, notice.run))
            if notice.kind == "hello":
                site.federation.service.sessions.notify("probe")
        return said
    finally:
        stream.cancel()
        gateway.close()


def test_a_session_begins_with_the_end_that_the_site_may_have_missed(tmp_path: Path) -> None:
    with Federation(tmp_path) as fed:
        site = fed.join("site-a")
        assert heard(site) == [("hello", "")], "no run yet"
        reservation = site.hospital.reservation("grant-1", DP, "federated", "run-1")
        verdicts = fed.service.at.intake.reserve_run("run-1", {"site-a": site.seal(reservation)}, 1)
        assert verdicts["site-a"].admitted
        assert heard(site) == [("hello", "")], "the run goes on"
        fed.service.at.intake.register.close("grant-1", "expired")
        assert heard(site) == [("hello", ""), ("over", "run-1")]
