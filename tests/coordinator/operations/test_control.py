"""What persons decide by command, beside a coordinator that serves and without one: the same words and entries."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path

import pytest

from coordinator.cli.ledger import records
from coordinator.cli.main import main
from coordinator.operations.control import ABSENT, ACTS, coordinator_app
from coordinator.storage.directory import CoordinatorDirectory, open_ledger
from protos.identity.key_files import pem, write_private
from protos.service.control_client import SOCKET
from tests.support.coordinator_serving import serving
from tests.support.ledger_world import Person
from tests.support.ports import free_port

PERSONS = {"dpo-1": "compliance", "physician-1": "hospital"}


def governed(root: Path, capsys: pytest.CaptureFixture[str]) -> list[tuple[int, str]]:
    """All that persons decide, and what of it is refused: exit status and words of each command."""
    said, folder = [], root / "people"
    folder.mkdir(mode=0o700)

    def types(*words: object) -> None:
        capsys.readouterr()
        status = main(["--home", str(root / "coordinator"), *map(str, words)])
        # keys, and with them digests, are drawn anew in each world
        said.append((status, re.sub(r"[0-9a-f]{40,}", "HEX", "".join(capsys.readouterr()))))

    def approved(serial: str, *what: str) -> None:
        files = []
        for name in ("dpo-1", "physician-1"):
            files.append(folder / f"{serial}-{name}")
            signing = ("--person", name, "--serial", serial, "--key", folder / f"{name}.key", "--out", files[-1])
            types("ledger", "sign", *what, *signing)
        types("ledger", "approve", *files)

    for name, role in PERSONS.items():
        person = Person(name, role)
        write_private(folder / f"{name}.key", pem(person.key))
        types("ledger", "appoint", name, role, person.public.hex())
    second = Person("dpo-2", "compliance").public.hex()
    types("ledger", "appoint", "dpo-2", "compliance", second, "--serial", "s-1")
    approved("s-1", "appoint", "dpo-2", "compliance", second)
    types("ledger", "appoint", "dpo-2", "compliance", second, "--serial", "s-1")
    approved("s-2", "dismiss", "dpo-1", "compliance")
    types("ledger", "dismiss", "dpo-1", "--serial", "s-2")
    types("ledger", "dismiss", "physician-1")
    types("ledger", "propose", "site-a/rdp", "2.0")
    types("ledger", "limit", "site-a/rdp", "2.0", "--serial", "s-3")
    types("ledger", "waive", "site-a", "--serial", "s-4")
    return said


def test_every_decision_says_the_same_and_leaves_the_same_beside_a_service_and_without_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {}
    for way in ("here", "there"):
        root = tmp_path / way
        root.mkdir()
        home = ["--home", str(root / "coordinator")]
        assert main([*home, "init", "--policy", "internal", "--listen", f"127.0.0.1:{free_port()}"]) == 0
        with serving(home) if way == "there" else nullcontext():
            assert (root / "coordinator" / SOCKET).exists() == (way == "there")
            said = governed(root, capsys)
        kinds = [type(record.entry).__name__ for record in records(CoordinatorDirectory(root / "coordinator"))]
        found[way] = (said, kinds)
    assert found["here"] == found["there"]
    said, kinds = found["here"]
    assert [status for status, _ in said] == [0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert kinds == ["Appointed"] * 2 + ["Approved"] * 2 + ["Appointed"] + ["Approved"] * 2 + ["Dismissed"]


def test_the_socket_knows_the_acts_and_no_others(tmp_path: Path) -> None:
    assert main(["--home", str(tmp_path / "home"), "init", "--policy", "internal"]) == 0
    with open_ledger(CoordinatorDirectory(tmp_path / "home")) as store:
        paths = coordinator_app(store, None).openapi()["paths"]
    assert {path.removeprefix("/v1").removeprefix("/") for path in paths} == {"", "health", ABSENT, *ACTS}
