"""Metrics in Prometheus' text form: a catalogue of what may be told, and a page that is made when somebody asks.

Nothing is counted for its own sake: each page reads the books, the folders and the log's tally as they are. Only what
the catalogue names is told, with the labels that it names, so that no path, address or patient can slip in; of the
process itself its memory, processor time and open files, which name nothing.
"""

from __future__ import annotations

import math
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family

from protos.tally import Tally

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
MOST: Final = 10_000  # samples of one page
_NAME: Final = re.compile(r"lazaret(_[a-z0-9]+)+")
_LABEL: Final = re.compile(r"[a-z][a-z_]{0,30}")
_LONGEST: Final = 128  # characters of a label's value


class NotInCatalogue(RuntimeError):
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
    "lazaret_source_faults", "1: this part of the page could not be made, and is missing.", ("source",)
)
BUILD: Final = Metric(
    "lazaret_build_info", "Always 1; the version that runs, and which side it is.", ("version", "side")
)


@dataclass(slots=True)
class Samples:
    """What one source tells."""

    catalogue: Mapping[str, Metric]
    told: dict[tuple[str, tuple[str, ...]], float] = field(default_factory=dict)

    def put(self, name: str, value: float, **labels: str) -> None:
        """One value.

        Raises:
            NotInCatalogue: the name or its labels are not in the catalogue.
            ValueError: it is no number: what cannot be told is left out by whoever asks.
        """
        metric = self.catalogue.get(name)
        if metric is None or set(labels) != set(metric.labels):
            raise NotInCatalogue(name)
        if math.isnan(value):
            raise ValueError(f"{name} is no number")
        self.told[name, tuple(_label(labels[label]) for label in metric.labels)] = value


Source = Callable[[Samples], None]
OF_LOG: Final = (
    Metric("lazaret_log_events_total", "Events of the log since the start.", ("event", "level"), "counter"),
    Metric("lazaret_log_lost_total", "Lines that the disk or the collector did not take.", ("to",), "counter"),
)


def logged(tally: Tally, told: Samples) -> None:
    """What the log counted: a source, for :data:`OF_LOG`."""
    counts = Counter[tuple[str, str]]()
    for heard, count in tally.counts().items():
        counts[heard.event, heard.level] += count
    for (event, level), count in counts.items():
        told.put("lazaret_log_events_total", count, event=event, level=level)
    for to in ("file", "syslog"):
        told.put("lazaret_log_lost_total", tally.lost(to), to=to)


class Page:
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
    return "".join(c if c.isprintable() else "?" for c in str(value))[:_LONGEST]
