"""A task's examples from the vault: which images count, what they are labelled, and how the network sees them.

Whether an image becomes an example depends on its own patient alone (P1): nobody's image decides over another's. What
is left out is counted by reason, for the site's own console and nowhere else (P8, P14).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from agent.deidentify.record import NO_SERIES
from agent.domain import Example, ExampleRule, TaskCohort, TaskKind, TaskPatient
from agent.errors import SiteStorageError
from agent.storage.instance_index import ExampleStore, FoundExample, InstanceRecord, Target
from agent.storage.label_tables import (
    LabelColumn,
    LabelTable,
    LabelTableError,
    Value,
    read_declaration,
    read_table,
    stay_with,
    words_of,
)
from agent.storage.vault import Vault

REASONS: Final[Mapping[str, str]] = {
    "held": "the study or series is held back: `cohort --held`",
    "face": "a face may be rebuilt from it: `deface --vault` first",
    "waiting": "the series is not complete yet",
    "other_form": "a volume where the task takes images, or an image where it takes volumes",
    "not_a_volume": "the slices of the series are no volume",
    "colour": "grey, and the task takes colour",
    "no_row": "the label table has no row for it",
    "missing": "the label is missing",
    "other_value": "the label is none of the task's classes",
    "contradiction": "the images of the study have different labels",
    "no_mask": "no mask of it has one of the task's segments",
    "mask_frame": "the mask is of another frame of reference",
    "mask_geometry": "the mask lies on another grid",
    "no_spacing": "the file does not say how large a pixel is",
    "too_small": "smaller than the task's size: images are not enlarged",
    "blank": "it shows one value everywhere",
    "gone": "it was deleted meanwhile",
    "unreadable": "its file, or that of a mask of it, cannot be read",
}


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What a task does not use, and why. For the site alone."""

    reason: str  # of REASONS
    images: int
    patients: int


@dataclass(frozen=True, slots=True)
class OutputCount:
    """The patients behind one output of a task: a class, a finding that is there, a number. For the site alone."""

    output: str
    patients: int


