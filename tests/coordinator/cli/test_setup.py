"""``setup`` of a coordinator, and what persons sign by its number until a hospital is enrolled."""

from __future__ import annotations

import datetime as dt
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.gateway import enrolment
from agent.gateway.enrolment import Given
from agent.storage import site_directory
from agent.storage.site_directory import SiteDirectory
from coordinator.cli.main import main
from coordinator.storage.directory import CoordinatorDirectory, look_at_ledger
from policies.ledger.store import lines
from policies.review.policy import preset
from protos.identity.key_files import pem, write_private
from tests.support.command_server import python
from tests.support.coordinator_serving import serving
from tests.support.federation_world import SETTINGS
from tests.support.ledger_world import Person
from tests.support.ports import free_port
from tests.support.unchanged import files_of

Typed = Callable[..., tuple[int, str, str]]
OFFICER, HEAD = Person("officer-1", "compliance"), Person("head-1", "hospital")
PEOPLE = ("--compliance", "officer-1", OFFICER.public.hex(), "--hospital", "head-1", HEAD.public.hex())


@pytest.fixture
def typed(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Typed:
    """A command of the coordinator in ``hub``; its status and what it said."""
    monkeypatch.chdir(tmp_path)

    def act(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = main(["--home", "hub", *map(str, words)])
        except SystemExit as usage:
            status = int(usage.code or 0)
        said = capsys.readouterr()
        return status, said.out, said.err

    return act


def test_one_command_makes_directory_console_persons_and_an_invitation(typed: Typed, tmp_path: Path) -> None:
    words = ["--address", f"localhost:{free_port()}", "--policy", "internal", "--console", "localhost:8123", *PEOPLE]
    status, out, _ = typed("setup", *words, "--invite", "site-a")
    assert status == 0
    assert {"token, valid for one request", "fingerprint of the federation's root"} <= {
        line.partition(":")[0].replace(" within 30 minutes", "") for line in out.splitlines()
    }
    assert "lazaret-coordinator serve" in out
    before = files_of(tmp_path)
    assert {"hub/coordinator.toml", "hub/console.toml", "site-a.invitation"} <= before.keys()
    status, out, _ = typed("setup", *words, "--invite", "site-a", "--json")
    assert (status, json.loads(out)["written"], json.loads(out)["telephone"]) == (0, [], {})
    assert files_of(tmp_path) == before, "a script types the same every day"
    (tmp_path / "site-a.invitation").unlink()
    assert typed("setup", "--invite", "site-a", "--json")[0] == 2, "a token is in no output that programs keep"
    status, out, _ = typed("setup", "--invite", "site-a", "--json", "--token-file", "token")
    assert (status, json.loads(out)["written"]) == (0, ["site-a.invitation"])
    assert (tmp_path / "token").read_text().strip() not in out
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        ([], 2, "give --address"),
        (["--address", "gateway"], 1, "listen and address must be host:port"),
        (["--address", "a:1", "--policy", "lax"], 1, "--policy: no preset 'lax'"),
        (["--address", "a:1", "--policy", "own.toml"], 1, "--policy: own.toml cannot be read"),
        (["--address", "a:1", "--compliance", "x", "key"], 1, "--compliance: the public key is not 32 bytes"),
        (["--address", "a:1", "--hospital", "No Name", "k"], 1, "--hospital: two words"),
        (["--address", "a:1", "--hospital", "X", HEAD.public.hex()], 1, "--hospital: a person's name is 1 to 64"),
        (["--address", "a:1", "--invite", "Nord"], 1, "--invite: a hospital's name is"),
        (["--address", "a:1", "--console", "No Name"], 1, "--console: a name in lower case"),
    ],
)
def test_bad_input_is_one_sentence_and_the_next_command_goes_on(
    typed: Typed, words: list[str], status: int, sentence: str
) -> None:
    found, _, err = typed("setup", *words)
    assert (found, sentence in err, err.count("\n")) == (status, True, 1), err
    assert typed("setup", "--address", f"localhost:{free_port()}", *PEOPLE)[0] == 0


