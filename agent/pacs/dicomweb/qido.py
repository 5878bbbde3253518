"""Search an archive over DICOMweb: QIDO-RS (PS3.18 section 10.6), and the connection for it.

Queries go through ``dicomweb-client``; what it leaves open is closed here: the size of an answer, redirects, other
hosts, proxies and netrc of the environment, its own retries, and its log, which names UIDs. Retrieval is ``wado``'s.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

import requests
import urllib3
from dicomweb_client.web import DICOMwebClient
from requests.adapters import HTTPAdapter
from requests.auth import HTTPBasicAuth

from agent.pacs.archive import ArchiveQuery
from agent.pacs.dicomweb.config import FAULTY, DicomWebArchive, DicomWebError, faults, refused
from agent.pacs.instance_header import is_uid
from agent.pacs.secret_files import SecretFileError, read_secret

_PAGE: Final = 500  # matches asked for at a time
_MOST_ANSWER: Final = 64 * 2**20  # bytes of one QIDO answer
_MOST_INSTANCES: Final = 100_000  # of one series
_MOST_QUERIES: Final = 10_000  # patients x accession numbers x modalities
_PIECE: Final = 2**20
_MOST_LOST: Final = 50  # matches in a row that it fails at, until its listing is given up


@dataclass(frozen=True, slots=True)
class QidoSeries:
    """One series that matches, with its instances as the archive lists them."""

    study: str = field(repr=False)
    series: str = field(repr=False)
    instances: tuple[str, ...] = field(repr=False)
    announced: int  # instances that the archive counts; fewer listed are missing
    unlisted: int = 0  # of them, those it fails to list

    @property
    def path(self) -> str:
        """Below the service's root (PS3.18 section 10.4.1)."""
        return f"/studies/{self.study}/series/{self.series}"


@contextlib.contextmanager
def _dicom_json(web: DicomWebArchive) -> Iterator[None]:
    """Whatever is wrong with an answer to a query."""
    try:
        yield
    except requests.exceptions.HTTPError:
        raise  # of the status, not of the body
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, requests.exceptions.RequestException | urllib3.exceptions.HTTPError) and not isinstance(
            error, requests.exceptions.JSONDecodeError
        ):
            raise
        raise DicomWebError(f"{web.name}: the answer is not DICOMweb; check its url") from None


class _Bearer(requests.auth.AuthBase):  # type: ignore[misc,unused-ignore]
    def __init__(self, token: str) -> None:
        self._token = token

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {self._token}"
        return request


class ArchiveSession(requests.Session):  # type: ignore[misc,unused-ignore]
    """A connection to one archive and nowhere else, with its credentials. Not for two threads."""

    def __init__(self, web: DicomWebArchive) -> None:
        """Read the credentials.

        Raises:
            DicomWebError: a file of them cannot be used.
        """
        super().__init__()
        for name in ("dicomweb_client", "urllib3"):  # they log URLs, which hold UIDs and patients' ids
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
        self._web, self._root = web, _origin(web.url)
        self.trust_env = False  # no proxy, netrc or CA bundle from the environment
        self.headers.update({"Accept-Encoding": "identity", "User-Agent": "lazaret"})
        for scheme in ("http://", "https://"):
            self.mount(scheme, HTTPAdapter(pool_connections=1, pool_maxsize=1, max_retries=0))
        for path in (web.ca, web.certificate, web.key):
            if path is not None and not path.is_file():
                raise DicomWebError(f"{web.name}: a certificate's file is missing")
        self.verify = str(web.ca) if web.ca else True
        if web.certificate is not None:
            self.cert = (str(web.certificate), str(web.key)) if web.key else str(web.certificate)
        try:
            if web.password_file is not None:
                secret = read_secret(web.password_file, f"{web.name}: password_file")
                self.auth = HTTPBasicAuth(web.user.encode(), secret.encode())
            elif web.token_file is not None:
                self.auth = _Bearer(read_secret(web.token_file, f"{web.name}: token_file"))
        except SecretFileError as fault:
            raise DicomWebError(str(fault)) from None

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        """Send to this archive only, follow nothing, unpack nothing, and bound what is not read as a stream."""
        if _origin(request.url or "") != self._root:
            raise DicomWebError(f"{self._web.name}: a request would leave the archive")
        request.headers.pop("Host", None)  # dicomweb-client leaves out the port
        streamed = bool(options.get("stream"))
        limits = {"stream": True, "allow_redirects": False, "timeout": (self._web.connect_s, self._web.read_s)}
        response: requests.Response = super().send(request, **{**options, **limits})
        try:
            if not 200 <= response.status_code < 300:
                raise refused(self._web, response.status_code)
            if response.headers.get("Content-Encoding", "identity").strip().lower() != "identity":
                raise DicomWebError(f"{self._web.name} compresses its answers, although the request forbids it")
            if not streamed:
                response.raw = io.BytesIO(self._bounded(response))
        except BaseException:
            response.close()
            raise
        return response

    def _bounded(self, response: requests.Response) -> bytes:
        body = bytearray()
        for piece in pieces(self._web, response, time.monotonic):
            body += piece
            if len(body) > _MOST_ANSWER:
                raise DicomWebError(f"{self._web.name} answers a query with more than {_MOST_ANSWER >> 20} MiB")
        return bytes(body)