@dataclass(frozen=True, slots=True)
class TaskSurvey:
    """What a task would find here. For the site alone: counts of patients are releases (P8)."""

    patients: int
    examples: int
    version: str  # of the label table; "" without one
    outputs: tuple[OutputCount, ...]
    left_out: tuple[LeftOut, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ExampleSample:
    """What may become a task's examples, by what is known of it without its pixels. For the site alone."""

    patients: int
    order: tuple[FoundExample, ...]  # all of them, in the order of the sample
    left_out: tuple[LeftOut, ...]


class _Tally:
    """What is left out: images and patients by reason."""

    def __init__(self) -> None:
        self.images: dict[str, int] = {}
        self.persons: dict[str, set[str]] = {}

    def add(self, reason: str, heads: Iterable[InstanceRecord]) -> None:
        for head in heads:
            self.images[reason] = self.images.get(reason, 0) + 1
            self.persons.setdefault(reason, set()).add(head.person)

    def told(self) -> tuple[LeftOut, ...]:
        return tuple(LeftOut(r, self.images[r], len(self.persons[r])) for r in REASONS if r in self.images)


def rule_for(table: LabelTable, columns: tuple[str, ...], images: ExampleRule) -> ExampleRule:
    """The rule of a task that learns all that columns of a table declare.

    Args:
        table: of the vault.
        columns: one of category or several values, or any of binary ones, or of numbers.
        images: which images, and how they are seen.
    Raises:
        LabelTableError: there is no such column, or they are of kinds that no task learns together.
    """
    found = [table.columns[table.column(name)] for name in columns]
    kinds = {column.kind for column in found}
    made = replace(images, table=table.name, columns=columns)
    if kinds == {"binary"} and len(found) > 1:
        return replace(made, kind="multi-label")
    if kinds == {"number"}:
        return replace(made, kind="regression", low=tuple(c.low for c in found), high=tuple(c.high for c in found))
    if len(found) != 1:
        raise LabelTableError(f"{table.name}: several columns are all binary, or all numbers")
    kind: TaskKind = "multi-label" if kinds == {"several"} else "classification"
    return replace(made, kind=kind, classes=found[0].values or ("no", "yes"))


def task_cohort(vault: Vault, rule: ExampleRule, without: Iterable[str] = ()) -> TaskCohort:
    """The patients with examples, by pseudonym. Nobody who has opted out is among them.

    Args:
        vault: the project's.
        rule: public.
        without: pseudonyms that may not take part.
    Raises:
        LabelTableError: there is no such table, it declares other columns or values than the task, or it was replaced
            since the run began.
    """
    table = _table(vault, rule)
    if rule.run and table is not None:
        stay_with(vault, rule.run, table)
    patients: dict[str, list[Example]] = {}
    for person, example in _examples(vault, rule, table, _Tally(), without):
        patients.setdefault(person, []).append(example)
    return TaskCohort(tuple(TaskPatient(person, tuple(patients[person])) for person in sorted(patients)))


def survey(vault: Vault, rule: ExampleRule) -> TaskSurvey:
    """What :func:`task_cohort` would find, and what it would leave out and why; one image at a time.

    Raises:
        LabelTableError: see :func:`task_cohort`.
    """
    table, tally = _table(vault, rule), _Tally()
    names = rule.classes or rule.columns
    behind: dict[str, set[str]] = {name: set() for name in names}
    persons, count = set(), 0
    for person, example in _examples(vault, rule, table, tally, ()):
        persons.add(person)
        count += 1
        for name in _said(rule, example.target):
            behind[name].add(person)
    outputs = tuple(OutputCount(name, len(behind[name])) for name in names)
    return TaskSurvey(len(persons), count, table.version if table else "", outputs, tally.told())


def _said(rule: ExampleRule, target: Target) -> list[str]:
    names = rule.classes or rule.columns
    if rule.kind == "classification":
        return [names[int(target[0])]]
    if rule.kind == "segmentation":
        return [name for at, name in enumerate(names, 1) if bool((target == at).any())]
    if rule.kind == "multi-label":
        return [name for name, value in zip(names, target, strict=True) if value == 1]
    return [name for name, value in zip(names, target, strict=True) if not np.isnan(value)]


def sample(vault: Vault, rule: ExampleRule, rng: np.random.Generator) -> ExampleSample:
    """What :func:`task_cohort` would open, in a random order in which few patients are seen twice. No pixel is read.

    Every patient's first example comes before anybody's second one; among those, labels take turns, so that a rare
    one is among the first.

    Raises:
        LabelTableError: see :func:`task_cohort`.
    """
    tally = _Tally()
    found = _found(vault, rule, _table(vault, rule), tally, vault.opted_out())
    order = [found[at] for at in rng.permutation(len(found))]
    own, same = Counter[str](), Counter[tuple[int, bytes]]()
    turns = []
    for one in order:
        turn, label = own[one.person], b"" if one.target is None else one.target.tobytes()
        turns.append((turn, same[turn, label]))
        own[one.person] += 1
        same[turn, label] += 1
    ranked = sorted(range(len(order)), key=turns.__getitem__)
    return ExampleSample(len(own), tuple(order[at] for at in ranked), tally.told())


# -- labels


def label_misfit(vault: Vault, rule: ExampleRule) -> str:
    """Why the rule's table is not what the task needs, by its declaration alone; "" where it is. No row is used."""
    try:
        if _has_table(rule):
            _require_declared(rule, read_declaration(vault, rule.table))
    except LabelTableError as fault:
        return str(fault)
    return ""


def _has_table(rule: ExampleRule) -> bool:
    return bool(rule.table) and rule.kind != "segmentation"


def _table(vault: Vault, rule: ExampleRule) -> LabelTable | None:
    """The rule's table, which declares all that the rule names.

    Raises:
        LabelTableError: it does not.
    """
    if not _has_table(rule):
        return None
    table = read_table(vault, rule.table)
    _require_declared(rule, table)
    return table


def _require_declared(rule: ExampleRule, table: LabelTable) -> None:
    """Columns, their kinds, values and bounds.

    Raises:
        LabelTableError: the table declares others than the rule names.
    """
    columns = [table.columns[table.column(name)] for name in rule.columns]
    wanted = {"classification": ("binary", "category"), "regression": ("number",)}.get(rule.kind, ("binary",))
    if rule.kind == "multi-label" and rule.classes:
        wanted = ("several",)
    for column in columns:
        if column.kind not in wanted:
            raise LabelTableError(
                f"{rule.table}.{column.name}: {rule.kind} takes {' or '.join(wanted)}, and this is {column.kind}"
            )
        declared = column.values or ("no", "yes")
        if rule.kind != "regression" and not set(rule.classes) <= set(declared):
            raise LabelTableError(f"{rule.table}.{column.name}: the table does not declare all classes of the task")
    for column, low, high in zip(columns, rule.low, rule.high, strict=False):
        if rule.kind == "regression" and not max(low, column.low) < min(high, column.high):
            raise LabelTableError(
                f"{rule.table}.{column.name}: the table's bounds, {column.low:g} to {column.high:g} {column.unit}, "
                f"and the task's, {low:g} to {high:g}, do not overlap: perhaps the units differ"
            )


def _target(rule: ExampleRule, table: LabelTable | None, head: InstanceRecord) -> Target | str:
    """What an image should give; or why it is left out, a key of REASONS."""
    if table is None:
        return _class(rule, head.label) if head.label else "missing"
    row = table.of(head)
    if row is None:
        return "no_row"
    said = [(table.columns[at], row[at]) for at in map(table.column, rule.columns)]
    if all(value is None for _, value in said):
        return "missing"
    if rule.kind == "classification":
        column, value = said[0]
        return _class(rule, words_of(column, value)[0])
    if rule.kind == "multi-label" and rule.classes:
        column, value = said[0]
        there = words_of(column, value)
        return np.array([name in there for name in rule.classes], np.float32)
    numbers_of = (_number(rule, at, column, value) for at, (column, value) in enumerate(said))
    return np.array(list(numbers_of), np.float32)


def _class(rule: ExampleRule, word: str) -> Target | str:
    return np.array([rule.classes.index(word)], np.int64) if word in rule.classes else "other_value"


def _number(rule: ExampleRule, at: int, column: LabelColumn, value: Value) -> float:
    if value is None or isinstance(value, tuple):
        return float("nan")
    if column.kind == "binary":
        return float(value)
    low, high = rule.low[at], rule.high[at]
    return (min(max(float(value), low), high) - low) / (high - low)


# -- images


def _examples(
    vault: Vault, rule: ExampleRule, table: LabelTable | None, tally: _Tally, without: Iterable[str]
) -> Iterator[tuple[str, Example]]:
    """The examples, patient after patient, one at a time."""
    for found in _found(vault, rule, table, tally, vault.opted_out() | set(without)):
        for one in read_found(vault, rule, found):
            if isinstance(one, str):
                tally.add(one, found.heads)
            else:
                yield found.person, one


def read_found(vault: ExampleStore, rule: ExampleRule, found: FoundExample) -> list[Example | str]:
    """What a network sees of it, one example for each of its volumes; or why it is left out, a key of REASONS.

    A failure that one patient's file brings about leaves out that file alone; faults of the machine are raised.
    """
    from agent.storage.example_pixels import as_seen  # noqa: PLC0415 - the readers of volumes: half a second

    try:
        seen = as_seen(vault, rule, found)
    except KeyError:
        return ["gone"]
    except (MemoryError, SiteStorageError):
        raise
    except Exception as fault:  # whatever a reader raises
        if isinstance(fault, OSError) and fault.errno is not None:  # of a disk: readers of bytes name no number
            raise
        return ["unreadable"]
    return [one if isinstance(one, str) else "blank" if not np.ptp(one[0]) > 0 else Example(*one) for one in seen]


def _found(
    vault: Vault, rule: ExampleRule, table: LabelTable | None, tally: _Tally, excluded: set[str] | frozenset[str]
) -> list[FoundExample]:
    """What counts by what is known of it without its pixels, sorted by patient and name."""
    index = _Index(vault, rule, excluded)
    found = []
    for person, kept in _fitting(index, rule, tally):
        if rule.kind != "segmentation":
            target = _common(rule, table, kept, tally)
            if target is not None:
                found.append(FoundExample(person, tuple(kept), target))
        elif drawn := sorted({name for head in kept for name in index.masks.get(head.series, ())}):
            found.append(FoundExample(person, tuple(kept), None, tuple(drawn)))
        else:
            tally.add("no_mask", kept)
    return found


def _fitting(index: _Index, rule: ExampleRule, tally: _Tally) -> Iterator[tuple[str, list[InstanceRecord]]]:
    """The instances that may be one example, with their patient, by what their heads say."""
    for (person, _), members in sorted(index.groups.items()):
        kept = []
        for head in sorted(members, key=lambda one: one.name):
            if why := index.unfit(head):
                tally.add(why, [head])
            else:
                kept.append(head)
        if len(rule.size) == 3 and len(kept) < len(members):
            tally.add("face" if any(head.face for head in members) else "held", kept)  # a volume is whole, or is none
        else:
            yield person, kept


def without_labels(
    store: ExampleStore, rule: ExampleRule, excluded: set[str] | frozenset[str] = frozenset()
) -> tuple[list[FoundExample], tuple[LeftOut, ...]]:
    """What a task's network can be shown, whatever is known of it: by the same rule as its examples, but for labels.

    Args:
        store: the vault, or a study in memory.
        rule: of the task; its labels are not asked for.
        excluded: pseudonyms that may not take part.
    Returns:
        What counts, sorted by patient and name; what is left out by its heads, and why.
    """
    tally = _Tally()
    index = _Index(store, rule, excluded)
    return [
        FoundExample(person, tuple(kept), None) for person, kept in _fitting(index, rule, tally) if kept
    ], tally.told()


class _Index:
    """What the vault has, without pixels: the instances of each possible example, and the masks of each series."""

    def __init__(self, vault: ExampleStore, rule: ExampleRule, excluded: set[str] | frozenset[str]) -> None:
        self._rule, self._barred = rule, vault.barred() | vault.held()
        self._sizes: dict[str, int] = {}
        self.groups: dict[tuple[str, str], list[InstanceRecord]] = {}
        self.masks: dict[str, list[str]] = {}  # series -> names
        parts: dict[str, bool] = {}
        for head in vault.heads():
            if head.kind == "mask":  # never an image itself, whatever modality is asked for
                if not head.held(self._barred):
                    self.masks.setdefault(head.masks, []).append(head.name)
                continue
            self._sizes[head.series] = self._sizes.get(head.series, 0) + 1
            if head.modality != rule.modality or (rule.body_part and head.body_part != rule.body_part):
                continue
            if head.person not in excluded and _in_part(vault, rule, head.person, parts):
                self.groups.setdefault((head.person, _group(rule, head)), []).append(head)

    def unfit(self, head: InstanceRecord) -> str:
        """Why one instance can be no part of an example, as far as its head says; else ""."""
        if head.held(self._barred):
            return "held"
        in_series = head.kind == "image" and head.series != NO_SERIES  # a volume file is whole by itself
        waits = in_series and self._sizes[head.series] < self._rule.min_instances
        return _unfit(self._rule, head) or ("waiting" if waits else "")


def _in_part(vault: ExampleStore, rule: ExampleRule, person: str, parts: dict[str, bool]) -> bool:
    if rule.split is None:
        return True
    if person not in parts:
        parts[person] = vault.part_of(rule.split, person) == rule.part
    return parts[person]


def _group(rule: ExampleRule, head: InstanceRecord) -> str:
    """What is one example: the images of a study, the slices of a series, or one image or volume file."""
    if len(rule.size) == 3 and head.kind == "image" and head.series != NO_SERIES:
        return head.series
    return head.study if rule.per_study else head.name


def _unfit(rule: ExampleRule, head: InstanceRecord) -> str:
    """Why one instance can be no part of an example, as far as its head says; else ""."""
    if head.face:
        return "face"
    if len(rule.size) == 3:
        return "other_form" if head.kind == "image" and head.series == NO_SERIES else ""
    if head.kind == "volume" or head.shape is None:
        return "other_form"
    return "colour" if rule.channels == 3 and not rule.per_study and len(head.shape) != 3 else ""


def _common(rule: ExampleRule, table: LabelTable | None, heads: list[InstanceRecord], tally: _Tally) -> Target | None:
    """The one label of what is one example; None, and the reason is counted, where there is none."""
    targets = [_target(rule, table, head) for head in heads]
    for target in targets:
        why = target if isinstance(target, str) else ""
        if not why and not np.array_equal(target, targets[0], equal_nan=True):
            why = "contradiction"
        if why:
            tally.add(why, heads)
            return None
    return targets[0] if targets and not isinstance(targets[0], str) else None
