"""Questions at a terminal, their options, and what happens where nobody can be asked."""

from __future__ import annotations

import io
import sys

import pytest

from protos.operations import questions
from protos.operations.questions import BadAnswerError, ask, ask_or_take, ask_pair, ask_secret, confirm


class Keyboard(io.StringIO):
    """What somebody types; or, without a terminal, what is piped in."""

    terminal = True

    def isatty(self) -> bool:
        return self.terminal


@pytest.fixture
def keyboard(monkeypatch: pytest.MonkeyPatch) -> type[Keyboard]:
    def types(text: str, terminal: bool = True) -> None:
        made = Keyboard(text)
        made.terminal = terminal
        monkeypatch.setattr(sys, "stdin", made)
        monkeypatch.setattr(questions.getpass, "getpass", lambda _prompt: made.readline().rstrip("\n"))

    return types  # type: ignore[return-value]


def even(text: str) -> int:
    if int(text) % 2:
        raise ValueError("an even number")
    return int(text)


def test_a_bad_answer_is_asked_for_again_and_the_default_is_an_empty_line(
    keyboard: type[Keyboard], capsys: pytest.CaptureFixture[str]
) -> None:
    keyboard("3\n\n4\n")
    assert ask("--n", "how many", even) == 4
    said = capsys.readouterr()
    assert (said.out, said.err.count("how many: "), "an even number\n" in said.err) == ("", 3, True)
    keyboard("\n")
    assert ask("--n", "how many", even, "6") == 6
    assert "how many [6]: " in capsys.readouterr().err


@pytest.mark.parametrize("terminal", [True, False])
def test_where_nobody_answers_a_sentence_names_the_option_and_the_status_is_2(
    keyboard: type[Keyboard], capsys: pytest.CaptureFixture[str], terminal: bool
) -> None:
    keyboard("", terminal)
    for act in (
        lambda: ask("--n", "how many", even),
        lambda: ask_secret("--n", "secret", str),
        lambda: confirm(False, "sure?") if terminal else ask("--n", "", str),
    ):
        with pytest.raises(SystemExit) as usage:
            act()
        assert usage.value.code == 2
    said = capsys.readouterr().err
    assert said.count("this command can ask nobody here: give --n\n") >= 2
    assert confirm(True, "sure?")


def test_an_option_is_read_like_an_answer_and_without_a_terminal_the_default_holds(keyboard: type[Keyboard]) -> None:
    keyboard("4\n", terminal=False)
    assert ask_or_take("--n", "8", "how many", even) == 8
    assert ask_or_take("--n", "", "how many", even, "2") == 2
    with pytest.raises(BadAnswerError, match="--n: an even number"):
        ask_or_take("--n", "7", "how many", even)
    assert ask_pair("--p", (), "who", lambda a, b: (a, b)) is None
    assert ask_pair("--p", ("anna", "key"), "who", lambda a, b: (a, b)) == ("anna", "key")
    with pytest.raises(BadAnswerError, match="--p: two words"):
        ask_pair("--p", ("anna",), "who", lambda a, b: (a, b))


def test_a_secret_is_asked_for_again_at_a_terminal_alone(keyboard: type[Keyboard]) -> None:
    keyboard("3\n4\n")
    assert ask_secret("--file", "secret", even) == 4
    keyboard("3\n4\n", terminal=False)
    with pytest.raises(ValueError, match="an even number"):
        ask_secret("--file", "secret", even)


@pytest.mark.parametrize(("text", "meant"), [("y\n", True), ("N\n", False), ("perhaps\nyes\n", True)])
def test_a_confirmation_is_y_or_n(keyboard: type[Keyboard], text: str, meant: bool) -> None:
    keyboard(text)
    assert confirm(False, "sign?") is meant


def test_an_interrupt_at_a_question_ends_the_command_with_a_sentence(
    keyboard: type[Keyboard], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> str:
        raise KeyboardInterrupt

    keyboard("")
    monkeypatch.setattr(sys.stdin, "readline", interrupted)
    monkeypatch.setattr(questions.getpass, "getpass", interrupted)
    for act in (lambda: ask("--n", "how many", even), lambda: ask_secret("--n", "secret", str)):
        with pytest.raises(SystemExit) as ended:
            act()
        assert ended.value.code == 130
    assert capsys.readouterr().err.count("type the command again to go on") == 2
