"""The coordinator's time with every answer to Hello, so that a site's doctor can compare the clocks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import grpc

from coordinator.edges.guard import Call

KEY: Final = "lazaret-time"  # seconds since 1970, in the answer's initial metadata
_METHOD: Final = "/Hello"


class Dated(grpc.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """For :func:`coordinator.edges.port.start`, behind the guard: a stranger is not told even that."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """``clock``: seconds since 1970."""
        self._clock = clock

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """The handler of Hello with the time before its answer; every other one as it is."""
        handler = continuation(details)
        if handler is None or not str(details.method).endswith(_METHOD) or handler.unary_unary is None:
            return handler

        def answer(request: Any, call: Call) -> Any:  # the guard, which is outside, hands on a call
            call.context.send_initial_metadata(((KEY, f"{self._clock():.3f}"),))
            return handler.unary_unary(request, call)

        return grpc.unary_unary_rpc_method_handler(
            answer, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
        )
