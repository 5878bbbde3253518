"""How a command gets short work done: by the service that runs on this machine, or by itself.

One process writes a site's ledger. Where ``serve`` holds it, a command asks it over the control socket
(:mod:`protos.service`); where nothing runs, the command opens the ledger for as long as its act takes. Both run the
functions of :mod:`agent.service.site`, which a command that only asks does not import.
"""

from __future__ import annotations

import getpass
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from protos.service.control_client import ask_or_do

if TYPE_CHECKING:
    from policies.governance.acts import Acts
    from policies.review.rules import Finding, Verdict

PROGRAM: Final = "lazaret-agent"  # in sentences that say what to type


@contextmanager
def site_acts(root: Path, say: Callable[[str, str], None]) -> Iterator[Acts]:
    """The acts on a site: through the service that runs in its directory, or here where none runs.

    ``say``: hears of the steps of what is done here: also of what an interrupted command left.

    Raises:
        ServiceRefusedError: the service runs under another user, or is of another version.
    """

    def here(act: str, **fields: Any) -> Any:
        from agent.service.site import carry_out  # noqa: PLC0415 - half a second that a question to the service saves

        return carry_out(root, say, act, fields)

    with ask_or_do(root, here, another_writes) as do:
        yield do


def another_writes(error: Exception) -> bool:
    """Another process has the ledger."""
    from policies.ledger.store import LedgerBusyError  # noqa: PLC0415 - who only asks waits for none of this

    return isinstance(error, LedgerBusyError)


def read_verdict(told: Mapping[str, Any]) -> Verdict:
    """A verdict as the acts tell it."""
    from policies.review.rules import Verdict  # noqa: PLC0415 - as above

    return Verdict(read_findings(told), told["level"])


def read_findings(told: Mapping[str, Any]) -> tuple[Finding, ...]:
    """The findings of a verdict or of a dry run."""
    from policies.review.rules import Finding  # noqa: PLC0415 - as above

    return tuple(Finding(one["rule"], one["detail"]) for one in told["findings"])


def operator_name() -> str:
    """Who asks, as the operating system has it."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.getuid()}"
