"""The site's settings of an archive (PACS): its address, schedule and rate, and the query."""

from __future__ import annotations

import datetime as dt
import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from agent.pacs.schedule import Hours
from agent.pacs.tls import AE_TITLE, CIPHERS, Tls
from protos.common.errors import UnreachableError

_CODE: Final = re.compile(r"[A-Z0-9_ ]{1,16}")  # PS3.5 section 6.2, CS
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}")


class ArchiveError(UnreachableError, RuntimeError):
    """An archive cannot be used: a sentence for the operator, without anything of a patient or of what was sent."""

    def __init__(self, sentence: str, *, passing: bool = False) -> None:
        """``passing``: it may go by itself (no answer, too busy), so it is worth another attempt."""
        super().__init__(sentence)
        self.passing = passing


class ArchiveUnreachableError(ArchiveError):
    """There is no association at all, or not this service: no study will fare better than another."""


class ArchiveQueryError(ArchiveError):
    """The archive answered with a failure: of this question, not of the next one on the same association."""


@dataclass(frozen=True, slots=True)
class ArchiveQuery:
    """What to ask for. Everything given must hold; of patients and accession numbers, one of either list."""

    modalities: tuple[str, ...] = ()  # of the series; none: all
    since: dt.date | None = None  # study date, inclusive
    until: dt.date | None = None  # study date, inclusive
    body_part: str = ""  # of the series, PS3.16 annex L; a series that does not say it is left out then
    patients: tuple[str, ...] = field(default=(), repr=False)  # patient ids; none: all
    accessions: tuple[str, ...] = field(default=(), repr=False)  # accession numbers; none: all

    def __post_init__(self) -> None:
        """Code strings, dates in order, and lists without wildcards: one would match other patients too."""
        codes = (*self.modalities, *((self.body_part,) if self.body_part else ()))
        if not all(_CODE.fullmatch(code) for code in codes):
            raise ValueError("query: modalities and body_part are upper-case codes such as MR, HEAD")
        if self.since is not None and self.until is not None and not self.since <= self.until:
            raise ValueError("query: since is after until")
        for values, length in ((self.patients, 64), (self.accessions, 16)):
            if not all(0 < len(v) <= length and v.isprintable() and not set(v) & set("*?\\") for v in values):
                raise ValueError("query: patients and accessions are complete values, without * ? \\")

    @property
    def dates(self) -> str:
        """As a range of PS3.4 section C.2.2.2.5; "" for any date."""
        ends = [day.strftime("%Y%m%d") if day else "" for day in (self.since, self.until)]
        return "-".join(ends) if any(ends) else ""

    def in_range(self, day: str) -> bool:
        """Does a study date (DA) lie between? One that is missing or no date lies nowhere."""
        if self.since is None and self.until is None:
            return True
        if not re.fullmatch(r"[0-9]{8}", day):
            return False
        first, last = (
            end.strftime("%Y%m%d") if end else default
            for end, default in ((self.since, "00000000"), (self.until, "99999999"))
        )
        return first <= day <= last


@dataclass(frozen=True, slots=True)
class ArchiveConfig:
    """An archive, and how gently it is asked. The defaults suit one that also serves the wards."""

    name: str  # of its table in ingest.toml; the only thing about it that is logged
    aet: str  # AE title of the archive
    host: str  # name or address of the archive
    port: int  # of the archive
    calling: str  # our own title, which the archive must know
    mode: Literal["get", "move"] = "get"  # C-GET, or C-MOVE to our own listener
    destination: str = ""  # of C-MOVE: our listener's title; "": the calling one
    query: ArchiveQuery = field(default_factory=ArchiveQuery)  # what is asked for; the command line only narrows it
    tls: Tls | None = None  # None: unprotected TCP, for a network which is protected otherwise
    user: str = ""  # user identity (PS3.7 annex D.3.3.7); needs tls
    passcode_file: Path | None = None  # 0600; of the user
    hours: str = ""  # local time in which it may be asked, "22:00-06:00"; "": always
    outside_hours: Literal["wait", "stop"] = "wait"  # wait for the hours, or stop
    associations: int = 1  # at once, at most
    per_minute: int = 0  # instances, at most; 0: as fast as it sends
    retries: int = 3  # of the same study without a single new instance
    runs: int = 10  # that end without all of a study, before only a change of it has it asked for again
    max_bytes: int = 256 * 2**20  # of one instance
    max_matches: int = 100_000  # of one C-FIND
    least_free_bytes: int = 2 * 2**30  # on the room's disk, below which nothing is fetched
    connect_seconds: float = 15.0  # to connect
    answer_seconds: float = 120.0  # for the next sign of life
    stall_seconds: float = 1800.0  # for one C-FIND; for the next instance of a retrieval, though it answers
    arrive_seconds: float = 120.0  # C-MOVE: for the last instance to come in after the archive said it was sent

    def __post_init__(self) -> None:
        """Everything in range."""
        if not NAME.fullmatch(self.name):
            raise ValueError("pacs: a name has 1 to 32 letters, digits, _ . -")
        titles = (self.aet, self.calling, self.destination or self.calling)
        if not all(AE_TITLE.fullmatch(title) for title in titles):
            raise ValueError(f"pacs {self.name}: an AE title has 1 to 16 printable characters, no backslash")
        if not (self.host and 0 < self.port < 65536):
            raise ValueError(f"pacs {self.name}: give host and port")
        if (self.user != "") is not (self.passcode_file is not None) or (self.user and self.tls is None):
            raise ValueError(f"pacs {self.name}: user, passcode_file and tls belong together")
        if self.hours:
            Hours.parse(self.hours)
        self._check_numbers()

    def _check_numbers(self) -> None:
        counts = (self.associations, self.retries, self.runs, self.max_bytes, self.max_matches)
        times = (self.connect_seconds, self.answer_seconds, self.stall_seconds, self.arrive_seconds)
        if not (min(counts) > 0 and self.associations <= 16 and self.retries <= 20 and self.least_free_bytes >= 0):
            raise ValueError(f"pacs {self.name}: a count or size is out of range")
        if not (self.per_minute == 0 or 6 <= self.per_minute <= 1_000_000):
            raise ValueError(f"pacs {self.name}: per_minute must be 0 (no limit) or at least 6")
        if not all(0 < t <= 86400 for t in times):
            raise ValueError(f"pacs {self.name}: a time is out of range")

    def client_context(self) -> ssl.SSLContext | None:
        """TLS as PS3.15 annex B.12 wants it (BCP 195), its name checked against ``host``; None without ``tls``.

        Raises:
            ArchiveError: a file is missing or no PEM.
        """
        if self.tls is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(CIPHERS)
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        try:
            context.load_verify_locations(self.tls.authorities)
            context.load_cert_chain(self.tls.certificate, self.tls.key)
        except OSError:
            raise ArchiveError(f"{self.name}: a file of tls cannot be read or is not PEM.") from None
        return context

    def passcode(self) -> bytes:
        """What the passcode file holds, without the end of its line.

        Raises:
            ArchiveError: it cannot be read.
        """
        if self.passcode_file is None:
            return b""
        try:
            return self.passcode_file.read_bytes().rstrip(b"\r\n")
        except OSError:
            raise ArchiveError(f"{self.name}: passcode_file cannot be read.") from None
