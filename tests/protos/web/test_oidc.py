"""Logins by OpenID: with a real provider as it should be, and with one that lies in every way that it can."""

from __future__ import annotations

import base64
import hmac
import json
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx
import pytest
from joserfc import jwt
from joserfc.jwk import KeySet, RSAKey

from protos.identity.key_files import write_private
from protos.web.oidc import LoginError, Provider
from protos.web.sessions import COOKIE
from protos.web.settings import ConsoleConfigError, Oidc
from tests.support.browser import chromium
from tests.support.console_kit import Clock, Console, console, words_of

CALLBACK = "https://localhost/oidc/back"
KEY = RSAKey.generate_key(2048, {"kid": "one"})
OTHER = RSAKey.generate_key(2048, {"kid": "one"})


def settings(folder: Path, issuer: str, **more: Any) -> Oidc:
    secret = folder / "secret" / "oidc"
    if not secret.exists():
        secret.parent.mkdir(mode=0o700, parents=True)
        write_private(secret, b"a secret\n")
    persons = MappingProxyType({"sub-of-ada": "ada", "nobody-here": "nemo"})
    given: dict[str, Any] = {"client_id": "lazaret", "client_secret_file": secret, "persons": persons}
    return Oidc(issuer=issuer, **given | more)


# ------------------------------------------------------------------ an honest provider


@pytest.fixture(scope="module")
def honest() -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from oidc_provider_mock import User, run_server_in_thread  # type: ignore[import-untyped] # it ships none

        users = [User(sub="sub-of-ada"), User(sub="stranger"), User(sub="nobody-here")]
        with run_server_in_thread(require_nonce=True, user_claims=users) as server:
            yield f"http://localhost:{server.server_port}"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, honest: str) -> Iterator[Console]:
    folder = tmp_path_factory.mktemp("console")
    with console(folder / "home", oidc=settings(folder, honest)) as made:
        yield made


def agree(url: str, subject: str) -> str:
    """What a person does at the provider; where the browser is sent then."""
    answer = httpx.post(url, data={"sub": subject}, trust_env=False)
    assert answer.status_code == 302, answer.text[:300]
    return answer.headers["location"]


def test_a_person_comes_in_by_the_institutions_account(served: Console) -> None:
    with served.client() as client:
        start = client.get("/oidc/start", params={"to": "/form"})
        cookie = start.headers["set-cookie"]
        assert cookie.startswith("__Host-lazaret-oidc=")
        assert {"secure", "httponly", "samesite=lax"} <= {part.strip().lower() for part in cookie.split(";")}
        asked = parse_qs(urlsplit(start.headers["location"]).query)
        assert asked["code_challenge_method"] == ["S256"]
        assert len(asked["nonce"][0]) == len(asked["state"][0]) == 43
        way_back = agree(start.headers["location"], "sub-of-ada")
        page = client.get(way_back)
        assert 'content="0;url=/form"' in page.text
        assert f"{COOKIE}=" in page.headers["set-cookie"]
        assert "<b>ada</b>, operator" in client.get("/form").text
        again = client.get(way_back)
        assert again.status_code == 403
        assert "was used before" in words_of(again)


@pytest.mark.parametrize(
    ("subject", "why"), [("stranger", "this console does not"), ("nobody-here", "not in the ledger")]
)
def test_who_is_known_to_the_institution_only_does_not_come_in(served: Console, subject: str, why: str) -> None:
    served.clock.at += 61
    with served.client() as client:
        start = client.get("/oidc/start")
        answer = client.get(agree(start.headers["location"], subject))
        assert answer.status_code == 403
        assert why in words_of(answer)
        assert COOKIE + "=" not in str(answer.headers.get("set-cookie"))
        assert client.get("/").status_code == 303


def test_a_way_back_that_another_browser_began_logs_nobody_in(served: Console) -> None:
    served.clock.at += 61
    with served.client() as attacker, served.client() as victim:
        way_back = agree(attacker.get("/oidc/start").headers["location"], "sub-of-ada")
        victim.get("/oidc/start")
        answer = victim.get(way_back)
        assert answer.status_code == 403
        assert "another browser" in words_of(answer)
        assert attacker.get(way_back).status_code == 403  # the state was good once


def test_a_browser_makes_the_whole_way_with_strict_cookies(served: Console) -> None:
    served.clock.at += 61
    with chromium() as chrome, chrome.visitor(served.base) as visitor:
        visitor.go("/form")
        visitor.axe()
        visitor.page.get_by_role("link", name="Log in with your institution's account").click()
        visitor.page.locator("input[name=sub]").fill("sub-of-ada")
        ours = [url for url in visitor.foreign() if "pico" not in url]  # the provider's page dresses from elsewhere
        assert ours == []
        visitor.asked.clear()
        visitor.said.clear()
        visitor.page.get_by_role("button", name=re.compile("Authorize", re.I)).click()
        visitor.page.wait_for_url("**/form")
        assert "ada" in visitor.page.inner_text(".who")
        visitor.page.get_by_role("button", name="Log out").click()
        assert "Logged out" in visitor.page.inner_text("h1")
        assert visitor.go("/form").url.endswith("/login?to=/form")


