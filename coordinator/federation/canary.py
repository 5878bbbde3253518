"""A canary: one round on made patients over the whole way of a round. What is sent, and what becomes of the parts.

A part is the numbers of a round, and no statement is with them. They are read and aggregated in the run's own
process, by the job's strategy, and let go there: nothing of them is admitted, released or written down.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from coordinator.federation.aggregation import Advancing, Aggregator, Moments, NoAggregateError
from coordinator.federation.replies import InvalidReplyError
from protos.artifacts.bfloat16 import BFLOAT16, is_finite, widened
from protos.federation.site_check import MOST, SiteCheck, SiteCheckError
from protos.secagg.ring import NotEncodableError, Ring
from protos.secagg.round import ring_of

Part = NDArray[Any]  # (p,) float32, new parameters; of a masked run the change as words of the ring, without masks
_SMALL: Final = np.float32(1e-30)  # beside any parameter nothing


def made_model(parameters: int) -> NDArray[np.float32]:
    """(p,) float32 at zero, as a first round starts, but for numbers too small to change what is trained.

    Flower carries pieces that are alike once: of a model of zeros one MiB would travel, and a line's time for the
    later rounds would not be known.
    """
    return np.random.default_rng(0).random(parameters, np.float32) * _SMALL


def read_answer(raw: bytes) -> tuple[SiteCheck, memoryview]:
    """A site's report, and what follows its line; not copied, since it may be as large as a model.

    Raises:
        InvalidReplyError: "schema".
    """
    end = raw.find(b"\n", 0, MOST)
    try:
        return SiteCheck.of_bytes(raw[: max(end, 0)]), memoryview(raw)[end + 1 :]
    except SiteCheckError:
        raise InvalidReplyError("schema") from None


@dataclass(frozen=True, slots=True)
class PartForm:
    """What a part of a job's round looks like."""

    parameters: int
    precision: str  # of the numbers of a part in clear
    ring: Ring | None  # None: it is in clear

    @classmethod
    def of(cls, config: bytes, parameters: int, precision: str) -> Self:
        """Of a mechanism's public configuration."""
        values = json.loads(config)
        return cls(parameters, precision, ring_of(values, parameters) if "ring_bits" in values else None)

    def read(self, raw: memoryview) -> Part:
        """The numbers of a part.

        Raises:
            InvalidReplyError: "size"; "not_finite"; of a masked part "schema": beyond the job's bound.
        """
        if self.ring is not None:
            try:
                words = self.ring.read(raw)
            except NotEncodableError:
                raise InvalidReplyError("size") from None
            steps = words.view(f"<i{words.itemsize}")
            if not (-self.ring.peak <= int(steps.min()) and int(steps.max()) <= self.ring.peak):
                raise InvalidReplyError("schema")
            return words
        kind = np.dtype("<u2" if self.precision == BFLOAT16 else "<f4")
        if len(raw) != kind.itemsize * self.parameters:
            raise InvalidReplyError("size")
        numbers: Any = np.frombuffer(raw, kind)
        if not is_finite(numbers):
            raise InvalidReplyError("not_finite")
        return widened(numbers)

    def is_aggregated(
        self, parts: Sequence[tuple[str, Part]], start: NDArray[np.float32], aggregator: Aggregator
    ) -> bool:
        """Whether one step of the job's strategy makes a model of the parts. It is let go at once."""
        try:
            if self.ring is None:
                aggregator.step(start, parts, Moments())
            elif not parts or not isinstance(aggregator, Advancing):
                return False
            else:
                total = np.zeros(self.parameters, self.ring.dtype)
                for _, words in parts:
                    total += words
                aggregator.advance(start, self.ring.decode(self.ring.lower(total)) / len(parts), Moments())
        except NoAggregateError:
            return False
        return True
