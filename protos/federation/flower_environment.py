"""Silence Flower before it is imported: no telemetry, no update check, no installs, a private home.

Flower reads these variables while its modules are being imported, and by default it then reports start and stop
events to its vendor, asks for updates and writes a random identity below the user's home. A hospital's agent must not
open a connection that nobody configured. So both ``__main__`` files call `configure_environment` first and import
everything that leads to Flower *after* it: that is why those imports stand below a statement and carry a lint
exception. The adapters call `require_configured` and refuse to run in a process where this was forgotten.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from protos.common.errors import InvariantError
from protos.federation.messages import PIECE

# Flower 1.41 honours the first only when it is exactly "1" and the next two only at exactly "1".
SETTINGS: Final[Mapping[str, str]] = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    # The vendor's cloud API. Port 9 (discard) on loopback: a look-up by mistake ends there.
    "FLWR_SUPERGRID_API_URL": "http://127.0.0.1:9/none",
    # A cut costs at most the pieces that are under way: two seconds each at 4 Mbit/s.
    "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE": str(PIECE),
}
_HOME: Final = "FLWR_HOME"


class FlowerEnvironmentError(InvariantError, RuntimeError):
    """Flower is or would be imported with settings under which it may talk to the outside."""


def configure_environment(home: Path) -> None:
    """Set Flower's environment for this process and its children; give it ``home`` (made, mode 0700).

    Calling it again is harmless.

    Raises:
        FlowerEnvironmentError: Flower was already imported with other settings, which can no longer be undone.
    """
    loud = any(os.environ.get(name) != value for name, value in SETTINGS.items())
    if loud and "flwr" in sys.modules:
        raise FlowerEnvironmentError(
            "call protos.federation.flower_environment.configure_environment before anything imports flwr"
        )
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.environ.update({**SETTINGS, _HOME: str(home.absolute())})


def require_configured() -> None:
    """Refuse to go on unless `configure_environment` was called in this process or its parent.

    Raises:
        FlowerEnvironmentError: naming the variables that are not set as they must be.
    """
    loose = [name for name, value in SETTINGS.items() if os.environ.get(name) != value]
    if not os.environ.get(_HOME):
        loose.append(_HOME)
    if loose:
        raise FlowerEnvironmentError(
            f"call {__name__}.configure_environment first; not as required: {', '.join(loose)}"
        )
