"""``systemctl`` for machines where systemd does not run: starts what an installed unit says, as systemd would.

    systemctl enable --now UNIT | daemon-reload        UNITS and RUN name the folders of units and of process ids

Of the unit it takes the condition, the environment, the working directory and the command, and holds the service to
``Type=notify``: it has started when it says so. What the unit forbids is checked apart.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

PATIENCE_S = 60.0


def settings(text: str) -> Iterator[tuple[str, str]]:
    """Each line NAME=VALUE of a unit."""
    for line in text.splitlines():
        name, sign, value = line.partition("=")
        if sign and not line.startswith(("#", ";")):
            yield name, value


def start(unit: Path, run: Path) -> int:
    """Start a service, and wait until it is ready."""
    of = list(settings(unit.read_text()))
    one = dict(of)
    if not Path(one["ConditionPathExists"]).exists():
        sys.stderr.write(f"{unit.name} was skipped because of an unmet condition check\n")
        return 1
    more = dict(word.split("=", 1) for name, value in of if name == "Environment" for word in shlex.split(value))
    command = [word for word in shlex.split(one["ExecStart"]) if not word.startswith("$")]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told, tempfile.TemporaryDirectory() as folder:
        if one["Type"] == "notify":
            told.bind(f"{folder}/notify")
            told.settimeout(PATIENCE_S)
            more["NOTIFY_SOCKET"] = f"{folder}/notify"
        base = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        log = (run / f"{unit.stem}.log").open("wb")
        process = subprocess.Popen(
            command, env={**base, **more}, cwd=one["WorkingDirectory"], stdout=log, stderr=log, start_new_session=True
        )
        (run / f"{unit.stem}.pid").write_text(str(process.pid))
        if one["Type"] == "notify":
            try:
                while b"READY=1" not in told.recv(4096):
                    pass
            except TimeoutError:
                sys.stderr.write(f"{unit.name}: never said that it is ready\n")
                return 1
    return 0


def main() -> int:
    """As systemctl's own."""
    match sys.argv[1:]:
        case ["daemon-reload"]:
            return 0
        case ["enable", "--now", name]:
            return start(Path(os.environ["UNITS"]) / f"{name}.service", Path(os.environ["RUN"]))
    return 2


if __name__ == "__main__":
    sys.exit(main())
