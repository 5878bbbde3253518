"""Approve, refuse, hand over: over real TLS, real ledgers and a real coordinator; nobody decides alone."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import agent.console.releases
import agent.release.approval
import agent.runtime
from agent.console import review_images
from agent.console.context import PendingRelease, SiteConsoleContext
from agent.console.descriptions import REFUSALS
from agent.gateway.client import GatewayClient
from agent.storage import projects
from policies.audit.verify import verify
from policies.ledger.backends.sqlite import read_lines
from policies.ledger.entries import Approved, Expired
from tests.agent.console.hospital import Client, Hospital, approve, held, hospital, serving, settled, sha, words
from tests.support.ledger_world import Person


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Hospital]:
    with hospital(tmp_path) as one:
        yield one


def waits(made: Hospital) -> list[str]:
    vault = projects.open_vault(made.home)
    try:
        return sorted(vault.note("pending") or {})
    finally:
        vault.close()


def account(made: Hospital) -> tuple[int, int]:
    from agent.service.ledger_access import BorrowedLedger

    k = BorrowedLedger(made.home).read().state.accounts["site-a/k"]
    return k.held, k.spent


def refuse(client: Client, name: str, release: str, value: str, serial: str = "") -> str:
    sealed = client.hospital.approval(name, serial or f"refuse-{release}", "refuse", release, value)
    answer = client.post(f"/releases/{release}/refuse", files={"envelope": sealed})
    return settled(client) if answer.status_code == 303 else words(answer)


def test_a_release_leaves_when_both_have_signed_and_not_before(made: Hospital) -> None:
    release = made.release()
    value = sha(made, release)
    with serving(made), made.client("dora") as dora, made.client("hugo") as hugo, made.client("olga") as olga:
        page = words(dora.get(f"/releases/{release}"))
        assert "At least 5 different patients" in page
        assert "Missing: compliance, hospital" in page
        assert "cannot be sent" in words(olga.post(f"/releases/{release}/send"))
        assert "in the ledger" in approve(dora, "dora", release, value)
        assert "cannot be sent" in words(dora.post(f"/releases/{release}/send")), "one role is not two"
        approve(dora, "dora", release, value)
        assert "Missing: hospital" in words(dora.get(f"/releases/{release}")), "nor is one person twice"
        assert "in the ledger" in approve(hugo, "hugo", release, value)
        assert olga.post(f"/releases/{release}/send").status_code == 303
        assert f"Admitted at level B: {release} has left." in settled(olga)
        assert hugo.get(f"/releases/{release}").status_code == 404
    assert release in made.federation.store.state.releases
    assert (waits(made), account(made)) == ([], (0, 1))


def test_who_does_not_decide_cannot_approve_refuse_or_see_a_picture(made: Hospital) -> None:
    release = made.release()
    value = sha(made, release)
    with serving(made):
        for role in ("olga", "otto", "rita"):
            with made.client(role) as client:
                _may_only_look(client, role, release, value)
    assert waits(made) == [release]


def _may_only_look(client: Client, role: str, release: str, value: str) -> None:
    for path in ("approve", "refuse"):
        sealed = client.hospital.approval(role, release, "release", release, value)
        assert client.post(f"/releases/{release}/{path}", files={"envelope": sealed}).status_code == 403
    assert client.post(f"/releases/{release}/compare").status_code == 403
    assert client.get(f"/releases/{release}/sheet/0.png").status_code == 403
    assert client.get(f"/releases/{release}/beside/0/near.png").status_code == 403
    page = client.get(f"/releases/{release}")
    assert page.status_code == (403 if role == "rita" else 200)
    assert ".png" not in page.text


def test_what_was_signed_is_this_persons_own_word_on_this_artifact_or_nothing(made: Hospital) -> None:
    release = made.release()
    value = sha(made, release)
    with serving(made), made.client("dora") as dora:
        assert "signature is of hugo" in approve(dora, "hugo", release, value), "another's word, handed in by dora"
        assert "for another text" in approve(dora, "dora", release, value, "limit")
        assert "for another text" in approve(dora, "dora", release, "cd" * 32), "another artifact"
        assert "for another text" in approve(dora, "dora", release, value, "refuse")
        assert "for another text" in approve(dora, "dora", release, value, serial="another"), (
            "it would not be counted"
        )
        for serial in (release, "another"):
            assert "for another text" in refuse(dora, "dora", release, f"{value} quality", serial)
        _forged(dora, release, value)
        assert "it is not refused" in words(dora.post(f"/releases/{release}/withdraw")).lower()
        assert "Missing: compliance, hospital" in words(dora.get(f"/releases/{release}"))
    assert not [x for x in read_lines(made.home.root / "ledger.db") if isinstance(x.record.entry, Approved)]
    assert waits(made) == [release]


def _forged(dora: Client, release: str, value: str) -> None:
    """Signatures are the fold's to refuse."""
    mallory = Person("dora", "compliance")  # another key under her name
    sealed = mallory.approval(release, "release", release, value, "lazaret/site-a")
    told = words(dora.post(f"/releases/{release}/approve", files={"envelope": sealed}))
    assert "not signed by that person's key" in told
    elsewhere = dora.hospital.persons["dora"].approval(release, "release", release, value, "lazaret/other")
    told = words(dora.post(f"/releases/{release}/approve", files={"envelope": elsewhere}))
    assert "for another ledger" in told
    assert dora.post(f"/releases/{release}/approve", files={"envelope": b"{}"}).status_code == 409
    assert dora.post(f"/releases/{release}/approve").status_code == 400


