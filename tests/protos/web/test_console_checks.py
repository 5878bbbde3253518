"""A console that would not open, or not for long, is told by both doctors before anybody opens a browser."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest

from protos.identity.key_files import write_private
from protos.operations.checks import CheckResult
from protos.web.client_certificates import make
from protos.web.console_checks import CERTIFICATE, KEY, SECRET, console
from protos.web.oidc import Provider
from protos.web.settings import ConsoleConfigError, read
from protos.web.tls import own_certificate

NOW = dt.datetime(2026, 6, 1, tzinfo=dt.UTC)
DAY = dt.timedelta(days=1)
OIDC = '[oidc]\nissuer = "https://x.example"\nclient_id = "a"\nclient_secret_file = "secret/s"\npersons = {a = "b"}\n'


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "keys").mkdir(mode=0o700)
    (tmp_path / "secret").mkdir(mode=0o700)
    return tmp_path


def named(home: Path, begun: dt.datetime) -> None:
    """A hospital's own certificate, which was made then."""
    key, chain, _ = make("x", begun, "pw")
    write_private(home / "secret" / "h.key", key)
    (home / "h.crt").write_bytes(chain)
    (home / "console.toml").write_text('certificate = "h.crt"\nkey = "secret/h.key"\n')


def found(home: Path, now: dt.datetime = NOW) -> dict[str, CheckResult]:
    return {finding.name: finding for finding in console(home, home / "keys", now)}


def wrong(home: Path, now: dt.datetime = NOW) -> dict[str, str]:
    told = found(home, now).values()
    assert not any(str(home) in f.said + f.fix for f in told), "no path of the machine"
    return {f.name: f.said for f in told if f.state == "fail"}


def test_without_a_console_nothing_is_asked_and_a_fresh_one_makes_its_own(home: Path) -> None:
    assert found(home) == {}
    (home / "console.toml").write_text("")
    assert set(found(home)) == {"console.toml"}
    assert not (home / "keys" / "console.crt").exists(), "only looked at"


def test_its_own_certificate_is_looked_at_too(home: Path) -> None:
    (home / "console.toml").write_text("")
    settings = read(home)
    assert settings is not None
    ends = own_certificate(home / "keys", settings, NOW).ends
    assert wrong(home) == {}
    assert set(wrong(home, ends - 10 * DAY)) == {CERTIFICATE}
    (home / "keys" / "console.key").chmod(0o644)
    assert set(wrong(home)) == {KEY}


def test_a_named_certificate_is_to_be_there_to_fit_and_to_have_time_left(home: Path) -> None:
    named(home, NOW - DAY)
    settings = read(home)
    assert settings is not None
    ends = own_certificate(home / "keys", settings, NOW).ends
    assert wrong(home) == {}
    assert "it ends in 20.0 days" in wrong(home, ends - 20 * DAY)[CERTIFICATE]
    assert wrong(home, ends + DAY)[CERTIFICATE] == "it has expired"
    assert "it begins at" in wrong(home, NOW - 30 * DAY)[CERTIFICATE]
    other, _, _ = make("y", NOW, "pw")
    key = home / "secret" / "h.key"
    key.write_bytes(other)
    assert "does not fit" in wrong(home)[KEY]
    key.unlink()
    assert "cannot be read" in wrong(home)[KEY]
    (home / "h.crt").write_text("no certificate")
    assert "not a certificate in PEM" in wrong(home)[CERTIFICATE]
    (home / "h.crt").unlink()
    assert "cannot be read" in wrong(home)[CERTIFICATE]


def test_a_named_certificate_is_looked_at_and_not_the_one_that_was_made_before_it(home: Path) -> None:
    named(home, NOW - DAY)
    (home / "keys" / "console.crt").write_text("of before")
    assert wrong(home) == {}


def test_who_else_can_read_the_key_is_told(home: Path) -> None:
    named(home, NOW - DAY)
    (home / "secret" / "h.key").chmod(0o640)
    assert found(home)[KEY].state == "note"
    (home / "secret" / "h.key").chmod(0o644)
    assert "everybody on this machine" in wrong(home)[KEY]


def test_the_secret_of_a_login_is_to_be_there_and_its_owners_alone(home: Path) -> None:
    (home / "console.toml").write_text(OIDC)
    settings, secret = read(home), home / "secret" / "s"
    assert settings is not None
    assert settings.oidc is not None
    assert "missing" in wrong(home)[SECRET]
    with pytest.raises(ConsoleConfigError):
        Provider(settings.oidc, lambda: 0.0, lambda: 0.0)
    write_private(secret, b"hush\n")
    assert found(home)[SECRET].state == "pass"
    Provider(settings.oidc, lambda: 0.0, lambda: 0.0)
    for body, why in ((b"\n", "is empty"), (b"\xff\xfe", "is not text")):
        secret.write_bytes(body)
        assert why in wrong(home)[SECRET]
    secret.write_bytes(b"hush")
    secret.chmod(0o640)
    assert "can be read by others" in wrong(home)[SECRET]
    secret.chmod(0o600)
    (home / "console.toml").write_text(OIDC + 'ca = "nowhere.pem"\n')
    assert "oidc.ca" in wrong(home)[SECRET]
