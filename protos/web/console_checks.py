"""What both doctors ask of a service: its console with certificate and login secret, its log's collector."""

from __future__ import annotations

import datetime as dt
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from cryptography import x509

from protos.identity.certificates import days_left, end_of
from protos.identity.key_files import KeyFileError, ec_key, read_private
from protos.operations.checks import CheckResult, failed, note, of_days, passed
from protos.operations.event_log import read_settings
from protos.operations.machine_checks import telemetry
from protos.web.settings import Oidc, read

CERTIFICATE: Final = "the certificate of console"
KEY: Final = "the key of console"
SECRET: Final = "the secret of OpenID Connect"  # noqa: S105 - a name
_SOON: Final = 30.0  # days
_MADE: Final = "remove keys/console.crt and keys/console.key, and start again: fresh ones are made"
_PKI: Final = "ask the hospital's PKI to renew the certificate that console.toml names, and start again"
_BELONG: Final = "give console.toml a certificate in PEM and the key that was made for it, without a passphrase"


def service(home: Path, keys: Path, now: dt.datetime) -> list[tuple[str, Callable[[], Iterator[CheckResult]]]]:
    """The checks of what every service of ours has, by name; see :func:`console` for the arguments."""
    return [
        ("telemetry is off", telemetry),
        ("console.toml", lambda: console(home, keys, now)),
        ("the log's collector answers", lambda: collector(home)),
    ]


def collector(home: Path) -> Iterator[CheckResult]:
    """``log.toml``, and whether the collector takes a connection; nothing where there is no collector.

    Raises:
        LogConfigError: the file cannot be read.
    """
    found = read_settings(home).syslog
    if found is None:
        return
    name = "the log's collector answers"
    try:
        found.connected().close()
        yield passed(name, found.to)
    except OSError as error:
        fix = "see to, ca and the firewall; what is logged stays in the file meanwhile"
        yield failed(name, f"{found.to}: {error.strerror or type(error).__name__}", fix)


def console(home: Path, keys: Path, now: dt.datetime) -> Iterator[CheckResult]:
    """``console.toml`` and what it names; nothing where there is no console. Only looked at: `serve` makes its own.

    Args:
        home: where ``console.toml`` is.
        keys: where the console's own certificate is made, if none is named.
        now: UTC.
    Raises:
        ConsoleConfigError: the file cannot be read, or names what it must not.
    """
    settings = read(home)
    if settings is None:
        return
    yield passed("console.toml", f"https on {settings.listen}")
    if settings.certificate is not None and settings.key is not None:
        yield from _named(settings.certificate, settings.key, now)
    else:
        yield from _own(keys, now)
    if settings.oidc is not None:
        yield _secret(settings.oidc)


def _own(keys: Path, now: dt.datetime) -> Iterator[CheckResult]:
    """The one that `serve` made, and makes anew at a start within its last days."""
    chain, key = keys / "console.crt", keys / "console.key"
    if key.exists():
        try:
            ec_key(key)
        except KeyFileError as error:
            yield failed(KEY, str(error), "make it this user's alone, or remove it and keys/console.crt")
    if chain.exists():
        end = end_of(chain)
        yield of_days(CERTIFICATE, float("nan") if end is None else days_left(end, now), _SOON, _MADE)


def _named(chain: Path, key: Path, now: dt.datetime) -> Iterator[CheckResult]:
    """The hospital's: is it there, does the key fit, and is it good for a while yet?"""
    try:
        leaf = x509.load_pem_x509_certificates(chain.read_bytes())[0]
    except OSError as error:
        yield failed(CERTIFICATE, f"it cannot be read ({error.strerror or type(error).__name__})", _BELONG)
        return
    except ValueError:
        yield failed(CERTIFICATE, "it is not a certificate in PEM", _BELONG)
        return
    if not leaf.not_valid_before_utc <= now:
        begins = f"it begins at {leaf.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
        yield failed(CERTIFICATE, begins, "set this machine's clock, or wait")
    else:
        yield of_days(CERTIFICATE, days_left(leaf.not_valid_after_utc, now), _SOON, _PKI)
    yield from _key_of(chain, key)


def _key_of(chain: Path, key: Path) -> Iterator[CheckResult]:
    try:
        open_to_others = key.stat().st_mode & 0o077
        # a key that wants a passphrase is refused: nobody can type it for `serve`
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(str(chain), str(key), password="")
    except ssl.SSLError:
        yield failed(KEY, "it does not fit the certificate, or is not a usable key", _BELONG)
    except OSError as error:
        yield failed(KEY, f"it cannot be read ({error.strerror or type(error).__name__})", _BELONG)
    else:
        if open_to_others & 0o007:
            yield failed(KEY, "everybody on this machine can read it", "chmod 600 it")
        elif open_to_others:
            yield note(KEY, "its group can read it")
        else:
            yield passed(KEY)


def _secret(settings: Oidc) -> CheckResult:
    """Could a login be begun? The provider itself is not asked."""
    try:
        secret = read_private(settings.client_secret_file).decode().strip()
        ssl.create_default_context(cafile=str(settings.ca) if settings.ca else None)
    except KeyFileError as error:
        return failed(SECRET, f"oidc.client_secret_file: {error}", "put it where console.toml says, in a 0700 folder")
    except UnicodeDecodeError:
        return failed(SECRET, "oidc.client_secret_file is not text", "write the provider's secret into it again")
    except OSError:
        return failed(
            SECRET, "oidc.ca cannot be used", "give the PEM file of whoever signs the provider's certificate"
        )
    if not secret:
        return failed(SECRET, "oidc.client_secret_file is empty", "write the provider's secret into it")
    return passed(SECRET)
