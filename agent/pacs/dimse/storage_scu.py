"""Storage as a user of the service (PS3.4 annex B): objects that a person commands to be sent, by C-STORE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

from agent.pacs.archive import ArchiveConfig, ArchiveError, ArchiveUnreachableError
from agent.pacs.dimse.identifiers import even, us, write_fields
from agent.pacs.dimse.query_retrieve_scu import QueryRetrieveScu

_C_STORE: Final = 0x0001
_WARNINGS: Final = frozenset({0xB000, 0xB006, 0xB007})  # PS3.4 table B.2-1: it is stored all the same
_WHY: Final = {
    0x0122: "it does not take objects of this class.",
    0x0124: "this site is not authorised to store there. Allow its AE title to store.",
    0xA700: "it has no room left.",
    0xA900: "it says that the object does not match its class.",
    0xC000: "it cannot understand the object.",
}


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object as it travels."""

    sop_class: str
    sop_instance: str
    transfer_syntax: str
    data: bytes = field(repr=False)  # the data set alone, in this syntax


class StorageScu(QueryRetrieveScu):
    """An association on which one class of objects is sent."""

    stores: ClassVar[bool] = True

    def __init__(self, remote: ArchiveConfig, sop_class: str, transfer_syntax: str) -> None:
        """Open it.

        Raises:
            ArchiveUnreachableError: no connection, no TLS, rejected, or it does not take this class in this syntax.
        """
        try:
            super().__init__(remote, [(sop_class, transfer_syntax)])
        except KeyError:  # the requestor has no word for a service that is no retrieval
            raise ArchiveUnreachableError(f"{remote.name}: it does not take such objects from this site.") from None

    def store(self, one: StoredObject) -> None:
        """C-STORE (PS3.7 section 9.1.1), and its answer.

        Raises:
            ArchiveError: it did not store the object, or the association ended.
        """
        self._message = self._message % 65535 + 1
        fields = {
            0x0002: even(one.sop_class, b"\0"),
            0x0100: us(_C_STORE),
            0x0110: us(self._message),
            0x0700: us(0),
            0x0800: us(1),
            0x1000: even(one.sop_instance, b"\0"),
        }
        with self._told():
            self._send(write_fields(fields), one.data)
            context, _, answer = self._next()
            status, _ = self._response(context, answer, _C_STORE)
        if status and status not in _WARNINGS:
            why = (
                _WHY.get(status & 0xFF00 if status >> 12 == 0xA else status)
                or f"it answers with status {status:04X}."
            )
            raise ArchiveError(f"{self._remote.name}: an object was not stored: {why}")


def store_all(remote: ArchiveConfig, objects: Sequence[StoredObject]) -> int:
    """Send objects of one class, each by one C-STORE; how many were stored.

    Raises:
        ArchiveError: one was not; those before it were. The text says how many.
    """
    done = 0
    try:
        with StorageScu(remote, objects[0].sop_class, objects[0].transfer_syntax) as association:
            for one in objects:
                association.store(one)
                done += 1
    except ArchiveError as error:
        raise ArchiveError(f"{error} {done} of {len(objects)} were stored", passing=error.passing) from None
    return done
