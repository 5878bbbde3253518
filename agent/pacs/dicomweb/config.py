"""A DICOMweb archive as the site describes it, and what may go wrong with it, as sentences."""

from __future__ import annotations

import contextlib
import datetime as dt
import http.client
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import requests
import urllib3

from agent.pacs.archive import ArchiveQuery
from agent.pacs.schedule import Hours
from agent.pacs.secret_files import is_loopback
from protos.common.errors import UnreachableError

FAULTY: Final = 500  # it fails at this question, perhaps for one lost file, and not at the next
_STATUS: Final = {
    400: "does not understand the request: is its url that of a DICOMweb service?",
    401: "does not accept the user, password, token or certificate",
    403: "does not allow this user to do that: ask for the right to query and retrieve",
    404: "has no DICOMweb service at this url",
    406: "cannot send instances as they are stored (Accept: application/dicom; transfer-syntax=*)",
}
_AGAIN: Final = frozenset({408, 425, 429, 500, 502, 503, 504})


class DicomWebError(UnreachableError, RuntimeError):
    """An archive cannot be used. The text is for the operator: no UID, no path of a URL, nothing of a patient."""

    def __init__(self, text: str, *, retry: bool = False, status: int = 0) -> None:
        """``retry``: another attempt may succeed. ``status``: of the answer, 0 when there was none."""
        super().__init__(text)
        self.retry, self.status = retry, status


@dataclass(frozen=True, slots=True)
class DicomWebArchive:
    """One DICOMweb archive."""

    name: str  # what the site calls it; it is the source of what comes from it
    url: str  # of the service's root, https unless the host is this machine
    user: str = ""  # for a password
    password_file: Path | None = None  # 0600
    token_file: Path | None = None  # 0600, a bearer token
    certificate: Path | None = None  # of this client, PEM
    key: Path | None = None  # of the certificate, PEM
    ca: Path | None = None  # who signs the archive's certificate; None: whom the system trusts
    unsafe_plain_http: bool = False  # identified images and the password cross the network in clear
    query: ArchiveQuery = field(default_factory=ArchiveQuery)  # what is asked for; the command line only narrows it
    hours: str = ""  # local time in which it may be asked, "22:00-06:00"; "": always
    connections: int = 2  # retrievals at a time
    per_minute: int = 0  # instances, at most; 0: as fast as it sends
    retries: int = 6  # attempts after the first one, counted from the last instance that came
    max_bytes: int = 512 * 2**20  # of one instance
    most_studies: int = 10_000  # more matches are an error: the query is too wide
    least_free_bytes: int = 10 * 2**30  # on the disk of the spool
    connect_s: float = 10.0  # to connect
    read_s: float = 60.0  # without a byte
    whole_s: float = 7200.0  # one answer

    def __post_init__(self) -> None:
        """Check everything that can be checked without the network."""
        where = urlsplit(self.url)
        if where.scheme not in ("https", "http") or not where.hostname or where.query or where.fragment:
            raise ValueError("url must be http(s)://HOST[:PORT][/PATH]")
        if where.username is not None or where.password is not None:
            raise ValueError("url must hold no user and no password: use user and password_file")
        if where.scheme == "http" and not (is_loopback(where.hostname) or self.unsafe_plain_http):
            raise ValueError("url must be https: images and passwords would cross the network in clear")
        if bool(self.user) != (self.password_file is not None) or (self.user and self.token_file is not None):
            raise ValueError("user and password_file belong together, and exclude token_file")
        if (self.key is not None) > (self.certificate is not None) or not self.name:
            raise ValueError("a key needs its certificate, and an archive its name")
        if self.hours:
            Hours.parse(self.hours)
        counts = (self.connections, self.max_bytes, self.most_studies)
        times = (self.connect_s, self.read_s, self.whole_s)
        if not (all(n > 0 for n in (*counts, *times)) and min(self.retries, self.per_minute) >= 0):
            raise ValueError("counts and times must be positive; retries and per_minute not negative")

    def may_ask(self, when: dt.datetime) -> bool:
        """Is this, in local time, within its hours?"""
        return not self.hours or Hours.parse(self.hours).hold(when)


@contextlib.contextmanager
def faults(web: DicomWebArchive) -> Iterator[None]:
    """Whatever goes wrong on the way, as a ``DicomWebError`` that quotes nothing."""
    try:
        yield
    except (requests.exceptions.SSLError, urllib3.exceptions.SSLError):
        raise DicomWebError(f"{web.name}: TLS failed: check ca, certificate and the host's name") from None
    except (requests.exceptions.Timeout, urllib3.exceptions.TimeoutError, TimeoutError):
        raise DicomWebError(f"{web.name} does not answer in time", retry=True) from None
    except requests.exceptions.HTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        raise refused(web, status) from None
    except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError, http.client.HTTPException, OSError):
        raise DicomWebError(f"{web.name} cannot be reached, or closed the connection", retry=True) from None


def refused(web: DicomWebArchive, status: int) -> DicomWebError:
    """An answer of this HTTP status, which is none of success."""
    if 300 <= status < 400:
        return DicomWebError(f"{web.name} redirects to another address: put that address into url", status=status)
    if status in _AGAIN:
        return DicomWebError(f"{web.name} reports an internal error (HTTP {status})", retry=True, status=status)
    said = _STATUS.get(status, "refused")
    return DicomWebError(f"{web.name} {said} (HTTP {status})", status=status)
