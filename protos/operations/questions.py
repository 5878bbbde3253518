"""The few questions that commands ask. Each is an option too, so that a script answers all of them beforehand.

Without a terminal nothing is asked: one sentence names the option that is missing, and the command ends as it does
after every mistake of usage.
"""

from __future__ import annotations

import contextlib
import getpass
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn, TypeVar

from protos.common.errors import ConfigError

T = TypeVar("T")


class BadAnswerError(ConfigError, ValueError):
    """What was typed for a question, or given as its option, cannot be used. The text says why."""


def can_ask() -> bool:
    """Whether somebody is at a terminal."""
    return sys.stdin.isatty()


def ask(option: str, question: str, read: Callable[[str], T], default: str | None = None) -> T:
    """Ask at the terminal until the answer can be read; prompts go to standard error.

    Args:
        option: that answers it beforehand, such as "--site".
        question: one line.
        read: the answer from what was typed; raises ValueError with a sentence.
        default: what an empty line means, and what holds without a terminal; None: an answer is needed.
    Raises:
        SystemExit: with status 2, where nobody can be asked and there is no default, or standard input ends.
    """
    if not can_ask():
        if default is None:
            missing(option)
        return read(default)
    while True:
        sys.stderr.write(f"{question}{f' [{default}]' if default else ''}: ")
        sys.stderr.flush()
        with _interrupted():
            line = sys.stdin.readline()
        if not line:
            missing(option)
        if not line.strip() and default is None:
            continue
        try:
            return read(line.strip() or default or "")
        except ValueError as error:
            sys.stderr.write(f"{error}\n")


def ask_secret(option: str, question: str, read: Callable[[str], T]) -> T:
    """A secret: from the terminal, unseen, until it can be read; or a line of standard input.

    Args:
        option: names a file that holds it.
        question: one line.
        read: the answer from what was typed; raises ValueError with a sentence.
    Raises:
        SystemExit: with status 2, where there is neither.
        ValueError: as ``read``, where nobody is at a terminal.
    """
    while True:
        with _interrupted():
            try:
                text = getpass.getpass(f"{question}: ") if can_ask() else sys.stdin.readline()
            except EOFError:
                text = ""
        if not text.strip():
            missing(option)
        try:
            return read(text)
        except ValueError as error:
            if not can_ask():
                raise
            sys.stderr.write(f"{error}\n")


def ask_or_take(option: str, text: str, question: str, read: Callable[[str], T], default: str | None = None) -> T:
    """What the option says, where it was given; else :func:`ask`.

    Raises:
        BadAnswerError: the option's text cannot be read; the sentence names the option.
        SystemExit: as :func:`ask`.
    """
    if not text:
        return ask(option, question, read, default)
    try:
        return read(text)
    except ValueError as error:
        raise BadAnswerError(f"{option}: {error}") from None


def ask_pair(option: str, words: Sequence[str], question: str, read: Callable[[str, str], T]) -> T | None:
    """Two words, from the option or the terminal; None for an empty line, and where nobody can be asked.

    Raises:
        BadAnswerError: the option's words cannot be read; the sentence names the option.
    """

    def split(text: str) -> T | None:
        pair = text.split()
        if pair and len(pair) != 2:
            raise ValueError("two words, with a space between them")
        return read(*pair) if pair else None

    return ask_or_take(option, " ".join(words), question, split, "")


def confirm(yes: bool, question: str) -> bool:
    """Whether a person says y; ``yes``: the option ``--yes`` was given."""
    return yes or ask("--yes", f"{question} (y/n)", _yes_or_no)


@contextlib.contextmanager
def _interrupted() -> Iterator[None]:
    """Ctrl-C at a question ends the command, without a trace of calls."""
    try:
        yield
    except KeyboardInterrupt:
        sys.stderr.write("\nstopped here: type the command again to go on\n")
        raise SystemExit(130) from None


def missing(option: str) -> NoReturn:
    """End the command as after a mistake of usage."""
    sys.stderr.write(f"this command can ask nobody here: give {option}\n")
    raise SystemExit(2)


def _yes_or_no(text: str) -> bool:
    if text.lower() not in ("y", "yes", "n", "no"):
        raise ValueError("type y or n")
    return text.lower().startswith("y")
