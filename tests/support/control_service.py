"""A service with one act behind a control socket."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from protos.common.errors import InvariantError, LedgerIntegrityError, RefusedError, StorageError, UnreachableError
from protos.service.control_app import add_act, control_app
from protos.service.control_socket import control_socket

ERRORS: dict[str, Exception] = {
    "no": RefusedError("that account is unknown: `ledger show` lists them"),
    "ledger": LedgerIntegrityError("the ledger does not fold"),
    "ours": InvariantError("patient 7"),
    "theirs": ValueError("patient 7"),
    "disk": OSError(28, "No space left on device", "/somewhere/vault.db"),
    "rights": PermissionError(13, "Permission denied", "/somewhere/vault.db"),
    "away": UnreachableError("no answer from the coordinator"),
    "busy": StorageError("another command has the ledger"),
}


class Log:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def _told(self, event: str, **more: Any) -> None:
        self.lines.append((event, more))

    info = warning = error = _told


def limit(_store: None, account: str, budget: int = 1) -> dict[str, Any]:
    """An act."""
    if account in ERRORS:
        raise ERRORS[account]
    if account == "slow":
        time.sleep(1)
    return {"account": account, "budget": budget}


def app() -> Any:
    made = control_app("agent", "1.2", Log())
    add_act(made, "ledger/limit", limit, lambda act, fields: act(None, **fields))
    return made


if __name__ == "__main__":
    with control_socket(Path(sys.argv[1]), app(), Log()):
        sys.stdout.write("up\n")
        sys.stdout.flush()
        time.sleep(600)
