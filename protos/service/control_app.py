"""The HTTP application behind a control socket: acts with named fields, errors with a sentence and an exit status.

Its description is OpenAPI, made from the acts' own signatures: ``GET /v1/openapi.json``.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ConfigDict, create_model
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from protos.common.errors import InvariantError, LazaretError, LedgerIntegrityError, RefusedError, is_transient
from protos.service.control_client import API, PROBLEM

Act = Callable[..., Any]  # the first argument is what the service works with, the others are fields


class NotTextError(RefusedError):
    """A field of a request is no Unicode text."""


def control_app(side: str, version: str, log: Any) -> FastAPI:
    """An application that knows ``/v1``: what is running here, and ``/v1/health``: what only a restart mends.

    A side adds its acts, and sets ``state.wrong`` to what says what is wrong with it, or None.

    Args:
        side: "agent" or "coordinator".
        version: of the program.
        log: hears of each act by its name, but for those that only look.
    """
    app = FastAPI(
        title=f"Lazaret {side}: control socket",
        version=str(API),
        openapi_url=f"/v{API}/openapi.json",
        docs_url=None,
        redoc_url=None,
    )

    app.state.log = log
    app.state.wrong = lambda: None

    @app.get(f"/v{API}")
    def about() -> dict[str, Any]:
        return {"api": API, "side": side, "version": version, "pid": os.getpid()}

    @app.get(f"/v{API}/health")
    def health() -> dict[str, str | None]:
        return {"wrong": app.state.wrong()}

    app.add_exception_handler(RequestValidationError, lambda _, error: as_problem(error, 422))
    app.add_exception_handler(HTTPException, lambda _, error: as_problem(error, getattr(error, "status_code", 500)))
    app.add_exception_handler(LazaretError, lambda _, error: as_problem(error, 409))
    app.add_exception_handler(OSError, lambda _, error: as_problem(error, 507))
    app.add_exception_handler(Exception, lambda _, error: as_problem(error, 500))
    return app


def add_act(
    app: FastAPI, name: str, act: Act, run: Callable[[Act, Mapping[str, Any]], Any], *, looks: bool = False
) -> None:
    """``POST /v1/NAME`` with the act's own parameters as fields; a field that it does not have is refused.

    Args:
        app: of :func:`control_app`.
        name: the path below ``/v1``.
        act: its signature, without the first parameter, is the form of the request.
        run: carries it out with fields, in a thread.
        looks: it changes nothing, and pages ask for it every few seconds: it leaves no line in the log.
    """
    hints, parameters = get_type_hints(act), list(inspect.signature(act).parameters.values())[1:]
    fields: Any = {p.name: (hints[p.name], ... if p.default is p.empty else p.default) for p in parameters}
    form = create_model(
        f"{name.replace('/', ' ').title().replace(' ', '')}Fields", __config__=ConfigDict(extra="forbid"), **fields
    )

    def carry_out(asked: Any) -> Any:
        fields = asked.model_dump()
        try:
            json.dumps(fields, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError:  # half of a surrogate pair, which JSON can write and no file takes
            raise NotTextError("a field holds what is no text: send Unicode characters") from None
        if not looks:
            app.state.log.info("control_act", action=name)
        return run(act, fields)

    carry_out.__annotations__.update({"asked": form, "return": hints.get("return", Any)})
    carry_out.__doc__ = act.__doc__
    app.post(f"/v{API}/{name}", name=name)(carry_out)


def as_problem(error: Exception, status: int) -> Response:
    """What a caller is told of an error: its class, a sentence, the exit status that the command ends with, and
    whether the same may succeed later.

    Texts of errors that are not ours may hold patient data, and stay here.
    """
    told = {
        "code": type(error).__name__,
        "sentence": _sentence(error),
        "exit": error.exit_code if isinstance(error, LazaretError) else 70 if status == 500 else 1,
        "stopped": isinstance(error, LedgerIntegrityError),
        "again": is_transient(error),
    }
    return JSONResponse(told, status, media_type=PROBLEM)


def _sentence(error: Exception) -> str:
    if isinstance(error, RequestValidationError):
        if any(one["type"] == "json_invalid" for one in error.errors()):
            return "the request is not JSON"
        wrong = sorted({".".join(str(part) for part in one["loc"][1:]) or "the request" for one in error.errors()})
        return f"the service does not take these fields: {', '.join(wrong)[:200]}; see /v{API}/openapi.json"
    if isinstance(error, HTTPException) and error.status_code not in (404, 405):
        return "the request cannot be read"
    if isinstance(error, HTTPException):
        return f"the running service has no such path: it may be older than this command; see /v{API}/openapi.json"
    if isinstance(error, OSError):
        return f"{error.strerror or type(error).__name__}: {Path(str(error.filename or '')).name}"
    if isinstance(error, LazaretError) and not isinstance(error, InvariantError):
        return str(error)
    return f"internal fault ({type(error).__name__})"