@pytest.mark.slow
def test_a_kill_before_any_write_loses_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    for number in range(1, 200):
        place = tmp_path / str(number)
        place.mkdir()
        words = ["--home", "hub", "setup", "--address", "localhost:7443", "--console", "localhost:8123", *PEOPLE]
        words += ["--invite", "site-a", "--token-file", "token"]
        killed = [python(), "-m", "tests.support.killed_writes", str(number), str(place), "coordinator", *words]
        status = subprocess.run(killed, capture_output=True, check=False, cwd=place, env=environment).returncode
        keys = files_of(place / "hub" / "keys") if (place / "hub" / "coordinator.toml").exists() else {}
        if status != -signal.SIGKILL:
            assert status == 0
            break
        again = [python(), "-m", "coordinator", *words]
        done = subprocess.run(again, capture_output=True, text=True, check=False, cwd=place, env=environment)
        assert done.returncode == 0, (number, done.stderr)
        home = CoordinatorDirectory(place / "hub")
        appointed = [r.record.entry.person for r in lines(look_at_ledger(home)) if hasattr(r.record.entry, "person")]
        assert sorted(appointed) == ["head-1", "officer-1"], number
        after = files_of(place / "hub" / "keys")
        assert {n for n in keys if keys[n] != after.get(n)} == set(), number
        assert (place / "token").exists(), number
        assert json.loads((place / "site-a.invitation").read_text())["site"] == "site-a"
    else:
        pytest.fail("it never came to its end")
    assert number > 20, "there were writes to be killed before"


# -- signing by number


@pytest.fixture
def hub(typed: Typed, tmp_path: Path) -> tuple[int, Path]:
    """A coordinator with persons, whose keys lie in ``persons``; its port."""
    port = free_port()
    assert typed("setup", "--address", f"127.0.0.1:{port}", "--policy", "internal", *PEOPLE)[0] == 0
    (tmp_path / "persons").mkdir(mode=0o700)
    for person in (OFFICER, HEAD):
        write_private(tmp_path / "persons" / f"{person.name}.key", pem(person.key))
    return port, tmp_path


def asking(hub: tuple[int, Path], typed: Typed, name: str) -> tuple[SiteDirectory, str]:
    """A site that has handed in its request; and the fingerprint that it reads out."""
    port, place = hub
    out = typed("invite", name, "--out", f"{name}.invitation", "--token-file", f"{name}.token")[1]
    settings = SETTINGS.format(site=name, listen=f"127.0.0.1:{port}")
    site = site_directory.create(place / name, settings, preset("internal"))
    given = Given(
        (place / f"{name}.invitation").read_bytes(),
        (place / f"{name}.token").read_text(),
        out.partition("root: ")[2].splitlines()[0],
    )
    progress = enrolment.enrol(site, given, enrolment.over_grpc(), dt.datetime.now(dt.UTC))
    return site, progress.fingerprint


def sign(typed: Typed, number: object, person: Person, *more: str) -> tuple[int, str, str]:
    return typed("ledger", "sign", number, "--person", person.name, "--key", f"persons/{person.name}.key", *more)


def test_two_persons_sign_by_number_and_the_second_one_enrols_the_hospital(
    hub: tuple[int, Path], typed: Typed
) -> None:
    with serving(["--home", str(hub[1] / "hub")]):
        site, heard = asking(hub, typed, "north")
        _, other = asking(hub, typed, "south")
        status = typed("status")[1]
        assert "request 1, north" in status
        assert "request 2, south" in status
        assert heard not in status, "it is heard, and not read beside the question"
        for more, code, sentence in (
            ((), 2, "give --fingerprint"),
            (("--yes",), 2, "give --fingerprint"),
            (("--fingerprint", other, "--yes"), 1, "that is not the fingerprint of this request; nothing was signed"),
            (("--fingerprint", heard), 2, "give --yes"),
            (("--fingerprint", heard, "--yes", "--serial", "s"), 2, "leave out --serial"),
        ):
            found, out, err = sign(typed, 1, OFFICER, *more)
            assert (found, sentence in err) == (code, True), err
            assert heard not in err
            assert ("signs: " in out) == (sentence == "give --yes"), "what is signed is shown after what was heard"
        for word in ("7", "0", "01x"):
            assert sign(typed, word, OFFICER, "--yes")[0] in (1, 2)
        found, out, _ = sign(typed, 1, OFFICER, "--fingerprint", heard, "--yes")
        assert (found, "request 1, north: hospital must approve it" in out) == (0, True)
        assert "more are needed: one person in the role of hospital" in typed("approve", "1")[2]
        found, _, err = typed(
            *("ledger", "sign", "1", "--person", "head-1", "--key", "persons/officer-1.key", "--yes"),
            *("--fingerprint", heard),
        )
        assert (found, "not signed by that person's key" in err) == (1, True), "each with a key of their own"
        found, out, _ = sign(typed, 1, HEAD, "--fingerprint", heard, "--yes")
        assert (found, "north is enrolled" in out) == (0, True)
        assert enrolment.enrol(site, None, enrolment.over_grpc(), dt.datetime.now(dt.UTC)).state == "enrolled"
        found, _, err = sign(typed, 1, HEAD, "--fingerprint", heard, "--yes")
        assert (found, "nothing waits under the number 1 (any more)" in err) == (1, True)
        assert typed("approve", "1")[0] == 1
        assert "request 2, south" in typed("status")[1], "it keeps its number"


