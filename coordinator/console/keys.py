"""Whose keys count, until when: the ledger's, the authorities', and each site's certificates."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

from cryptography.hazmat.primitives.serialization import Encoding

from coordinator.storage.directory import CoordinatorDirectory
from policies.ledger.store import Store
from protos.common.dsse import key_id
from protos.identity.certificates import fingerprint, leaf_of, root_fingerprint


@dataclass(frozen=True, slots=True)
class SiteCertificate:
    """One certificate of a site."""

    number: str
    until: int  # seconds since 1970
    state: str  # valid | ended | revoked


@dataclass(frozen=True, slots=True)
class SiteKeys:
    """A site's keys, by the ledger."""

    site: str
    state: str  # enrolled | revoked
    sign_key: str  # its fingerprint
    certificates: tuple[SiteCertificate, ...]  # newest first
    hours: int | None  # until the last of the valid ones ends; None: none is valid


@dataclass(frozen=True, slots=True)
class Key:
    """A key of the coordinator."""

    name: str
    fingerprint: str
    until: int | None  # seconds since 1970; None: it does not end
    about: str


def sites_of(store: Store, now: dt.datetime) -> list[SiteKeys]:
    """Every site that was ever enrolled, by name."""
    with store.exclusive() as state:
        enrolled = [(site, e.sign_key, site in state.revoked_sites) for site, e in sorted(state.sites.items())]
        issued = list(state.issued.values())
        revoked = set(state.revoked)
    at, out = now.timestamp(), []
    for site, key, barred in enrolled:
        mine = sorted((c for c in issued if c.site == site), key=lambda c: -c.not_after)
        shown = tuple(
            SiteCertificate(
                c.number, c.not_after, "revoked" if c.number in revoked else "valid" if at < c.not_after else "ended"
            )
            for c in mine
        )
        ends = [c.until for c in shown if c.state == "valid"]
        hours = int((max(ends) - at) // 3_600) if ends else None
        out.append(SiteKeys(site, "revoked" if barred else "enrolled", fingerprint(key), shown, hours))
    return out


def keys_of(home: CoordinatorDirectory, store: Store) -> list[Key]:
    """The coordinator's own."""
    root, tls = home.root_crt(), leaf_of(home.tls()[1])
    return [
        Key("Ledger", key_id(store.public), None, "signs the checkpoints; auditors and sites pin all of it"),
        Key(
            "Root of the federation",
            root_fingerprint(root),
            int(leaf_of(root).not_valid_after_utc.timestamp()),
            "every certificate leads to it; its key is kept off line; hospitals compare this fingerprint",
        ),
        Key(
            "Intermediate authority",
            root_fingerprint((home.keys / "intermediate.crt").read_bytes()),
            int(home.ca_ends().timestamp()),
            "issues the certificates; renewed once a year with the root at hand (renew-ca)",
        ),
        Key(
            "This service",
            fingerprint(tls.public_bytes(Encoding.DER)),
            int(tls.not_valid_after_utc.timestamp()),
            "what hospitals' agents connect to; renewed by itself",
        ),
    ]
