"""Heads of a site's own in federated runs: kept sealed in the vault beside the project, and never sent.

A head has taken the run's clipped and noised steps, so whoever held it would learn nothing beyond the run's price. It
stays all the same: what hospitals share is the rest of the network. The newest head of a run is kept, and the one
that each look was made with, since the run ends with the round that looked best.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agent.domain import Update
from agent.release.ports import VaultPort

_NEWEST: Final = "newest"
_FORM: Final = "<f4"


def beside(vault: VaultPort, run: str, model: Update) -> Update:
    """The global parameters with the head that this site has trained in the run so far, if it has one.

    Raises:
        ValueError: what is kept is no head.
        SiteStorageError: the vault cannot be read.
    """
    return replace(model, head=head_of(vault, run, _NEWEST))


def head_of(vault: VaultPort, run: str, name: str) -> NDArray[np.float32] | None:
    """A kept head, (h,); None: there is none.

    Args:
        vault: of the site.
        run: its name.
        name: "newest", or "look-1" and so on.
    Raises:
        ValueError: what is kept is no head.
    """
    raw = vault.place(_place(run, name)).read()
    return None if raw is None else np.frombuffer(raw, _FORM).astype(np.float32)


def keep(vault: VaultPort, run: str, head: NDArray[np.float32] | None) -> None:
    """The head that a round made, (h,), durable when this returns; nothing where the head is shared."""
    if head is not None:
        vault.place(_place(run, _NEWEST)).write(head.astype(_FORM).tobytes())


def keep_for_look(vault: VaultPort, run: str, number: int) -> None:
    """The head that a look is made with stays under the look's number, from 1."""
    raw = vault.place(_place(run, _NEWEST)).read()
    if raw is not None:
        vault.place(_place(run, f"look-{number}")).write(raw)


def _place(run: str, name: str) -> str:
    return f"own-head/{run}/{name}"
