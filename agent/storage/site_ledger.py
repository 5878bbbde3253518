"""How the site's own ledger begins, and the policy that binds the site today."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from agent.errors import SiteConfigError
from agent.storage.site_directory import SiteDirectory
from policies.ledger.store import Store
from policies.ledger_service import LedgerService
from policies.review.policy import Policy, PolicyError, strictest
from policies.statements import PAYLOAD_TYPE, Enrolment, parse
from protos.common.dsse import open_sealed


def site_policy(home: SiteDirectory, store: Store) -> Policy:
    """The strictest of the site's policy today, the one that it signed last, and the federation's.

    The auditor reviews under the signed one, so loosening takes ``ledger amend``, which signs (P12).
    """
    signed = store.state.policies.get(home.settings().site)
    envelope = store.envelope(signed) if signed else (home.root / "request.json").read_bytes()
    return strictest(strictest(home.policy(), home.signed_policy(envelope or b"")), home.federation_policy())


def policy_in_force(home: SiteDirectory, store: Store) -> Callable[[str], Policy]:
    """:func:`site_policy` for a process that goes on: read again when the site has signed, or written, another one.

    What is written badly meanwhile does not bind; the policy of before goes on.
    """
    site, held = home.settings().site, site_policy(home, store)
    seen = store.state.policies.get(site), home.policy_text()

    def of(_site: str) -> Policy:
        nonlocal seen, held
        with contextlib.suppress(SiteConfigError, PolicyError):
            now = store.state.policies.get(site), home.policy_text()
            if now != seen:
                held, seen = site_policy(home, store), now
        return held

    return of


def initialise_ledger(home: SiteDirectory, store: Store) -> None:
    """Write the first entries, if there are none: the site itself and its accounts, at the stricter of both policies.

    They come before any person is appointed, or those persons would have to approve their own hospital to itself.

    Raises:
        SiteConfigError: the site is not enrolled, so nobody knows under which policy its accounts open.
    """
    if store.state.sites:
        return
    policy = site_policy(home, store)
    envelope = (home.root / "request.json").read_bytes()
    public = home.sign_key().public_key().public_bytes_raw()
    statement = parse(open_sealed(envelope, PAYLOAD_TYPE, {"self": public}).payload)
    assert isinstance(statement, Enrolment)
    LedgerService(store, lambda _site: policy).enrol(statement, envelope, policy)
