"""The command by which persons get certificates and the operator pins them."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from protos.operations.command_line import add_login_commands
from protos.operations.next_steps import SetupReport
from protos.web.client_certificates import PinnedCertificates
from protos.web.login_cli import FOLDER, open_console, run


class Terminal:
    """The command line of a side."""

    def __init__(self, home: Path) -> None:
        self.said: list[str] = []
        self.parser = argparse.ArgumentParser()
        self.parser.set_defaults(home=home)
        add_login_commands(self.parser.add_subparsers(required=True))

    def __call__(self, *words: str) -> int:
        self.said.clear()
        arguments = self.parser.parse_args(["login", *words])
        return run(arguments, self.said.append)


@pytest.fixture
def terminal(tmp_path: Path) -> Terminal:
    return Terminal(tmp_path / "home")


def test_a_person_makes_what_the_operator_pins_and_both_read_the_same_digits(
    terminal: Terminal, tmp_path: Path
) -> None:
    assert terminal("make", "anna", "--out", str(tmp_path / "own")) == 0
    read_out = terminal.said[-1].rpartition(": ")[2]
    assert ((tmp_path / "own" / "anna.p12").stat().st_mode & 0o777) == 0o600
    assert terminal("trust", "anna", str(tmp_path / "own" / "anna.crt")) == 0
    assert read_out in terminal.said[0]
    assert terminal("list") == 0
    assert terminal.said[0].startswith("anna  until ")
    assert read_out in terminal.said[0]
    assert terminal("forget", "anna") == 0
    assert terminal("forget", "anna") == 1
    assert PinnedCertificates(tmp_path / "home" / FOLDER).names() == {}


def test_folders_above_that_are_missing_are_made_and_nobody_else_can_look_in(
    terminal: Terminal, tmp_path: Path
) -> None:
    assert terminal("make", "olga", "--out", str(tmp_path / "a" / "logins" / "olga")) == 0
    for name in ("a", "a/logins", "a/logins/olga"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "a/logins/olga/olga.p12").exists()
    with pytest.raises(FileExistsError):
        terminal("make", "olga", "--out", str(tmp_path / "a" / "logins" / "olga"))


def test_what_is_no_certificate_is_refused_with_a_reason(terminal: Terminal, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"rubbish")
    assert terminal("trust", "anna", str(tmp_path / "x")) == 1
    assert terminal.said[0].startswith("refused: ")


def test_nothing_is_made_over_what_is_there(terminal: Terminal, tmp_path: Path) -> None:
    with pytest.raises(FileExistsError):
        terminal("make", "anna", "--out", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_setup_opens_a_console_with_its_first_login_and_replaces_neither(terminal: Terminal, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    for name in ("own", "other"):
        assert terminal("make", "anna", "--out", str(tmp_path / name)) == 0
    report = SetupReport(as_json=True)
    open_console(home, "console.example:9000", ("anna", str(tmp_path / "own" / "anna.crt")), report)
    assert report.written == ["console.toml", "logins/anna.crt"]
    (digits,) = report.telephone.values()
    before = (home / "console.toml").read_text(), (home / FOLDER / "anna.crt").read_bytes()
    assert terminal("list") == 0
    assert digits in terminal.said[0]
    again = SetupReport(as_json=True)
    open_console(home, "elsewhere.example", ("anna", str(tmp_path / "other" / "anna.crt")), again)
    assert (again.written, again.telephone) == ([], {})
    assert before == ((home / "console.toml").read_text(), (home / FOLDER / "anna.crt").read_bytes())
