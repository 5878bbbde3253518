"""The file of each applying site: its invitation, and the signed requests received under it.

No secret is kept: of an invitation only the hash of the key that its token leads to. Beside it, and never forgotten:
which public key each certificate was issued for.
"""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from coordinator.errors import CoordinatorConfigError
from protos.identity.certificates import SITE_NAME
from protos.identity.key_files import read_private, replace_private

INVITATION_LIFE: Final = dt.timedelta(minutes=30)
WAITING_LIFE: Final = dt.timedelta(days=7)


@dataclass(frozen=True, slots=True)
class SignedRequest:
    """A site's sealed request to take part."""

    envelope: bytes
    key: str  # SHA-256 of the public key (DER) that it asks a certificate for
    received: int  # seconds since 1970
    state: str = "waiting"  # waiting | declined; whether it is enrolled is the ledger's to say
    reason: str = ""
    certificate: str = ""  # the chain that was issued last, PEM

    @property
    def digest(self) -> str:
        """SHA-256 of the envelope, hexadecimal: what persons approve."""
        return hashlib.sha256(self.envelope).hexdigest()

    @property
    def ends(self) -> dt.datetime:
        """Until when it may wait, and be asked for, UTC."""
        return dt.datetime.fromtimestamp(self.received, dt.UTC) + WAITING_LIFE

    def declined(self, reason: str) -> SignedRequest:
        """It will not be approved; one that was declined keeps its first reason."""
        return self if self.state == "declined" else replace(self, state="declined", reason=reason)


@dataclass(frozen=True, slots=True)
class EnrolmentRecord:
    """Everything about one site that is not in the ledger."""

    site: str
    until: int  # the invitation's end, seconds since 1970
    key: str  # SHA-256 of the public key (DER) that its token leads to
    bound: str = ""  # digest of the one request that it was used for
    asked: SignedRequest | None = None  # the newest request
    earlier: tuple[SignedRequest, ...] = ()  # those that it replaced
    contested: bool = False  # the token came with another request too

    def exchanged(self, old: SignedRequest, new: SignedRequest) -> EnrolmentRecord:
        """The same with another version of one of the requests."""
        asked = new if self.asked is old else self.asked
        return replace(self, asked=asked, earlier=tuple(new if a is old else a for a in self.earlier))


class Enrolments:
    """A folder with a private file for each site; the caller must ensure one access at a time."""

    def __init__(self, folder: Path) -> None:
        """Make the folder, if there is none."""
        folder.mkdir(mode=0o700, exist_ok=True)
        self._folder = folder

    def read(self, site: str) -> EnrolmentRecord | None:
        """What is known of a site.

        Raises:
            CoordinatorConfigError: its file was changed by hand.
            KeyFileError: its file is open to others.
        """
        path = self._path(site)
        if not path.exists():
            return None
        body = read_private(path)
        try:
            record = _record(json.loads(body))
        except (ValueError, KeyError, TypeError):
            raise CoordinatorConfigError(
                f"enrolments/{path.name} cannot be read: remove it, and invite the site again"
            ) from None
        if record.site != site:
            raise CoordinatorConfigError(
                f"enrolments/{path.name} is another site's: remove it, and invite the site again"
            )
        return record

    def write(self, record: EnrolmentRecord) -> None:
        """Keep it; durable when this returns."""
        replace_private(self._path(record.site), json.dumps(_json(record), sort_keys=True, indent=1).encode())

    def remove(self, site: str) -> None:
        """Forget it."""
        self._path(site).unlink(missing_ok=True)

    def keys(self, site: str) -> dict[str, str]:
        """The number of each certificate that was issued to the site -> SHA-256 of its public key (DER).

        Raises:
            CoordinatorConfigError: the file was changed by hand.
            KeyFileError: it is open to others.
        """
        path = self._path(site).with_suffix(".keys")
        if not path.exists():
            return {}
        body = read_private(path)
        try:
            known = json.loads(body)
        except ValueError:
            known = None
        if not isinstance(known, dict) or not all(isinstance(key, str) for key in known.values()):
            raise CoordinatorConfigError(f"enrolments/{path.name} cannot be read: restore it from a backup")
        return known

    def remember(self, site: str, number: str, key: str) -> None:
        """Which key a certificate is for; durable when this returns."""
        known = self.keys(site) | {number: key}
        replace_private(self._path(site).with_suffix(".keys"), json.dumps(known, indent=0).encode())

    def all(self) -> list[EnrolmentRecord]:
        """Every site's, by name."""
        sites = sorted(path.stem for path in self._folder.glob("*.json"))
        return [record for site in sites if (record := self.read(site)) is not None]

    def _path(self, site: str) -> Path:
        if not SITE_NAME.fullmatch(site):
            raise ValueError("not a site's name")
        return self._folder / f"{site}.json"


def _json(record: EnrolmentRecord) -> dict[str, Any]:
    out = asdict(record)
    out["asked"] = _asked_json(record.asked) if record.asked else None
    out["earlier"] = [_asked_json(a) for a in record.earlier]
    return out


def _asked_json(asked: SignedRequest) -> dict[str, Any]:
    return {**asdict(asked), "envelope": base64.b64encode(asked.envelope).decode()}


def _record(document: Any) -> EnrolmentRecord:
    asked, earlier = document.pop("asked"), document.pop("earlier")
    return EnrolmentRecord(**document, asked=_asked(asked) if asked else None, earlier=tuple(map(_asked, earlier)))


def _asked(document: Any) -> SignedRequest:
    return SignedRequest(**{**document, "envelope": base64.b64decode(document["envelope"], validate=True)})
