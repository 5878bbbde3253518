"""How much of a console one peer can take: connections before they speak, bodies before a login, requests of one
person; and what the log is told of who does something."""

from __future__ import annotations

import re
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from starlette.formparsers import FormParser

from protos.web import router
from protos.web import server as serving
from protos.web.security import BODY_BYTES, STRANGER_BYTES
from protos.web.server import PlainAnswer, PlainServing
from protos.web.sessions import COOKIE
from tests.support.console_kit import Console, console, wait_for

FORM = {"Content-Type": "application/x-www-form-urlencoded"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    with console(tmp_path_factory.mktemp("console") / "home") as made:
        yield made


@pytest.fixture(autouse=True)
def _calm(served: Console) -> None:
    served.clock.at += 61
    served.log.lines.clear()
    served.told.clear()


@contextmanager
def silent(port: int, count: int) -> Iterator[list[socket.socket]]:
    """So many connections that say nothing."""
    with ExitStack() as stack:
        made = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 20)) for _ in range(count)]
        for connection in made:
            connection.setblocking(False)
        yield made


def ended(connection: socket.socket) -> bool:
    """Whether the other side has closed it."""
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def port_of(made: Console) -> int:
    return int(made.base.rpartition(":")[2])


# ------------------------------------------------------------------ connections


def test_connections_that_never_say_hello_are_counted_before_anything_is_made_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert serving._HANDSHAKE_S <= 3
    monkeypatch.setattr(serving, "_HANDSHAKE_S", 60.0)
    with console(tmp_path / "home") as made:
        with silent(port_of(made), 100) as all_of_them:
            wait_for(lambda: sum(map(ended, all_of_them)) >= 100 - serving._EACH)
            assert sum(map(ended, all_of_them)) == 100 - serving._EACH
        with made.client() as client:
            wait_for(lambda: answers(client))


def answers(client: httpx.Client) -> bool:
    with suppress(httpx.HTTPError):
        return client.get("/login").status_code == 200
    return False


def test_all_addresses_together_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_CONNECTIONS", 5)
    with console(tmp_path / "home") as made, silent(port_of(made), 9) as all_of_them:
        wait_for(lambda: sum(map(ended, all_of_them)) == 4)


def test_a_handshake_that_is_not_said_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_HANDSHAKE_S", 0.3)
    with console(tmp_path / "home") as made, silent(port_of(made), serving._EACH) as all_of_them:
        all_of_them[0].send(b"\x16\x03\x01\x02")  # the beginning of one
        wait_for(lambda: all(map(ended, all_of_them)))
        with made.client() as client:
            assert client.get("/login").status_code == 200


def test_health_is_answered_soon_after_somebody_took_every_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    assert serving._PLAIN_S <= 2
    monkeypatch.setattr(serving, "_PLAIN_S", 0.3)
    monkeypatch.setattr(serving, "_HEADER_S", 60.0)
    with (
        PlainServing("127.0.0.1:0", {"/healthz": lambda: PlainAnswer(200, b"well\n")}) as plain,
        silent(plain.port, 40) as all_of_them,
    ):
        wait_for(lambda: all(map(ended, all_of_them)))
        assert httpx.get(f"http://127.0.0.1:{plain.port}/healthz", trust_env=False).text == "well\n"


def test_who_asks_and_never_reads_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_READ_S", 0.3)
    with console(tmp_path / "home") as made:
        tls = ssl.create_default_context(cafile=str(made.home / "keys" / "console.crt"))
        with (
            socket.create_connection(("127.0.0.1", port_of(made)), 20) as plain,
            tls.wrap_socket(plain, server_hostname="localhost") as connection,
            pytest.raises(OSError, match=r"reset|[Bb]roken|EOF|aborted"),
        ):
            connection.sendall(
                b"GET /login HTTP/1.1\r\nHost: localhost\r\n\r\n" * 800_000
            )  # more than both kernels keep


# ------------------------------------------------------------------ bodies of strangers


