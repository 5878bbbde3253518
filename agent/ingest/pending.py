"""Pending files, wherever they are: received files in the spool, and rejected files to retry."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from agent.deidentify.errors import FileRejectedError
from agent.storage.quarantine import Quarantine
from agent.storage.spool import ReceivedFile, Spool, SpoolError


class PendingFile(Protocol):
    """One file that waits, wherever it lies."""

    @property
    def place(self) -> str:
        """Where it lies, of which its name in the quarantine is made; "" when its content makes it."""

    def load(self) -> ReceivedFile:
        """Its bytes. Raises: Refused (not_a_file, unreadable, too_large), Taken (by another process)."""

    def settle(self) -> None:
        """It is kept, was known, or is in quarantine: what waited may go."""

    def release(self) -> None:
        """It stays where it waits, for the next run."""

    def refuse(self, quarantine: Quarantine, refusal: Refusal) -> None:
        """It goes to quarantine."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a file does not come in, and under which name it is in quarantine."""

    name: str  # the same at every attempt
    code: str  # a key of REASONS
    digest: str  # keyed, of its bytes; "" when they could not be read
    arrival: ReceivedFile | None  # None when it could not be read


@dataclass(slots=True)
class SpooledFile:
    """An arrival in the spool: loading it keeps other processes from it until it is settled or released."""

    room: Spool
    name: str
    place: str = ""  # nowhere: what is sent again with the same content is the same refused file
    _descriptor: int = -1

    def load(self) -> ReceivedFile:
        """Unseal it."""
        arrival, self._descriptor = self.room.claim(self.name)
        if arrival is None:
            raise FileRejectedError("unreadable")
        return arrival

    def settle(self) -> None:
        """Remove it."""
        self.room.remove(self.name)
        self.release()

    def release(self) -> None:
        """Let others work with it, if it is still there."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def refuse(self, quarantine: Quarantine, refusal: Refusal) -> None:
        """Seal it there, then remove it here; what cannot be unsealed is moved as it is."""
        if refusal.arrival is None:
            quarantine.move_from(self.room, self.name, refusal.code)
        else:
            quarantine.refuse(refusal.name, refusal.code, refusal.arrival, refusal.digest)
            self.room.remove(self.name)
        self.release()


@dataclass(frozen=True, slots=True)
class QuarantinedFile:
    """A file in quarantine that a person wants tried once more."""

    quarantine: Quarantine
    name: str
    reload: Callable[[ReceivedFile], ReceivedFile]  # of what lies in a folder: reads it there again

    @property
    def place(self) -> str:
        """Its name in the quarantine."""
        return self.name

    def load(self) -> ReceivedFile:
        """Unseal it, or read it where it lies."""
        try:
            arrival = self.quarantine.open(self.name)
        except (SpoolError, FileNotFoundError):
            raise FileRejectedError("unreadable") from None
        return arrival if arrival.body else self.reload(arrival)

    def settle(self) -> None:
        """It came in after all."""
        self.quarantine.remove(self.name)

    def release(self) -> None:
        """It stays in quarantine."""

    def refuse(self, quarantine: Quarantine, refusal: Refusal) -> None:
        """Once more: the count goes up, its bytes stay as they are."""
        quarantine.record_retry(self.name, refusal.code)


def in_room(room: Spool) -> Iterator[SpooledFile]:
    """What waits in the spool, oldest first."""
    return (SpooledFile(room, name) for name in room.names())
