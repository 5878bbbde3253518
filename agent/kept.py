"""Made releases lie sealed at the site until they have left: for persons to approve, or the coordinator to answer.

What was made from patients is made once: a kill, a full disk or a silent coordinator must not take it away and leave
its price spent. So it is kept before a byte of it leaves, together with whose it is, and its grant stays held; it is
forgotten with the verdict, or when it is withdrawn. One note of the site lists them; their bytes lie beside it.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agent.nouns import Unreachable
from policies.statement import Release, encode, parse
from protos.artifact import BadArtifact, pack_images, unpack_images

if TYPE_CHECKING:
    from agent.site import Shelf, Site, Vault

NOTE = "pending"


class NotSentError(Unreachable):
    """A release was made and is kept; whether the coordinator has it is not known."""

    def __init__(self, release: str, why: str) -> None:
        """Say how it goes on."""
        told = f"the set is made, and kept here under its grant: `release send {release}` sends the same again"
        super().__init__(f"{why}; {told}")
        self.release = release


def listed(vault: Vault) -> dict[str, dict[str, Any]]:
    """What is kept, by release: ``grant``, ``statement``, ``persons``."""
    return vault.note(NOTE) or {}


def keep(vault: Vault, release: Release, artifact: bytes, clear: bytes, persons: Set[str]) -> None:
    """Seal a made release into the vault, durable when this returns; from here on its grant stays held.

    Args:
        vault: of the site.
        release: what it states.
        artifact: what leaves.
        clear: the same before it was sealed to a reader; "": it is in clear.
        persons: of whom, where the site's record of clusters does not say it.
    Raises:
        NotKept: the vault failed; nothing of it is listed.
    """
    name = release.release
    _place(vault, name, "artifact").write(artifact)
    if clear:
        _place(vault, name, "clear").write(clear)
    told = {"grant": release.grant, "statement": encode(release).decode(), "persons": sorted(persons)}
    vault.write_note(NOTE, {**listed(vault), name: told})


def forget(site: Site, release: str) -> None:
    """It has left, was refused or is withdrawn: nothing of it stays."""
    kept = listed(site.vault)
    if release in kept:
        site.vault.write_note(NOTE, {name: one for name, one in kept.items() if name != release})
    for part in ("artifact", "clear"):
        _place(site.vault, release, part).clear()


def renew(site: Site) -> None:
    """Write what an earlier version kept as it is kept and admitted today.

    Pictures of before compression are packed anew, so that their digest is another one, and persons approve that: as
    they were, the coordinator would refuse the set, and its grant would be spent.

    Raises:
        NotKept: the vault failed; what was kept is as it was.
    """
    for name, one in listed(site.vault).items():
        if "artifact" not in one:
            continue
        draft, raw = statement_of(one), artifact_of(site.vault, name, one)
        clear = clear_of(site.vault, name, one) if one.get("clear") else b""
        if name not in site.books.store.state.sent and not draft.reader and draft.artifact_type == "image-set":
            with contextlib.suppress(BadArtifact):  # of DICOM: as before
                raw = pack_images(*unpack_images(raw))
        digest = hashlib.sha256(raw).hexdigest()
        if digest != draft.artifact_sha256:
            site.say(
                "keep", f"{name} was made before pictures were compressed: packed anew, it is to be approved again"
            )
        statement = replace(draft, artifact_sha256=digest, artifact_bytes=len(raw))
        keep(site.vault, statement, raw, clear, set(one.get("persons", ())))


def statement_of(one: Mapping[str, Any]) -> Release:
    """What the release states, by its entry in the list."""
    found = parse(one["statement"].encode())
    assert isinstance(found, Release)
    return found


def artifact_of(vault: Vault, release: str, one: Mapping[str, Any]) -> bytes:
    """The bytes that leave."""
    if "artifact" in one:  # an earlier version kept them in the list
        return base64.b64decode(one["artifact"])
    return _place(vault, release, "artifact").read() or b""


def clear_of(vault: Vault, release: str, one: Mapping[str, Any]) -> bytes:
    """The same as persons look at it: before it was sealed to a reader."""
    if "artifact" in one:
        return base64.b64decode(one.get("clear") or one["artifact"])
    return _place(vault, release, "clear").read() or artifact_of(vault, release, one)


def _place(vault: Vault, release: str, part: str) -> Shelf:
    return vault.site_place(f"kept/{release}/{part}")
