"""Store a label table in a vault, with a kill -9 before the Nth statement of the database: ``FOLDER N``."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from agent.storage.encrypted_sqlite import EncryptedDatabase
from agent.storage.label_tables import LabelColumn, LabelTable, keep_table
from tests.support.vault_records import key_of, open_vault


def main() -> int:
    left = int(sys.argv[2])
    rows = EncryptedDatabase.rows

    def watched(self: EncryptedDatabase, statement: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return rows(self, statement, values)

    vault = open_vault(Path(sys.argv[1]))
    EncryptedDatabase.rows = watched  # type: ignore[method-assign]
    persons = [key_of(number, 3) for number in range(50)]
    found = {(person, person): (1,) for person in persons}
    keep_table(vault, LabelTable("findings", "patient-id", "patient", (LabelColumn("effusion", "binary"),), found))
    EncryptedDatabase.rows = rows  # type: ignore[method-assign]
    return 0


if __name__ == "__main__":
    sys.exit(main())
