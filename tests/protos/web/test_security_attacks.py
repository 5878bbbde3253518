"""What somebody tries against a console, and the refusal of each: forms from elsewhere, stolen and planted sessions,
other hosts' names, bodies without an end, roles that are not theirs, texts that want to be more than texts."""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.responses import Response

from protos.web import security
from protos.web import server as serving
from protos.web.request import Form, LoggedInPerson, PageError, RequestContext, is_local
from protos.web.router import Router, UnprotectedRouteError
from protos.web.security import BODY_BYTES, CSP
from protos.web.server import PlainAnswer, PlainServing
from protos.web.sessions import COOKIE
from protos.web.settings import ConsoleConfigError
from tests.support.console_kit import Console, console, words_of

XSS = [
    "<script>fetch('https://evil.example')</script>",
    '"><img src=x onerror=alert(1)>',
    "javascript:alert(1)",
    "{{ 7*7 }}{% raw %}",
    "</textarea><svg/onload=alert(1)>",
    "&lt;b&gt;",
]
SNEAKY = ["a\x00b", "a\x1b[31mred", "a\x7f", "safe\u202etxt.exe", "\u2066hidden\u2069"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    with console(tmp_path_factory.mktemp("console") / "home") as made:
        yield made


@pytest.fixture(autouse=True)
def _calm(served: Console) -> None:
    served.clock.at += 61  # whoever tried too often in the test before has waited
    served.log.lines.clear()
    served.told.clear()


def raw(served: Console, request: bytes, name: str = "") -> bytes:
    """Bytes as they are, and what comes back until the connection ends."""
    tls = ssl.create_default_context(cafile=str(served.home / "keys" / "console.crt"))
    if name:
        tls.load_cert_chain(*served.login(name))
    port = int(served.base.rpartition(":")[2])
    answer = b""
    with (
        socket.create_connection(("127.0.0.1", port), 20) as plain,
        tls.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        connection.sendall(request)
        while chunk := connection.recv(65536):
            answer += chunk
    return answer


# ------------------------------------------------------------------ who may come in


def test_nobody_without_a_login_sees_anything(served: Console) -> None:
    with served.client() as client:
        for path in ("/", "/form", "/sign", "/entry/1", "/entry/x"):
            answer = client.get(path)
            assert (answer.status_code, answer.headers["location"].partition("?")[0]) == (303, "/login")
        assert client.post("/told", data={"reason": "x"}, headers=served.own).status_code == 401
        assert "no certificate" in client.get("/login").text
        assert client.post("/login", data={"to": "/"}, headers=served.own).status_code == 403
    assert served.told == []


def test_a_certificate_alone_opens_no_page(served: Console) -> None:
    with served.client("ada", entered=False) as client:
        assert client.get("/").status_code == 303
        assert client.post("/told", data={"reason": "x"}, headers=served.own).status_code == 401


def test_a_pinned_person_who_is_in_no_ledger_may_do_nothing(served: Console) -> None:
    with served.client("nemo", entered=False) as client:
        assert "the ledger has no such person" in client.get("/login").text
        assert client.post("/login", data={"to": "/"}, headers=served.own).status_code == 403


def test_who_is_dismissed_is_out_with_the_next_click(served: Console) -> None:
    with served.client("otto") as client:
        assert client.get("/form").status_code == 200
        otto = served.persons.pop("otto")
        try:
            assert client.get("/form").status_code == 303
        finally:
            served.persons["otto"] = otto


def test_a_certificate_that_is_forgotten_logs_out_who_is_logged_in(served: Console) -> None:
    with served.client("ada") as client:
        assert client.get("/").status_code == 200
        served.logins.forget("ada")
        try:
            assert client.get("/").status_code == 303
            assert "no longer known here" in client.get("/login").text
        finally:
            served.logins.trust("ada", served.login("ada")[0].read_bytes())


def test_a_role_counts_at_every_request_and_is_the_ledgers(served: Console) -> None:
    with served.client("otto") as auditor:
        answer = served.post(auditor, "/told", reason="x")
        assert (answer.status_code, words_of(answer)) == (
            403,
            "This is for operator; you are logged in as otto, auditor.",
        )
        assert auditor.get("/sign").status_code == 403
        for form in ({"role": "operator"}, {"person": "ada"}):
            assert served.post(auditor, "/told", reason="x", **form).status_code == 403
    assert served.told == []
    assert served.log.rules() == ["role"] * 4


def test_the_menu_shows_what_a_role_may_see(served: Console) -> None:
    with served.client("otto") as auditor, served.client("ada") as operator:
        assert 'href="/sign"' not in auditor.get("/").text
        assert 'href="/sign"' in operator.get("/").text


# ------------------------------------------------------------------ sessions


def test_the_cookie_is_for_this_host_over_tls_and_for_no_script(served: Console) -> None:
    with served.client("ada", entered=False) as client:
        answer = client.post("/login", data={"to": "/"}, headers=served.own)
        cookie = answer.headers["set-cookie"]
    assert cookie.startswith(f"{COOKIE}=")
    assert COOKIE.startswith("__Host-")
    flags = {part.strip().lower() for part in cookie.split(";")[1:]}
    assert flags == {"secure", "httponly", "samesite=strict", "path=/"}


def test_a_planted_session_is_not_the_one_after_the_login(served: Console) -> None:
    with served.client("ada", entered=False) as client:
        client.cookies.set(COOKIE, "planted")
        answer = client.post("/login", data={"to": "/"}, headers={**served.own, "Cookie": f"{COOKIE}=planted"})
        assert f"{COOKIE}=planted" not in answer.headers["set-cookie"]
        first = answer.headers["set-cookie"].partition(";")[0]
        again = client.post("/login", data={"to": "/"}, headers={**served.own, "Cookie": first})
        assert again.headers["set-cookie"].partition(";")[0] != first
        assert client.get("/", headers={"Cookie": first}).status_code == 303  # the one before has ended


def test_a_stolen_cookie_is_worth_nothing_without_the_certificate(served: Console) -> None:
    with served.client("ada") as owner:
        cookie = {"Cookie": f"{COOKIE}={owner.cookies[COOKIE]}"}
        assert owner.get("/form").status_code == 200
        with served.client() as thief, served.client("otto") as insider:
            assert thief.get("/form", headers=cookie).status_code == 303
            insider.cookies.clear()
            assert insider.get("/form", headers=cookie).status_code == 303


def test_a_logout_ends_the_session_and_needs_the_forms_token(served: Console) -> None:
    with served.client("ada") as client:
        cookie = client.cookies[COOKIE]
        assert client.post("/logout", data={"csrf": "x"}, headers=served.own).status_code == 403
        assert served.post(client, "/logout").status_code == 303
        assert client.get("/", headers={"Cookie": f"{COOKIE}={cookie}"}).status_code == 303


def test_a_page_that_looks_again_by_itself_keeps_nobody_logged_in(served: Console) -> None:
    with served.client("ada") as client:
        live = {"X-Lazaret-Live": "1"}
        for _ in range(2):
            served.clock.at += 500
            answer = client.get("/", headers=live)
        assert answer.status_code == 401
        assert client.get("/").status_code == 303


def test_logins_are_counted_for_each_address(served: Console) -> None:
    with served.client("ada", entered=False) as client:
        codes = [client.post("/login", data={"to": "/"}, headers=served.own).status_code for _ in range(25)]
    assert codes == [303] * 20 + [429] * 5


# ------------------------------------------------------------------ forms from elsewhere


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "https://localhost"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "none"},
        {"Sec-Fetch-Site": "same-origin", "Origin": "https://evil.example"},
    ],
)
def test_a_form_of_another_sites_page_is_refused(served: Console, headers: dict[str, str]) -> None:
    with served.client("ada") as client:
        token = re.search(r'name="csrf" value="([^"]+)"', client.get("/form").text)
        assert token is not None
        answer = client.post("/told", data={"csrf": token[1], "reason": "x"}, headers=headers)
        assert answer.status_code == 403
        assert client.post("/login", data={"to": "/"}, headers=headers).status_code == 403
    assert served.told == []
    assert "cross_site" in served.log.rules()


