"""Metrics in Prometheus' text format: a catalogue of allowed metrics, and a page that is computed for each request.

Each page reads the ledger, the folders and the log's counters as they are. Only metrics and labels of the catalogue
are exported, so no path, address or patient can slip in. Of the process itself, memory, processor time and open files
are exported.
"""

from __future__ import annotations

import math
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family

from protos.common.errors import InvariantError
from protos.common.text import printable
from protos.operations.event_counters import EventCounters

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
MOST: Final = 10_000  # samples of one page
_NAME: Final = re.compile(r"lazaret(_[a-z0-9]+)+")
_LABEL: Final = re.compile(r"[a-z][a-z_]{0,30}")
_LONGEST: Final = 128  # characters of a label's value
_LEAST: Final = 64 << 20  # bytes without which the next commit may fail


class MetricError(InvariantError, RuntimeError):
    """A metric or a label that the catalogue does not name; nothing is told of it."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of the catalogue."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    kind: Literal["gauge", "counter"] = "gauge"

    def __post_init__(self) -> None:
        """Names as Prometheus wants them: a counter ends in _total, and nothing else does."""
        if not _NAME.fullmatch(self.name) or self.name.endswith("_total") is not (self.kind == "counter"):
            raise ValueError(f"{self.name} is no name for a {self.kind}")
        if not self.help or not all(_LABEL.fullmatch(label) for label in self.labels):
            raise ValueError(f"{self.name}: a metric has a help text, and labels of a-z and _")

    def family(self) -> GaugeMetricFamily | CounterMetricFamily:
        """As the client library wants it."""
        made = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        return made(self.name, self.help, labels=self.labels)


FAULTS: Final = Metric(
    "lazaret_source_faults", "1: this part of the page is missing because of an error.", ("source",)
)
BUILD: Final = Metric("lazaret_build_info", "Always 1; the running version and the side.", ("version", "side"))


@dataclass(slots=True)
class Samples:
    """The samples of one source."""

    catalogue: Mapping[str, Metric]
    told: dict[tuple[str, tuple[str, ...]], float] = field(default_factory=dict)

    def put(self, name: str, value: float, **labels: str) -> None:
        """One value.

        Raises:
            MetricError: the name or its labels are not in the catalogue.
            ValueError: it is no number: what cannot be told is left out by whoever asks.
        """
        metric = self.catalogue.get(name)
        if metric is None or set(labels) != set(metric.labels):
            raise MetricError(name)
        if math.isnan(value):
            raise ValueError(f"{name} is no number")
        self.told[name, tuple(_label(labels[label]) for label in metric.labels)] = value


Source = Callable[[Samples], None]
OF_LOG: Final = (
    Metric("lazaret_log_events_total", "Events of the log since the start.", ("event", "level"), "counter"),
    Metric(
        "lazaret_log_lost_total",
        "Log lines that could not be written to the disk or the collector.",
        ("to",),
        "counter",
    ),
)


def logged(tally: EventCounters, told: Samples) -> None:
    """What the log counted: a source, for :data:`OF_LOG`."""
    counts = Counter[tuple[str, str]]()
    for heard, count in tally.counts().items():
        counts[heard.event, heard.level] += count
    for (event, level), count in counts.items():
        told.put("lazaret_log_events_total", count, event=event, level=level)
    for to in ("file", "syslog"):
        told.put("lazaret_log_lost_total", tally.lost(to), to=to)


def put_refusals(counts: Mapping[tuple[str, str], int], told: Samples) -> None:
    """Of (stage, rule), how often: the commonest, and all others together."""
    for name, count in capped({f"{stage}\n{rule}": count for (stage, rule), count in counts.items()}).items():
        stage, _, rule = name.partition("\n")
        told.put("lazaret_refusals_total", count, stage=stage, rule=rule)


def put_disk(home: Path, watermark: Callable[[int], int], told: Samples) -> None:
    """The file system of the home directory; ``watermark`` gives that of a file system of so many bytes."""
    disk = os.statvfs(home)
    size = disk.f_blocks * disk.f_frsize
    told.put("lazaret_disk_free_bytes", disk.f_bavail * disk.f_frsize)
    told.put("lazaret_disk_size_bytes", size)
    told.put("lazaret_disk_watermark_bytes", watermark(size))


def disk_full(home: Path) -> bool:
    """Would the next commit perhaps find no room?"""
    disk = os.statvfs(home)
    return not disk.f_bavail * disk.f_frsize > _LEAST


class MetricsPage:
    """All metrics of one side, as a callable that makes the page."""

    def __init__(self, side: str, version: str, catalogue: Sequence[Metric], sources: Mapping[str, Source]) -> None:
        """Nothing is read yet.

        Args:
            side: "agent" or "coordinator".
            version: of this software.
            catalogue: all that may be told.
            sources: who tells it; one that fails takes nothing of the others with it.
        """
        self._catalogue = {metric.name: metric for metric in (*catalogue, FAULTS, BUILD)}
        if len(self._catalogue) != len(catalogue) + 2:
            raise ValueError("a name is in the catalogue twice")
        self._sources, self._one = sources, threading.Lock()
        self._build = {"version": version, "side": side}

    def __call__(self) -> bytes:
        """The page, UTF-8."""
        with self._one:
            registry = CollectorRegistry(auto_describe=False)
            ProcessCollector(registry=registry)
            registry.register(_Told(self._families()))
            return generate_latest(registry)

    def _families(self) -> list[Family]:
        all_told = Samples(self._catalogue)
        all_told.put(BUILD.name, 1, **self._build)
        for name, source in self._sources.items():
            told = Samples(self._catalogue)
            try:
                source(told)
                fault = len(told.told) + len(all_told.told) > MOST
            except Exception:  # noqa: BLE001 - whatever it is: the rest is told, and that this is missing
                fault = True
            if not fault:
                all_told.told |= told.told
            all_told.put(FAULTS.name, float(fault), source=name)
        families = {name: metric.family() for name, metric in self._catalogue.items()}
        for (name, labels), value in all_told.told.items():
            families[name].add_metric(labels, value)
        return [family for family in families.values() if family.samples]


@dataclass(frozen=True, slots=True, eq=False)
class _Told:
    families: list[Family]

    def collect(self) -> Iterator[Family]:
        yield from self.families

    def describe(self) -> list[Family]:
        return []


def capped(counts: Mapping[str, int], most: int = 64) -> dict[str, int]:
    """The commonest keys and their counts, all others together as "other": a label has few values."""
    common = Counter(counts).most_common(most)
    left = sum(counts.values()) - sum(count for _, count in common)
    return {**dict(common), **({"other": left + dict(common).get("other", 0)} if left else {})}


def _label(value: str) -> str:
    """Printable and short: who fills a field elsewhere does not write on our page."""
    return printable(value)[:_LONGEST]
