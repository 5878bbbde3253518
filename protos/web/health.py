"""Metrics and health where somebody asks for them: a plain port for Prometheus and Kubernetes; and systemd."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from protos.operations.metrics import CONTENT_TYPE
from protos.operations.systemd import Systemd
from protos.web.server import PlainAnswer, PlainServing
from protos.web.settings import ConsoleSettings

Wrong = Callable[[], str | None]


def answers(page: Callable[[], bytes], live: Wrong, ready: Wrong) -> Mapping[str, Callable[[], PlainAnswer]]:
    """What each path says.

    Args:
        page: the metrics.
        live: what only a restart mends, or None.
        ready: what keeps the service from its work now, or None.
    """
    return {
        "/metrics": lambda: PlainAnswer(200, page(), CONTENT_TYPE),
        "/healthz": lambda: _told(live()),
        "/readyz": lambda: _told(ready()),
    }


def _told(wrong: str | None) -> PlainAnswer:
    return PlainAnswer(200, b"well\n") if wrong is None else PlainAnswer(503, f"{wrong}\n".encode())


@contextmanager
def watched_over(
    settings: ConsoleSettings | None, page: Callable[[], bytes], live: Wrong, ready: Wrong
) -> Iterator[int]:
    """While the service serves: the plain port where ``console.toml`` names one, and systemd told that it lives.

    Yields:
        The port; 0: none.
    Raises:
        ConsoleConfigError: the port cannot be used.
    """
    with ExitStack() as stack:
        port = 0
        if settings is not None and settings.metrics:
            serving = PlainServing(settings.metrics, answers(page, live, ready), settings.names)
            port = stack.enter_context(serving).port
        stack.enter_context(Systemd(live))
        yield port
