"""Logins by an OpenID provider: authorization code with PKCE, a state and a nonce for each try.

OpenID Connect Core 1.0, section 3.1; RFC 7636 (PKCE, S256); RFC 9207 (the issuer in the answer). Tokens are verified
here. The provider authenticates the person. ``console.toml`` maps a claim's value to a name of the ledger; anyone
else is refused.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import secrets
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

import httpx
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet

from protos.common.errors import PeerError
from protos.identity.key_files import KeyFileError, read_private
from protos.web.settings import ConsoleConfigError, Oidc, is_loopback

ALGORITHMS: Final = ("RS256", "PS256", "ES256", "ES384", "EdDSA", "Ed25519")  # none with a shared secret, nor none
_ANSWER_BYTES: Final = 1 << 18
_TIMEOUT_S: Final = 10.0
_TRY_S: Final = 600.0  # from the button to the way back
_TRIES: Final = 500  # under way at a time
_LEEWAY_S: Final = 60.0  # between two clocks
_OLDEST_S: Final = 600.0  # of a token, since it was issued
_KEYS_S: Final = 3_600.0


class LoginError(PeerError):
    """The provider's answer logs nobody in. The sentence is for the person, the rule for the log."""

    def __init__(self, rule: str, sentence: str) -> None:
        """``rule``: a short word."""
        super().__init__(sentence)
        self.rule, self.sentence = rule, sentence


@dataclass(frozen=True, slots=True)
class _Try:
    """A login under way: whoever comes back with its state must be the browser that left with it."""

    binding: bytes  # SHA-256 of what that browser holds
    nonce: str
    verifier: str
    to: str
    began: float


@dataclass(frozen=True, slots=True)
class _Known:
    """What the provider says of itself."""

    authorization: str
    token: str
    jwks: str
    by_post: bool  # the secret goes into the form, because the provider takes it no other way
    at: float


@dataclass(frozen=True, slots=True)
class PendingLogin:
    """A login in progress: the redirect address, and the browser's state until it returns."""

    url: str
    binding: str


