"""``vault.db``: the site's private records, over all its projects.

Who was released (each patient once, ever: P5), what was sent, the ledger's length, and who has opted out: the end of
a project changes none of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Set
from typing import Final

from agent.storage.encrypted_sqlite import EncryptedDatabase

_PSEUDONYM: Final = re.compile(r"[0-9a-f]{32}")


class SiteDatabase(EncryptedDatabase):
    """The private records, one sealed row each."""

    def opted_out(self) -> frozenset[str]:
        """The pseudonyms of all who have opted out and not in again. They stay inside the site."""
        return frozenset((self.note("opted_out") or {}).get("persons", ()))

    def purging(self) -> frozenset[str]:
        """Who opted out and is perhaps not yet deleted everywhere: a start goes on with it."""
        return frozenset((self.note("opted_out") or {}).get("purging", ()))

    def opt_out(self, person: str) -> None:
        """Put a patient on the list, durable when this returns; whether it was known here is not looked at.

        Raises:
            ValueError: not a pseudonym.
        """
        if not _PSEUDONYM.fullmatch(person):
            raise ValueError("a pseudonym has 32 hex characters")
        self._change({person}, set(), {person}, set())

    def opt_in(self, person: str) -> None:
        """Remove a patient from the opt-out list. Deleted data stays deleted, spent budget stays spent."""
        self._change(set(), {person}, set(), set())

    def purged(self, persons: Set[str]) -> None:
        """These are deleted from every project, and so is what a person said of their ids."""
        with self.transaction():
            self._write_apart(group - persons for group in self.apart())
        self._change(set(), set(), set(), persons)

    def apart(self) -> tuple[frozenset[str], ...]:
        """Groups of ids of which a person has said that each is another patient."""
        return tuple(map(frozenset, self.note("apart") or ()))

    def tell_apart(self, persons: Set[str]) -> None:
        """A person says that these ids are as many patients. Durable when this returns."""
        with self.transaction():
            self._write_apart((*self.apart(), frozenset(persons)))

    def _write_apart(self, groups: Iterable[frozenset[str]]) -> None:
        self.write_note("apart", sorted({tuple(sorted(group)) for group in groups if len(group) > 1}))

    def _change(self, come: Set[str], go: Set[str], begun: Set[str], done: Set[str]) -> None:
        with self.transaction():  # two processes may do this at once
            persons, purging = (self.opted_out() | come) - go, (self.purging() | begun) - done
            self.write_note("opted_out", {"persons": sorted(persons), "purging": sorted(purging)})