def test_a_refusal_is_signed_with_its_reason_and_the_release_is_gone(made: Hospital) -> None:
    release = made.release()
    value = sha(made, release)
    with serving(made), made.client("dora") as dora, made.client("hugo") as hugo:
        approve(dora, "dora", release, value)
        page = words(hugo.get(f"/releases/{release}/refuse?why=too_alike"))
        assert REFUSALS["too_alike"] in page
        assert hugo.get(f"/releases/{release}/refuse?why=nonsense").status_code == 400
        assert "an unknown reason" in refuse(hugo, "hugo", release, f"{value} because")
        assert "another artifact" in refuse(hugo, "hugo", release, f"{'ab' * 32} too_alike")
        assert "Refused and withdrawn" in refuse(hugo, "hugo", release, f"{value} too_alike")
        assert dora.get(f"/releases/{release}").status_code == 404
    assert (waits(made), account(made)) == ([], (0, 1))
    entries = [line.record.entry for line in read_lines(made.home.root / "ledger.db")]
    assert [e.serial for e in entries if isinstance(e, Approved)] == [release, f"refuse-{release}"]
    assert any(isinstance(e, Expired) and e.why == "expired" for e in entries)
    vault = projects.open_vault(made.home)
    try:
        assert vault.project_note(f"representative/{release}/0") is None, "the pictures are deleted"
    finally:
        vault.close()
    assert made.federation.store.state.releases == {}


