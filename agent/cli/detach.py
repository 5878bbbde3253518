"""``--detach``: a command becomes a job of the running service, with copies of the files that it reads."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agent.cli import options
from agent.cli.output import OUT, print_progress
from agent.errors import CommandError
from agent.service.commands import operator_name, read_findings, site_acts
from agent.service.jobs import JobStore
from policies.governance.acts import Acts
from policies.review.rules import Finding
from protos.common.errors import RefusedError

_WRITTEN: Final = ("out", "sheet", "report")  # options that name what a command writes
_SEEN_BY_NAME: Final = ("pictures", "heads")  # folders too large to copy: the service must be able to read them
_UNFIT: Final = re.compile(r"[^A-Za-z0-9._-]")  # in names of files that a backup holds
_LONGEST: Final = 100  # of their characters
_UNFINISHED: Final = "unfinished"  # a finding of a dry run that a queue is the remedy for


CarryOut = Callable[[argparse.Namespace], int]  # a command, in this process; its exit status


class WouldBeRefusedError(RefusedError):
    """Something known speaks against the release already: it is not queued."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        """``findings``: of the dry run."""
        told = "; ".join(f"{one.rule}: {one.detail}" for one in findings)
        super().__init__(f"the release would be refused, so it is not queued: {told}")
        self.findings = tuple(findings)


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A command that has become a job."""

    number: int
    price: Mapping[str, Any]  # of a release, as `--dry-run --json` tells it


class _Files:
    """Copies of what a command reads, in the folder ``in`` of a job that has no number yet."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._known = folder, dict[Path, str]()
        self.cuda = False

    def take(self, path: Path) -> str:
        """Copy a file; its name from the job's folder.

        Raises:
            CommandError: it is no file.
        """
        path = path.absolute()
        if not path.is_file():
            raise CommandError(f"{path.name}: no such file")
        if path not in self._known:
            name = f"in/{len(self._known)}-{_UNFIT.sub('_', path.name)[-_LONGEST:]}"
            self._known[path] = name
            if path.suffix == ".toml":
                (self.folder / name).write_text(self._configuration(path))
            else:
                shutil.copyfile(path, self.folder / name)
        return self._known[path]

    def _configuration(self, path: Path) -> str:
        """The text of a configuration whose files are copied, too, and named as they lie beside it then."""
        try:
            text = path.read_text()
            told = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError):
            raise CommandError(f"{path.name}: not TOML") from None
        self.cuda |= any(value == "cuda" for key, value in _values(told) if key == "device")
        named = {}
        for _, value in _values(told):
            kind, colon, file = value.rpartition(":")  # a file, or KIND:FILE
            if names_file(path.parent, file):
                named[value] = kind + colon + self.take(path.parent / file).removeprefix("in/")
            elif (path.parent / value).is_dir():
                self._see(path.parent, value, named)
        for value, copy in named.items():
            for quote in ('"', "'"):
                text = text.replace(f"{quote}{value}{quote}", json.dumps(copy))
        if _renamed(told, named) != tomllib.loads(text):
            raise CommandError(f"{path.name}: write the names of files as plain strings")
        return text

    def _see(self, beside: Path, value: str, named: dict[str, str]) -> None:
        """Folders of public images are too large to copy: the job sees them where they lie.

        A plain word may name a folder by chance, such as a label: it stays, and a link of that name lies beside the
        configuration.
        """
        if "/" in value:
            named[value] = str((beside / value).resolve())
        elif not (self.folder / "in" / value).is_symlink():
            (self.folder / "in" / value).symlink_to((beside / value).resolve())


def names_file(folder: Path, text: str) -> bool:
    """Whether a text in a configuration is taken for the name of a file."""
    return bool(re.search(r"[./]", text)) and (folder / text).is_file()


def _values(told: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every text in a document, with the key that it stands under."""
    if isinstance(told, str):
        yield key, told
    elif isinstance(told, Mapping):
        for name, value in told.items():
            yield from _values(value, str(name))
    elif isinstance(told, Sequence):
        for value in told:
            yield from _values(value, key)


def _renamed(told: Any, named: Mapping[str, str]) -> Any:
    if isinstance(told, str):
        return named.get(told, told)
    if isinstance(told, Mapping):
        return {key: _renamed(value, named) for key, value in told.items()}
    return [_renamed(value, named) for value in told] if isinstance(told, list) else told


def queue(arguments: argparse.Namespace, typed: Sequence[str], carry_out: CarryOut) -> int:
    """Queue a command that was typed with ``--detach``, and say its number.

    Args:
        arguments: as parsed.
        typed: all words of the program.
        carry_out: a command, for the dry run.
    Returns:
        The exit status: 1 where a release would be refused as far as is known now.
    """
    say = lambda step, detail: print_progress(step, detail, arguments.json)  # noqa: E731 - one line of progress
    try:
        job = submit(arguments, typed, carry_out, lambda: site_acts(arguments.home, say))
    except WouldBeRefusedError as error:
        OUT.print("the release would be refused, so it is not queued:")
        for one in error.findings:
            OUT.print(f"  {one.rule}: {one.detail}", markup=False, soft_wrap=True)
        return 1
    if arguments.json:
        sys.stdout.write(json.dumps({"job": job.number, "price": job.price}) + "\n")
    else:
        number = job.number
        OUT.print(f"job {number} is queued: `jobs follow {number}` shows it, `jobs cancel {number}` ends it")
    return 0


