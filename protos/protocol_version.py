"""The wire protocol versions of each side, and their negotiation.

Each side announces the oldest and the newest protocol version that it supports: an agent in the ``user-agent`` of its
channel, the coordinator in the trailing metadata of a reply. They use the newest common version. If there is none,
the newer side says so in a message and nothing else happens. This program supports the newest version and the one
before it (N and N-1), so a federation can be upgraded one site at a time, in any order.

Protocol 1 announced nothing; 2 is the same calls with the announcement; since 3 the images of a set are compressed
(:mod:`protos.artifacts.png`), and from an agent that speaks 2 at most a set comes without compression, or not at all;
and an agent shows the head of its site's own ledger.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from protos.common.errors import UnreachableError

NEWEST: Final = 3
OLDEST: Final = NEWEST - 1
COMPRESSED: Final = 3  # the protocol since which images are
HEADS: Final = 3  # the protocol since which an agent shows the head of its site's own ledger
METADATA: Final = "lazaret-protocol"  # of replies
_AGENT: Final = re.compile(r"(?:^| )lazaret-protocol/(\S{1,40})")
_RANGE: Final = re.compile(r"([1-9][0-9]{0,5})-([1-9][0-9]{0,5})")


class NoCommonVersionError(UnreachableError, ValueError):
    """There is no common protocol version; the text says which side to upgrade."""


@dataclass(frozen=True, slots=True, order=True)
class VersionRange:
    """The protocols that one side speaks: from ``oldest`` to ``newest``."""

    oldest: int = OLDEST
    newest: int = NEWEST

    def __post_init__(self) -> None:
        """A range."""
        if not 1 <= self.oldest <= self.newest:
            raise ValueError("an empty range of protocols")

    def __str__(self) -> str:
        """As announced: ``2-3``."""
        return f"{self.oldest}-{self.newest}"

    @classmethod
    def of(cls, text: str) -> VersionRange:
        """The reverse.

        Raises:
            NoCommonVersionError: it cannot be read, so nothing is known of what that side speaks.
        """
        found = _RANGE.fullmatch(text)
        try:
            return cls(*map(int, found.groups())) if found else cls(0)
        except ValueError:
            raise NoCommonVersionError(
                "the other side announces an unreadable protocol: check that both sides are Lazaret"
            ) from None


OTHER: Final = {"agent": "coordinator", "coordinator": "agent"}
FIRST: Final = VersionRange(1, 1)  # of whoever announces nothing
OURS: Final = VersionRange()
USER_AGENT: Final = f"lazaret-protocol/{OURS}"
EARLIER_AGENT: Final = (
    f"lazaret-protocol/{VersionRange(OLDEST, COMPRESSED - 1)}"  # of a set that waited since before then
)


def announced(metadata: Iterable[Any]) -> VersionRange:
    """What an agent speaks, by the metadata of its call.

    Args:
        metadata: (key, value) pairs.
    Raises:
        NoCommonVersionError: it announces something that cannot be read.
    """
    agents = [str(pair[1]) for pair in metadata if pair[0] == "user-agent"]
    found = [match for agent in agents if (match := _AGENT.search(agent))]
    return VersionRange.of(found[0].group(1)) if found else FIRST


def answered(metadata: Iterable[Any]) -> VersionRange:
    """What a coordinator speaks, by the trailing metadata of its reply.

    Raises:
        NoCommonVersionError: it announces something that cannot be read.
    """
    found = [str(pair[1]) for pair in metadata if pair[0] == METADATA]
    return VersionRange.of(found[0]) if found else FIRST


def agree(theirs: VersionRange, they: str, ours: VersionRange = OURS) -> int:
    """The newest protocol that both speak.

    Args:
        theirs: what the other side announces.
        they: what it is called in the sentence: ``agent`` or ``coordinator``.
        ours: what this side speaks.
    Raises:
        NoCommonVersionError: there is none.
    """
    both = min(theirs.newest, ours.newest)
    if both >= max(theirs.oldest, ours.oldest):
        return both
    if theirs.newest < ours.oldest:
        said = f"it speaks protocol {theirs.newest} at most, and this side {ours.oldest} at least"
        raise NoCommonVersionError(f"the {they} is too old: {said}; upgrade the {they}")
    said = f"it speaks protocol {theirs.oldest} at least, and this side {ours.newest} at most"
    behind = OTHER[they]
    raise NoCommonVersionError(
        f"the {they} is too new: {said}; upgrade the {behind} first, or downgrade the {they} by one version"
    )