class Provider:
    """One OpenID provider."""

    def __init__(self, settings: Oidc, clock: Callable[[], float], now: Callable[[], float]) -> None:
        """Read the secret; nothing is asked yet.

        Args:
            settings: of ``console.toml``.
            clock: seconds that never go back.
            now: seconds since 1970.
        Raises:
            ConsoleConfigError: the secret or the CA cannot be used.
        """
        self._settings, self._clock, self._now = settings, clock, now
        try:
            self._secret = read_private(settings.client_secret_file).decode().strip()
            self._tls = ssl.create_default_context(cafile=str(settings.ca) if settings.ca else None)
        except KeyFileError as error:
            raise ConsoleConfigError(f"oidc.client_secret_file: {error}") from None
        except (OSError, ssl.SSLError, UnicodeDecodeError):
            raise ConsoleConfigError("oidc.ca or oidc.client_secret_file cannot be used: check the files") from None
        self._lock = threading.Lock()
        self._tries: dict[str, _Try] = {}
        self._known: _Known | None = None
        self._keys: tuple[float, KeySet] | None = None

    def start(self, redirect: str, to: str) -> PendingLogin:
        """Begin a login.

        Args:
            redirect: where the provider sends the browser back to; registered there.
            to: a page of this console.
        Raises:
            LoginError: the provider does not answer.
        """
        known = self._metadata()
        state, binding, nonce, verifier = (secrets.token_urlsafe(32) for _ in range(4))
        now = self._clock()
        with self._lock:
            for old in [key for key, one in self._tries.items() if not now - one.began < _TRY_S]:
                del self._tries[old]
            if len(self._tries) >= _TRIES:
                raise LoginError("tries", "Too many logins are under way: wait a minute.")
            self._tries[state] = _Try(_digest(binding), nonce, verifier, to, now)
        challenge = base64.urlsafe_b64encode(_digest(verifier)).decode().rstrip("=")
        query = {
            "response_type": "code",
            "client_id": self._settings.client_id,
            "redirect_uri": redirect,
            "scope": "openid" if self._settings.claim == "sub" else "openid profile email",
            "state": state,
            "nonce": nonce,
            "code_challenge": challenge,
            "code_challenge_method": "S256",
        }
        return PendingLogin(
            f"{known.authorization}{'&' if '?' in known.authorization else '?'}{urlencode(query)}", binding
        )

    def finish(self, answer: Mapping[str, str], binding: str, redirect: str) -> tuple[str, str]:
        """The way back: exchange the code, check the token.

        Args:
            answer: the query that the browser brought.
            binding: what the browser held since the start.
            redirect: as given to :meth:`start`.
        Returns:
            The person's name in the ledger, and the page to go to.
        Raises:
            LoginError: for anything that is not as it must be; a state is good for one try.
        """
        with self._lock:
            tried = self._tries.pop(answer.get("state", ""), None)
        if tried is None or not self._clock() - tried.began < _TRY_S:
            raise LoginError(
                "state", "That login was not started here, has expired, or was used before: start again."
            )
        if not secrets.compare_digest(tried.binding, _digest(binding)):
            raise LoginError("binding", "That login was started in another browser: start again.")
        if answer.get("iss", self._settings.issuer) != self._settings.issuer:
            raise LoginError("issuer", "The answer is from another provider than the one that was asked.")
        if "error" in answer or not answer.get("code"):
            raise LoginError("denied", "Your institution's login refused, or was cancelled.")
        token = self._exchange(answer["code"], tried.verifier, redirect)
        return self._person(self._claims(token), tried.nonce), tried.to

    def _exchange(self, code: str, verifier: str, redirect: str) -> str:
        known = self._metadata()
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": redirect,
            "client_id": self._settings.client_id,
            "code_verifier": verifier,
        }
        basic = None if known.by_post else httpx.BasicAuth(self._settings.client_id, self._secret)
        if known.by_post:
            form["client_secret"] = self._secret
        token = self._ask("POST", known.token, data=form, auth=basic).get("id_token")
        if type(token) is not str:
            raise LoginError("token", "Your institution's login gave no token.")
        return token

    def _claims(self, token: str) -> Mapping[str, Any]:
        """The claims of a token that one of the provider's keys signed."""
        for fresh in (False, True):  # a key that is not known is looked for once more
            try:
                return jwt.decode(token, self._key_set(fresh), algorithms=list(ALGORITHMS)).claims
            except (JoseError, ValueError, TypeError):
                continue
        raise LoginError("signature", "The provider's token is not signed by its keys.")

    def _person(self, claims: Mapping[str, Any], nonce: str) -> str:
        settings, now = self._settings, self._now()
        audience = claims.get("aud")
        audiences = audience if isinstance(audience, list) else [audience]
        expires, issued = _time(claims.get("exp")), _time(claims.get("iat"))
        if claims.get("iss") != settings.issuer:
            raise LoginError("issuer", "The token is from another provider.")
        if settings.client_id not in audiences or (
            (len(audiences) > 1 or "azp" in claims) and claims.get("azp") != settings.client_id
        ):
            raise LoginError("audience", "The token was made for another program.")
        if not (now < expires + _LEEWAY_S and issued - _LEEWAY_S < now < issued + _OLDEST_S + _LEEWAY_S):
            raise LoginError("expired", "The token has expired or is not valid yet: check this machine's clock.")
        said = claims.get("nonce")
        if type(said) is not str or not secrets.compare_digest(said.encode(), nonce.encode()):
            raise LoginError("nonce", "The token belongs to another login.")
        subject = claims.get(settings.claim)
        if settings.claim == "email" and claims.get("email_verified") is not True:
            raise LoginError("unverified", "Your institution has not verified your address.")
        person = settings.persons.get(subject) if type(subject) is str else None
        if person is None:
            raise LoginError("nobody", "Your institution knows you, but this console does not: ask its operator.")
        return person

    def _metadata(self) -> _Known:
        with self._lock:
            known = self._known
        if known is not None and self._clock() - known.at < _KEYS_S:
            return known
        told = self._ask("GET", f"{self._settings.issuer.rstrip('/')}/.well-known/openid-configuration")
        ways = told.get("token_endpoint_auth_methods_supported", ["client_secret_basic"])
        urls = [told.get(f"{name}_endpoint") for name in ("authorization", "token")] + [told.get("jwks_uri")]
        if told.get("issuer") != self._settings.issuer or not all(_is_safe(url) for url in urls):
            raise LoginError(
                "provider", "The configuration of your institution's login is incomplete: ask the operator."
            )
        by_post = "client_secret_basic" not in ways and "client_secret_post" in ways
        known = _Known(str(urls[0]), str(urls[1]), str(urls[2]), by_post, self._clock())
        with self._lock:
            self._known = known
        return known

    def _key_set(self, fresh: bool) -> KeySet:
        with self._lock:
            kept = self._keys
        if kept is not None and not fresh and self._clock() - kept[0] < _KEYS_S:
            return kept[1]
        raw = self._ask("GET", self._metadata().jwks)
        try:
            keys = KeySet.import_key_set({"keys": [k for k in raw["keys"] if k.get("kty") != "oct"]})
        except (JoseError, ValueError, TypeError, KeyError, AttributeError):
            raise LoginError("provider", "The keys of your institution's login cannot be read.") from None
        with self._lock:
            self._keys = (self._clock(), keys)
        return keys

    def _ask(self, method: str, url: str, **more: Any) -> dict[str, Any]:
        """A JSON object of the provider; bounded in time and size, no redirects, no proxy of the environment."""
        body = bytearray()
        try:
            with (
                httpx.Client(verify=self._tls, trust_env=False, timeout=_TIMEOUT_S, follow_redirects=False) as client,
                client.stream(method, url, headers={"accept": "application/json"}, **more) as answer,
            ):
                for chunk in answer.iter_bytes():
                    body += chunk
                    if len(body) > _ANSWER_BYTES:
                        raise LoginError("provider", "The answer of your institution's login is too large.")
                good = answer.status_code == 200
            told = json.loads(body) if good else None
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, RecursionError):
            told = None
        if not isinstance(told, dict):
            raise LoginError("provider", "Your institution's login does not answer: try later, or ask the operator.")
        return told


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _time(value: object) -> float:
    """Seconds since 1970; of anything else not a number, which loses every comparison."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _is_safe(url: object) -> bool:
    parts = urlsplit(url) if type(url) is str else None
    if parts is None or not parts.hostname or parts.username:
        return False
    return parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname))
