"""What both ends of a round with secure aggregation build from the same facts: the session, the framing, the ring.

`protos.secagg.member` is the protocol; here is what Lazaret puts into it. Every fact that members must have alike
(start parameters, strategy, mechanism and its configuration) goes into the session's context, so that a coordinator
that shows different sites different models gets nothing it can unmask (Pasquini et al. 2022).
"""

from __future__ import annotations

import base64
import binascii
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protos.common.canonical_json import canonical
from protos.common.errors import PeerError
from protos.secagg.messages import SumStep, open_message
from protos.secagg.ring import Ring, Words
from protos.secagg.session import Params, Quorum, SumSession, start_context

LOOK: Final = "look"  # in a strategy's place: the sum is one of a look at the model, and moves no parameter
LOOK_BITS: Final = 64  # of the ring of its sums
CORRUPT: Final = 1  # sites that may work with the coordinator against the others
MOST_SETUP: Final = 1 << 16
_LENGTH: Final = struct.Struct(">Q")


class SecAggSetupError(PeerError, ValueError):
    """What a round begins with is not in its one form."""


@dataclass(frozen=True, slots=True)
class RoundParams:
    """One round of one run, and its public configuration."""

    run: str
    round_index: int  # from 0
    config: bytes  # the mechanism's, JSON
    strategy: str  # the coordinator's, JSON; or LOOK


@dataclass(frozen=True, slots=True)
class RoundSetup:
    """The parameters that a site gets before it advertises its keys."""

    roster: Mapping[str, bytes]  # site -> Ed25519 key, raw
    strategy: str
    start: bytes  # safetensors of the start parameters

    def encode(self) -> bytes:
        """The one byte form: the length of a canonical JSON text, the text, the start parameters."""
        keys = {site: base64.b64encode(key).decode() for site, key in sorted(self.roster.items())}
        text = canonical({"roster": keys, "strategy": self.strategy})
        return frame(text, self.start)

    @staticmethod
    def decode(raw: bytes) -> RoundSetup:
        """The setup of :meth:`encode`.

        Raises:
            SecAggSetupError: anything else.
        """
        text, start = unframe(raw)
        try:
            table: Any = json.loads(text) if len(text) <= MOST_SETUP else None
            roster = {str(s): base64.b64decode(k, validate=True) for s, k in table["roster"].items()}
            setup = RoundSetup(roster, str(table["strategy"]), start)
        except (ValueError, KeyError, TypeError, AttributeError, binascii.Error, RecursionError):
            raise SecAggSetupError("the setup is not one") from None
        if setup.encode() != raw:
            raise SecAggSetupError("the setup is not in its one form")
        return setup


def frame(head: bytes, body: bytes) -> bytes:
    """Two byte strings as one."""
    return _LENGTH.pack(len(head)) + head + body


def unframe(raw: bytes) -> tuple[bytes, bytes]:
    """The two byte strings of :func:`frame`.

    Raises:
        SecAggSetupError: not two.
    """
    if not len(raw) >= _LENGTH.size:
        raise SecAggSetupError("too short")
    (length,) = _LENGTH.unpack_from(raw)
    if not length <= len(raw) - _LENGTH.size:
        raise SecAggSetupError("too short")
    at = _LENGTH.size + length
    return bytes(raw[_LENGTH.size : at]), bytes(raw[at:])


def ring_of(config: Mapping[str, Any], parameters: int) -> Ring:
    """The ring that a mechanism's public configuration names, for vectors of so many parameters."""
    return Ring(parameters, config["ring_bits"], config["value_bound"], config["scale"])


def session(
    terms: RoundParams,
    start: NDArray[np.float32],
    roster: Mapping[str, bytes],
    quorum: Quorum,
    look: Ring | None = None,
) -> SumSession:
    """The session as one side sees it: equal on both sides, or nothing can be unmasked.

    Args:
        terms: the round.
        start: the parameters that it starts from, or that are looked at.
        roster: site -> its enrolled key.
        quorum: for so many sites.
        look: the ring of a look's sums; None: it is that of the parameters.

    Raises:
        ValueError: a configuration under which a sum could wrap, or a site be unmasked.
    """
    config = json.loads(terms.config)
    ring = ring_of(config, int(start.size)) if look is None else look
    context = start_context(start, (terms.strategy.encode(), terms.config))
    return SumSession(terms.run, terms.round_index, Params(ring, quorum), context, roster)


def masked_vector(of: SumSession, message: bytes) -> Words:
    """The masked vector in a member's answer to `Step.MASK`: what the site seals as its artifact.

    Raises:
        ValueError: not such an answer, or not signed by its sender.
    """
    _, body = open_message(of, SumStep.MASK, message, of.params.ring.size)
    return of.params.ring.read(body)
