"""console.toml: everything that is wrong with it is said at once, and what cannot be meant is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from protos.web.settings import ConsoleConfigError, ConsoleSettings, draft, parse, read

HOME = Path("home")
GOOD = """
listen = "0.0.0.0:8743"
names = ["console.hospital.example"]
certificate = "tls/console.crt"
key = "tls/console.key"
metrics = "[::1]:9464"
idle_minutes = 10
hours = 4
[oidc]
issuer = "https://id.hospital.example/realm"
client_id = "lazaret"
client_secret_file = "keys/oidc"
claim = "email"
[oidc.persons]
"anna@hospital.example" = "anna"
"""


def test_a_whole_file_is_read_and_its_paths_are_the_homes() -> None:
    settings = parse(GOOD, HOME)
    assert settings.certificate == HOME / "tls/console.crt"
    assert settings.names == ("console.hospital.example",)
    assert settings.oidc is not None
    assert settings.oidc.persons == {"anna@hospital.example": "anna"}
    assert settings.oidc.client_secret_file == HOME / "keys/oidc"


def test_an_empty_file_means_this_machine_only() -> None:
    settings = parse("", HOME)
    assert settings == ConsoleSettings()
    assert settings.listen.startswith("127.0.0.1:")


def test_no_file_means_no_console(tmp_path: Path) -> None:
    assert read(tmp_path) is None


def test_a_file_that_cannot_be_read_is_no_missing_one(tmp_path: Path) -> None:
    (tmp_path / "console.toml").write_bytes(b"\xff")
    with pytest.raises(ConsoleConfigError, match="cannot be read"):
        read(tmp_path)


def test_every_problem_is_named_at_once() -> None:
    text = 'listen = "here"\nnames = ["UPPER", "a b"]\nkey = "k"\nidle_minutes = 0\nhours = true\nlisten_to = 1\n'
    text += '[oidc]\nissuer = "http://id.example"\nclient_id = ""\nclient_secret_file = 3\nclaim = "a b"\n'
    with pytest.raises(ConsoleConfigError) as refused:
        parse(text, HOME)
    words = str(refused.value)
    for problem in ("unknown keys: listen_to", "hours must be", "oidc.client_secret_file must be", "missing keys"):
        assert problem in words
    for problem in ("oidc.persons", "listen must be host:port", "names must list", "belong together", "idle_minutes"):
        assert problem in words


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("issuer", '"http://id.hospital.example"'),
        ("issuer", '"https://id.hospital.example?x=1"'),
        ("issuer", '"https://user@id.hospital.example"'),
        ("issuer", '"file:///etc/passwd"'),
        ("client_id", '""'),
        ("claim", '"a claim"'),
    ],
)
def test_an_unsafe_provider_is_refused(key: str, value: str) -> None:
    lines = [line for line in GOOD.splitlines() if not line.startswith(f"{key} =")]
    at = lines.index("[oidc]") + 1
    with pytest.raises(ConsoleConfigError, match=f"oidc.{key}"):
        parse("\n".join([*lines[:at], f"{key} = {value}", *lines[at:]]), HOME)


@pytest.mark.parametrize("person", ["Anna", "../anna", "", "anna bell"])
def test_a_claim_leads_to_a_name_as_the_ledger_writes_it(person: str) -> None:
    with pytest.raises(ConsoleConfigError, match=r"oidc\.persons"):
        parse(GOOD.replace('= "anna"', f'= "{person}"'), HOME)


def test_two_claims_are_not_one_person() -> None:
    with pytest.raises(ConsoleConfigError, match="two claims lead to one person"):
        parse(GOOD + '"other@hospital.example" = "anna"\n', HOME)


@pytest.mark.parametrize("listen", ["8743", "::1:8743", "localhost:70000", "localhost:"])
def test_an_address_is_host_and_port(listen: str) -> None:
    with pytest.raises(ConsoleConfigError, match="listen must be host:port"):
        ConsoleSettings(listen=listen)


@pytest.mark.parametrize(
    ("name", "listen"),
    [
        ("console.hospital.example", "0.0.0.0:8743"),
        ("console.hospital.example:9000", "0.0.0.0:9000"),
        ("localhost", "127.0.0.1:8743"),
        ("127.0.0.1:1", "127.0.0.1:1"),
    ],
)
def test_a_draft_for_one_name_is_a_console(name: str, listen: str) -> None:
    made = parse(draft(name), HOME)
    assert (made.listen, made.names) == (listen, (name.partition(":")[0],))


@pytest.mark.parametrize("name", ["", "Not A Name", "a:b", "a:70000", 'a"', "a:1:2"])
def test_what_is_no_name_makes_no_draft(name: str) -> None:
    with pytest.raises(ValueError, match="a name in lower case"):
        draft(name)
