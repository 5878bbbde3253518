"""The kit in a real browser: a person logs in, signs with a key that stays there, and gets along without a script;
axe-core finds nothing serious; and the instruments that say so see what they should."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from playwright.sync_api import Error

from policies.statements import PAYLOAD_TYPE, Approval, Request, encode
from protos.common.dsse import open_sealed, seal
from protos.identity.key_files import pem, signing_key, write_private
from tests.support.browser import Chrome, chromium, sideways
from tests.support.console_kit import Console, console, wait_for


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    with console(tmp_path_factory.mktemp("console") / "home") as made:
        yield made


@pytest.fixture(scope="module")
def chrome() -> Iterator[Chrome]:
    with chromium() as made:
        yield made


@pytest.fixture(autouse=True)
def _calm(served: Console) -> None:
    served.clock.at += 61
    served.envelopes.clear()


def test_a_person_logs_in_looks_and_logs_out(served: Console, chrome: Chrome) -> None:
    with chrome.visitor(served.base, *served.login("ada")) as visitor:
        visitor.go("/form?told=well")
        visitor.axe()
        visitor.screenshot("kit-login")
        with visitor.page.expect_navigation():
            visitor.page.get_by_role("button", name="Log in as ada").click()
        assert visitor.page.input_value("#f-reason") == "well"
        visitor.axe()
        visitor.go("/")
        visitor.axe()
        visitor.screenshot("kit-first")
        assert visitor.pdf("kit-first").read_bytes().startswith(b"%PDF")
        with visitor.page.expect_navigation():
            visitor.page.get_by_role("button", name="Log out").click()
        visitor.axe()
        assert visitor.go("/").url.endswith("/login")


def test_somebody_without_a_certificate_is_told_how_to_get_one(served: Console, chrome: Chrome) -> None:
    with chrome.visitor(served.base) as visitor:
        visitor.go("/")
        assert "login make NAME" in visitor.page.inner_text("main")
        visitor.axe()
        visitor.screenshot("kit-login-none")


@pytest.mark.parametrize("dark", [False, True])
def test_pages_fit_a_telephone_in_light_and_dark(served: Console, chrome: Chrome, dark: bool) -> None:
    with chrome.visitor(served.base, *served.login("ada"), width=360, dark=dark) as visitor:
        visitor.log_in("/")
        for path in ("/", "/form", "/sign", "/nope"):
            visitor.go(path)
            visitor.axe()
            assert sideways(visitor.page) == 0
            visitor.screenshot(f"kit-360-{'dark' if dark else 'light'}-{path.strip('/') or 'first'}")


def test_the_browser_signs_what_the_command_would_sign(served: Console, chrome: Chrome) -> None:
    key = signing_key(served.key("ada"))
    raw = encode(Approval("ada", "lazaret/test", "limit-1", "limit", "alpha/rdp", "4.0"))
    with chrome.visitor(served.base, *served.login("ada")) as visitor:
        visitor.log_in("/sign")
        assert "ada approves that the limit of alpha/rdp becomes 4.0" in visitor.page.inner_text(".sign .what")
        visitor.axe()
        visitor.screenshot("kit-sign")
        sent: list[bytes] = []
        visitor.page.on("request", lambda request: sent.append(request.post_data_buffer or b""))
        visitor.page.set_input_files("input.key", served.key("ada"))
        visitor.page.get_by_role("button", name="Sign the approval").click()
        visitor.page.wait_for_selector("text=Handed in.")
    assert served.envelopes == [seal(raw, PAYLOAD_TYPE, key)]
    assert open_sealed(served.envelopes[0], PAYLOAD_TYPE, {"ada": key.public_key().public_bytes_raw()}).payload == raw
    secret = served.key("ada").read_bytes()
    assert any(sent)
    assert not any(line in body for body in sent for line in secret.splitlines() if line)


def test_a_wrong_key_signs_nothing_and_says_why(served: Console, chrome: Chrome, tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    folder.mkdir(mode=0o700)
    write_private(folder / "other.key", pem(Ed25519PrivateKey.generate()))
    (folder / "crt.key").write_bytes(served.login("ada")[0].read_bytes())
    (folder / "ec.key").write_bytes(served.login("ada")[1].read_bytes())
    with chrome.visitor(served.base, *served.login("ada")) as visitor:
        visitor.log_in("/sign")
        for name, why in (
            ("other.key", "another person's key"),
            ("crt.key", "no private key"),
            ("ec.key", "no Ed25519 key"),
        ):
            visitor.page.set_input_files("input.key", folder / name)
            visitor.page.get_by_role("button", name="Sign the approval").click()
            visitor.page.wait_for_function(
                "why => document.querySelector('.sign .error').textContent.includes(why)", arg=why
            )
            visitor.axe()
    assert served.envelopes == []


AS_SHOWN = {
    "person": "ada",
    "origin": "lazaret/test",
    "serial": "limit-1",
    "action": "limit",
    "subject": "alpha/rdp",
    "value": "4.0",
}
CHANGED = {
    "Value": encode(Approval(**{**AS_SHOWN, "value": "40.0"})),
    "Of what": encode(Approval(**{**AS_SHOWN, "subject": "beta/rdp"})),
    "Action": encode(Approval(**{**AS_SHOWN, "action": "release"})),
    "Who": encode(Approval(**{**AS_SHOWN, "person": "otto"})),
    "Proposal": encode(Approval(**{**AS_SHOWN, "serial": "limit-2"})),
    "Ledger": encode(Approval(**{**AS_SHOWN, "origin": "lazaret/other"})),
    "Does": encode(Request(**AS_SHOWN)),
}


def test_nothing_is_signed_whose_bytes_say_something_else_than_the_page(served: Console, chrome: Chrome) -> None:
    """The page's words and the bytes come from one server: whoever changed one of them on its way is found out."""
    with chrome.visitor(served.base, *served.login("ada")) as visitor:
        visitor.log_in("/sign")
        for name, raw in CHANGED.items():
            visitor.go("/sign")
            said = " ".join(visitor.page.inner_text(".bytes dl").split())
            assert said.startswith("Who ada Does approves Action limit Of what alpha/rdp Value 4.0 Proposal limit-1")
            given = base64.b64encode(raw).decode()
            visitor.page.evaluate("x => document.querySelector('form.by-key').dataset.statement = x", given)
            visitor.page.set_input_files("input.key", served.key("ada"))
            visitor.page.get_by_role("button", name="Sign the approval").click()
            visitor.page.wait_for_function("() => !document.querySelector('.sign .error').hidden")
            assert f"something else than this page ({name})" in visitor.page.inner_text(".sign .error")
            assert " ".join(visitor.page.inner_text(".bytes dl").split()) != said, "what the bytes say is shown"
        visitor.axe()
        visitor.screenshot("kit-sign-refused")
    assert served.envelopes == []