@pytest.mark.parametrize("token", ["", "x", "é", "0" * 43])
def test_a_form_without_its_logins_token_is_refused(served: Console, token: str) -> None:
    with served.client("ada") as client, served.client("otto") as other:
        theirs = re.search(r'name="csrf" value="([^"]+)"', other.get("/form").text)
        assert theirs is not None
        for wrong in (token, theirs[1]):
            answer = client.post("/told", data={"csrf": wrong, "reason": "x"}, headers=served.own)
            assert answer.status_code == 403
        assert client.post("/told", data={"reason": "x"}, headers=served.own).status_code == 403
    assert served.told == []


def test_a_page_that_changes_something_is_not_read(served: Console) -> None:
    with served.client("ada") as client:
        assert client.get("/told").status_code == 405
        for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "HEAD"):
            assert client.request(method, "/form", headers=served.own).status_code == 405


def test_another_sites_page_reads_nothing_but_may_lead_here(served: Console) -> None:
    with served.client("ada") as client:
        picture = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
        frame = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}
        link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
        assert [client.get("/", headers=h).status_code for h in (picture, frame, link)] == [403, 403, 200]


# ------------------------------------------------------------------ hosts, sizes, addresses


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "", "127.0.0.2", "[::1]"])
def test_a_name_that_is_not_configured_is_not_answered(served: Console, host: str) -> None:
    answer = raw(served, f"GET /login HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 421 "), answer[:100]


