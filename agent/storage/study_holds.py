"""Series and studies of a project that are held back: series that belong to two studies, studies with burned-in text.

Both are stored under keyed names of one patient (:func:`agent.deidentify.record.keyed_name`), so one patient's file
cannot hold back another patient's data. Holds by UID alone, of older versions, last until a person lifts them.
"""

from __future__ import annotations

from collections.abc import Iterable

from agent.storage.encrypted_sqlite import EncryptedDatabase


class StudyHolds:
    """Sealed notes of one project's file."""

    def __init__(self, file: EncryptedDatabase) -> None:
        """``file``: the project's."""
        self._file = file

    def hold(self, study: str) -> None:
        """Hold a study back: text was read in one of its images, so that nothing is drawn from any of them."""
        with self._file.transaction():
            self._file.write_note("held", sorted(self.held() | {study}))

    def looked_at(self, study: str) -> bool:
        """Has a person looked at the study's images?"""
        return study in (self._file.note("looked_at") or ())

    def held(self) -> frozenset[str]:
        """The studies that are held back until a person has looked."""
        return frozenset(self._file.note("held") or ())

    def barred(self) -> frozenset[str]:
        """The series that are held back, since they hold instances of two studies."""
        return frozenset(self._file.note("barred") or ())

    def bar(self, series: set[str]) -> None:
        """Hold series back: within a transaction."""
        self._file.write_note("barred", sorted(self.barred() | series))

    def let_go(self, name: str, looked_at: Iterable[str]) -> None:
        """A study or series is held back no more; no alert is raised again for the studies that were looked at."""
        with self._file.transaction():
            self._file.write_note("held", sorted(self.held() - {name}))
            self._file.write_note("barred", sorted(self.barred() - {name}))
            self._file.write_note("looked_at", sorted({*(self._file.note("looked_at") or ()), *looked_at}))
