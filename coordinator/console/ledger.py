"""The ledger's pages: search and filter, one entry in words with its proof, and what was refused and why."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from starlette.responses import Response

from coordinator.console import entry_text
from coordinator.console.context import INFORMED, READERS, CoordinatorConsoleContext
from coordinator.console.statements import statement_view
from coordinator.explanations import KINDS, count, explain
from policies.audit.inclusion_proof import Proof, check
from policies.index.search import COUNTED, EntryPage, EntryQuery, QueryTooWideError, RuleRefusals
from policies.ledger.entries import decode, kind_of
from policies.ledger.store import LedgerUnsoundError
from protos.common.text import DATE, utc
from protos.web.router import PageError, RequestContext, Router

DAY: Final = 86_400
NEW: Final = 1_000  # entries that a page takes into the index itself
PERIODS: Final = (7, 30, 90, 365)
_LARGEST: Final = 10**15  # of an entry's number; beyond 2^63 SQLite has none
_REFUSED: Final = "refused"
_NOT_YOURS: Final = "Refusals are not shown to researchers. A run's page shows which sites are missing, and why."
_NO_ENTRY: Final = "There is no such entry, or it is not durable yet."
_NUMBER: Final = re.compile(r"#?([0-9]{1,15})")


def add(pages: Router, context: CoordinatorConsoleContext) -> None:
    """The ledger, one entry of it, and the refusals."""
    pages.menu("Ledger", "/ledger", READERS)
    pages.menu("Refusals", "/refusals", INFORMED)

    @pages.get("/ledger", READERS)
    def ledger(  # noqa: PLR0913 - a filter has that many fields
        asked: RequestContext,
        *,
        kind: str = "",
        site: str = "",
        since: str = "",
        until: str = "",
        text: str = "",
        before: int | None = None,
        after: int | None = None,
    ) -> Response:
        chosen = {"kind": kind, "site": site, "since": since, "until": until, "text": text.strip()}
        with searching():
            return asked.page("ledger.html", **listing(context, chosen, _kinds(asked, kind), before, after))

    @pages.get("/ledger/{seq}", READERS)
    def entry(asked: RequestContext, seq: int) -> Response:
        with searching():
            return asked.page("entry.html", **entry_page(context, seq, _proof(asked, context, seq)))

    @pages.get("/ledger/{seq}/proof.json", READERS)
    def proof(asked: RequestContext, seq: int) -> Response:
        return asked.download(f"entry-{seq}-proof.json", _proof(asked, context, seq).to_json(), "application/json")

    @pages.get("/ledger/{seq}/checkpoint", READERS)
    def checkpoint(asked: RequestContext, seq: int) -> Response:
        note = _proof(asked, context, seq).checkpoint.encode()
        return asked.download("ledger.checkpoint", note, "text/plain; charset=utf-8")

    @pages.get("/ledger/{seq}/statement.json", READERS)
    def statement(asked: RequestContext, seq: int) -> Response:
        digest = getattr(decode(_proof(asked, context, seq).entry).entry, "envelope", b"")
        raw = context.store.envelope(digest) if digest else None
        if raw is None:
            raise PageError(404, f"Entry {seq} rests on no signed statement that is kept here.")
        return asked.download(f"entry-{seq}-statement.json", raw, "application/json")

    @pages.get("/refusals", INFORMED)
    def refusals(asked: RequestContext, days: int = 7, site: str = "") -> Response:
        with searching():
            return asked.page("refusals.html", **refused(context, days, site))


def follow(context: CoordinatorConsoleContext) -> str:
    """Bring the index up to date; what to say when it is not."""
    try:
        level = context.index.follow(NEW)
    except (LedgerUnsoundError, OSError):
        level = False
    if level:
        return ""
    held, size = context.index.size, context.store.state.size
    return f"The search index is still being built: it has the first {held:,} of {size:,} entries.".replace(",", " ")


@contextmanager
def searching() -> Iterator[None]:
    """Report on the page that the search is unavailable; the next request rebuilds the index."""
    try:
        yield
    except LedgerUnsoundError as error:
        raise PageError(
            503, f"{str(error).capitalize()}. The ledger itself is not affected: try again soon."
        ) from None


def listing(
    context: CoordinatorConsoleContext,
    chosen: Mapping[str, str],
    kinds: Sequence[str],
    before: int | None,
    after: int | None,
) -> dict[str, Any]:
    """A page of entries, and what the filter is.

    Args:
        context: the coordinator's.
        chosen: the filter's fields.
        kinds: that may be chosen by the person who looks.
        before: entries before this number.
        after: or after this one.
    """
    behind = follow(context)
    query = _query(chosen, kinds, before, after)
    try:
        found, total = context.index.find(query), context.index.count(query)
        problem = ""
    except QueryTooWideError as error:
        found, total, problem = EntryPage((), False, False), 0, f"{error}."
    with context.store.exclusive() as state:
        rows = [entry_text.row(seq, context.store.line(seq).record, state) for seq in found.seqs]
        sites, size = sorted(state.sites), state.size
        jump = _jump(chosen["text"], size)
        if jump is not None and _REFUSED not in kinds and kind_of(context.store.line(jump).record.entry) == _REFUSED:
            jump = None  # as if there were none
    given = {name: value for name, value in chosen.items() if value}
    many = f"more than {COUNTED:,} entries".replace(",", " ")
    return {
        "rows": rows,
        "chosen": chosen,
        "filtered": bool(given),
        "kinds": [("", "everything"), *sorted(((k, KINDS[k]) for k in kinds), key=lambda pair: pair[1])],
        "sites": [("", "all"), *((name, name) for name in sites)],
        "size": size,
        "total": many if total > COUNTED else count(total, "entry", "entries"),
        "problem": problem,
        "behind": behind,
        "jump": jump,
        "newer": _link(given, after=found.seqs[0]) if found.newer and found.seqs else "",
        "older": _link(given, before=found.seqs[-1]) if found.older and found.seqs else "",
        "newest": _link(given) if before is not None or after is not None else "",
    }


def _link(given: Mapping[str, str], **place: int) -> str:
    words = urlencode({**given, **place})
    return f"/ledger?{words}" if words else "/ledger"


def _jump(text: str, size: int) -> int | None:
    """The entry that a typed number is, if there is one."""
    match = _NUMBER.fullmatch(text)
    return int(match[1]) if match and int(match[1]) < size else None


def _kinds(asked: RequestContext, kind: str) -> tuple[str, ...]:
    """The kinds of entries that a person may choose from: refusals are for those who are told of them.

    Raises:
        PageError: the person chose another kind.
    """
    if asked.person.role in INFORMED:
        return tuple(KINDS)
    if kind == _REFUSED:
        raise PageError(403, _NOT_YOURS)
    return tuple(name for name in KINDS if name != _REFUSED)


def _query(chosen: Mapping[str, str], kinds: Sequence[str], before: int | None, after: int | None) -> EntryQuery:
    """What the filter asks for.

    Raises:
        PageError: a kind that does not exist, a date that is none, or a page that lies on both sides of an entry.
    """
    kind = chosen["kind"]
    if kind and kind not in KINDS:
        raise PageError(400, "There is no such kind of entry.")
    if any(abs(number) > _LARGEST for number in (before, after) if number is not None):
        raise PageError(400, "No entry has that number.")
    until = _day(chosen["until"])
    ends = None if until is None else until + DAY
    wanted = (kind,) if kind else tuple(kinds) if len(kinds) < len(KINDS) else ()
    try:
        return EntryQuery(wanted, chosen["site"], _day(chosen["since"]), ends, chosen["text"], before, after)
    except ValueError as error:
        raise PageError(400, f"The page cannot be found: {error}.") from None


def _day(text: str) -> int | None:
    """The beginning of a day, UTC, in seconds since 1970."""
    if not text:
        return None
    try:
        return int(dt.datetime.combine(dt.date.fromisoformat(text), dt.time(), dt.UTC).timestamp())
    except ValueError:
        raise PageError(400, "A date is written as in 2026-01-31.") from None


def _proof(asked: RequestContext, context: CoordinatorConsoleContext, seq: int) -> Proof:
    """One entry with its proof, for a person.

    Raises:
        PageError: there is no such entry; for a person who is told of no refusal, one is answered in the same way.
    """
    proof = proof_of(context, seq)
    if asked.person.role not in INFORMED and kind_of(decode(proof.entry).entry) == _REFUSED:
        raise PageError(404, _NO_ENTRY)
    return proof


def proof_of(context: CoordinatorConsoleContext, seq: int) -> Proof:
    """One entry with its inclusion proof, checked here.

    Raises:
        PageError: there is no such entry.
    """
    shown = context.store.prove(0, seq) if 0 <= seq < 1 << 62 else None
    if shown is None or not shown.entry:
        raise PageError(404, _NO_ENTRY)
    return check(seq, shown.entry, shown.included, shown.checkpoint, (context.store.origin, context.store.public))


def entry_page(context: CoordinatorConsoleContext, seq: int, proof: Proof) -> dict[str, Any]:
    """One entry in words, its signed statement and its proof."""
    behind = follow(context)
    record = decode(proof.entry)
    with context.store.exclusive() as state:
        line = entry_text.row(seq, record, state)
        facts = entry_text.facts(record.entry, state)
        said = statement_view(record.entry, state, context.store, context.index)
    return {
        "line": line,
        "key": entry_text.visible_text(record.key),
        "facts": facts,
        "reasons": entry_text.reasons(record.entry),
        "said": said,
        "proof": proof,
        "size": proof.head.size if proof.head else 0,
        "behind": behind,
        "home": Path(context.home.root).name,
    }


def refused(context: CoordinatorConsoleContext, days: int, site: str) -> dict[str, Any]:
    """What was refused in the last days: how often by which rule, in words, and the newest of them."""
    if days not in PERIODS:
        raise PageError(400, f"Choose one of {', '.join(map(str, PERIODS))} days.")
    behind, now = follow(context), int(context.now().timestamp())
    since = (now // DAY - days + 1) * DAY
    counted = [r for r in context.index.refusals(since, now + DAY) if not site or r.site == site]
    newest = context.index.find(EntryQuery(("refused",), site, since, most=20))
    with context.store.exclusive() as state:
        rows = [entry_text.row(seq, context.store.line(seq).record, state) for seq in newest.seqs]
        sites = sorted(state.sites)
    first = utc(since, DATE)
    return {
        "days": days,
        "periods": [(n, f"{n} days") for n in PERIODS],
        "site": site,
        "sites": [("", "all"), *((name, name) for name in sites)],
        "rules": rules_of(counted, first),
        "rows": rows,
        "behind": behind,
        "since": first,
        "all": _link({"kind": "refused", "since": first, **({"site": site} if site else {})}),
    }


def rules_of(counted: Sequence[RuleRefusals], since: str) -> list[dict[str, Any]]:
    """Refusals by their rule, the most frequent first: why, what to do, whose, and where to read them.

    Args:
        counted: as the index counts them.
        since: the first day, as in 2026-01-31.
    """
    by_rule: dict[str, dict[str, int]] = {}
    for r in counted:
        by_rule.setdefault(r.rule, {})[r.site or entry_text.NOBODY] = r.times
    return [
        {
            "rule": entry_text.visible_text(rule),
            "why": entry_text.visible_text(explain(rule)[0]),
            "what": explain(rule)[1],
            "sites": entry_text.visible_text(", ".join(f"{site} {times}" for site, times in sorted(sites.items()))),
            "times": sum(sites.values()),
            "href": _link({"kind": "refused", "since": since, "text": f"rule={rule}"}),
        }
        for rule, sites in sorted(by_rule.items(), key=lambda pair: -sum(pair[1].values()))
    ]
