"""The command that a page prints signs the very bytes that the page would: each action, by both sides' parsers."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agent.cli.main import main as agent
from coordinator.cli.main import main as coordinator
from policies.governance import decisions
from policies.governance.cli import _value
from policies.governance.options import VALUES
from policies.ledger.entries import InvalidEntryError
from policies.statements import PAYLOAD_TYPE
from protos.common.dsse import open_sealed
from protos.identity.key_files import signing_key
from protos.web.request import Form, LoggedInPerson, RequestContext

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32))).public_key().public_bytes_raw()
SHA = "ab" * 32
PROPOSALS = [
    ("amend", "site-a", SHA),
    ("appoint", "dpo-2", f"compliance {KEY.hex()}"),
    ("dismiss", "dpo-1", "compliance"),
    ("enrol", "site-b", SHA),
    ("limit", "site-a/rdp", "8.0"),
    ("limit", "site-a/rdp", "1e-05"),
    ("limit", "site-a/k", "3"),
    ("refuse", "rel-1", f"{SHA} quality"),
    ("release", "rel-1", SHA),
    ("run", "run-1", SHA),
    ("use", "run-1", SHA),
    ("waive", "site-a", "2"),
    ("dismiss", "--out=/tmp/elsewhere", "--serial=other"),  # a hostile request's words, in an approver's terminal
    ("dismiss", "a b; rm -rf $HOME `id`", "'\"&&"),
]
Main = Callable[[Sequence[str]], int]


@pytest.mark.parametrize("main", [coordinator, agent])
@pytest.mark.parametrize("kind", ["requesting", "signing"])
def test_the_printed_command_of_every_action_signs_what_the_page_signs(
    main: Main, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if main is agent:
        pytest.importorskip("pydicom", reason="agent: its vault reads DICOM")
    assert {action for action, _, _ in PROPOSALS} == set(VALUES)
    monkeypatch.chdir(tmp_path)
    assert main(["ledger", "person", "YOUR.key"]) == 0
    public = signing_key(tmp_path / "YOUR.key").public_key().public_bytes_raw()
    asked = RequestContext(
        LoggedInPerson("ada", "hospital"), "/", Form(()), {}, lambda *_: "", encode=decisions.statement_bytes
    )
    for number, (action, subject, value) in enumerate(PROPOSALS):
        panel = getattr(asked, kind)("lazaret/test", f"s-{number}", action, subject, value)
        assert KEY.hex() not in panel["command"], "a key is typed as `ledger person` prints it"
        assert main(shlex.split(panel["command"])) == 0, panel["command"]
        sealed = (tmp_path / f"s-{number}-ada.json").read_bytes()
        payload = open_sealed(sealed, PAYLOAD_TYPE, {"ada": public}).payload
        assert payload == base64.b64decode(panel["statement"]), panel["command"]


def test_a_key_is_typed_as_it_was_printed_or_as_the_ledger_shows_it_and_nothing_else_is_one() -> None:
    signed = f"auditor {KEY.hex()}"
    for text in (base64.b64encode(KEY).decode(), KEY.hex()):
        assert _value("appoint", "neu", ["auditor", text]) == signed
    for text in (
        KEY.hex().upper(),  # 48 bytes in base64
        base64.b64encode(KEY * 2).decode(),
        base64.b64encode(KEY[:31]).decode(),
        KEY.hex()[:62],
        "",
        "not a key",
    ):
        with pytest.raises(InvalidEntryError, match="ROLE KEY"):
            _value("appoint", "neu", ["auditor", text])


def test_the_ledger_appoints_nobody_by_a_key_of_another_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = base64.b64encode(KEY * 2).decode()
    assert coordinator(["--home", str(tmp_path), "ledger", "appoint", "neu", "auditor", key]) == 1
    assert "not 32 bytes in base64" in " ".join(capsys.readouterr().err.split())
