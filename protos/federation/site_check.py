"""What a site says when it is asked whether it could take part in a run: both ends; closed words and bounded numbers.

Nothing in it comes of a patient: no cohort is counted and no image is read for it. What it says of time is of made
patients, as many as the task's public bound; of memory it says whether they fit, and no figure, since the most that a
process and its children took remembers the rounds before. No text of a site's crosses: what is wrong is one of
:data:`WRONG`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Final, Self

from protos.common.canonical_json import json_object
from protos.common.errors import PeerError
from protos.federation.messages import PIECE

PROBE: Final = 2 * PIECE  # bytes each way, by which the line is measured
MOST: Final = 1 << 14  # bytes of a report
_VERSION: Final = re.compile(r"[0-9a-z.+-]{1,32}")
_LARGEST: Final = 1e12
PLANS: Final[Mapping[str, str]] = MappingProxyType(
    {"none": "no approval needed", "approved": "approved", "waiting": "persons decide", "refused": "refused"}
)
DEVICES: Final = frozenset({"cpu", "cuda"})
# what may be wrong -> in words, for the operator
WRONG: Final[Mapping[str, str]] = MappingProxyType(
    {
        "mechanism": "this version does not know the task, or its network has another number of parameters",
        "round_seconds": "a round may last longer than the site allows (most_round_seconds in its site.toml)",
        "weights": "a public file that the task begins at is not there, or the site does not vouch for it",
        "labels": "the label table of the task is not there, or has other columns",
        "engine": "the engine that the site has chosen cannot train this network",
        "memory": "one step on made input of the real size does not fit in memory",
        "time": "by the made step a round would last longer than the job's round_seconds",
        "training": "one step on made input failed; the site's log says how",
        "disk": "the vault or the folder of jobs cannot be written, or the disk is nearly full",
        "shared_memory": "no memory can be shared with the process that trains",
        "certificate": "its certificate ends within two hours and was not renewed",
        "accelerator": "device = auto, and there is no accelerator: it would train by the processor",
        "policy": "a rule of the site's policy speaks against the price; the site's log says which",
    }
)
NOTES: Final = frozenset({"accelerator"})  # to be known, and no reason against the run


class SiteCheckError(PeerError, ValueError):
    """The bytes are no report."""


@dataclass(frozen=True, slots=True)
class SiteCheck:
    """One site's answer."""

    version: str  # of its agent
    plan: str  # one of PLANS: where the approval of its persons stands
    device: str  # one of DEVICES
    seconds: float  # that a round would compute, by the made step; 0: not known
    rate: float  # bytes a second from the coordinator, measured on the probe; 0: not known
    wrong: tuple[str, ...] = ()  # of WRONG

    @property
    def could(self) -> bool:
        """Whether nothing speaks against its part."""
        return not set(self.wrong) - NOTES and self.plan != "refused"

    def to_bytes(self) -> bytes:
        """JSON."""
        return json.dumps(asdict(self), allow_nan=False).encode()

    @classmethod
    def of_bytes(cls, raw: bytes) -> Self:
        """The reverse, strictly.

        Raises:
            SiteCheckError: a word that is not on its list, a number out of bounds, another key.
        """
        try:
            if len(raw) > MOST:
                raise ValueError
            return cls.of_table(json_object(raw.decode()))
        except (ValueError, TypeError, KeyError):
            raise SiteCheckError("not a report") from None

    @classmethod
    def of_table(cls, told: Mapping[str, Any]) -> Self:
        """The same from its parts.

        Raises:
            ValueError, TypeError: as above.
        """
        one = cls(**{**told, "wrong": tuple(told["wrong"])})
        numbers = (one.seconds, one.rate)
        right = (
            type(one.version) is str
            and _VERSION.fullmatch(one.version) is not None
            and one.plan in PLANS
            and one.device in DEVICES
            and all(type(n) in (int, float) and 0 <= n <= _LARGEST for n in numbers)  # neither NaN nor infinity
            and set(one.wrong) <= WRONG.keys()
            and len(one.wrong) == len(set(one.wrong))
        )
        if not right:
            raise ValueError("not a report")
        return one