def test_two_hosts_are_none(served: Console) -> None:
    request = b"GET /login HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
    assert raw(served, request).split(b" ")[1] in (b"400", b"421")


def test_a_body_that_is_too_large_is_not_read(served: Console) -> None:
    with served.client("ada") as client:
        cookie = f"Cookie: {COOKIE}={client.cookies[COOKIE]}\r\n".encode()
    head = b"POST /kept HTTP/1.1\r\nHost: localhost\r\nSec-Fetch-Site: same-origin\r\n" + cookie
    told = raw(served, head + b"Content-Length: %d\r\n\r\n" % (BODY_BYTES + 1), "ada")
    assert told.startswith(b"HTTP/1.1 413 ")
    chunk = b"10000\r\n" + b"a" * 0x10000 + b"\r\n"
    many = chunk * (BODY_BYTES // 0x10000 + 2)
    untold = raw(served, head + b"Transfer-Encoding: chunked\r\n\r\n" + many, "ada")
    assert untold.startswith(b"HTTP/1.1 413 ")


def test_large_headers_are_refused(served: Console) -> None:
    """They may come in pieces, which h11 refuses, or whole in one read, which it does not."""
    answer = raw(served, b"GET /login HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 40_000 + b"\r\n\r\n")
    assert answer[:12] in (b"", b"HTTP/1.1 400", b"HTTP/1.1 431")


def test_headers_without_an_end_are_cut_off(served: Console) -> None:
    try:
        answer = raw(served, b"GET /login HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 400_000)
    except (ConnectionError, ssl.SSLEOFError):  # cut off while it was still being sent
        answer = b""
    assert answer[:12] in (b"", b"HTTP/1.1 400")


def test_who_says_nothing_or_speaks_slowly_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_HEADER_S", 0.2)
    monkeypatch.setattr(security, "BODY_S", 0.2)
    head = b"POST /login HTTP/1.1\r\nHost: localhost\r\nSec-Fetch-Site: same-origin\r\nContent-Length: 9\r\n\r\n"
    with console(tmp_path / "home") as made:
        assert raw(made, b"GET /login HTTP/1.1\r\nHost: local") == b""  # it returns: the connection has ended
        assert raw(made, head + b"to").startswith(b"HTTP/1.1 408 ")


def test_one_address_does_not_take_every_connection(served: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_EACH", 1)
    with served.client() as first, served.client() as second:
        assert first.get("/login").status_code == 200
        with pytest.raises(httpx.HTTPError):
            second.get("/login")
        assert first.get("/login").status_code == 200


def test_a_console_closes_while_somebody_is_connected(tmp_path: Path) -> None:
    with console(tmp_path / "home") as made, made.client() as client:
        assert client.get("/login").status_code == 200
        made.serving.__exit__(None, None, None)
        with pytest.raises(httpx.HTTPError):
            client.get("/login")


def test_a_port_that_is_taken_is_said_to_be(served: Console) -> None:
    with pytest.raises(ConsoleConfigError, match="does another program"), PlainServing(served.base[8:], {}):
        raise AssertionError


def test_a_smuggled_request_is_malformed(served: Console) -> None:
    head = b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = raw(served, head + b"0\r\n\r\nGET /form HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert b"HTTP/1.1 200" not in answer


@pytest.mark.parametrize(
    "path",
    ["/static/../pages.py", "/static/%2e%2e%2fpages.py", "/static/..%5cpages.py", "/static/pages.py", "//etc/passwd"],
)
def test_no_path_leads_out_of_the_console(served: Console, path: str) -> None:
    request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    assert raw(served, request).startswith(b"HTTP/1.1 404 ")


@pytest.mark.parametrize("path", ["/a%00b", "/a%0d%0aSet-Cookie:x", "/?q=%1b[31m", "/%ff", "/" + "a" * 5000])
def test_an_address_with_control_characters_is_none(served: Console, path: str) -> None:
    request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    assert raw(served, request).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    "to", ["//evil.example", "https://evil.example", "/\\evil.example", "/login", "evil", "/a\nb"]
)
def test_a_login_leads_to_this_console_only(served: Console, to: str) -> None:
    with served.client("ada", entered=False) as client:
        answer = client.post("/login", data={"to": to}, headers=served.own)
        assert (answer.status_code, answer.headers.get("location")) in ((303, "/"), (400, None))


def test_a_login_leads_where_one_wanted_to_go(served: Console) -> None:
    with served.client("ada", entered=False) as client:
        way = client.get("/form?told=a%26b").headers["location"]
        page = client.get(way)
        to = re.search(r'name="to" value="([^"]+)"', page.text)
        assert to is not None
        assert to[1] == "/form?told=a%26b"
    assert not is_local("//evil.example")


# ------------------------------------------------------------------ answers


def test_every_answer_has_the_headers_and_no_page_is_kept(served: Console) -> None:
    with served.client("ada") as client:
        for path in ("/", "/form", "/nope", "/entry/1", "/entry/13", "/login"):
            answer = client.get(path)
            assert answer.headers["content-security-policy"] == CSP
            assert answer.headers["cache-control"] == "no-store"
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
            assert answer.headers["cross-origin-opener-policy"] == "same-origin"
            assert answer.headers["cross-origin-resource-policy"] == "same-origin"
            assert "server" not in answer.headers
    assert "unsafe" not in CSP


def test_browsers_are_told_to_stay_with_tls_but_not_for_this_machines_own_name(tmp_path: Path) -> None:
    with console(tmp_path / "home", names=("console.hospital.example", "localhost")) as made, made.client() as client:
        named = client.get("/login", headers={"Host": "console.hospital.example"})
        assert named.headers["strict-transport-security"] == "max-age=31536000"
        assert "strict-transport-security" not in client.get("/login").headers


def test_a_fault_says_its_number_and_nothing_of_its_text(served: Console) -> None:
    with served.client("ada") as client:
        answer = client.get("/entry/13")
    assert answer.status_code == 500
    number = re.search(r"incident ([0-9a-f]{8})", answer.text)
    assert number is not None
    assert "Doe" not in answer.text
    assert ("console_incident", {"rule": number[1], "state": "ValueError GET /entry/{seq}"}) in served.log.lines
    assert "Doe" not in str(served.log.lines)


def test_a_refusal_is_a_page_with_a_way_back(served: Console) -> None:
    with served.client("ada") as client:
        answer = client.get("/entry/7")
        assert (answer.status_code, words_of(answer)) == (404, "There is no entry 7.")
        assert 'href="/entry"' in answer.text
        assert client.get("/entry/seven").status_code == 404


@pytest.mark.parametrize("text", XSS)
def test_a_text_stays_a_text_in_every_place_of_a_page(served: Console, text: str) -> None:
    with served.client("ada") as client:
        page = client.get("/form", params={"told": text}).text
        assert served.post(client, "/told", reason=text).status_code == 303
        flash = client.get("/form").text
    for shown in (page, flash):
        assert not re.search(r"<(script>|img|svg/)|onerror=alert\(1\)>", shown.replace("&#34;", ""))
        assert "49" not in re.sub(r'csrf" value="[^"]+"|static/[^"]+|\d\d:\d\d:\d\d', "", shown)


@pytest.mark.parametrize("text", SNEAKY)
def test_control_characters_and_turned_writing_are_refused_in_forms(served: Console, text: str) -> None:
    with served.client("ada") as client:
        answer = served.post(client, "/told", reason=text)
        assert answer.status_code == 400
        assert "characters that cannot be shown" in answer.text
    assert served.told == []
    assert text not in str(served.log.lines)


def test_a_field_that_is_missing_or_given_twice_is_named(served: Console) -> None:
    with served.client("ada") as client:
        assert "“reason” is missing" in served.post(client, "/told").text
    with pytest.raises(PageError, match="given twice"):
        Form((("a", "1"), ("a", "2")))["a"]


def test_a_file_name_cannot_choose_its_folder_or_its_headers(served: Console) -> None:
    with served.client("ada") as client:
        for name in ("../../etc/passwd", 'a";\u00e9 x="y', ".htaccess", "\\\\host\\share", ""):
            answer = served.post(client, "/kept", name=name)
            told = answer.headers["content-disposition"]
            assert re.fullmatch(r'attachment; filename="[A-Za-z0-9][A-Za-z0-9._-]*"', told), told
            assert "/" not in told


def test_a_form_with_very_many_fields_or_of_another_kind_is_refused(served: Console) -> None:
    with served.client("ada") as client:
        many = client.post("/told", data={f"f{n}": "" for n in range(400)}, headers=served.own)
        assert many.status_code == 400
        kind = {**served.own, "Content-Type": "application/json"}
        assert client.post("/told", content=b"{}", headers=kind).status_code == 415


def test_a_field_or_a_file_with_a_name_without_an_end_is_malformed(served: Console) -> None:
    with served.client("ada") as client:
        for data, name in (({"f" * 9000: "x"}, "a"), ({}, "a" * 9000)):
            files = {"file": (name, b"x")}
            assert client.post("/kept", data=data, files=files, headers=served.own).status_code == 400
    assert not [event for event, _ in served.log.lines if event == "console_incident"]


def test_a_page_leads_to_its_own_console_and_shows_pngs(served: Console) -> None:
    asked = RequestContext(None, "/", Form(()), {}, lambda *_: "")
    for path in ("https://evil.example", "//evil.example", "evil"):
        with pytest.raises(ValueError, match="own pages"):
            asked.go(path)
    with pytest.raises(ValueError, match="PNG"):
        asked.png_response(b"<svg onload=alert(1)>")


# ------------------------------------------------------------------ what the kit itself refuses


def test_a_route_that_was_not_made_through_the_kit_keeps_the_console_from_starting(served: Console) -> None:
    pages = fresh(served)
    pages.build()
    app: FastAPI = pages.app
    app.add_api_route("/open", lambda: Response("open"), methods=["GET"])
    with pytest.raises(UnprotectedRouteError, match="/open"):
        pages.guarded()


def test_a_page_for_nobody_is_a_mistake(served: Console) -> None:
    with pytest.raises(UnprotectedRouteError, match="roles"):
        fresh(served).get("/x", set())


def fresh(served: Console) -> Router:
    return Router(
        title="t",
        side="site",
        who=lambda name: LoggedInPerson(name, "operator"),
        templates=served.home / "templates",
        settings=served.settings,
        log=served.log,
        logins=served.logins,
    )


# ------------------------------------------------------------------ the plain listener


def test_the_plain_listener_says_its_few_things_to_machines_only() -> None:
    def broken() -> PlainAnswer:
        raise ValueError("the patient's name is Doe")

    answers: dict[str, Any] = {"/healthz": lambda: PlainAnswer(200, b"ok\n"), "/readyz": broken}
    with PlainServing("127.0.0.1:0", answers, ("metrics.hospital.example",)) as plain:
        base = f"http://127.0.0.1:{plain.port}"
        with httpx.Client(base_url=base, trust_env=False) as client:
            assert client.get("/healthz").text == "ok\n"
            assert client.get("/healthz", headers={"Host": "agent:9464"}).status_code == 200
            assert client.get("/healthz", headers={"Host": "metrics.hospital.example"}).status_code == 200
            rebound = client.get("/healthz", headers={"Host": "evil.example"})
            assert rebound.status_code == 421
            fault = client.get("/readyz")
            assert (fault.status_code, fault.text) == (500, "internal fault\n")
            assert client.get("/login").status_code == 404
            assert client.post("/healthz").status_code == 405