# ------------------------------------------------------------------ one that lies

Change = Callable[[dict[str, Any]], Any]


class Liar:
    """A provider that says what a test wants."""

    def __init__(self) -> None:
        self.metadata: dict[str, Any] = {}
        self.claims: dict[str, Any] = {}
        self.key: Any = KEY
        self.header: dict[str, Any] = {"alg": "RS256", "kid": "one"}
        self.token: str | None = None
        self.keys: Any = KeySet([KEY]).as_dict(private=False)
        self.asked: list[dict[str, list[str]]] = []
        self.padding = b""
        liar = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if "/.well-known/" in self.path:
                    self._say({**liar.own(), **liar.metadata})
                else:
                    self._say(liar.keys)

            def do_POST(self) -> None:
                form = self.rfile.read(int(self.headers["content-length"])).decode()
                liar.asked.append(parse_qs(form) | {"authorization": [str(self.headers["authorization"])]})
                self._say({"id_token": liar.token if liar.token is not None else liar.signed()})

            def _say(self, told: Any) -> None:
                body = json.dumps(told).encode() + liar.padding
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.issuer = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def own(self) -> dict[str, Any]:
        return {
            "issuer": self.issuer,
            "authorization_endpoint": f"{self.issuer}/authorize",
            "token_endpoint": f"{self.issuer}/token",
            "jwks_uri": f"{self.issuer}/keys",
        }

    def signed(self) -> str:
        return jwt.encode(self.header, self.claims, self.key, algorithms=[self.header["alg"]])


@contextmanager
def lying() -> Iterator[Liar]:
    liar = Liar()
    try:
        yield liar
    finally:
        liar.server.shutdown()
        liar.server.server_close()


@pytest.fixture
def liar() -> Iterator[Liar]:
    with lying() as made:
        yield made


def come_back(liar: Liar, folder: Path, change: Change, *, clock: Clock | None = None, wait: float = 0) -> str:
    """A whole login with a token whose claims, right at first, were changed."""
    turned = clock or Clock()
    provider = Provider(settings(folder, liar.issuer), turned, time.time)
    begun = provider.start(CALLBACK, "/")
    asked = {key: value[0] for key, value in parse_qs(urlsplit(begun.url).query).items()}
    liar.claims = {
        "iss": liar.issuer,
        "aud": "lazaret",
        "sub": "sub-of-ada",
        "exp": time.time() + 300,
        "iat": time.time(),
        "nonce": asked["nonce"],
    }
    change(liar.claims)
    turned.at += wait
    answer = {"state": asked["state"], "code": "a code"}
    return provider.finish(answer, begun.binding, CALLBACK)[0]


def test_an_honest_token_is_taken_and_the_verifier_is_told(liar: Liar, tmp_path: Path) -> None:
    assert come_back(liar, tmp_path, lambda _: None) == "ada"
    assert len(liar.asked[0]["code_verifier"][0]) == 43
    assert liar.asked[0]["authorization"][0].startswith("Basic ")


