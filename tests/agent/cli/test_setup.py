"""``setup`` of a site: it goes on where things stand, asks for what is missing, and writes over nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.ingest.config import read_ingestion
from agent.storage.site_directory import SiteDirectory
from coordinator.enrolment.authority import Invitation
from protos.web import settings as console
from tests.support.command_line import CommandResult, Typed, typed
from tests.support.command_server import python
from tests.support.federation_world import Federation
from tests.support.ledger_world import Person
from tests.support.terminal import Terminal
from tests.support.unchanged import files_of

__all__ = ["typed"]  # a fixture

LONG = "0000 0000 0000 0000 0000 0000 0000 0000"


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    with Federation(tmp_path) as made:
        yield made


def invited(federation: Federation, name: str = "site-z") -> tuple[Invitation, list[str]]:
    """An invitation as files, and the options that name them."""
    made = federation.authority.invite(name)
    file, token = federation.root / f"{name}.invitation", federation.root / f"{name}.token"
    file.write_bytes(made.body)
    token.write_text(made.token + "\n")
    words = ["--invitation", str(file), "--token-file", str(token), "--fingerprint", made.fingerprint]
    return made, [*words, "--coordinator", f"127.0.0.1:{federation.port}", "--modality", "ot"]


PACS = ("--pacs", "HOSPITALPACS@10.20.0.5", "--pacs", "OTHER@10.20.1.0/24", "--dicom-tls", "plain")


def test_one_command_goes_on_from_nothing_to_an_enrolled_site(
    federation: Federation, typed: Typed, tmp_path: Path
) -> None:
    home = SiteDirectory(tmp_path / "new")
    _, words = invited(federation)

    def setup(*more: str) -> CommandResult:
        return typed("--home", home.root, "setup", *more)

    said = setup(*words, *PACS, "--console", "localhost:8123")
    assert said.status == 1, "it waits for two persons"
    (request,) = {line.partition("request: ")[2] for line in said.out.splitlines() if "request: " in line}
    assert (home.settings().site, home.settings().modalities) == ("site-z", frozenset({"OT"}))
    listener = read_ingestion(home).listener
    assert listener is not None
    assert [(one.ae_title, one.addresses) for one in listener.callers] == [
        ("HOSPITALPACS", ("10.20.0.5",)),
        ("OTHER", ("10.20.1.0/24",)),
    ]
    assert (listener.plain_tcp, listener.port) == (True, 11112)
    found = console.read(home.root)
    assert found is not None
    assert (found.listen, found.names) == ("127.0.0.1:8123", ("localhost",))

    before = files_of(home.root)
    waits = json.loads(setup("--json").out)
    assert (waits["written"], waits["telephone"]) == ([], {"fingerprint of this site's request": request})
    federation.approve("site-z")
    officer, head = Person("o", "compliance"), Person("h", "hospital")
    done = setup("--compliance", "officer-1", officer.public.hex(), "--hospital", "head-1", head.public.hex())
    assert done.status == 0, done.err
    assert "appointed officer-1, compliance" in done.out
    after = files_of(home.root)
    kept = before.keys() - {"keys/waiting.json", "agent.log"}
    assert {name for name in kept if before[name] != after[name]} == set(), "nothing is written over"
    again = setup(*words, *PACS, "--compliance", "officer-2", Person("x", "compliance").public.hex())
    assert (again.status, "this site is enrolled" in again.out) == (0, True), "a script types the same every day"
    last = setup(*PACS, "--console", "elsewhere.example", "--compliance", "officer-2", head.public.hex())
    assert (last.status, "appointed" in last.out) == (0, False)
    assert {name for name in kept if before[name] != files_of(home.root)[name]} == set()


def refused(typed: Typed, capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    """How a command ended that cannot be carried out, and what it said."""
    try:
        said = typed(*words)
    except SystemExit as usage:
        return int(usage.code or 0), capsys.readouterr().err
    return said.status, said.err


WRONG = {
    "no invitation": ([], 2, "give --invitation"),
    "a file that is none": (["--invitation", "nowhere.invitation"], 1, "nowhere.invitation: No such file"),
    "no fingerprint": (["--fingerprint", ""], 2, "give --fingerprint"),
    "a wrong fingerprint": (
        ["--fingerprint", LONG],
        1,
        "does not match the root in the invitation: compare it again",
    ),
    "half a fingerprint": (
        ["--fingerprint", "abcd"],
        1,
        "does not match the root in the invitation: compare it again",
    ),
    "no modality": (["--modality", "-"], 1, "DICOM modalities, such as CT,MR"),
    "another preset": (["--policy", "lax"], 1, "--policy: no preset 'lax'; there are controlled, internal, public"),
    "a policy that is missing": (["--policy", "own.toml"], 1, "--policy: own.toml cannot be read"),
    "another site": (["--site", "site-y"], 1, "the invitation is for another site"),
}


@pytest.mark.parametrize("what", WRONG)
def test_bad_input_is_one_sentence_and_makes_no_directory(
    federation: Federation, typed: Typed, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    more, status, sentence = WRONG[what]
    _, words = invited(federation)
    words = [*words, *more] if more else words[2:]
    if what == "no modality":
        words[words.index("ot")] = "-"
        words = words[: words.index("--modality", 10)]
    found, err = refused(typed, capsys, "--home", tmp_path / "new", "setup", *words)
    assert (found, sentence in err, err.count("\n")) == (status, True, 1), err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("token", ["", "abc", "AAAA-BBBB", "of another invitation"])
def test_a_wrong_token_makes_no_directory_and_is_not_said_again(
    federation: Federation, tmp_path: Path, token: str
) -> None:
    """From standard input, as it is typed where there is no terminal."""
    _, words = invited(federation)
    other, _ = invited(federation, "site-y")
    text = other.token if token.startswith("of") else token
    at = words.index("--token-file")
    command = [python(), "-m", "agent", "--home", str(tmp_path / "new"), "setup", *words[:at], *words[at + 2 :]]
    done = subprocess.run(command, input=f"{text}\n", capture_output=True, text=True, check=False)
    assert done.returncode == (1 if text else 2)
    assert ("give --token-file" if not text else "token") in done.stderr
    assert not text or text not in done.stdout + done.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--pacs", "HOSPITALPACS"], "--pacs: an AE title and an address"),
        (["--pacs", "A@pacs.example"], "--pacs: an AE title and an address"),
        (["--pacs", "A@10.0.0.1"], "give --dicom-tls"),
        (["--pacs", "A@10.0.0.1", "--dicom-tls", "yes"], "--dicom-tls: three files"),
        ([*PACS, "--ae-title", "A" * 17], "ae_title has 1 to 16"),
        ([*PACS, "--listen", "10.0.0.1:port"], "port"),
        (["--console", "Not A Name"], "--console: a name in lower case"),
        (["--login", "anna", "nowhere.crt"], "nowhere.crt"),
    ],
)
def test_what_cannot_be_written_stays_unwritten_and_the_next_command_goes_on(
    federation: Federation,
    typed: Typed,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    sentence: str,
) -> None:
    _, joining = invited(federation)
    home = tmp_path / "new"
    err = refused(typed, capsys, "--home", home, "setup", *joining, *words)[1]
    assert (sentence in err, err.count("\n")) == (True, 1), err
    assert (home / "site.toml").exists()
    assert not (home / "keys" / "waiting.json").exists()
    assert not (home / ("console.toml" if "--console" in words else "ingest.toml")).exists()
    said = typed("--home", home, "setup", *joining, *PACS)
    assert (said.status, "waiting for approval" in said.out) == (1, True), said.err


def test_an_invitation_that_is_good_no_more_is_replaced_by_another_one(
    federation: Federation, typed: Typed, tmp_path: Path
) -> None:
    _, old = invited(federation)
    words = ["--site", "site-z", *old[old.index("--coordinator") :]]
    stopped = typed("--home", tmp_path / "new", "setup", *words, *old[:2], "--fingerprint", old[5])
    assert stopped.status == 1
    _, fresh = invited(federation)
    (tmp_path / "old.token").write_text("x")
    wrong = typed("--home", tmp_path / "new", "setup", *fresh[:2], *fresh[4:], "--token-file", tmp_path / "old.token")
    assert (wrong.status, "the token is mistyped" in wrong.err) == (1, True)
    assert "waiting for approval" in typed("--home", tmp_path / "new", "setup", *fresh).out


def test_a_directory_of_another_site_or_of_something_else_is_left_alone(
    federation: Federation, typed: Typed, tmp_path: Path
) -> None:
    _, words = invited(federation)
    site = federation.join("site-a")
    said = typed("--home", site.home.root, "setup", "--site", "site-z", *words)
    assert "is the directory of site-a: give another --home" in said.err
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").write_text("dear")
    said = typed("--home", tmp_path / "mine", "setup", *words)
    assert (said.status, "is not empty: nothing was written" in said.err) == (1, True)
    assert files_of(tmp_path / "mine") == {"letter": b"dear"}
    (tmp_path / "file").write_text("no directory")
    assert typed("--home", tmp_path / "file", "setup", *words).status == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_is_told_who_must_type_it(federation: Federation, tmp_path: Path) -> None:
    site = federation.join("site-a")
    command = [sys.executable, "-c", "import sys; from agent.cli.main import main; sys.exit(main(sys.argv[1:]))"]
    drop = "import os, sys; os.setgid(65534); os.setuid(65534); " + command[2].removeprefix("import sys; ")
    preload = f"import agent.cli.setup, grpc, {', '.join(['json', 'rich.console'])}; "
    done = subprocess.run(
        [command[0], "-c", preload + drop, "--home", str(site.home.root), "setup"],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert "run `lazaret-agent setup` as the user who owns it" in done.stderr


def test_a_kill_before_any_write_loses_nothing(federation: Federation, tmp_path: Path) -> None:
    """Typed again it comes to the same end, with the keys that it began with once the directory was there."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    for number in range(1, 200):
        home, name = tmp_path / f"home-{number}", f"site-{number}"
        _, words = invited(federation, name)
        words = ["--home", str(home), "setup", *words, *PACS, "--console", "localhost:8123"]
        killed = [python(), "-m", "tests.support.killed_writes", str(number), str(home), "agent", *words]
        status = subprocess.run(killed, capture_output=True, check=False, env=environment).returncode
        begun = (home / "site.toml").exists()
        before = files_of(home) if begun else {}
        if status != -signal.SIGKILL:
            assert status == 1, "it came to its end, and waits"
            break
        again = [python(), "-m", "agent", *words]
        done = subprocess.run(again, capture_output=True, text=True, check=False, env=environment)
        assert (done.returncode, "waiting for approval" in done.stdout) == (1, True), (number, done.stderr)
        after = files_of(home)
        assert {n for n in before if before[n] != after.get(n) and not n.endswith((".part", ".log"))} == set(), number
        assert {"ingest.toml", "console.toml", "keys/waiting.json", "request.json"} <= after.keys()
        assert not [n for n in after if n.startswith(".fill")], number
    else:
        pytest.fail("it never came to its end")
    assert number > 20, "there were writes to be killed before"


def test_a_person_without_an_invitation_is_told_what_to_do_and_asked_no_more(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path)
    said = terminal.type("lazaret-agent --home new setup", ("file of the invitation", ""), status=1)
    assert "ask the coordinator's operator for an invitation" in said
    assert "--site NAME --coordinator HOST:PORT" in said
    assert not (tmp_path / "new").exists()
    words = "lazaret-agent --home new setup --site site-z --coordinator localhost:1 --modality CT --policy public"
    said = terminal.type(words, ("PACS", ""), ("console", ""), ("file of the invitation", ""), status=1)
    assert "next: enrolment: this site is not enrolled" in said
    assert SiteDirectory(tmp_path / "new").settings().site == "site-z"