def test_what_was_signed_elsewhere_is_approved_by_number_and_both_ways_mix(
    hub: tuple[int, Path], typed: Typed
) -> None:
    with serving(["--home", str(hub[1] / "hub")]):
        _, heard = asking(hub, typed, "north")
        (pending,) = json.loads(typed("enrolments", "--json")[1])
        offline = ["ledger", "sign", "enrol", "north", pending["digest"], "--ledger", "lazaret/coordinator"]
        offline += [
            "--serial",
            "join-a",
            "--person",
            "officer-1",
            "--key",
            "persons/officer-1.key",
            "--out",
            "o.json",
        ]
        assert main(offline) == 0
        found, _, err = typed("approve", "1", "o.json")
        assert (found, "more are needed" in err) == (1, True)
        found, out, _ = sign(typed, 1, HEAD, "--fingerprint", heard, "--yes")
        assert (found, "north is enrolled" in out) == (0, True), "the serial of the first one is found"


def test_who_signs_while_nothing_serves_is_told_what_comes_next(hub: tuple[int, Path], typed: Typed) -> None:
    with serving(["--home", str(hub[1] / "hub")]):
        _, heard = asking(hub, typed, "north")
    for person in (OFFICER, HEAD):
        found, out, _ = sign(typed, 1, person, "--fingerprint", heard, "--yes")
        assert found == 0
    assert "it is approved, and can be carried out: lazaret-coordinator approve 1" in out
    found, _, err = typed("approve", "1")
    assert (found, "does not serve from this directory: lazaret-coordinator serve" in err) == (1, True)
    with serving(["--home", str(hub[1] / "hub")]):
        assert typed("approve", "1")[0] == 0


def test_what_somebody_asked_for_is_signed_by_number_too(hub: tuple[int, Path], typed: Typed) -> None:
    _, place = hub
    olga = Person("olga", "operator")
    write_private(place / "persons" / "olga.key", pem(olga.key))
    words = ["ledger", "sign", "appoint", "olga", "operator", olga.public.hex(), "--serial", "new-1"]
    found, out, _ = typed(*words, "--person", "officer-1", "--key", "persons/officer-1.key")
    assert (found, "proposal 1, appoint olga: hospital must approve it" in out) == (0, True)
    found, out, _ = sign(typed, 1, HEAD, "--yes")
    assert f"head-1 signs: approve appoint olga operator {olga.public.hex()}, serial new-1" in out
    command = f"lazaret-coordinator ledger appoint olga operator {olga.public.hex()} --serial new-1"
    assert f"it is approved, and can be carried out: {command}" in out
    assert typed(*command.split()[1:])[0] == 0
    assert "waiting for people" not in typed("status")[1]


def test_the_invite_command_works_by_itself_where_nothing_serves(typed: Typed, hub: tuple[int, Path]) -> None:
    assert typed("invite", "north", "--out", "north.invitation")[0] == 0
    assert json.loads((hub[1] / "north.invitation").read_text())["site"] == "north"
