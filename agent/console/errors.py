"""Expected errors of an action become a refusal with a sentence; all others stay internal errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from agent.console.context import NoSuchReleaseError
from agent.console.proposal_process import ProposalNotCheckedError
from agent.errors import CoordinatorUnreachableError, LedgerForkError, SiteStorageError
from agent.ingest import errors as ingest_errors
from agent.service.job_proposals import NotTheirApprovalError
from agent.service.jobs import JobRecordError, JobStateError, NoSuchJobError
from agent.storage.encrypted_sqlite import VaultError
from policies.ledger.entries import InvalidEntryError
from policies.ledger.state import KeyReusedError
from policies.ledger.store import LedgerBusyError, LedgerStoppedError, LedgerUnsoundError
from policies.review.policy import PolicyError
from policies.statements import StatementError
from protos.artifacts.byte_source import ArtifactFormatError
from protos.service.control_client import (
    ServiceAnswerError,
    ServiceFaultError,
    ServiceHinderedError,
    ServiceRefusedError,
    ServiceStoppedError,
)
from protos.web.router import PageError

_BUSY: Final = (
    "another command of this agent uses the ledger (a release in progress, or a `serve` that cannot be asked): "
    "nothing was done; try again when it has ended"
)
_WORDS: Final = (
    *ingest_errors.EXPECTED,
    ArtifactFormatError,
    InvalidEntryError,
    KeyReusedError,
    StatementError,
    PolicyError,
    VaultError,
    SiteStorageError,
    JobRecordError,
    JobStateError,
    NotTheirApprovalError,
    ServiceRefusedError,
    ServiceHinderedError,
    ServiceAnswerError,
    ServiceStoppedError,
    ServiceFaultError,
)


def sentence(error: Exception) -> str:
    """What is wrong, without a word that may hold patient data."""
    if isinstance(error, LedgerBusyError):
        return _BUSY
    if isinstance(error, NoSuchReleaseError):
        return str(error)
    if isinstance(error, (LedgerStoppedError, LedgerUnsoundError, CoordinatorUnreachableError, OSError, *_WORDS)):
        return ingest_errors.sentence(error)
    return f"internal error ({type(error).__name__}): see agent.log"


@contextlib.contextmanager
def errors_as_pages() -> Iterator[None]:
    """Let people read what went wrong.

    Raises:
        PageError: 404 where there is no such job or release (any more), 409 where something is in the way of what was
            asked, 503 where nothing can be asked at all.
    """
    try:
        yield
    except (LedgerStoppedError, LedgerUnsoundError, LedgerForkError) as error:
        raise PageError(503, _finished(f"stopped: {error}")) from None
    except (ServiceStoppedError, ServiceFaultError) as error:
        raise PageError(503, _finished(f"the service cannot do it: {error}")) from None
    except CoordinatorUnreachableError as error:
        raise PageError(503, _finished(f"the coordinator cannot be reached: {error}")) from None
    except (ProposalNotCheckedError, ServiceAnswerError) as error:
        raise PageError(503, _finished(str(error))) from None
    except (NoSuchReleaseError, NoSuchJobError) as error:
        raise PageError(404, _finished(str(error))) from None
    except (LedgerBusyError, OSError, *_WORDS) as error:
        raise PageError(409, _finished(sentence(error))) from None


def _finished(text: str) -> str:
    """A text as a sentence."""
    text = text.strip()
    if not text.partition(" ")[0].endswith(":"):  # else it begins with the name of an archive or a file
        text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "?", "!")) else text + "."
