"""What an experiment has computed, kept in a folder: a killed run goes on, and nothing is computed twice."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from protos.common.durable_files import replace_file
from protos.common.errors import RefusedError, StorageError

Say = Callable[[str], None]


class BusyError(RefusedError, RuntimeError):
    """Another run works in the folder."""


class CellError(StorageError, ValueError):
    """A kept number cannot be read back. Delete the file to compute it anew."""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder, made if need be, that nobody else works in meanwhile.

    Raises:
        BusyError: somebody does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as fault:
            raise BusyError("another run works in this folder") from fault
        yield


class Kept:
    """Numbers and arrays, each made once, found by everything that they depend on but the program's version.

    Each is written beside its place and renamed, so it is there or it is not.
    """

    def __init__(self, folder: Path, digest: str, say: Say) -> None:
        """``digest`` is of all that the numbers of this experiment depend on; ``say`` is told what is being done."""
        self.folder, self.digest, self.say = folder, digest, say
        self._held: dict[str, Any] = {}

    def rng(self, *words: object) -> np.random.Generator:
        """A stream of its own for each purpose: results do not depend on the order in which they are computed."""
        return np.random.Generator(np.random.Philox(int(sha([str(w) for w in words])[:16], 16)))

    def numbers(self, key: str, compute: Callable[[], Mapping[str, float]]) -> dict[str, float]:
        """The numbers of a key, computed once. NaN and infinity are kept as they are."""
        path = self.folder / "numbers" / f"{sha([self.digest, key])[:32]}.json"
        if not path.exists():
            self.say(key)
            path.parent.mkdir(exist_ok=True)
            told = {name: float(value).hex() for name, value in compute().items()}
            replace_file(path, json.dumps({"key": key, "values": told}, indent=1).encode())
        try:
            kept = json.loads(path.read_bytes())
            if kept["key"] != key:
                raise CellError(f"numbers/{path.name} is damaged: delete it to compute it anew")
            return {name: float.fromhex(value) for name, value in kept["values"].items()}
        except (KeyError, TypeError, ValueError) as fault:
            raise CellError(f"numbers/{path.name} is damaged: delete it to compute it anew") from fault

    def arrays(
        self, key: str, compute: Callable[[], Mapping[str, NDArray[Any]]], told: str
    ) -> dict[str, NDArray[Any]]:
        """The arrays of a key, computed once; ``told`` is what a person is told meanwhile."""
        path = self.folder / "arrays" / f"{sha([self.digest, key])[:32]}.safetensors"
        if not path.exists():
            self.say(told)
            path.parent.mkdir(exist_ok=True)
            plain = {name: np.ascontiguousarray(value) for name, value in compute().items()}
            replace_file(path, safetensors.numpy.save(plain, {"key": key}))
        try:
            out: dict[str, NDArray[Any]] = safetensors.numpy.load(path.read_bytes())
        except safetensors.SafetensorError as fault:
            raise CellError(f"arrays/{path.name} is damaged: delete it to compute it anew") from fault
        return out

    def held(self, key: str, make: Callable[[], Any]) -> Any:
        """Something that is kept in memory only."""
        if key not in self._held:
            self._held[key] = make()
        return self._held[key]


def sha(value: object) -> str:
    """SHA-256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
