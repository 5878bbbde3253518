"""The policies: the federation's, each site's, the strictest of both, and what was amended when."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from starlette.responses import Response

from coordinator.console.context import READERS, CoordinatorConsoleContext
from coordinator.console.policy_comparison import AmendedKey, PolicyRow, Version, changes, compare
from policies.accounting.rounding import epsilon_text, format_rounded_up
from policies.audit.auditor import open_envelope
from policies.index.search import EntryQuery
from policies.ledger.entries import Amended, Enrolled
from policies.review.policy import Policy, PolicyError, parse, strictest
from policies.statements import Amendment, Enrolment
from policies.statements import parse as parse_statement
from protos.web.router import PageError, RequestContext, Router

MOST: Final = 100  # versions of one site's policy that are shown


@dataclass(frozen=True, slots=True)
class SitePolicyRow:
    """One site, and where its own policy is the stricter one."""

    site: str
    revoked: bool
    number: int  # of its newest amendment; 0 for none
    stricter: tuple[str, ...]  # keys where the site binds
    looser: tuple[str, ...]  # keys where the federation binds
    readable: bool


@dataclass(frozen=True, slots=True)
class AccountRow:
    """An account whose limit may have been set under another policy."""

    account: str
    limit: str
    ceiling: str
    bound: bool  # the policy of today is the smaller one


def add(pages: Router, context: CoordinatorConsoleContext) -> None:
    """The pages."""
    pages.menu("Policies", "/policies", READERS)

    @pages.get("/policies", READERS)
    def policies(asked: RequestContext) -> Response:
        federation = context.intake.federation
        rows = compare(federation, federation)
        return asked.page(
            "policies.html",
            federation=federation,
            rows=rows,
            text=context.home.policy_text(),
            stale=_stale(context),
            sites=_sites(context),
        )

    @pages.get("/policies/{site}", READERS)
    def policy(asked: RequestContext, site: str) -> Response:
        if site not in context.store.state.sites:
            raise PageError(404, "No hospital of that name is enrolled.")
        own, federation = _own(context, site), context.intake.federation
        return asked.page(
            "policy.html",
            site=site,
            revoked=site in context.store.state.revoked_sites,
            rows=compare(federation, own),
            both=strictest(federation, own),
            versions=_history(context, site),
            purses=_purses(context, site, strictest(federation, own)),
        )


def _stale(context: CoordinatorConsoleContext) -> bool:
    """Whether policy.toml is another one by now than this process was started with."""
    try:
        return context.home.policy() != context.intake.federation
    except (ValueError, OSError):
        return True


def _sites(context: CoordinatorConsoleContext) -> list[SitePolicyRow]:
    """Every site, by name."""
    with context.store.exclusive() as state:
        known = [(site, site in state.revoked_sites, state.amended.get(site, 0)) for site in sorted(state.sites)]
    out = []
    for site, revoked, number in known:
        try:
            rows = compare(context.intake.federation, _own(context, site))
        except PageError:
            out.append(SitePolicyRow(site, revoked, number, (), (), False))
            continue
        out.append(SitePolicyRow(site, revoked, number, _labels(rows, "site"), _labels(rows, "federation"), True))
    return out


def _labels(rows: list[PolicyRow], who: str) -> tuple[str, ...]:
    return tuple(row.label for row in rows if row.binds == who)


def _own(context: CoordinatorConsoleContext, site: str) -> Policy:
    """The policy of a site that is in force, from the very statement that the ledger names."""
    return _signed(context, site, context.store.state.policies[site])[1]


def _signed(context: CoordinatorConsoleContext, site: str, digest: bytes) -> tuple[str, Policy]:
    """A policy that a site signed: its text, and what it says. Its signature was verified before it was written down.

    Raises:
        PageError: it is not kept, or cannot be read.
    """
    envelope = context.store.envelope(digest) or b""
    try:
        if hashlib.sha256(envelope).digest() != digest:
            raise ValueError(site)
        said = parse_statement(open_envelope(envelope, None))
        if not isinstance(said, Enrolment | Amendment) or said.site != site:
            raise ValueError(site)
        return said.policy, parse(said.policy, f"policy of {site}")
    except (ValueError, PolicyError):
        raise PageError(409, f"The policy that {site} signed cannot be read here; the ledger names it.") from None


def _history(context: CoordinatorConsoleContext, site: str) -> list[Version]:
    """The policies that a site has signed, the newest first, each with what it changed."""
    context.index.follow()
    found = context.index.find(EntryQuery(kinds=("enrolled", "amended"), site=site, most=MOST))
    in_force = context.store.state.policies[site]
    out, before = list[Version](), None
    for seq in reversed(found.seqs):
        record = context.store.line(seq).record
        entry = record.entry
        if not isinstance(entry, Enrolled | Amended) or entry.site != site:
            continue
        text, policy = _signed(context, site, entry.envelope)
        made: tuple[AmendedKey, ...] = changes(before, policy) if before is not None else ()
        number = entry.number if isinstance(entry, Amended) else 0
        current = entry.envelope == in_force
        out.append(Version(seq, record.at, number, entry.envelope.hex(), text, policy, made, current))
        before = policy
    return out[::-1]


def _purses(context: CoordinatorConsoleContext, site: str, both: Policy) -> list[AccountRow]:
    """A site's accounts beside what the policies of today allow: the smaller of both binds."""
    out = []
    with context.store.exclusive() as state:
        for name, account in sorted(state.accounts.items()):
            if name.rpartition("/")[0] != site:
                continue
            if account.opened.order:
                bound = float(account.epsilon) > both.epsilon
                delta = f"at delta {format_rounded_up(account.opened.delta)}"
                row = AccountRow(
                    name,
                    f"epsilon {epsilon_text(account.epsilon)} {delta}",
                    f"epsilon {epsilon_text(both.epsilon)}",
                    bound,
                )
            else:
                most = both.max_releases_per_patient
                row = AccountRow(name, f"{account.limit} per patient", f"{most} per patient", account.limit > most)
            out.append(row)
    return out