@pytest.mark.parametrize("path", ["/login", "/logout", "/told", "/nope"])
def test_who_is_not_logged_in_sends_little(served: Console, path: str) -> None:
    with served.client() as client:
        body = b"a=" + b"x" * STRANGER_BYTES
        answer = client.post(path, content=body, headers={**FORM, **served.own})
        assert (answer.status_code, served.log.rules()) == (413, ["too_large"])
        client.cookies.set(COOKIE, "planted")
        assert client.post(path, content=body, headers={**FORM, **served.own}).status_code == 413
    assert STRANGER_BYTES <= 16_384


def test_a_login_is_as_small_for_who_is_logged_in_and_a_form_may_be_large(served: Console) -> None:
    with served.client("ada") as client:
        large = "x" * (STRANGER_BYTES * 4)
        assert served.post(client, "/login", to=large).status_code == 413
        assert served.post(client, "/kept", name=large).status_code == 200
        assert served.post(client, "/kept", name="a", more="x" * BODY_BYTES).status_code == 413


def test_tries_are_counted_before_a_body_is_taken_apart(served: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    parse = FormParser.parse

    async def noted(parser: FormParser) -> object:
        parsed.append(threading.current_thread().name)
        return await parse(parser)

    monkeypatch.setattr(FormParser, "parse", noted)
    with served.client() as client:
        for path in ("/login", "/logout"):
            parsed.clear()
            codes = [client.post(path, data={"to": "/"}, headers=served.own).status_code for _ in range(23)]
            assert codes[20:] == [429] * 3
            assert len(parsed) == 20
            assert not [name for name in parsed if name.startswith("lazaret-")], "the loop's own thread"


# ------------------------------------------------------------------ requests of one person


def test_a_person_has_so_many_requests_open_and_others_have_their_own(
    served: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert router._OPEN == 20
    monkeypatch.setattr(router, "_OPEN", 3)
    with served.client("ada") as client, served.client("otto") as other, ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(client.get, "/wait") for _ in range(3)]
        try:
            wait_for(lambda: served.told == ["ada"] * 3)
            assert client.get("/form").status_code == 429
            assert served.log.rules() == ["open"]
            assert other.get("/form").status_code == 200
        finally:
            served.gate.set()
        assert [answer.result().status_code for answer in waiting] == [200] * 3
        for path in ("/entry/1", "/entry/x", "/entry/13", "/sign", "/form", "/form"):
            assert client.get(path).status_code != 429, "what was answered, however, is not open any more"


# ------------------------------------------------------------------ who did it


def test_the_log_says_who_did_something_and_who_looked_at_what_is_told(served: Console) -> None:
    with served.client("ada") as client, served.client("otto") as other:
        served.post(client, "/told", reason="secret words")
        other.get("/seen/7")
        served.post(other, "/told", reason="secret words")
        served.post(client, "/logout")
    assert served.log.lines == [
        ("console_login", {"rule": "certificate", "person": "ada"}),
        ("console_login", {"rule": "certificate", "person": "otto"}),
        ("console_act", {"person": "ada", "role": "operator", "page": "/told"}),
        ("console_act", {"person": "otto", "role": "auditor", "page": "/seen/{number}"}),
        ("console_refused", {"rule": "role", "state": "auditor", "person": "otto"}),
        ("console_logout", {"person": "ada"}),
    ]


# ------------------------------------------------------------------ ways back


@pytest.mark.parametrize("path", ["//evil.example/x", "//evil.example/a/b", "/\\evil.example/x"])
def test_the_way_back_from_an_error_stays_in_the_console(served: Console, path: str) -> None:
    with served.client("ada") as client:
        cookie = f"Cookie: {COOKIE}={client.cookies[COOKIE]}\r\n"
    tls = ssl.create_default_context(cafile=str(served.home / "keys" / "console.crt"))
    tls.load_cert_chain(*served.login("ada"))
    request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{cookie}Connection: close\r\n\r\n".encode()
    answer = b""
    with (
        socket.create_connection(("127.0.0.1", port_of(served)), 20) as plain,
        tls.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        connection.sendall(request)
        while chunk := connection.recv(65536):
            answer += chunk
    found = re.search(rb'class="button" href="([^"]*)" data-back', answer)
    assert found is not None
    assert found[1] == b"/"
