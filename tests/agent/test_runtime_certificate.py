"""An agent that was away until its certificate had ended: it comes back by itself, or says why not."""

from __future__ import annotations

import datetime as dt
import time
from pathlib import Path

import pytest

from agent.errors import CoordinatorUnreachableError
from agent.gateway.credentials import Credentials
from agent.runtime import open_runtime, sync_with_coordinator
from tests.support.command_line import Typed, at, typed
from tests.support.federation_world import Federation, Site

__all__ = ["typed"]  # a fixture


def away(federation: Federation) -> Site:
    """A site whose certificate has ended."""
    federation.authority._life = dt.timedelta(seconds=6)
    site = federation.join("site-a")
    federation.authority._life = dt.timedelta(hours=24)
    while dt.datetime.now(dt.UTC) < Credentials(site.home.keys).not_after:
        time.sleep(0.05)
    return site


def test_it_comes_back_before_its_first_word_and_goes_on(tmp_path: Path) -> None:
    with Federation(tmp_path) as federation:
        site = away(federation)
        with open_runtime(site.home.root, lambda *_: None) as runtime:
            before = runtime.gateway.certificate
            sync_with_coordinator(runtime)
            assert (now := runtime.gateway.certificate) != before, "there is a new certificate"
            sync_with_coordinator(runtime)
            assert runtime.gateway.certificate == now, "and no other is needed"
        assert dt.datetime.now(dt.UTC) + dt.timedelta(hours=23) < Credentials(site.home.keys).not_after


def test_who_was_revoked_is_told_so_and_nothing_is_changed(tmp_path: Path, typed: Typed) -> None:
    with Federation(tmp_path) as federation:
        site = away(federation)
        number = Credentials(site.home.keys).number
        federation.authority.revoke("site-a", number, "stolen")
        refused = pytest.raises(CoordinatorUnreachableError, match="was revoked")
        with open_runtime(site.home.root, lambda *_: None) as runtime, refused:
            sync_with_coordinator(runtime)
        assert Credentials(site.home.keys).number == number
        said = typed(*at(site), "enrol")
        assert (said.status, "ask for a new invitation" in said.err) == (1, True), said.err


def test_enrol_without_an_invitation_brings_a_site_back(tmp_path: Path, typed: Typed) -> None:
    with Federation(tmp_path) as federation:
        site = away(federation)
        said = typed(*at(site), "enrol")
        assert (said.status, "there is a new one" in said.out) == (0, True), said.err
        said = typed(*at(site), "enrol")
        assert (said.status, "no request of this site is pending" in said.err) == (1, True), said.err


def test_what_another_process_brought_is_taken_up(tmp_path: Path, typed: Typed) -> None:
    """`enrol` beside a service that still has the certificate that ended."""
    with Federation(tmp_path) as federation:
        site = away(federation)
        with open_runtime(site.home.root, lambda *_: None) as runtime:
            assert typed(*at(site), "enrol").status == 0
            sync_with_coordinator(runtime)
            assert runtime.gateway.certificate == Credentials(site.home.keys).number


def test_a_key_file_that_others_can_read_ends_no_service(tmp_path: Path) -> None:
    with Federation(tmp_path) as federation:
        site = federation.join("site-a")
        with open_runtime(site.home.root, lambda *_: None) as runtime:
            (site.home.keys / "tls.pem").chmod(0o644)
            with pytest.raises(CoordinatorUnreachableError, match="chmod"):
                sync_with_coordinator(runtime)
