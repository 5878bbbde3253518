"""What the fold keeps of budgets: an account, and a grant that holds a part of it."""

from __future__ import annotations

from dataclasses import dataclass

from policies.entries import LimitSet, Opened, Recovered, Reserved


@dataclass(slots=True)
class Account:
    """A lifetime budget of one kind for one site's patients."""

    opened: Opened
    held: int = 0
    spent: int = 0
    changed: LimitSet | None = None  # the limit as persons last set it

    @property
    def limit(self) -> int:
        """What may be held and spent together, ever."""
        return self.changed.limit if self.changed else self.opened.limit

    @property
    def epsilon(self) -> str:
        """The limit as people state it."""
        return self.changed.epsilon if self.changed else self.opened.epsilon

    @property
    def left(self) -> int:
        """What may still be reserved; negative after a limit was lowered below what is gone."""
        return self.limit - self.held - self.spent


@dataclass(slots=True)
class Grant:
    """Budget reserved for one release, or for one site's part in one federated run."""

    reserved: Reserved | Recovered
    state: str = "held"  # "held" | "spent" | "freed"
    used: int = 0
    last_round: int = 0
    sent: int = 0  # in a site's own ledger: what set out under it has consumed, answered or not
