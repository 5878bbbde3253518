"""What was measured: latencies by method as the agents saw them, and what the coordinator's process used."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import numpy as np

_TICKS = os.sysconf("SC_CLK_TCK")
_SAMPLE_S = 0.5


@dataclass
class Calls:
    """Every call that was made: by method and status, how long each took. Any thread."""

    took: dict[str, dict[str, list[float]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    mutex: threading.Lock = field(default_factory=threading.Lock)

    def note(self, method: str, code: str, seconds: float) -> None:
        with self.mutex:
            self.took[method][code].append(round(seconds, 5))


class Timer(grpc.UnaryUnaryClientInterceptor, grpc.StreamUnaryClientInterceptor, grpc.StreamStreamClientInterceptor):  # type: ignore[misc]
    """Times each call of a channel from its start to its last byte; session streams are left alone."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    def _whole(self, continuation: Callable[[Any, Any], Any], details: Any, request: Any) -> Any:
        began = time.monotonic()
        outcome = continuation(details, request)  # returns when the call is over
        self.calls.note(_method(details), outcome.code().name, time.monotonic() - began)
        return outcome

    intercept_unary_unary = intercept_stream_unary = _whole

    def intercept_stream_stream(self, continuation: Callable[[Any, Any], Any], details: Any, parts: Any) -> Any:
        return self._parts(continuation(details, parts), _method(details), time.monotonic())

    def _parts(self, replies: Any, method: str, began: float) -> Iterator[Any]:
        code = "OK"
        try:
            yield from replies
        except grpc.RpcError as error:
            code = error.code().name
            raise
        finally:
            self.calls.note(method, code, time.monotonic() - began)


def _method(details: Any) -> str:
    return str(details.method).rpartition("/")[2]


def table(took: Iterable[Mapping[str, Mapping[str, list[float]]]], seconds: float) -> dict[str, dict[str, Any]]:
    """By method: how many calls, per second, which ended otherwise than OK, and the percentiles of the rest in ms."""
    whole: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in took:
        for method, codes in one.items():
            for code, values in codes.items():
                whole[method][code] += values
    rows = {}
    for method, codes in sorted(whole.items()):
        fine = np.array(codes.get("OK", [])) * 1000
        p50, p95, p99 = np.percentile(fine, [50, 95, 99]) if fine.size else (float("nan"),) * 3
        rows[method] = {
            "calls": sum(map(len, codes.values())),
            "per_s": round(sum(map(len, codes.values())) / seconds, 1),
            "p50_ms": round(float(p50), 1),
            "p95_ms": round(float(p95), 1),
            "p99_ms": round(float(p99), 1),
            "not_ok": {code: len(values) for code, values in codes.items() if code != "OK"},
        }
    return rows


@dataclass
class Process:
    """A process under observation, with its children, as a context manager: what it used at most, and on average."""

    pid: int
    cpu_s: float = 0.0  # without its children
    wall_s: float = 0.0
    rss_mb: float = 0.0
    threads: int = 0
    files: int = 0
    children: int = 0
    children_mb: float = 0.0  # resident, all of them at one moment

    def __enter__(self) -> Self:
        self._over = threading.Event()
        self._began, self._cpu = time.monotonic(), _cpu(self.pid)
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self.wall_s = time.monotonic() - self._began
        self.cpu_s = _cpu(self.pid) - self._cpu

    def _look(self) -> None:
        while not self._over.wait(_SAMPLE_S):
            try:
                status = _status(self.pid)
                self.rss_mb = max(self.rss_mb, int(status["VmRSS"].split()[0]) / 1024)
                self.threads = max(self.threads, int(status["Threads"]))
                self.files = max(self.files, len(os.listdir(f"/proc/{self.pid}/fd")))
                self._look_at_children()
            except (OSError, KeyError):  # it ended in the middle
                continue

    def _look_at_children(self) -> None:
        family = list(_descendants(self.pid))
        resident = sum(int(_status(pid).get("VmRSS", "0").split()[0]) / 1024 for pid in family)
        self.children, self.children_mb = max(self.children, len(family)), max(self.children_mb, resident)

    def to_json(self) -> dict[str, float]:
        """Cores are of the process itself."""
        return {
            "cores": round(self.cpu_s / self.wall_s, 2),
            "rss_mb": round(self.rss_mb, 1),
            "threads": self.threads,
            "open_files": self.files,
            "children_at_once": self.children,
            "children_rss_mb": round(self.children_mb, 1),
        }


def _status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _descendants(pid: int) -> Iterator[int]:
    """Children, their children, and so on."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield int(child)
            yield from _descendants(int(child))


def _cpu(pid: int) -> float:
    """Seconds of processor time, user and system."""
    after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after[11]) + int(after[12])) / _TICKS
