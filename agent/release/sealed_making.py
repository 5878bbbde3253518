"""What a confined process is handed: what it shall call, and its patients' images, in sealed memory.

This is the one file in which anything is pickled or unpickled (a test of the whole tree says so). The agent writes it
for its own child, in memory that nobody can change once it is sealed; a process opens it that is confined by then and
has nothing. Networks are code of a hundred classes: a form of our own for them would be pickle by another name.
Nothing that comes from elsewhere is ever read so, and what the child answers is not
(:mod:`agent.release.maker_values`).
"""

from __future__ import annotations

import fcntl
import io
import os
import pickle
import re
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from agent.mechanisms.common.workspace import Workspace

_ALIGNED: Final = 64
_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_ACCELERATOR: Final = re.compile(r"cuda(?::[0-9]{1,2})?")  # what a configuration may call one
_WORKSPACE: Final = "workspace"  # stays on the agent's side, and is reached over the pipe


def _of_accelerator(one: Any) -> bool:
    """Whether it computes on an accelerator that this machine has: a tensor, or a configuration's ``device``.

    A word alone decides nothing: a label, a class or a template may be any.
    """
    if (torch := sys.modules.get("torch")) is None:
        return False
    if isinstance(one, torch.Tensor):
        return one.device.type not in {"cpu", "meta"}
    name = getattr(one, "device", "") if "device" in getattr(type(one), "__dataclass_fields__", ()) else ""
    if not isinstance(name, str) or not _ACCELERATOR.fullmatch(name):
        return False
    return bool((torch.device(name).index or 0) < torch.cuda.device_count())


class _Pickler(pickle.Pickler):
    """Leaves the workspace on this side; notes whether anything is of an accelerator."""

    accelerated = False

    def persistent_id(self, one: Any) -> str | None:
        """A word instead of it; None: it goes along."""
        if isinstance(one, Workspace):
            return _WORKSPACE
        self.accelerated = self.accelerated or _of_accelerator(one)
        return None


def empty() -> int:
    """The descriptor of memory that holds nothing yet: a process can be started with it before there is a call."""
    return os.memfd_create("making", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


@dataclass(frozen=True, slots=True)
class Pickled:
    """A call as bytes: numbers of bytes, the pickles of function and arguments, then their arrays."""

    views: Sequence[memoryview]
    first: int  # of the arrays, how many are the function's
    accelerated: bool  # it works on an accelerator

    def seal(self, descriptor: int) -> None:
        """Write it to :func:`empty` memory, which nobody can change from here on."""
        with os.fdopen(descriptor, "wb", closefd=False) as out:
            out.write(struct.pack(f"<QQ{len(self.views)}Q", len(self.views), self.first, *map(_bytes, self.views)))
            for view in self.views:
                out.write(bytes(-out.tell() % _ALIGNED))
                out.write(view)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)


def _bytes(view: memoryview) -> int:
    return view.nbytes


def pickled(call: Callable[..., Any], given: Sequence[Any]) -> Pickled:
    """A call, and whether it works on an accelerator."""
    buffers: list[pickle.PickleBuffer] = []
    bodies = io.BytesIO(), io.BytesIO()
    picklers = [_Pickler(body, protocol=5, buffer_callback=buffers.append) for body in bodies]
    held = [0]
    for pickler, one in zip(picklers, (call, given), strict=True):
        pickler.dump(one)
        held.append(len(buffers))
    views = [*(body.getbuffer() for body in bodies), *(one.raw() for one in buffers)]
    return Pickled(views, held[1], any(pickler.accelerated for pickler in picklers))


def opened(memory: memoryview, bench: Workspace) -> tuple[Any, Sequence[Any]]:
    """What :func:`pickled` took, over there: the call and what it is given. Their arrays lie where they are.

    Args:
        memory: all of it.
        bench: stands there for the one that stayed here.
    """
    count, first = struct.unpack_from("<QQ", memory)
    at, views = 8 * (2 + count), list[memoryview]()
    for length in struct.unpack_from(f"<{count}Q", memory, 16):
        at += -at % _ALIGNED
        views.append(memory[at : at + length])
        at += length

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, _: Any) -> Any:
            return bench

    bodies, buffers = views[:2], views[2:]
    parts = (bodies[0], buffers[:first]), (bodies[1], buffers[first:])
    call, given = (Unpickler(io.BytesIO(body), buffers=held).load() for body, held in parts)
    return call, given
