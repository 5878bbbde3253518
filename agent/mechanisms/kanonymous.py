"""The k-anonymous mechanisms: the one list to which a new mechanism is added.

``lazaret-agent release --help`` shows what is in ``OPTIONS``; a release and the registry ask ``parts_of``. A folder
that is not named here is never imported (P13). A mechanism is imported only when it is asked for: some need torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, Protocol

from agent.mechanisms.anonfaces import options as anonfaces
from agent.mechanisms.ksalsa import options as ksalsa
from agent.mechanisms.ksame import options as ksame

if TYPE_CHECKING:  # it imports numpy: --help waits for no library
    from agent.mechanisms.common.synthesis import ReleaseConfig, Synthesis

    Parts = tuple[type[Synthesis], Callable[[argparse.Namespace, frozenset[str]], ReleaseConfig]]


class MechanismOptions(Protocol):
    """The ``options.py`` of a mechanism's folder."""

    @property
    def HELP(self) -> str:
        """One line for ``release --help``."""

    def add_release_options(self, command: argparse.ArgumentParser, /) -> None:
        """Add what only this mechanism has."""


OPTIONS: Final[Mapping[str, MechanismOptions]] = {
    "ksame": ksame,
    "ksalsa": ksalsa,
    "anonfaces": anonfaces,
}


def parts_of(name: str) -> Parts:
    """Import a mechanism: its class, and what reads its configuration (typed options, SHA-256 of public files).

    Raises:
        KeyError: no k-anonymous mechanism has that name.
    """
    match name:
        case "ksame":
            from agent.mechanisms.ksame.config import read_release as read_ksame
            from agent.mechanisms.ksame.mechanism import KSame

            return KSame, read_ksame
        case "ksalsa":
            from agent.mechanisms.kanonymous_config import read_release as read_ksalsa
            from agent.mechanisms.ksalsa.mechanism import KSalsa

            return KSalsa, read_ksalsa
        case "anonfaces":
            from agent.mechanisms.anonfaces.mechanism import AnonFaces
            from agent.mechanisms.kanonymous_config import read_release as read_anonfaces

            return AnonFaces, read_anonfaces
    raise KeyError(name)
