"""The first page, the site's own budget, and its own ledger with every entry's proof."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from dataclasses import fields
from itertools import islice
from typing import Any, Final
from urllib.parse import urlencode

from starlette.responses import Response

from agent.console import descriptions, log_reader
from agent.console.context import KEEPERS, LOOKERS, READERS, SiteConsoleContext
from agent.console.errors import errors_as_pages
from agent.console.quarantine import queue_of
from agent.errors import SiteConfigError
from agent.gateway.credentials import Credentials
from agent.service.jobs import PROPOSED, JobStore
from policies.accounting.rdp import epsilon_of
from policies.accounting.rounding import epsilon_text, rounded_up
from policies.audit.inclusion_proof import check
from policies.index.search import EntryQuery, Index, QueryTooWideError
from policies.ledger.backends.sqlite import export_file
from policies.ledger.entries import Entry, kind_of
from policies.ledger.state import Account, State
from protos.identity.key_files import KeyFileError
from protos.web.charts import Bar, BarPart, ChartFrame, StepCurve, bars, steps
from protos.web.client_certificates import PinnedCertificates
from protos.web.login_cli import FOLDER
from protos.web.router import PageError, RequestContext, Router

PAGE: Final = 50
GRANTS: Final = 100  # that the budget's page shows
NEW: Final = 1_000  # entries that a page takes into the index itself
_LEGEND: Final = (("spent", "spent"), ("held", "held for releases under way"), ("left", "left"))
_YEAR_S: Final = 365 * 86_400
_DAY_S: Final = 86_400


def add(pages: Router, context: SiteConsoleContext) -> None:
    """Overview, budget and ledger."""
    pages.menu("Overview", "/", READERS)
    _overview(pages, context)


def add_books(pages: Router, context: SiteConsoleContext) -> None:
    """Budget, ledger and people, which stand further back in the menu."""
    pages.menu("Budget", "/budget", READERS)
    _budget(pages, context)
    pages.menu("Ledger", "/ledger", READERS)
    _ledger(pages, context)
    pages.menu("People", "/people", READERS)
    _people(pages, context)


def _overview(pages: Router, context: SiteConsoleContext) -> None:
    @pages.get("/", READERS)
    def overview(asked: RequestContext) -> Response:
        looks = asked.person.role in LOOKERS
        with errors_as_pages():
            state = context.ledger.read().state
            waiting = context.waiting() if looks else ()
            queues = tuple(queue_of(context, name) for name in context.projects()) if looks else ()
            plans = sum(view.open for view in context.plans()) if looks else 0
            proposed = sum(job.state == PROPOSED for job in JobStore(context.home.root).all()) if looks else 0
        events = log_reader.read(context.home.root / "agent.log") if looks else []
        return asked.page(
            "overview.html",
            site=context.site,
            chart=chart(state, context.site),
            waiting=waiting,
            proposed=proposed,
            plans=plans,
            queues=queues,
            faults=[e for e in reversed(events) if e.fault][:5],
            looks=looks,
            keeps=asked.person.role in KEEPERS,
            certificate=certificate(context),
            frozen=state.frozen(context.site),
        )


def certificate(context: SiteConsoleContext) -> tuple[str, str]:
    """How long the site's certificate at the coordinator is good for: words, and the badge's kind."""
    now = context.now()
    try:
        held = Credentials(context.home.keys)
        left, late = held.not_after - now, held.due(now, 0.1)
    except (SiteConfigError, KeyFileError, OSError, ValueError):
        return "not enrolled yet", "warn"
    if left <= dt.timedelta(0):
        return "expired: run `enrol`, within 30 days without an invitation", "no"
    hours = int(left.total_seconds() // 3600)
    good = f"good for {hours} hours" if hours < 72 else f"good for {hours // 24} days"
    return (f"{good}; its renewal is late", "warn") if late else (f"{good}, renewed by itself", "yes")


def chart(state: State, site: str) -> Any:
    """The accounts as bars."""
    rows = []
    for name, account in sorted(state.accounts.items()):
        if name.rpartition("/")[0] != site:
            continue
        told = descriptions.budget(account)
        share = descriptions.share(account)
        rows.append(
            Bar(
                str(told["name"]),
                (BarPart("spent", share["spent"]), BarPart("held", share["held"])),
                100.0,
                f"{told['left']} left; spent: {told['spent']}; held: {told['held']}; limit: {told['limit']}",
                "/budget",
            )
        )
    return bars(rows, "Lifetime budget of this site's patients", _LEGEND) if rows else ""


def _budget(pages: Router, context: SiteConsoleContext) -> None:
    @pages.get("/budget", READERS)
    def budget(asked: RequestContext) -> Response:
        with errors_as_pages():
            store, (index, behind) = context.ledger.read(), updated_index(context)
            state = store.state
            curves = () if behind else tuple(_curves(context, state, index))
            with store.exclusive():  # nothing is granted while these are picked
                granted, of = _granted(state), len(state.grants)
        return asked.page(
            "budget.html",
            accounts=[
                descriptions.budget(a) for n, a in sorted(state.accounts.items()) if n.startswith(f"{context.site}/")
            ],
            chart=chart(state, context.site),
            curves=curves,
            grants=granted,
            of=of,
            behind=behind,
        )


def _granted(state: State) -> list[tuple[str, str, str, str]]:
    """The newest grants: name, method, how much of its account, and how it stands."""
    rows = []
    for name, grant in islice(reversed(state.grants.items()), GRANTS):
        said = grant.reserved
        share = _share(state, said.account, grant.used or said.amount)
        rows.append((name, descriptions.MECHANISMS.get(said.mechanism, said.mechanism), share, grant.state))
    return rows


def _share(state: State, account: str, amount: int) -> str:
    limit = state.accounts[account].limit
    return f"{rounded_up(100 * amount / limit, 1):g} %" if limit else "all"


def _curves(context: SiteConsoleContext, state: State, index: Index) -> Iterator[Any]:
    """What was gone of each account, day by day, in the last year."""
    now = context.now().timestamp()
    for name, account in sorted(state.accounts.items()):
        if name.rpartition("/")[0] != context.site:
            continue
        found = index.balances(name, int(now - _YEAR_S))
        points = tuple((float(b.day * _DAY_S), _gone(account, b.held + b.spent)) for b in found)
        noise = bool(account.opened.order)
        limit = float(account.epsilon) if noise else float(account.limit)
        unit = f"ε per patient at δ = {account.opened.delta}" if noise else "releases of each patient"
        begin = min([points[0][0] if points else now - 30 * _DAY_S, now - 30 * _DAY_S])
        frame = ChartFrame(
            f"{descriptions.budget(account)['name']}: spent and held", unit, begin, now, limit, "the limit"
        )
        yield steps((StepCurve("spent and held", points),), frame)


def _gone(account: Account, amount: int) -> float:
    opened = account.opened
    if not opened.order:
        return float(amount)
    return float(epsilon_text(epsilon_of(amount, float(opened.delta), opened.order)))


def updated_index(context: SiteConsoleContext) -> tuple[Index, str]:
    """The updated index, and a sentence if it lags behind the ledger.

    A page takes a few entries in by itself. Many are taken in the background, see :mod:`policies.index.follower`.
    """
    if context.index is None:
        raise PageError(503, "The ledger's index is not open.")
    if context.index.follow(NEW):
        return context.index, ""
    held = f"{context.index.size:,}".replace(",", " ")
    return context.index, f"The search index is still being built: it has the first {held} entries. Try again soon."


def _ledger(pages: Router, context: SiteConsoleContext) -> None:
    @pages.get("/ledger", READERS)
    def ledger(asked: RequestContext, text: str = "", kind: str = "", before: str = "", after: str = "") -> Response:
        kinds = (kind,) if kind else ()
        try:
            query = EntryQuery(kinds, text=text[:200], before=_number(before), after=_number(after), most=PAGE)
        except ValueError:
            raise PageError(400, "Ask either for the entries before a number or for those after one.") from None
        with errors_as_pages():
            store, (index, behind) = context.ledger.read(), updated_index(context)
            try:
                found = index.find(query)
            except QueryTooWideError as wide:
                raise PageError(400, f"{wide}.") from None
            lines = context.ledger.lines(found.seqs)
        kept = {"text": text[:200], "kind": kind}
        ends = (found.seqs[0], found.seqs[-1]) if found.seqs else (0, 0)
        return asked.page(
            "ledger.html",
            lines=[(x.seq, x.record.at, kind_of(x.record.entry), entry_summary(x.record.entry)) for x in lines],
            text=text[:200],
            kind=kind,
            kinds=sorted(index.tally(0, int(context.now().timestamp()) + _DAY_S)),
            newer="/ledger?" + urlencode({**kept, "after": str(ends[0])}) if found.newer else "",
            older="/ledger?" + urlencode({**kept, "before": str(ends[1])}) if found.older else "",
            size=store.state.size,
            behind=behind,
        )

    @pages.get("/ledger/{seq}", READERS)
    def entry(asked: RequestContext, seq: int) -> Response:
        with errors_as_pages():
            store = context.ledger.read()
            if not 0 <= seq < store.state.size:
                raise PageError(404, "There is no such entry.")
            line, shown = store.line(seq), store.prove(0, seq)
        proof = check(seq, shown.entry, shown.included, shown.checkpoint, (store.origin, store.public))
        record = line.record
        return asked.page(
            "entry.html",
            seq=seq,
            at=record.at,
            kind=kind_of(record.entry),
            facts=[(f.name.replace("_", " "), _plain(getattr(record.entry, f.name))) for f in fields(record.entry)],
            key=record.key,
            proof=proof,
            size=store.state.size,
        )

    @pages.get("/ledger/{seq}/proof", READERS)
    def proof(asked: RequestContext, seq: int) -> Response:
        with errors_as_pages():
            store = context.ledger.read()
            if not 0 <= seq < store.state.size:
                raise PageError(404, "There is no such entry.")
            shown = store.prove(0, seq)
        made = check(seq, shown.entry, shown.included, shown.checkpoint, (store.origin, store.public))
        return asked.download(f"entry-{seq}-proof.json", made.to_json(), "application/json")

    @pages.get("/ledger/export/file", LOOKERS)
    def export(asked: RequestContext) -> Response:
        with errors_as_pages():
            store = context.ledger.read()
            raw = export_file(context.home.root / "ledger.db", store.origin, context.home.sign_key())
        return asked.download(f"{context.site}.ledger.export", raw, "application/octet-stream")


def _people(pages: Router, context: SiteConsoleContext) -> None:
    @pages.get("/people", READERS)
    def people(asked: RequestContext) -> Response:
        with errors_as_pages():
            state = context.ledger.read().state
        pinned = PinnedCertificates(context.home.root / FOLDER).names()
        until = {name: f"{crt.not_valid_after_utc:%Y-%m-%d}" for name, crt in pinned.items()}
        return asked.page(
            "people.html",
            people=[
                (name, p.role, state.active_person(name) is not None, until.get(name, ""), p.public.hex())
                for name, p in sorted(state.persons.items())
            ],
            office=sorted(state.office()),
        )


def _number(text: str) -> int | None:
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise PageError(400, "An entry is named by its number.")
    return int(text)


def _plain(value: object) -> str:
    if isinstance(value, bytes):
        try:
            text = value.decode("ascii")
            return text if text.startswith("{") else value.hex()
        except UnicodeDecodeError:
            return value.hex()
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value) if value != "" else "–"


_SKIPPED: Final = frozenset({"envelope", "claim", "key", "sign_key", "policy", "proposal", "public", "root"})


def entry_summary(entry: Entry) -> str:
    """An entry in a line: its plain fields, digests cut short."""
    noise: object = getattr(entry, "epsilon", None)
    hidden = {"amount", "used", *(["limit"] if noise else [])}  # nano-nats say nothing to people
    parts = []
    for f in fields(entry):
        value = getattr(entry, f.name)
        if f.name in _SKIPPED or value in ("", 0, b"", []):
            continue
        if f.name in hidden:
            continue
        shown = epsilon_text(str(value)) if f.name == "epsilon" else _plain(value)
        parts.append(f"{f.name.replace('_', ' ')} {shown[:16] + '…' if len(shown) > 48 else shown}")
    return ", ".join(parts)
