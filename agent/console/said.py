"""What may go wrong with an act, as a refusal with its sentence; whatever else goes wrong stays an internal fault."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from agent import site_commands
from agent.console.desk import NoSuchReleaseError
from agent.edges.vault import VaultError
from agent.nouns import Forked, NotKept, Unreachable
from policies.entries import InvalidEntry
from policies.ledger import KeyReused
from policies.policy import PolicyError
from policies.statement import MalformedStatement
from policies.store import LedgerBusy, LedgerStopped, LedgerUnsound
from protos.blocks import BadArtifact
from protos.web.pages import Refusal

_BUSY: Final = (
    "another command of this agent holds the ledger (a release that is being made, or `serve` without this console): "
    "nothing was done; try again when it has ended"
)
_WORDS: Final = (
    *site_commands.EXPECTED,
    BadArtifact,
    InvalidEntry,
    KeyReused,
    MalformedStatement,
    PolicyError,
    VaultError,
    NotKept,
)


def sentence(error: Exception) -> str:
    """What is wrong, without a word that may hold patient data."""
    if isinstance(error, LedgerBusy):
        return _BUSY
    if isinstance(error, NoSuchReleaseError):
        return str(error)
    if isinstance(error, (LedgerStopped, LedgerUnsound, Unreachable, OSError, *_WORDS)):
        return site_commands.sentence(error)
    return f"an internal fault ({type(error).__name__}); the log may say more"


@contextlib.contextmanager
def said() -> Iterator[None]:
    """Let people read what went wrong.

    Raises:
        Refusal: 404 where no such release is kept (any more), 409 where something is in the way of what was asked,
            503 where nothing can be asked at all.
    """
    try:
        yield
    except (LedgerStopped, LedgerUnsound, Forked) as error:
        raise Refusal(503, _finished(f"stopped: {error}")) from None
    except Unreachable as error:
        raise Refusal(503, _finished(f"the coordinator cannot be asked: {error}")) from None
    except NoSuchReleaseError as error:
        raise Refusal(404, _finished(str(error))) from None
    except (LedgerBusy, OSError, *_WORDS) as error:
        raise Refusal(409, _finished(sentence(error))) from None


def _finished(text: str) -> str:
    """A text as a sentence."""
    text = text.strip()
    if not text.partition(" ")[0].endswith(":"):  # else it begins with the name of an archive or a file
        text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "?", "!")) else text + "."
