"""What waits for people at a site, with the short numbers that ``status`` shows and other commands take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from agent.federation import run_plan
from agent.release.unsent import NOTE, statement_of
from agent.service import run_plans
from agent.service.commands import PROGRAM
from agent.storage import read_only_access
from agent.storage.site_directory import SiteDirectory, origin
from agent.storage.site_ledger import site_policy
from policies.governance import amendments
from policies.governance.pending import Pending, choose, numbered, open_proposals
from policies.ledger.backends.sqlite import open_read_only
from policies.ledger.read_only import read_store
from policies.ledger.store import Store
from policies.review.policy import Policy, strictest
from policies.statements import Release
from protos.operations.short_numbers import numbers


def waiting(home: SiteDirectory) -> list[Pending]:
    """Everything that waits, also while another process holds the ledger; nothing but numbers is written.

    Raises:
        LedgerUnsoundError, VaultError, SiteConfigError, KeyFileError: it cannot be looked at; the text says why.
    """
    if not (home.root / "ledger.db").exists():
        return []
    with ExitStack() as stack:
        disk = open_read_only(home.root / "ledger.db")
        store = stack.enter_context(read_store(disk, origin(home.settings().site), home.sign_key()))
        notes = stack.enter_context(read_only_access.notes(home))
        kept, asked = (notes.note(NOTE), notes.note(run_plan.NOTE)) if notes is not None else (None, None)
        return of_store(home, store, kept or {}, asked)


def of_store(home: SiteDirectory, store: Store, kept: Mapping[str, Any], asked: Any = None) -> list[Pending]:
    """The same, where ledger and vault are open already.

    Args:
        home: the site's directory.
        store: the ledger, to read.
        kept: releases that are kept, see :mod:`agent.release.unsent`.
        asked: plans of runs that were asked for, see :mod:`agent.federation.run_plan`.
    """
    policy = site_policy(home, store)
    found = [_release(policy, store, statement_of(one)) for _, one in sorted(kept.items())]
    found += run_plans.pending(asked, store.state, policy)
    found += _amendment(home, store)
    found += open_proposals(store, PROGRAM)
    return numbered(found, partial(numbers, home.root))


def release_named(home: SiteDirectory, number: str) -> str:
    """The name of the release that has a short number.

    Raises:
        InvalidEntryError: nothing waits under that number, or something else than a release.
    """
    return choose(waiting(home), number, PROGRAM, "release").subject


def number_of(found: Sequence[Pending], release: str) -> int:
    """The short number of a release; 0: it has none."""
    return next((one.number for one in found if (one.action, one.subject) == ("release", release)), 0)


def _release(policy: Policy, store: Store, r: Release) -> Pending:
    given = store.state.approvals(r.release, "release", r.release, r.artifact_sha256)
    missing = tuple(sorted(policy.approvals - set(given)))
    details = (
        f"{r.mechanism}, {r.modality}, {r.artifact_type} of {r.artifact_bytes} bytes",
        f"approved by: {', '.join(sorted(given)) or 'nobody yet'}; missing: {', '.join(missing) or 'nobody'}",
    )
    return Pending(
        *("release", r.release, r.artifact_sha256, r.release),
        f"release NUMBER, {r.mechanism}",
        missing,
        f"{PROGRAM} release send NUMBER",
        f"{PROGRAM} release inspect NUMBER --out FOLDER",
        details,
    )


def _amendment(home: SiteDirectory, store: Store) -> Iterator[Pending]:
    """A ``policy.toml`` that loosens the policy in force, which persons have to approve."""
    state, site, text = store.state, home.settings().site, home.policy_text()
    if site not in state.policies or not state.office():  # where nobody may approve, nobody is asked
        return
    signed, proposed = home.signed_policy(store.envelope(state.policies[site]) or b""), home.policy()
    loosened = amendments.loosened_keys(strictest(proposed, signed), proposed)
    if not loosened:
        return
    words = amendments.ACTION, site, amendments.digest(text)
    serial = amendments.amendment_serial(text, state.amended.get(site, 0))
    missing = tuple(sorted(state.office() - set(state.approvals(serial, *words))))
    details = (f"it loosens {', '.join(loosened)}; read policy.toml before you sign",)
    yield Pending(*words, serial, "policy NUMBER, policy.toml", missing, f"{PROGRAM} ledger amend", details=details)
