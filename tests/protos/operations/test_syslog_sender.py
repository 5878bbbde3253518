"""The copy of the log for the hospital's collector: RFC 5424 over real TLS, bounded, and never in anybody's way."""

from __future__ import annotations

import json
import os
import re
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from protos.operations.event_counters import EventCounters
from protos.operations.event_log import open_journal
from protos.operations.syslog_sender import Collector, Forwarder, framed, message
from tests.support.collector import Syslogd
from tests.support.pki import Authority
from tests.support.ports import free_port

KEYS = frozenset({"event", "level", "timestamp", "state"})
# RFC 5424, section 6: HEADER SP STRUCTURED-DATA SP MSG
FORM = re.compile(
    rb"<(1[0-8][0-9]|19[01]|[1-9]?[0-9])>1 ([0-9-]{10}T[0-9:]{8}(?:\.[0-9]{1,6})?(?:Z|[+-][0-9:]{5})) "
    rb"([\x21-\x7e]{1,255}) ([\x21-\x7e]{1,48}) ([\x21-\x7e]{1,128}) ([\x21-\x7e]{1,32}) - ([\x20-\x7e]*)"
)


def settings(folder: Path, port: int, ca: Path, more: str = "") -> None:
    (folder / "log.toml").write_text(f'[syslog]\nto = "localhost:{port}"\nca = "{ca}"\n{more}')


def test_a_logged_line_reaches_the_collector_in_the_form_of_the_standard(tmp_path: Path) -> None:
    with Syslogd(tmp_path / "pki") as collector:
        settings(tmp_path, collector.port, collector.authority.ca)
        log = open_journal(tmp_path / "x.log", "lazaret-agent", KEYS, EventCounters())
        log.warning("release_refused", state="ä\nforged\x7f")
        log.info("a name with spaces and much too long for a message id", state="x")
        first, second = collector.wait(2)
    match = FORM.fullmatch(first)
    assert match is not None, first
    assert int(match[1]) == 8 * 13 + 4
    assert (match[4], match[5], match[6]) == (b"lazaret-agent", str(os.getpid()).encode(), b"release_refused")
    lines = (tmp_path / "x.log").read_bytes().splitlines()
    assert match[7] == lines[0], "the very line of the file"
    assert json.loads(match[7])["state"] == "ä\nforged\x7f"
    assert json.loads(match[7])["timestamp"].encode() == match[2]
    assert FORM.fullmatch(second)


def test_the_length_before_a_message_is_that_of_its_bytes() -> None:
    assert framed(b"abc") == b"3 abc"
    body = message("a b", Collector("h:1", hostname="w\x00ard 7"), "odd", "", '{"timestamp": ""}')
    assert body.startswith(b"<109>1 - w?ard?7 a?b ")


def test_a_collector_of_another_authority_or_name_gets_nothing(tmp_path: Path) -> None:
    other = Authority(tmp_path / "other", "somebody else")
    with Syslogd(tmp_path / "pki") as collector:
        with pytest.raises(ssl.SSLCertVerificationError):
            Collector(f"localhost:{collector.port}", other.ca).connected()
        with pytest.raises(ssl.SSLCertVerificationError):
            Collector(f"localhost:{collector.port}").connected()
        Collector(f"localhost:{collector.port}", collector.authority.ca).connected().close()
        assert not collector.messages


def test_a_collector_may_ask_for_our_certificate(tmp_path: Path) -> None:
    with Syslogd(tmp_path / "pki", asks=True) as collector:
        certificate, key = collector.authority.agent("site-a")
        settings(tmp_path, collector.port, collector.authority.ca, f'certificate = "{certificate}"\nkey = "{key}"\n')
        open_journal(tmp_path / "x.log", "lazaret-agent", KEYS, EventCounters()).info("step")
        assert FORM.fullmatch(collector.wait(1)[0])


def test_a_broken_connection_is_opened_again(tmp_path: Path) -> None:
    with Syslogd(tmp_path / "pki") as collector:
        settings(tmp_path, collector.port, collector.authority.ca)
        log = open_journal(tmp_path / "x.log", "lazaret-agent", KEYS, EventCounters())
        log.info("one")
        collector.wait(1)
        collector.hang_up()
        log.info("two")
        assert b" two - " in collector.wait(2)[1]


def test_nobody_waits_for_a_collector_that_is_not_there_and_what_is_dropped_is_counted_and_told(
    tmp_path: Path,
) -> None:
    port, lost = free_port(), []
    authority = Authority(tmp_path / "none")
    forwarder = Forwarder(Collector(f"localhost:{port}", authority.ca), "x", lost.append, most=5)
    for number in range(12):
        forwarder.send("info", f"e{number}", '{"timestamp": "2026-01-01T00:00:00Z"}')
    assert lost == [1] * 7
    forwarder.close()
    forwarder.send("info", "late", '{"timestamp": "2026-01-01T00:00:00Z"}')
    assert len(lost) == 8


def test_the_collector_hears_how_much_it_misses(tmp_path: Path) -> None:
    with Syslogd(tmp_path / "pki") as collector:
        where = Collector(f"localhost:{collector.port}", collector.authority.ca)
        forwarder = Forwarder(where, "x", most=0)
        forwarder.send("info", "dropped", '{"timestamp": "2026-01-01T00:00:00Z"}')
        forwarder._most = 10
        forwarder.send("info", "kept", '{"timestamp": "2026-01-01T00:00:00Z"}')
        gap, kept = collector.wait(2)
        assert b" syslog_dropped - " in gap
        assert json.loads(gap.split(b" - ", 1)[1])["count"] == 1
        assert b" kept - " in kept
        forwarder.close()


def test_a_command_that_logs_and_ends_sends_its_last_line(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from protos.operations.event_log import open_journal\n"
        "log = open_journal(Path(sys.argv[1]), 'x', {'event', 'level', 'timestamp'})\n"
        "log.info('last_words')\n"
    )
    with Syslogd(tmp_path / "pki") as collector:
        settings(tmp_path, collector.port, collector.authority.ca)
        command = [sys.executable, "-c", program, str(tmp_path / "x.log")]
        assert subprocess.run(command, check=False, timeout=60).returncode == 0
        assert b" last_words - " in collector.wait(1)[0]
