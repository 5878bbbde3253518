"""Made releases lie sealed at the site until they have left: for persons to approve, or the coordinator to answer.

A release is made from patients only once: a kill, a full disk or a silent coordinator must not destroy it and leave
its price spent. So it is stored before a byte of it leaves, together with its patients, and its grant stays held. It
is deleted with the verdict, or when it is withdrawn. One note of the site lists the stored releases; their bytes are
next to it.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agent.errors import CoordinatorUnreachableError, SiteStorageError
from policies.statements import Release, encode, parse, release_id

if TYPE_CHECKING:
    from agent.release.ports import ClearableCheckpointStore, VaultPort

NOTE = "pending"
PART = "run"  # the note of the part in a federated run that is open, see agent.federation.participant


@dataclass(frozen=True, slots=True)
class SealedUpdate:
    """A round's update that may leave, or has left, and of whom it is. Its bytes, which may be many, are kept."""

    release: Release
    envelope: bytes
    persons: frozenset[str]
    model: str  # SHA-256 of the parameters that it was made from; "": an earlier version kept it, and did not say


class NotSentError(CoordinatorUnreachableError):
    """A release was made and is kept; whether the coordinator has it is not known."""

    def __init__(self, release: str, why: str) -> None:
        """Say how it goes on."""
        told = f"the set is made and is kept here under its grant: `release send {release}` sends the same again"
        super().__init__(why if why.endswith(told) else f"{why}; {told}")  # the service has said so already
        self.release = release


def listed(vault: VaultPort) -> dict[str, dict[str, Any]]:
    """What is kept, by release: ``grant``, ``statement``, ``persons``."""
    return vault.note(NOTE) or {}


def keep(vault: VaultPort, release: Release, artifact: bytes, clear: bytes, persons: Set[str]) -> None:
    """Seal a made release into the vault, durable when this returns; from here on its grant stays held.

    Args:
        vault: of the site.
        release: what it states.
        artifact: what leaves.
        clear: the same before it was sealed to a reader; "": it is in clear.
        persons: of whom, where the site's record of clusters does not say it.
    Raises:
        SiteStorageError: the vault failed; nothing of it is listed.
    """
    name = release.release
    _place(vault, name, "artifact").write(artifact)
    if clear:
        _place(vault, name, "clear").write(clear)
    else:  # nor does one of an earlier attempt stay beside it
        _place(vault, name, "clear").clear()
    told = {"grant": release.grant, "statement": encode(release).decode(), "persons": sorted(persons)}
    vault.change_note(NOTE, lambda kept: {**(kept or {}), name: told})


def keep_update(vault: VaultPort, release: str, artifact: bytes) -> None:
    """Seal the bytes of a round's update into the vault, durable when this returns; the note of the part lists them.

    Raises:
        SiteStorageError: the vault failed.
    """
    _place(vault, release, "artifact").write(artifact)


def kept_update(vault: VaultPort, release: Release) -> bytes | None:
    """The bytes of a round's update; None: they are not there as they were stated."""
    found = _place(vault, release.release, "artifact").read()
    return found if found is not None and is_as_stated(found, release) else None


def updates_of_part(vault: VaultPort, site: str) -> set[str]:
    """The updates of the part in a run that may lie beside the list: the newest one, and that of a begun round."""
    part = vault.note(PART) or {}
    found = {part.get("sealed", {}).get("release", "")}
    if part.get("grant") and part["begun"]:
        found.add(release_id(site, part["grant"], part["begun"]))
    return found - {""}


def withdraw_update(vault: VaultPort, gone: Set[str]) -> None:
    """Delete a kept update if one of the persons ``gone`` is behind it; its round stays sealed, and has no answer."""
    sealed = (vault.note(PART) or {}).get("sealed", {})
    if not gone.isdisjoint(sealed.get("persons", ())):
        vault.change_note(PART, lambda part: {**part, "sealed": {"round": sealed["round"]}})
        forget(vault, sealed["release"])


def forget(vault: VaultPort, release: str) -> None:
    """It has left, was refused or is withdrawn: nothing of it stays.

    First it leaves the list: what a kill leaves of its bytes is nobody's then, and :func:`sweep_kept` finds it.
    """
    if release in listed(vault):
        vault.change_note(NOTE, lambda kept: {name: one for name, one in (kept or {}).items() if name != release})
    for part in ("artifact", "clear"):
        _place(vault, release, part).clear()


def sweep_kept(vault: VaultPort, places: Iterable[str], goes_on: Set[str]) -> None:
    """Clear the bytes that a kill left beside the list: of a release that was not listed yet, or no longer (P15).

    Args:
        vault: of the site.
        places: of kept bytes.
        goes_on: the release of the making that goes on, whose bytes are written anew.
    """
    known = goes_on | listed(vault).keys()
    for name in places:
        if name.split("/")[1] not in known:
            vault.site_place(name).clear()


def statement_of(one: Mapping[str, Any]) -> Release:
    """What the release states, by its entry in the list."""
    found = parse(one["statement"].encode())
    assert isinstance(found, Release)
    return found


def of_before(one: Mapping[str, Any]) -> bool:
    """Whether an earlier version kept it, in the list itself: its images are not compressed.

    Persons have approved those very bytes, and can approve no others under a release's name: they leave as they are.
    """
    return "artifact" in one


def artifact_of(vault: VaultPort, release: str, one: Mapping[str, Any]) -> bytes:
    """The bytes that leave.

    Raises:
        SiteStorageError: they are missing.
    """
    if of_before(one):
        return base64.b64decode(one["artifact"])
    found = _place(vault, release, "artifact").read()
    if found is None:
        raise SiteStorageError(
            f"the bytes of {release} are missing from the vault: restore the vault, or withdraw the release"
        )
    return found


def is_as_stated(artifact: bytes, release: Release) -> bool:
    """Whether these are the very bytes of which a statement speaks."""
    return hashlib.sha256(artifact).hexdigest() == release.artifact_sha256


def clear_of(vault: VaultPort, release: str, one: Mapping[str, Any]) -> bytes:
    """The same as persons look at it: before it was sealed to a reader.

    Raises:
        SiteStorageError: it is missing.
    """
    if of_before(one):
        return base64.b64decode(one.get("clear") or one["artifact"])
    return _place(vault, release, "clear").read() or artifact_of(vault, release, one)


def _place(vault: VaultPort, release: str, part: str) -> ClearableCheckpointStore:
    return vault.site_place(f"kept/{release}/{part}")
