"""Who is logged in: sessions in memory, a new id at every login, bound to the certificate they began with.

A restart ends all of them. The browser holds 256 random bits; here lies only their hash, so that a memory dump or a
log logs nobody in.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

COOKIE: Final = "__Host-lazaret"
MOST: Final = 1_000  # sessions at a time
MOST_EACH: Final = 8  # of one person; the oldest ends


@dataclass(slots=True, eq=False)
class LoginSession:
    """One login. ``flash`` is said once, on the next page."""

    person: str
    certificate: bytes  # SHA-256 of the certificate that was shown; b"" for a login by OpenID
    began: float  # seconds of the clock given to :class:`LoginSessions`
    used: float
    csrf: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    flash: str = ""


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def fingerprint(der: bytes) -> bytes:
    """SHA-256 of a certificate, DER; b"" of none."""
    return hashlib.sha256(der).digest() if der else b""


class LoginSessions:
    """All logins of this process."""

    def __init__(self, idle_s: float, life_s: float, clock: Callable[[], float]) -> None:
        """``clock``: seconds that never go back."""
        self._idle, self._life, self._clock = idle_s, life_s, clock
        self._lock = threading.Lock()
        self._all: dict[bytes, LoginSession] = {}

    def begin(self, person: str, certificate: bytes) -> str:
        """Log somebody in, under an id that nobody knew before.

        Returns:
            What the cookie holds.
        """
        now, token = self._clock(), secrets.token_urlsafe(32)
        with self._lock:
            self._sweep(now)
            theirs = [key for key, session in self._all.items() if session.person == person]
            for key in (
                *theirs[: max(0, len(theirs) - MOST_EACH + 1)],
                *list(self._all)[: len(self._all) - MOST + 1],
            ):
                self._all.pop(key, None)
            self._all[_digest(token)] = LoginSession(person, fingerprint(certificate), now, now)
        return token

    def find(self, token: str, certificate: bytes, *, touch: bool) -> LoginSession | None:
        """The session of a cookie, if it still runs and is shown with the certificate that it began with.

        Args:
            token: what the cookie holds.
            certificate: what the connection shows, DER; b"" for none.
            touch: whether a person acts here; a page that looks again by itself keeps nobody logged in.
        """
        now = self._clock()
        with self._lock:
            self._sweep(now)
            session = self._all.get(_digest(token))
            if session is None or (session.certificate and session.certificate != fingerprint(certificate)):
                return None
            if touch:
                session.used = now
            return session

    def end(self, token: str) -> None:
        """Log out; harmless when nobody is in."""
        with self._lock:
            self._all.pop(_digest(token), None)

    def said(self, session: LoginSession) -> str:
        """What is to be said once; afterwards it is not there any more."""
        with self._lock:
            words, session.flash = session.flash, ""
        return words

    def _sweep(self, now: float) -> None:
        over = [
            key
            for key, session in self._all.items()
            if not (now - session.used < self._idle and now - session.began < self._life)
        ]
        for key in over:
            del self._all[key]
