"""Metrics and health where somebody asks for them: a plain port for Prometheus and Kubernetes; and systemd."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from protos.operations.metrics import CONTENT_TYPE
from protos.operations.systemd import Systemd
from protos.web.server import PlainAnswer, PlainServing
from protos.web.settings import ConsoleSettings

Wrong = Callable[[], str | None]


@dataclass(frozen=True, slots=True)
class Health:
    """Three questions about a service; each answer is what is wrong, or None."""

    live: Wrong  # what only a restart mends
    ready: Wrong  # what keeps it from its own work now
    joined: Wrong = lambda: None  # what parts it from the others: no restart here mends that


def answers(page: Callable[[], bytes], health: Health) -> Mapping[str, Callable[[], PlainAnswer]]:
    """What each path says. ``/healthz`` is well where only the connection is not, and says so in a second line.

    ``page``: the metrics.
    """
    return {
        "/metrics": lambda: PlainAnswer(200, page(), CONTENT_TYPE),
        "/healthz": lambda: _told(health.live(), health.joined() or ""),
        "/readyz": lambda: _told(health.ready()),
        "/joinedz": lambda: _told(health.joined()),
    }


def _told(wrong: str | None, besides: str = "") -> PlainAnswer:
    if wrong is not None:
        return PlainAnswer(503, f"{wrong}\n".encode())
    return PlainAnswer(200, f"well\n{besides}\n".encode() if besides else b"well\n")


@contextmanager
def watched_over(settings: ConsoleSettings | None, page: Callable[[], bytes], health: Health) -> Iterator[int]:
    """While the service serves: the plain port where ``console.toml`` names one, and systemd told that it lives.

    Yields:
        The port; 0: none.
    Raises:
        ConsoleConfigError: the port cannot be used.
    """
    with ExitStack() as stack:
        port = 0
        if settings is not None and settings.metrics:
            serving = PlainServing(settings.metrics, answers(page, health), settings.names)
            port = stack.enter_context(serving).port
        stack.enter_context(Systemd(health.live))
        yield port
