"""Made identifiers: each place gets a text of its own that occurs nowhere else, so that a leak names its place."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

Treatment = Literal["removed", "shifted", "rekeyed", "pixels"]

_CONSONANTS: Final = "bdfgjkmpqvwxz"
_VOWELS: Final = "aeiouy"
_FIRST_DAY: Final = datetime.date(2016, 1, 1)
_DAYS: Final = 1826  # to the end of 2020: what is moved by five years or more falls on no other planted day


@dataclass(frozen=True, slots=True)
class Plant:
    """One identifier in one place of one file."""

    id: str  # FILE/PLACE
    file: str
    place: str
    sentinel: str  # the text to look for
    treatment: Treatment  # what a de-identifier should do to it


class Sower:
    """Gives out the planted texts of one file, and remembers them. The same at every start: nothing is drawn."""

    def __init__(self, file: str) -> None:
        """``file`` is the name of the file that is being made."""
        self.file = file
        self.plants: list[Plant] = []

    def _digest(self, place: str) -> bytes:
        return hashlib.sha256(f"{self.file}/{place}".encode()).digest()

    def _add(self, place: str, sentinel: str, treatment: Treatment) -> str:
        plant = Plant(f"{self.file}/{place}", self.file, place, sentinel, treatment)
        self.plants = [p for p in self.plants if p.place != place] + [plant]  # a place holds what came last
        return sentinel

    def known(self, place: str, sentinel: str, treatment: Treatment = "removed") -> str:
        """A text chosen by the caller."""
        return self._add(place, sentinel, treatment)

    def word(self, place: str, treatment: Treatment = "removed") -> str:
        """A surname that nobody has: ten letters, pronounceable."""
        digest = self._digest(place)
        pairs = zip(digest[0:10:2], digest[1:10:2], strict=True)
        letters = "".join(_CONSONANTS[a % len(_CONSONANTS)] + _VOWELS[b % len(_VOWELS)] for a, b in pairs)
        return self._add(place, letters.capitalize(), treatment)

    def name(self, place: str) -> str:
        """A person's name in DICOM form; the family name is the sentinel."""
        return f"{self.word(place)}^Testperson^^Dr"

    def code(self, place: str) -> str:
        """An identifier in upper case letters and digits, at most 16 characters (CS, AE, SH)."""
        digest = self._digest(place + "#")
        word = "".join(_CONSONANTS[b % len(_CONSONANTS)] for b in digest[:6]).upper()
        return self._add(place, f"{word}{int.from_bytes(digest[6:8], 'big') % 10000:04}", "removed")

    def digits(self, place: str) -> str:
        """Ten digits: a telephone or record number."""
        number = 10**9 + int.from_bytes(self._digest(place)[:8], "big") % (9 * 10**9)
        return self._add(place, str(number), "removed")

    def day(self, place: str) -> str:
        """A date, YYYYMMDD, between 2016 and 2020; another one in each place of a file."""
        taken = {plant.sentinel for plant in self.plants}
        start = int.from_bytes(self._digest(place)[:4], "big")
        days = (_FIRST_DAY + datetime.timedelta((start + n) % _DAYS) for n in range(_DAYS))
        texts: Iterable[str] = (day.strftime("%Y%m%d") for day in days)
        return self._add(place, next(text for text in texts if text not in taken), "shifted")

    def uid(self, place: str) -> str:
        """An instance UID, 2.999 being the standard's arc for examples."""
        number = int.from_bytes(self._digest(place)[:8], "big")
        return self._add(place, f"2.999.{number}.1", "rekeyed")
