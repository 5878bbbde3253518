"""The agent's own errors that several rooms raise or catch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protos.common.errors import (
    ArtifactError,
    ConfigError,
    RefusedError,
    StorageError,
    TrainingError,
    UnreachableError,
    WorkerError,
)

if TYPE_CHECKING:
    from policies.review.rules import Verdict


class CommandError(ConfigError, ValueError):
    """A command that cannot be carried out. The text says why and what to type; it quotes no file."""


class CohortTooSmallError(RefusedError, ValueError):
    """Fewer eligible patients than the mechanism needs. The text never says how many there are (P14)."""

    def __init__(self) -> None:
        """Say only that the cohort does not qualify."""
        super().__init__("the cohort does not qualify for this release")


class CoordinatorUnreachableError(UnreachableError):
    """No answer from the coordinator. The outcome is unknown, so the grant counts as spent until it is known."""


class AnotherRootError(CoordinatorUnreachableError):
    """What answers at the coordinator's address is not of the root that this site joined by."""


class SiteStorageError(StorageError, RuntimeError):
    """The site's store could not write or read: a disk error, not an error of the release."""


class LedgerForkError(CoordinatorUnreachableError):
    """The coordinator's ledger is not the one seen before; nothing goes to it until people have looked."""


class ReviewRejectedError(RefusedError):
    """A review refused; the verdict says why. Nothing left under it."""

    def __init__(self, where: str, verdict: Verdict) -> None:
        """``where`` is "site" or "coordinator"."""
        super().__init__("; ".join(f"{f.rule}: {f.detail}" for f in verdict.findings))
        self.where, self.verdict = where, verdict


class SiteConfigError(ConfigError, ValueError):
    """The site's directory cannot be used; the text names the file and the remedy."""


class OtherRunError(ArtifactError, ValueError):
    """The folder holds the checkpoint of another run: other configuration or other images."""


class TrainingCheckpointError(ArtifactError, ValueError):
    """A checkpoint cannot be read back. Delete it to begin anew; it was not changed."""


class DivergedError(TrainingError, ValueError):
    """The loss is not a number any more. The last good checkpoint stays."""


class ParserError(WorkerError, RuntimeError):
    """The worker could not be started: a fault of this installation, not of a file."""


class TransformError(TrainingError, ValueError):
    """A picture cannot be brought into the form that the task wants. The text names the transform, never a value."""
