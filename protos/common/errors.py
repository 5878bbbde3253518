"""The bases of every error of ours, one for each kind of cause. What a command prints and how it ends hangs on them.

None of them derives from ``ValueError``: many places catch that of a library, and must not swallow a refusal. A class
that used to be a ``ValueError`` remains one in addition to its base.

An error's text says what happened, why, and what to type next. It may hold what a person typed (of a path the last
part), a key or a value of a configuration, the names of classes in a network or a configuration, a name that Lazaret
made (of a release, a grant, a file in quarantine), the number of a line, and counts. It never holds what was read
from a patient's file or found in a folder of images: no value, no label or cell of a table, no name of a file or
folder that nobody typed, and no text of a library's error about such a file (of an ``OSError`` the ``strerror``
alone, without the path). ``tests/test_error_texts.py`` checks what of this can be seen in the code.
"""

from __future__ import annotations

import errno
from typing import ClassVar, Final

_PASSING: Final = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)


class LazaretError(Exception):
    """Base of all errors of ours. A command prints the text and ends with ``exit_code``."""

    exit_code: ClassVar[int] = 1


class ConfigError(LazaretError):
    """What a person wrote cannot be used: a configuration, a list, a key file, the words of a command."""


class RefusedError(LazaretError):
    """A check says no. Nothing was changed or sent."""


class UnreachableError(LazaretError):
    """The other side does not answer, or its answer is unusable: the coordinator, a PACS, a collector."""


class StorageError(LazaretError):
    """Files or databases of this machine cannot be read or written as they must be."""


class LedgerIntegrityError(StorageError):
    """A ledger contradicts its own signed heads. Nothing may be spent until a person has investigated."""

    exit_code: ClassVar[int] = 70


class ArtifactError(LazaretError):
    """Bytes from elsewhere are not in the form they must have: a file, an envelope, a certificate, a checkpoint."""


class PeerError(LazaretError):
    """Ends the answer to a peer. A code leaves this process, and never the text."""


class WorkerError(LazaretError):
    """A process that this one started failed, or a program that it needs is not installed."""


class TrainingError(LazaretError):
    """A training or a sampling cannot go on, or its result cannot be used."""


class InvariantError(LazaretError):
    """A guard of our own code: a mistake in the program, not in its input."""

    exit_code: ClassVar[int] = 70


def is_transient(error: BaseException) -> bool:
    """Whether the same may succeed later, though nobody changes anything: a silent peer, a busy ledger, a full disk.

    A ledger that contradicts itself needs a person.
    """
    if isinstance(error, OSError):
        return error.errno in _PASSING
    return isinstance(error, (UnreachableError, StorageError)) and not isinstance(error, LedgerIntegrityError)


class Signal(Exception):
    """Leaves a loop or waits for a person. It is no error, and no person reads it."""


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of this machine or of its accelerator. Few libraries have a class for it."""
    text = str(error)
    match error:
        case MemoryError():
            return True
        case OSError():
            return error.errno == errno.ENOMEM
        case RuntimeError():  # of torch, oneDNN and C++
            of_torch = type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in text
            return of_torch or text in ("could not create a primitive", "std::bad_alloc")
        case SystemError():  # of the interpreter, where a library did not say that nothing could be allocated
            return "without exception set" in text or "without setting an exception" in text
    panic = type(error).__name__ == "PanicException"  # of Rust, which hides what Python told it
    return panic and ("MemoryError" in text or "memory allocation" in text)