def _origin(url: str) -> tuple[str, str | None, int | None]:
    where = urlsplit(url)
    usual = {"http": 80, "https": 443}.get(where.scheme)
    return where.scheme, where.hostname, where.port or usual


def pieces(web: DicomWebArchive, response: requests.Response, clock: Callable[[], float]) -> Iterator[bytes]:
    """A body as it comes, at most 1 MiB at a time, never unpacked.

    Raises:
        DicomWebError: it takes longer than ``whole_s``.
    """
    begun = clock()
    # http.client's own reader bounds the lines of a chunked body; urllib3's stream() does not.
    while piece := response.raw.read1(_PIECE, decode_content=False):
        yield piece
        if not clock() - begun <= web.whole_s:
            raise DicomWebError(f"{web.name} takes longer than {web.whole_s:.0f} s for one answer", retry=True)


class QidoClient:
    """Asks one archive what it has."""

    def __init__(self, web: DicomWebArchive, session: ArchiveSession, rest: Callable[[int], None]) -> None:
        """``session`` is this thread's; ``rest`` waits after that many failures of one question."""
        self._web, self._rest = web, rest
        self._client = DICOMwebClient(web.url.rstrip("/"), session=session, timeout=(web.connect_s, web.read_s))
        self._client.set_http_retry_params(retry=False)

    def reach(self) -> None:
        """Ask for one study, whichever. Raises: DicomWebError, when the archive cannot be asked."""
        with faults(self._web), _dicom_json(self._web):
            self._client.search_for_studies(limit=1)

    def series(self, query: ArchiveQuery) -> Iterator[QidoSeries]:
        """Every series that matches, study by study.

        What the archive sends is checked against the query again: one that ignores a filter would send everybody.

        Raises:
            DicomWebError: the archive cannot be asked, answers no DICOMweb, or more studies match than may.
        """
        for study in self._studies(query):
            yield from self.of_study(study, query)

    def of_study(self, study: str, query: ArchiveQuery) -> Iterator[QidoSeries]:
        """The series of one study that have the query's modality and part of the body. Raises as ``series`` does."""
        fields = ["BodyPartExamined"] if query.body_part else None
        search = partial(self._client.search_for_series, study, fields=fields)
        matches, lost = self._listed(search, "0020000E")
        if lost:
            yield QidoSeries(study, "", (), lost, lost)
        for uid, entry in matches.items():
            with _dicom_json(self._web):
                modality, part, counted = (_value(entry, tag) for tag in ("00080060", "00180015", "00201209"))
            if query.modalities and modality not in query.modalities:
                continue
            if query.body_part and part != query.body_part:
                continue
            announced = int(counted) if counted.isdecimal() and len(counted) < 10 else 0
            listed, lost = self._listed(partial(self._client.search_for_instances, study, uid), "00080018", announced)
            yield QidoSeries(study, uid, tuple(listed), max(announced, len(listed) + lost), lost)

    def _studies(self, query: ArchiveQuery) -> list[str]:
        found: dict[str, None] = {}
        options = (query.patients or ("",), query.accessions or ("",), query.modalities or ("",))
        if math.prod(map(len, options)) > _MOST_QUERIES:
            raise DicomWebError(
                f"{self._web.name}: too many combinations of patients, accession numbers and modalities"
            )
        for patient, accession, modality in itertools.product(*options):
            filters = {
                "PatientID": patient,
                "AccessionNumber": accession,
                "ModalitiesInStudy": modality,
                "StudyDate": query.dates,
            }
            asked = {key: value for key, value in filters.items() if value}
            search = partial(self._client.search_for_studies, search_filters=asked)
            matches = self._all(search, "0020000D", self._web.most_studies)
            with _dicom_json(self._web):
                found |= dict.fromkeys(uid for uid, entry in matches.items() if _matches(entry, query))
            if len(found) > self._web.most_studies:
                raise DicomWebError(_too_many(self._web))
        return list(found)

    def _all(
        self, search: Callable[..., list[dict[str, Any]]], key: str, most: int, enough: int = 0
    ) -> dict[str, dict[str, Any]]:
        """Page after page, until there are ``enough`` (0: not known), or one brings nothing new; by UID."""
        found: dict[str, dict[str, Any]] = {}
        offset = 0
        while True:
            entries, length = self._entries(self._page(partial(search, limit=_PAGE, offset=offset)), key)
            before = len(found)
            found |= entries
            if len(found) > most:
                raise DicomWebError(_too_many(self._web))
            if len(found) == before or len(found) == enough:
                return found
            offset += length

    def _entries(self, page: list[dict[str, Any]], key: str) -> tuple[dict[str, dict[str, Any]], int]:
        with _dicom_json(self._web):
            entries = {_value(entry, key): entry for entry in page}
        if not all(is_uid(uid) for uid in entries):
            raise DicomWebError(f"{self._web.name}: a match has no valid UID: report this to its vendor")
        return entries, len(page)

    def _listed(
        self, search: Callable[..., list[dict[str, Any]]], key: str, enough: int = 0
    ) -> tuple[dict[str, dict[str, Any]], int]:
        """As ``_all``, around matches at which the archive fails; by UID, and how many those are."""
        try:
            return self._all(search, key, _MOST_INSTANCES, enough), 0
        except DicomWebError as fault:
            if fault.status != FAULTY:
                raise
        found: dict[str, dict[str, Any]] = {}
        offset = lost = 0
        while True:
            entries, failed = self._around(search, key, offset)
            if not entries.keys() - found.keys() and not failed:
                return found, lost
            found |= entries
            lost, offset = lost + failed, offset + _PAGE
            if len(found) + lost > _MOST_INSTANCES:
                raise DicomWebError(_too_many(self._web))

    def _around(
        self, search: Callable[..., list[dict[str, Any]]], key: str, start: int
    ) -> tuple[dict[str, dict[str, Any]], int]:
        """One page, by halves where the archive fails, down to single matches; and at how many it fails."""
        found: dict[str, dict[str, Any]] = {}
        lost = in_a_row = 0
        spans = [(start, _PAGE)]
        while spans:
            offset, size = spans.pop()
            try:
                asked = partial(search, limit=size, offset=offset)
                entries, length = self._entries(self._page(asked, tries=0), key)
            except DicomWebError as fault:
                if fault.status != FAULTY or in_a_row >= _MOST_LOST:
                    raise
                half = size // 2
                spans += [(offset + half, size - half), (offset, half)] if half else []
                lost, in_a_row = (lost, in_a_row) if half else (lost + 1, in_a_row + 1)
                continue
            in_a_row = 0
            found |= entries
            if 0 < length < size:  # the end, or no more at a time
                spans.append((offset + length, size - length))
        return found, lost

    def _page(self, search: Callable[[], list[dict[str, Any]]], tries: int = 2) -> list[dict[str, Any]]:
        """One question, again when it may have been too early; ``tries``: at most so often after a fault of 500."""
        failures = 0
        while True:
            try:
                with faults(self._web), _dicom_json(self._web):
                    return search()
            except DicomWebError as fault:
                failures += 1
                most = min(tries, self._web.retries) if fault.status == FAULTY else self._web.retries
                if not fault.retry or failures > most:
                    raise
            self._rest(failures)


def _too_many(web: DicomWebArchive) -> str:
    return f"{web.name}: more matches than most_studies allows ({web.most_studies}); narrow the query"


def _matches(entry: dict[str, Any], query: ArchiveQuery) -> bool:
    return (
        (not query.patients or _value(entry, "00100020") in query.patients)
        and (not query.accessions or _value(entry, "00080050") in query.accessions)
        and query.in_range(_value(entry, "00080020"))
    )


def _value(entry: dict[str, Any], tag: str) -> str:
    """The first value of an attribute in the DICOM JSON Model (PS3.18 annex F), "" when there is none."""
    if not isinstance(entry, dict) or not isinstance(entry.get(tag, {}), dict):
        raise TypeError("not the DICOM JSON Model")
    values = entry.get(tag, {}).get("Value") or [""]
    return str(values[0]).strip()
