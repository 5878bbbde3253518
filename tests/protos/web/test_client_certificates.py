"""Certificates by which persons log in: pinned ones and no others, from one moment to the next."""

from __future__ import annotations

import datetime as dt
import os
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.hazmat.primitives.serialization.pkcs12 import load_key_and_certificates

from protos.web.client_certificates import LoginConfigError, PinnedCertificates, make
from protos.web.sessions import MOST_EACH, LoginSessions
from protos.web.settings import ConsoleConfigError, ConsoleSettings
from protos.web.tls import own_certificate
from tests.support.console_kit import Clock, Console, console
from tests.support.pki import Authority

NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    with console(tmp_path_factory.mktemp("console") / "home") as made:
        yield made


def der(crt: bytes) -> bytes:
    return x509.load_pem_x509_certificate(crt).public_bytes(Encoding.DER)


def test_a_pinned_certificate_is_its_persons_and_no_other_is_anybodys(tmp_path: Path) -> None:
    logins = PinnedCertificates(tmp_path / "logins")
    _, crt, _ = make("anna", NOW, "a password")
    _, twin, _ = make("anna", NOW, "a password")  # the same name in it, another key
    logins.trust("anna", crt)
    assert logins.name_of(der(crt)) == "anna"
    assert logins.name_of(der(twin)) is None
    assert logins.name_of(b"") is None


def test_what_is_forgotten_is_nobodys_at_once_also_in_another_process(tmp_path: Path) -> None:
    serving, operator = PinnedCertificates(tmp_path / "logins"), PinnedCertificates(tmp_path / "logins")
    _, crt, _ = make("anna", NOW, "a password")
    operator.trust("anna", crt)
    assert serving.name_of(der(crt)) == "anna"
    assert operator.forget("anna")
    assert serving.name_of(der(crt)) is None
    assert not operator.forget("anna")


def test_two_persons_do_not_share_a_certificate(tmp_path: Path) -> None:
    logins = PinnedCertificates(tmp_path / "logins")
    _, crt, _ = make("anna", NOW, "a password")
    logins.trust("anna", crt)
    with pytest.raises(LoginConfigError, match="belongs to anna already"):
        logins.trust("bert", crt)
    (tmp_path / "logins" / "bert.crt").write_bytes(crt)  # by hand, past the check
    assert logins.name_of(der(crt)) is None


@pytest.mark.parametrize("name", ["../anna", "Anna", "", "a/b", ".", "-x", "a" * 65])
def test_a_name_never_leaves_the_folder(tmp_path: Path, name: str) -> None:
    logins = PinnedCertificates(tmp_path / "logins")
    _, crt, _ = make("anna", NOW, "a password")
    with pytest.raises(LoginConfigError):
        logins.trust(name, crt)
    assert not logins.forget(name)
    with pytest.raises(LoginConfigError):
        make(name, NOW, "a password")
    assert not list(tmp_path.rglob("*.crt"))


def test_a_key_or_rubbish_is_not_pinned(tmp_path: Path) -> None:
    logins = PinnedCertificates(tmp_path / "logins")
    key, crt, _ = make("anna", NOW, "a password")
    for raw in (key, b"", b"rubbish", crt + crt, crt * 30):
        with pytest.raises(LoginConfigError):
            logins.trust("anna", raw)
    assert logins.names() == {}


def test_a_link_in_the_folder_is_not_followed(tmp_path: Path) -> None:
    logins = PinnedCertificates(tmp_path / "logins")
    _, crt, _ = make("anna", NOW, "a password")
    (tmp_path / "logins").mkdir(mode=0o700)
    (tmp_path / "elsewhere.crt").write_bytes(crt)
    os.symlink(tmp_path / "elsewhere.crt", tmp_path / "logins" / "anna.crt")
    assert logins.name_of(der(crt)) is None


def test_a_smart_cards_certificate_is_pinned_without_its_authority(served: Console, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    crt, key = authority.agent("card-of-ada")
    other_crt, other_key = authority.agent("card-of-eve")
    served.logins.trust("card", crt.read_bytes())
    trusted = ssl.create_default_context(cafile=str(served.home / "keys" / "console.crt"))
    trusted.load_cert_chain(crt, key)
    with httpx.Client(base_url=served.base, verify=trusted, trust_env=False) as client:
        assert "the certificate of <b>card</b>" in client.get("/login").text
    other = ssl.create_default_context(cafile=str(served.home / "keys" / "console.crt"))
    other.load_cert_chain(other_crt, other_key)
    with httpx.Client(base_url=served.base, verify=other, trust_env=False) as client, pytest.raises(httpx.HTTPError):
        client.get("/login")  # the same authority signed it, and it is not pinned


def test_the_files_for_a_browser_open_with_their_password_only() -> None:
    _, crt, p12 = make("anna", NOW, "a password")
    _, found, _ = load_key_and_certificates(p12, b"a password")
    assert found is not None
    assert found.public_bytes(Encoding.PEM) == crt
    with pytest.raises(ValueError, match=r"[Pp]assword|PKCS12"):
        load_key_and_certificates(p12, b"another")


def test_a_session_ends_when_it_is_not_used_and_at_last_in_any_case() -> None:
    clock = Clock()
    sessions = LoginSessions(900.0, 3600.0, clock)
    token = sessions.begin("anna", b"crt")
    clock.at = 899
    assert sessions.find(token, b"crt", touch=True) is not None
    clock.at = 1798
    assert sessions.find(token, b"crt", touch=False) is not None  # a page that looks again by itself
    clock.at = 1799
    assert sessions.find(token, b"crt", touch=True) is None
    token = sessions.begin("anna", b"crt")
    for _ in range(10):
        clock.at += 800
        sessions.find(token, b"crt", touch=True)
    assert sessions.find(token, b"crt", touch=True) is None


def test_a_session_is_of_the_certificate_that_it_began_with() -> None:
    sessions = LoginSessions(900.0, 3600.0, Clock())
    token = sessions.begin("anna", b"crt")
    assert sessions.find(token, b"another", touch=True) is None
    assert sessions.find(token, b"", touch=True) is None
    assert sessions.find(token, b"crt", touch=True) is not None


def test_a_person_has_a_few_sessions_and_the_oldest_ends() -> None:
    sessions = LoginSessions(900.0, 3600.0, Clock())
    other = sessions.begin("bert", b"")
    tokens = [sessions.begin("anna", b"") for _ in range(MOST_EACH + 1)]
    found = [sessions.find(token, b"", touch=True) is not None for token in (*tokens, other)]
    assert found == [False] + [True] * (MOST_EACH + 1)


def test_the_consoles_own_certificate_is_made_once_and_again_when_it_ends(tmp_path: Path) -> None:
    settings = ConsoleSettings()
    first = own_certificate(tmp_path / "keys", settings, NOW)
    assert (first.key.stat().st_mode & 0o777, first.key.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert own_certificate(tmp_path / "keys", settings, NOW).fingerprint == first.fingerprint
    later = own_certificate(tmp_path / "keys", settings, first.ends - dt.timedelta(days=10))
    assert later.fingerprint != first.fingerprint
    named = ConsoleSettings(names=("console.hospital.example",))
    assert own_certificate(tmp_path / "keys", named, NOW).fingerprint != later.fingerprint


def test_a_key_that_others_can_read_opens_no_console(tmp_path: Path) -> None:
    own_certificate(tmp_path / "keys", ConsoleSettings(), NOW)
    (tmp_path / "keys" / "console.key").chmod(0o644)
    with pytest.raises(ConsoleConfigError, match="can be read by others"):
        own_certificate(tmp_path / "keys", ConsoleSettings(), NOW)