def submit(
    arguments: argparse.Namespace,
    typed: Sequence[str],
    carry_out: CarryOut,
    acts: Callable[[], AbstractContextManager[Acts]],
) -> QueuedJob:
    """Make a job of a command, with copies of the files that it reads.

    Args:
        arguments: as parsed.
        typed: all words of the program.
        carry_out: a command, for the dry run of a release.
        acts: on the site, when the job is ready.
    Raises:
        CommandError: it cannot be a job, or a file is missing.
        WouldBeRefusedError: the dry run of the release says no.
    """
    if arguments.home is None:
        raise CommandError("--detach needs --home: a job belongs to a site")
    _refuse(arguments)
    name = os.urandom(8).hex()
    store = JobStore(arguments.home)
    fresh = store.fresh_folder(name)
    try:
        files = _Files(fresh)
        if arguments.command == "predict":
            from agent.cli import predict_job  # noqa: PLC0415 - torch, which no other command waits for

            words, files.cuda = predict_job.freeze(arguments, fresh, name)
        else:
            words = _words(arguments, _of_command(typed), files)
        price: dict[str, Any] = {}
        if words[0] == "release":
            quoted = dry_run(arguments.home, [_placed(word, fresh) for word in words], carry_out)
            if against := [one for one in read_findings(quoted) if one.rule != _UNFINISHED]:
                raise WouldBeRefusedError(against)
            price = quoted["price"]
        told = {"words": words, "project": getattr(arguments, "project", options.MAIN), "price": price}
        told["by"] = operator_name()
        told |= {"cuda": files.cuda or getattr(arguments, "device", "") == "cuda", "key": name}
        if arguments.priority:
            told["priority"] = arguments.priority
        with acts() as do:
            return QueuedJob(do("jobs/add", job=told, files=name)["number"], price)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)  # where it was queued, the folder has its number now


def _refuse(arguments: argparse.Namespace) -> None:
    """What cannot be a job.

    Raises:
        CommandError: it reads patients' files that the service cannot see, or it only looks.
    """
    if arguments.command == "ingest" and arguments.folder is not None:
        raise CommandError(
            "a folder is read by whoever types `ingest --folder`, without --detach: it needs no service"
        )
    if arguments.command == "ingest" and (arguments.patients or arguments.accessions):
        raise CommandError("a list of patients is not kept beside a job: leave out --detach")
    if arguments.command == "deface" and not arguments.vault:
        raise CommandError("--detach is for `deface --vault`; files are de-faced by whoever types it")
    if getattr(arguments, "dry_run", False):
        raise CommandError("a dry run is done at once: leave out --detach")
    if getattr(arguments, "blank", None) is not None:
        raise CommandError("--blank writes an example at once: leave out --detach")


def _words(arguments: argparse.Namespace, typed: Sequence[str], files: _Files) -> list[str]:
    """The words with every file in the job's own folder: what is read under ``in``, what is written under ``out``."""
    paths = {name: value for name, value in vars(arguments).items() if isinstance(value, Path) and name != "home"}
    if isinstance(value := getattr(arguments, "generator", None), str):  # a file, or KIND:FILE
        paths["generator"] = Path(value.rpartition(":")[2])
    if isinstance(value := getattr(arguments, "labels", None), str) and Path(value).is_file():  # or a word
        paths["labels"] = Path(value)
    found: list[str] = []
    for word in typed:
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        if option and not equals:
            found.append(word)
            continue
        option = option or (found[-1] if found and found[-1].startswith("--") else "")
        name = next((one for one in paths if option and f"--{one.replace('_', '-')}".startswith(option)), "")
        before, _, file = value.rpartition(":") if name == "generator" else ("", "", value)
        if name and Path(file) == paths[name]:
            value = (f"{before}:" if before else "") + _copied(name, Path(file), files)
        found.append(f"{option}={value}" if equals else value)
    return found


def _copied(name: str, path: Path, files: _Files) -> str:
    if name in _WRITTEN:
        if path.exists():
            raise CommandError(f"{path.name}: name a new file; `jobs fetch` writes it")
        return f"out/{path.name}"
    return str(path.absolute()) if name in _SEEN_BY_NAME else files.take(path)


def _placed(word: str, folder: Path) -> str:
    """A word of a job as it is before the job has a number."""
    option, equals, value = word.partition("=")
    if equals and value.startswith(("in/", "out/")):
        return f"{option}={folder / value}"
    return str(folder / word) if word.startswith("in/") else word


def _of_command(typed: Sequence[str]) -> list[str]:
    """The words of the command alone: without the home directory, ``--detach`` and ``--priority``, which may be
    shortened.
    """
    words = list(typed)
    while words and words[0].startswith("--"):
        del words[: 1 if "=" in words[0] else 2]
    found, values = list[str](), iter(words)
    for word in values:
        option, equals, _ = word.partition("=")
        if len(option) > 3 and "--priority".startswith(option):
            if not equals:
                next(values, "")
        elif len(word) <= 4 or not "--detach".startswith(word):
            found.append(word)
    return found


def dry_run(home: Path, words: Sequence[str], carry_out: CarryOut) -> dict[str, Any]:
    """What a release would cost, count and weigh, and what speaks against it, as ``--dry-run --json`` tells it.

    Args:
        home: the site's directory.
        words: of the release, without the program and ``--home``.
        carry_out: a command.
    """
    words = [word for word in words if word != "--json"]
    for option in ("--out", "--sheet"):
        if option in words:
            del words[words.index(option) : words.index(option) + 2]
    words = [word for word in words if not word.startswith(("--out=", "--sheet="))]
    arguments = options.build_parser().parse_args(["--home", str(home), *words, "--dry-run", "--json"])
    with contextlib.redirect_stdout(io.StringIO()) as said:
        carry_out(arguments)
    told: dict[str, Any] = json.loads(said.getvalue().splitlines()[-1])
    return told
