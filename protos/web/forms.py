"""A form that was sent, read in memory: nothing of it touches a disk.

It is taken apart in a thread: a form can be made so that this takes seconds, and every other request waits for the
loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import FormParser, MultiPartException, MultiPartParser
from starlette.requests import Request

from protos.web.request import Form, PageError
from protos.web.security import BODY_BYTES

_MOST_FIELDS: Final = 300
_MOST_FILES: Final = 8


async def read_form(request: Request) -> tuple[Form, dict[str, bytes]]:
    """The fields and the files of a form.

    Raises:
        PageError: it is no form, or one with too much in it.
    """
    body = await request.body()  # the guard has bounded it
    return await run_in_threadpool(lambda: asyncio.run(_parsed(request.headers, body)))


async def _parsed(headers: Headers, body: bytes) -> tuple[Form, dict[str, bytes]]:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    fields: list[tuple[str, str]] = []
    files: dict[str, bytes] = {}
    try:
        if kind == "multipart/form-data":
            parser = MultiPartParser(
                headers, _stream(body), max_files=_MOST_FILES, max_fields=_MOST_FIELDS, max_part_size=BODY_BYTES
            )
            parser.spool_max_size = BODY_BYTES + 1  # in memory, whatever it is
            data = await parser.parse()
        elif kind == "application/x-www-form-urlencoded":
            data = await FormParser(headers, _stream(body), max_fields=_MOST_FIELDS).parse()
        else:
            raise PageError(415, "That is not a form of this console.")
    except (MultiPartException, ValueError):  # of a header too long, an encoding, a boundary that is none
        raise PageError(400, "The form is malformed or too large.") from None
    for name, value in data.multi_items():
        if isinstance(value, UploadFile):
            files[name] = await value.read()
            await value.close()
        else:
            fields.append((name, value))
    return Form(tuple(fields)), files


async def _stream(body: bytes) -> AsyncGenerator[bytes, None]:
    yield body
    yield b""
