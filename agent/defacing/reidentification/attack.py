"""An attacker of defaced heads (C-DeID-GAN, Fig. 3): learns on public people, then picks a person's head.

The attacker has other people's heads before and after the same method, and learns from them what the method leaves. A
release of refaced heads is judged by how many people this attacker re-identifies. The paper's figure, with chance and
power for each rate, is computed outside the agent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agent.defacing.reidentification.icp import Fit
from agent.defacing.reidentification.matching import Choice, Learn, People, chosen, matchers


@dataclass(frozen=True, slots=True, eq=False)
class Attacker:
    """The attacker's configuration."""

    fit: Fit = field(default_factory=Fit)
    only: tuple[str, ...] = ()  # names of matchers; (): all

    def learned(self, public: People) -> Choice:
        """The matcher that this attacker relies on, from people who are not tested.

        Raises:
            ValueError: too few people, or no matcher is left.
        """
        offered: Mapping[str, Learn] = matchers(public.known[0], len(public.known), self.fit)
        offered = {name: one for name, one in offered.items() if not self.only or name in self.only}
        if not offered:
            raise ValueError("an attacker has a matcher")
        return chosen(public, offered)
