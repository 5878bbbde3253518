"""The coordinator's own errors that several rooms raise or catch."""

from __future__ import annotations

from protos.common.errors import ConfigError


class CoordinatorConfigError(ConfigError, ValueError):
    """The directory cannot be used; the text names the file and the remedy."""