def test_a_refusal_stands_while_the_coordinator_is_away_and_nothing_can_be_sent(
    made: Hospital, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = made.release()
    value = sha(made, release)
    with serving(made), made.client("dora") as dora, made.client("hugo") as hugo:
        approve(dora, "dora", release, value)
        approve(hugo, "hugo", release, value)
        with monkeypatch.context() as patch:
            full = OSError(28, "disk full")
            patch.setattr(agent.release.approval, "withdraw", lambda *_: (_ for _ in ()).throw(full))
            assert "disk full" in refuse(hugo, "hugo", release, f"{value} purpose").lower()
        assert "Refused by hugo" in words(dora.get(f"/releases/{release}"))
        assert "so it cannot be sent" in words(dora.post(f"/releases/{release}/send"))
        assert "was refused already" in approve(dora, "dora", release, value)
        made.federation.server.stop(0).wait()
        monkeypatch.setattr(agent.runtime, "GatewayClient", partial(GatewayClient, patience_s=0.1))
        assert dora.post(f"/releases/{release}/withdraw").status_code == 303
        assert "The coordinator could not be informed yet" in settled(dora)
    assert (waits(made), account(made)) == ([], (0, 1))


def test_a_copy_of_a_patient_among_the_pictures_is_shown_first_and_marked(made: Hospital) -> None:
    """What the reviewer is there for: a release with one real picture in it."""
    import hashlib
    from dataclasses import replace

    import numpy as np

    from agent.domain import Selection
    from agent.release.unsent import artifact_of, keep, listed, statement_of
    from protos.artifacts.arrays import pack_images, unpack_images

    release = made.release()
    vault = projects.open_vault(made.home)
    try:
        (_, real) = next(iter(vault.images(Selection("OT", (32, 32)))))
        one = listed(vault)[release]
        images, labels = unpack_images(artifact_of(vault, release, one))
        images[1] = np.rint(real.pixels * 255)
        raw = pack_images(images, labels)
        other = replace(statement_of(one), artifact_sha256=hashlib.sha256(raw).hexdigest(), artifact_bytes=len(raw))
        keep(vault, other, raw, b"", set(one["persons"]))
    finally:
        vault.close()
    with serving(made), made.client("dora") as dora:
        assert dora.post(f"/releases/{release}/compare").status_code == 303
        assert "Compared with 24 images" in settled(dora)
        page = dora.get(f"/releases/{release}")
        first = words(page).partition("1. Image")[2]
        assert first.startswith(" 2: 0.")
        assert "less than a quarter as far as strangers are" in first[:200]
        pictures = re.findall(r'src="(/releases/[^"]+\.png)"', page.text)
        assert len(pictures) > 4
        for path in pictures:
            answer = dora.get(path)
            assert answer.headers["content-type"] == "image/png"
            assert "no-store" in answer.headers["cache-control"]
        near = dora.get(f"/releases/{release}/beside/0/near.png").content
        assert near == dora.get(f"/releases/{release}/beside/0/made.png").content
        for gone in (f"/releases/{release}/beside/99/near.png", f"/releases/{release}/beside/0/other.png"):
            assert dora.get(gone).status_code == 404


def test_no_address_log_or_name_of_a_file_holds_a_patient(made: Hospital) -> None:
    release = made.release()
    vault = projects.open_vault(made.home)
    persons = {head.person for head in vault.heads()}
    vault.close()
    with serving(made), made.client("dora") as dora:
        dora.post(f"/releases/{release}/compare")
        settled(dora)
        text = dora.get(f"/releases/{release}").text
        for picture in ("sheet/0", "beside/0/near", "beside/0/made", "beside/0/heat"):
            assert dora.get(f"/releases/{release}/{picture}.png").status_code == 200
    log = (made.home.root / "agent.log").read_text()
    assert _acts(log) == [
        ("dora", "compliance", "/releases/{release}/compare"),
        ("dora", "compliance", "/releases/{release}/sheet/{number}.png"),
        *[("dora", "compliance", "/releases/{release}/beside/{number}/{which}.png")] * 3,
    ], "who looked at patients is told, and never at which"
    names = " ".join(str(path) for path in made.home.root.rglob("*"))
    assert not [p for p in persons if p in text or p in log or p in names]
    assert "PAT-0" not in text + log + names


def _acts(log: str) -> list[tuple[str, str, str]]:
    """Who did what, by the log."""
    lines = [json.loads(line) for line in log.splitlines()]
    return [(x["person"], x["role"], x["page"]) for x in lines if x["event"] == "console_act"]


def test_a_picture_is_forgotten_as_soon_as_its_patient_opts_out_anywhere(made: Hospital) -> None:
    release = made.release()
    with serving(made), made.client("dora") as dora:
        dora.post(f"/releases/{release}/compare")
        settled(dora)
        path = f"/releases/{release}/beside/0/near.png"
        assert dora.get(path).status_code == 200
        vault = projects.open_vault(made.home)
        persons = {head.person for head in vault.heads()}
        vault.close()
        for person in persons:
            projects.opt_out(made.home, person)  # by the command, in another process
        assert dora.get(path).status_code == 404
        assert "can never be sent" in words(dora.get(f"/releases/{release}"))
        assert "cannot be sent" in words(dora.post(f"/releases/{release}/send"))


def test_pictures_are_kept_for_half_an_hour_and_of_few_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace
    from typing import Any

    import numpy as np

    from agent.console.context import ConsoleState

    context: Any = SimpleNamespace(memory=ConsoleState())
    for n in range(5):
        shown = review_images.ReleaseImages(1000.0 + n, "", np.zeros((0, 1, 1), np.uint8))
        review_images._keep(context, f"r{n}", shown)
    monkeypatch.setattr(time, "monotonic", lambda: 1004.0 + review_images.KEPT_S)
    assert [n for n in range(5) if review_images.recall(context, f"r{n}")] == [4]
    review_images.forget(context)
    assert review_images.recall(context, "r4") is None


def test_beside_a_process_that_holds_the_ledger_the_same_is_done_and_the_books_stay_sound(made: Hospital) -> None:
    release = made.release()
    value = sha(made, release)
    with held(made), made.client("dora") as dora, made.client("hugo") as hugo:
        approve(dora, "dora", release, value)
        approve(hugo, "hugo", release, value)
        assert hugo.post(f"/releases/{release}/send").status_code == 303
        assert "has left" in settled(hugo)
        export = dora.get("/ledger/export/file").content
    assert verify(export)


def test_no_page_opens_a_kept_set_but_that_of_the_release_which_is_shown(
    made: Hospital, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agent.storage.encrypted_sqlite import EncryptedCheckpointStore

    release = made.release()
    opened: list[str] = []
    read = EncryptedCheckpointStore.read

    def counted(self: EncryptedCheckpointStore) -> bytes | None:
        opened.append(repr(self))
        return read(self)

    monkeypatch.setattr(EncryptedCheckpointStore, "read", counted)
    with serving(made), made.client("dora") as dora, made.client("olga") as olga:
        for path in ("/", "/releases"):
            assert dora.get(path).status_code == 200
        assert release in dora.get("/releases").text
        assert olga.get(f"/releases/{release}").status_code == 200, "who sees no picture has none opened"
        assert opened == []
        assert dora.get(f"/releases/{release}").status_code == 200
        assert opened


@pytest.mark.parametrize("half", [False, True], ids=["listed no more", "its bytes are gone"])
def test_a_release_that_another_process_forgets_meanwhile_is_no_such_release(
    made: Hospital, monkeypatch: pytest.MonkeyPatch, half: bool
) -> None:
    from agent.console import context

    release = made.release()
    waiting = context.SiteConsoleContext.waiting

    def forgotten(self: context.SiteConsoleContext) -> tuple[context.PendingRelease, ...]:
        found = waiting(self)
        vault = projects.open_vault(made.home)
        try:
            if not half:
                vault.write_note("pending", None)
            for part in ("artifact", "clear"):
                vault.site_place(f"kept/{release}/{part}").clear()
        finally:
            vault.close()
        return found

    monkeypatch.setattr(context.SiteConsoleContext, "waiting", forgotten)
    with serving(made), made.client("dora") as dora:
        answer = dora.get(f"/releases/{release}")
        assert answer.status_code == 404
        assert "No release of that name is pending" in words(answer)


def test_an_opt_out_names_the_way_out_where_nobody_approves() -> None:
    from agent.console.optout import Consequences, sentences

    told = " ".join(text for _, text in sentences(Consequences(1, 1, 0, (), ("release-a",), (), 0, 0, 0)))
    assert "`release withdraw`" in told


def test_a_comparison_that_ends_while_its_page_is_made_is_shown_by_the_next_look_of_the_same_page(
    made: Hospital, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, shown = made.release(), review_images.shown

    def late(context: SiteConsoleContext, one: PendingRelease) -> review_images.ReleaseImages:
        found = shown(context, one)
        if threading.current_thread().name != "errand":  # the comparison looks, too
            context.errand.wait(30)
        return found

    with serving(made), made.client("dora") as dora:
        monkeypatch.setattr(agent.console.releases.review_images, "shown", late)
        assert dora.post(f"/releases/{release}/compare").status_code == 303
        page = dora.get(f"/releases/{release}").text
        assert re.search(r'id="likeness" data-live|nearest real<', page), "it would stay as it is for ever"
        assert "nearest real<" in dora.get(f"/releases/{release}").text