LIES: dict[str, tuple[Change, str]] = {
    "issuer": (lambda c: c.update(iss="https://evil.example"), "issuer"),
    "no issuer": (lambda c: c.pop("iss"), "issuer"),
    "audience": (lambda c: c.update(aud="another"), "audience"),
    "no audience": (lambda c: c.pop("aud"), "audience"),
    "among others": (lambda c: c.update(aud=["lazaret", "another"]), "audience"),
    "for another": (lambda c: c.update(azp="another"), "audience"),
    "expired": (lambda c: c.update(exp=time.time() - 120), "expired"),
    "no end": (lambda c: c.pop("exp"), "expired"),
    "an end in words": (lambda c: c.update(exp="never"), "expired"),
    "not a number": (lambda c: c.update(exp=True), "expired"),
    "of tomorrow": (lambda c: c.update(iat=time.time() + 3600), "expired"),
    "of yesterday": (lambda c: c.update(iat=time.time() - 86_400), "expired"),
    "nonce": (lambda c: c.update(nonce="of another login"), "nonce"),
    "no nonce": (lambda c: c.pop("nonce"), "nonce"),
    "nobody": (lambda c: c.update(sub="stranger"), "nobody"),
    "no subject": (lambda c: c.pop("sub"), "nobody"),
    "a list": (lambda c: c.update(sub=["sub-of-ada"]), "nobody"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_token_that_is_wrong_in_one_claim_logs_nobody_in(liar: Liar, tmp_path: Path, lie: str) -> None:
    change, rule = LIES[lie]
    with pytest.raises(LoginError) as refused:
        come_back(liar, tmp_path, change)
    assert refused.value.rule == rule


def base64url(told: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(told).encode()).decode().rstrip("=")


def test_a_token_of_another_key_or_of_none_logs_nobody_in(liar: Liar, tmp_path: Path) -> None:
    def signature(**change: Any) -> str:
        for name, value in change.items():
            setattr(liar, name, value)
        with pytest.raises(LoginError) as refused:
            come_back(liar, tmp_path, lambda _: None)
        return refused.value.rule

    assert signature(key=OTHER) == "signature"
    # the public key's own text as a shared secret: the classic confusion
    said = f"{base64url({'alg': 'HS256', 'kid': 'one'})}.{base64url(liar.claims)}"
    mac = hmac.new(KEY.as_pem(private=False), said.encode(), "sha256").digest()
    confused = f"{said}.{base64.urlsafe_b64encode(mac).decode().rstrip('=')}"
    assert signature(key=KEY, token=confused) == "signature"
    assert signature(token=f"{base64url({'alg': 'none'})}.{base64url(liar.claims)}.") == "signature"
    assert signature(token="rubbish") == "signature"
    assert signature(token="") == "signature"


def test_a_login_that_took_too_long_is_over(liar: Liar, tmp_path: Path) -> None:
    with pytest.raises(LoginError) as refused:
        come_back(liar, tmp_path, lambda _: None, wait=601)
    assert refused.value.rule == "state"


def test_keys_that_changed_are_looked_for_once_more(liar: Liar, tmp_path: Path) -> None:
    provider = Provider(settings(tmp_path, liar.issuer), Clock(), time.time)
    provider._key_set(False)
    liar.key = RSAKey.generate_key(2048, {"kid": "two"})
    liar.header = {"alg": "RS256", "kid": "two"}
    liar.keys = KeySet([liar.key]).as_dict(private=False)
    liar.claims = {"sub": "x"}
    assert provider._claims(liar.signed())["sub"] == "x"


@pytest.mark.parametrize(
    "metadata",
    [
        {"issuer": "https://evil.example"},
        {"token_endpoint": "http://evil.example/token"},
        {"jwks_uri": "file:///etc/passwd"},
        {"authorization_endpoint": None},
    ],
)
def test_a_provider_that_describes_itself_wrongly_is_not_asked(
    liar: Liar, tmp_path: Path, metadata: dict[str, Any]
) -> None:
    liar.metadata = metadata
    with pytest.raises(LoginError) as refused:
        Provider(settings(tmp_path, liar.issuer), Clock(), time.time).start(CALLBACK, "/")
    assert refused.value.rule == "provider"


def test_a_provider_that_talks_without_an_end_is_cut_off(liar: Liar, tmp_path: Path) -> None:
    liar.padding = b" " * 400_000
    with pytest.raises(LoginError, match="too large"):
        Provider(settings(tmp_path, liar.issuer), Clock(), time.time).start(CALLBACK, "/")


def test_a_provider_that_does_not_answer_is_said_to(tmp_path: Path) -> None:
    with lying() as liar:
        issuer = liar.issuer
    with pytest.raises(LoginError, match="does not answer"):
        Provider(settings(tmp_path, issuer), Clock(), time.time).start(CALLBACK, "/")


def test_an_answer_of_another_provider_is_refused(liar: Liar, tmp_path: Path) -> None:
    provider = Provider(settings(tmp_path, liar.issuer), Clock(), time.time)
    begun = provider.start(CALLBACK, "/")
    state = parse_qs(urlsplit(begun.url).query)["state"][0]
    with pytest.raises(LoginError) as refused:
        provider.finish({"state": state, "code": "x", "iss": "https://evil.example"}, begun.binding, CALLBACK)
    assert refused.value.rule == "issuer"
    assert liar.asked == []


def test_an_address_counts_when_the_institution_has_verified_it(liar: Liar, tmp_path: Path) -> None:
    persons = MappingProxyType({"ada@hospital.example": "ada"})
    provider = Provider(settings(tmp_path, liar.issuer, claim="email", persons=persons), Clock(), time.time)
    claims = {"iss": liar.issuer, "aud": "lazaret", "exp": time.time() + 9, "iat": time.time(), "nonce": "n"}
    claims["email"] = "ada@hospital.example"
    assert provider._person(claims | {"email_verified": True}, "n") == "ada"
    for unverified in ({}, {"email_verified": False}, {"email_verified": "true"}):
        with pytest.raises(LoginError, match="not verified"):
            provider._person(claims | unverified, "n")


def test_the_secret_is_a_private_file(tmp_path: Path, liar: Liar) -> None:
    given = settings(tmp_path, liar.issuer)
    given.client_secret_file.chmod(0o644)
    with pytest.raises(ConsoleConfigError, match="can be read by others"):
        Provider(given, Clock(), time.time)
    assert "secret" not in urlencode({"x": str(given.issuer)})