def test_everything_works_without_a_script(served: Console, chrome: Chrome, tmp_path: Path) -> None:
    key = signing_key(served.key("ada"))
    with chrome.visitor(served.base, *served.login("ada"), script=False) as visitor:
        visitor.log_in("/sign")
        page = visitor.page
        assert not page.locator("form.by-key").is_visible()
        words = page.inner_text(".sign pre")
        assert words == (
            "lazaret-coordinator ledger sign limit alpha/rdp 4.0 --ledger lazaret/test --person ada --serial limit-1 "
            "--key YOUR.key --out limit-1-ada.json"
        )
        raw = encode(Approval("ada", "lazaret/test", "limit-1", "limit", "alpha/rdp", "4.0"))
        sealed = tmp_path / "limit-1-ada.json"
        sealed.write_bytes(seal(raw, PAYLOAD_TYPE, key))
        page.set_input_files("input[name=envelope][type=file]", sealed)
        page.get_by_role("button", name="Hand it in").click()
        assert "Handed in." in page.inner_text(".flash")
    assert json.loads(served.envelopes[0]) == json.loads(sealed.read_bytes())


def test_a_live_part_is_replaced_while_the_page_is_looked_at(served: Console, chrome: Chrome) -> None:
    with chrome.visitor(served.base, *served.login("ada")) as visitor:
        visitor.log_in("/")
        before = visitor.page.inner_text("#beat")
        wait_for(lambda: visitor.page.inner_text("#beat") != before)
        served.pages.sessions._all.clear()  # as when a login has ended
        visitor.page.wait_for_url("**/login")


def test_the_keyboard_reaches_the_content_first(served: Console, chrome: Chrome) -> None:
    with chrome.visitor(served.base, *served.login("ada")) as visitor:
        visitor.log_in("/")
        visitor.page.keyboard.press("Tab")
        assert visitor.page.evaluate("document.activeElement.textContent") == "Skip to the content"
        visitor.page.keyboard.press("Enter")
        assert visitor.page.evaluate("document.activeElement.id") == "main"


def test_a_cookie_is_hidden_from_scripts_and_another_site_cannot_use_it(served: Console, chrome: Chrome) -> None:
    with chrome.visitor(served.base, *served.login("ada")) as visitor:
        visitor.log_in("/")
        assert visitor.page.evaluate("document.cookie") == ""
        (cookie,) = visitor.context.cookies()
        assert (cookie["secure"], cookie["httpOnly"], cookie["sameSite"]) == (True, True, "Strict")


# ------------------------------------------------------------------ the instruments see red


def test_an_inline_script_or_style_is_seen(served: Console, chrome: Chrome) -> None:
    for inline in (
        "<script>document.title='x'</script>",
        "<p style='color:red'>x</p>",
        "<style>p{color:red}</style>",
    ):
        (served.home / "templates" / "form.html").write_text(
            '{% extends "base.html" %}{% block title %}x{% endblock %}{% block main %}' + inline + "{% endblock %}"
        )
        served.clock.at += 61
        with pytest.raises(AssertionError, match="Content Security Policy"):
            opened(served, chrome)


def opened(served: Console, chrome: Chrome) -> None:
    with chrome.visitor(served.base, *served.login("ada")) as visitor:
        visitor.log_in("/form?told=1")


def test_a_request_that_leaves_this_machine_is_seen(served: Console, chrome: Chrome) -> None:
    with pytest.raises(AssertionError, match=r"evil\.example"):
        gone(served, chrome)


def gone(served: Console, chrome: Chrome) -> None:
    with chrome.visitor(served.base) as visitor, pytest.raises(Error, match="ERR_NAME_NOT_RESOLVED"):
        visitor.page.goto("https://evil.example/")


def test_a_page_that_cannot_be_read_is_seen(served: Console, chrome: Chrome) -> None:
    with chrome.visitor(served.base) as visitor:
        visitor.go("/login")
        visitor.page.evaluate("document.querySelector('h1').innerHTML = '<img src=\"/static/none.png\"><input>'")
        with pytest.raises(AssertionError, match=re.compile("image-alt.*label", re.S)):
            visitor.axe()
