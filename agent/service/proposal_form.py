"""A form for a release or a training, and the command that it makes when it is filled in.

A form describes the dataclasses that a mechanism's configuration is read into, and the options of its command
(:mod:`agent.cli.proposal_forms`). What was typed becomes the very file and words that somebody would have typed at a
command line. Types and bounds are not checked here: the command's own reader does it. What is no number stays a text,
and the reader says so.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from agent.service.job_outputs import trained_files
from agent.service.jobs import JobStore

NETWORKS: Final = "networks"  # folder of the home directory: what IT offers to proposals
_MOST: Final = 200  # files that are offered; a folder of more than that is one of images
_SHA256: Final = "_sha256"
_AT: Final = re.compile(r"; (?=[a-z_]+(?:\.[a-z_]+|\[\d+\])*: |unknown )")  # between two problems of a file


@dataclass(frozen=True, slots=True)
class FormField:
    """One key of a table, or one option."""

    name: str  # "cohort.modality"; of an option "--basis"
    kind: str  # "text", "int", "float", "bool", "choice", "file", "folder"
    default: str = ""  # as it is typed; of a "bool" "yes" or ""
    help: str = ""
    required: bool = False
    many: bool = False  # several, with commas between them
    choices: tuple[str, ...] = ()  # of a "file": words in the place of one
    prefixes: tuple[str, ...] = ()  # of a "file": published kinds, KIND:FILE


@dataclass(frozen=True, slots=True)
class FormGroup:
    """A table of the configuration; "": keys outside of any, and options."""

    name: str
    about: str
    fields: tuple[FormField, ...]
    optional: bool = False  # left out, unless it is asked for


@dataclass(frozen=True, slots=True)
class ProposalForm:
    """The form of one command."""

    command: tuple[str, ...]
    about: str
    groups: tuple[FormGroup, ...]
    config: str = ""  # the option that names the configuration file; "": there is none
    mechanism: str = ""  # the file's key of that name; "": it has none
    out: str = ""  # what it writes: "--sheet" where something is vetted, "--out" for a training
    vetted: bool = False  # the sheet is written only with the group "vetting"

    @property
    def name(self) -> str:
        """In an address: "release-ksame"."""
        return "-".join(self.command)

    def fields(self) -> Iterator[FormField]:
        """All of them."""
        for group in self.groups:
            yield from group.fields


def read_forms(text: str) -> tuple[ProposalForm, ...]:
    """The forms, of JSON as ``dataclasses.asdict`` writes them."""
    return tuple(_form(told) for told in json.loads(text))


def _form(told: dict[str, Any]) -> ProposalForm:
    groups = tuple(_group(one) for one in told["groups"])
    return ProposalForm(**{**told, "command": tuple(told["command"]), "groups": groups})


def _group(told: dict[str, Any]) -> FormGroup:
    fields = (replace(FormField(**one), **_tuples(one, "choices", "prefixes")) for one in told["fields"])
    return FormGroup(**{**told, "fields": tuple(fields)})


def _tuples(told: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: tuple(told[name]) for name in names}


# -- what may be chosen


def offered_files(home: Path) -> dict[str, Path]:
    """Files that a proposal may name, by how the form names them.

    They lie in the folder ``networks`` of the home directory, at most one folder down, or a finished training job of
    this site wrote them.
    """
    found = dict[str, Path]()
    for name, folder in {NETWORKS: home / NETWORKS, **offered_folders(home)}.items():
        inside = sorted(one for one in _inside(folder) if one.is_file())
        found |= {f"{name}/{one.name}": one for one in inside} if len(inside) <= _MOST else {}
    store = JobStore(home)
    for job in store.all():
        for trained in trained_files(store, job):
            found[f"job {job.number}/{trained}"] = store.folder(job.number) / "out" / trained
    return found


def offered_folders(home: Path) -> dict[str, Path]:
    """Folders of public images, by how the form names them."""
    return {f"{NETWORKS}/{one.name}": one for one in sorted(_inside(home / NETWORKS)) if one.is_dir()}


def _inside(folder: Path) -> list[Path]:
    return [one for one in folder.iterdir() if not one.name.startswith(".")] if folder.is_dir() else []


# -- what was typed


@dataclass(frozen=True, slots=True)
class FilledForm:
    """A form that was filled in, as a command with files of its own."""

    words: tuple[str, ...]  # names of files as they are in the job's folder
    texts: Mapping[str, str] = field(default_factory=dict)  # of files to write, by name
    copies: Mapping[str, Path] = field(default_factory=dict)  # of files to copy, by name
    problems: Mapping[str, str] = field(default_factory=dict)  # by the name of the field
    cuda: bool = False


class _Filling:
    """Gathers what a form becomes."""

    def __init__(self, form: ProposalForm, typed: Mapping[str, tuple[str, ...]], home: Path) -> None:
        self.form, self.typed = form, typed
        self._files, self._folders = offered_files(home), offered_folders(home)
        self.copies: dict[str, Path] = {}
        self.problems: dict[str, str] = {}

    def value(self, one: FormField) -> Any:
        """What stands in a field, as TOML has it; None: it is left out."""
        given = self.typed.get(one.name, ())
        if one.kind == "bool":
            return "yes" in given
        texts = [part.strip() for text in given for part in (re.split(r"[,\n]", text) if one.many else [text])]
        texts = [text for text in texts if text]
        if one.name.endswith(_SHA256) and not texts:
            return self._digest(one.name.removesuffix(_SHA256))
        if not texts:
            return None
        made = [self._single(one, text) for text in texts]
        return made if one.many else made[0]

    def _single(self, one: FormField, text: str) -> Any:
        if one.kind == "file" and text not in one.choices:
            return self._file(one, text)
        if one.kind == "folder":
            return str(self._found(one.name, text, self._folders) or "")
        makers: dict[str, Callable[[str], Any]] = {"int": int, "float": float}
        try:
            return makers.get(one.kind, str)(text)
        except ValueError:
            return text  # the reader says what it must be

    def _file(self, one: FormField, text: str) -> str:
        kind, colon, name = text.partition(":")
        kind, name = (kind + colon, name) if kind in one.prefixes else ("", text)
        path = self._found(one.name, name, self._files)
        return kind + self._copied(path) if path is not None else ""

    def _found(self, field_name: str, name: str, offered: Mapping[str, Path]) -> Path | None:
        if name not in offered:
            self.problems[field_name] = f"{name} is not there any more: choose another, or ask IT for it"
        return offered.get(name)

    def _copied(self, path: Path) -> str:
        known = {source: name for name, source in self.copies.items()}
        if path not in known:
            known[path] = f"{len(self.copies) + 1}-{path.name}"
            self.copies[known[path]] = path
        return known[path]

    def _digest(self, name: str) -> str | None:
        """Of the file that was chosen: the proposal freezes it, and pins it as it is."""
        chosen = self._files.get("".join(self.typed.get(name, ())))
        if chosen is None:
            return None
        with chosen.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()


def fill(form: ProposalForm, typed: Mapping[str, tuple[str, ...]], home: Path) -> FilledForm:
    """The command that a form makes.

    Args:
        form: of the command.
        typed: texts by the name of the field; ``use:NAME``: an optional table is asked for.
        home: the site's directory.
    """
    filling = _Filling(form, typed, home)
    known = {one.name for one in form.fields()} | {f"use:{group.name}" for group in form.groups}
    filling.problems |= {name: "there is no such key" for name in typed if name not in known}
    words, lines, cuda = list(form.command), [], False
    if form.mechanism:
        lines.append(f"mechanism = {json.dumps(form.mechanism)}")
    used = [group for group in form.groups if not group.optional or "yes" in typed.get(f"use:{group.name}", ())]
    for group in used:
        keys = [one for one in group.fields if not one.name.startswith("--")]
        if group.name:
            lines += ["", f"[{group.name}]"]
        for one in keys:
            value = filling.value(one)
            key = one.name.removeprefix(f"{group.name}.")
            lines += [f"{key} = {_toml(value)}"] if value is not None else []
            cuda |= key == "device" and str(value).startswith("cuda")
        for one in group.fields:
            if one.name.startswith("--"):
                words += _option(one, filling.value(one))
                cuda |= one.name == "--device" and "cuda" in typed.get(one.name, ())
    texts = {}
    if form.config and any(line.startswith("[") or line.startswith("mechanism") for line in lines):
        texts[f"0-{form.mechanism or form.config.strip('-')}.toml"] = "\n".join(lines).strip() + "\n"
        words.append(f"{form.config}=in/{next(iter(texts))}")
    if form.out and (not form.vetted or any(group.name == "vetting" for group in used)):
        words.append(f"{form.out}=out/{'sheet.html' if form.out == '--sheet' else form.command[-1]}")
    return FilledForm(tuple(words), texts, filling.copies, filling.problems, cuda)


def _option(one: FormField, value: Any) -> list[str]:
    if value is None or value is False:
        return []
    if value is True:
        return [one.name]
    is_copy = one.kind == "file" and value not in one.choices
    kind, colon, name = str(value).rpartition(":") if is_copy else ("", "", str(value))
    return [f"{one.name}={kind}{colon}in/{name}" if is_copy else f"{one.name}={value}"]


def _toml(value: Any) -> str:
    """A value as TOML writes it: JSON, but for texts beyond ASCII and numbers that are none."""
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, float):
        return repr(value)  # "inf" and "nan" are TOML, and the reader refuses them
    return json.dumps(value, ensure_ascii=False)


def place_problems(form: ProposalForm, said: str) -> tuple[dict[str, str], list[str]]:
    """Everything that a command's reader says is wrong: by the field that it is about, and the rest."""
    said = re.sub(r"^0-[a-z-]+\.toml: ", "", said)
    names, placed, rest = {one.name for one in form.fields()}, dict[str, str](), list[str]()
    for part in _AT.split(said):
        where, colon, what = part.partition(": ")
        if colon and where in names:
            placed[where] = what
        else:
            rest.append(part)
    return placed, rest
