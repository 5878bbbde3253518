"""What of a project is held back: series of two patients, and studies in whose pictures text was read."""

from __future__ import annotations

from agent.edges.sealed import SealedFile


class Holds:
    """Sealed notes of one project's file."""

    def __init__(self, file: SealedFile) -> None:
        """``file``: the project's."""
        self._file = file

    def hold(self, study: str) -> None:
        """Hold a study back: text was read in one of its pictures, so that nothing is drawn from any of them."""
        with self._file.transaction():
            self._file.write_note("held", sorted(self.held() | {study}))

    def lift(self, study: str) -> None:
        """A person has looked at the study: it is as eligible as any, and no alarm is raised for it again."""
        with self._file.transaction():
            self._file.write_note("held", sorted(self.held() - {study}))
            self._file.write_note("looked_at", sorted({*(self._file.note("looked_at") or ()), study}))

    def looked_at(self, study: str) -> bool:
        """Has a person looked at the study's pictures?"""
        return study in (self._file.note("looked_at") or ())

    def held(self) -> frozenset[str]:
        """The studies that are held back until a person has looked."""
        return frozenset(self._file.note("held") or ())

    def barred(self) -> frozenset[str]:
        """The series that are held back, since they hold instances of two patients or two studies."""
        return frozenset(self._file.note("barred") or ())

    def bar(self, series: set[str]) -> None:
        self._file.write_note("barred", sorted(self.barred() | series))
