"""What both ends of a secure round build from the same facts: one form on the wire, and a session that differs."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.artifacts.arrays import pack_vector
from protos.secagg import round
from protos.secagg.messages import SumStep
from protos.secagg.round import RoundParams, RoundSetup, SecAggSetupError
from protos.secagg.server import Server
from protos.secagg.session import Quorum
from tests.support.secagg import Sites, play, site_key

START = np.arange(4, dtype=np.float32)
CONFIG = json.dumps({"ring_bits": 32, "value_bound": 4.0, "scale": 20}).encode()
ROSTER = {name: site_key(name).public_key().public_bytes_raw() for name in ("a", "b", "c")}
TERMS = RoundParams("run-1", 0, CONFIG, '{"name":"fedavg"}')
QUORUM = Quorum.smallest(3, round.CORRUPT, 2)


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_two_byte_strings_come_back_as_they_went(head: bytes, body: bytes) -> None:
    assert round.unframe(round.frame(head, body)) == (head, body)


@given(st.binary(max_size=64))
def test_any_bytes_are_two_byte_strings_or_none(raw: bytes) -> None:
    try:
        head, body = round.unframe(raw)
    except SecAggSetupError:
        return
    assert round.frame(head, body) == raw


def test_a_setup_comes_back_as_it_went_and_its_bytes_are_pinned() -> None:
    setup = RoundSetup(ROSTER, '{"name":"fedavg"}', pack_vector(START))
    raw = setup.encode()
    back = RoundSetup.decode(raw)
    assert (dict(back.roster), back.strategy, back.start) == (ROSTER, setup.strategy, setup.start)
    text = raw[8 : 8 + int.from_bytes(raw[:8], "big")]
    assert list(json.loads(text)) == ["roster", "strategy"]
    assert list(json.loads(text)["roster"]) == ["a", "b", "c"]
    again = RoundSetup(dict(reversed(ROSTER.items())), setup.strategy, setup.start).encode()
    assert hashlib.sha256(again).digest() == hashlib.sha256(raw).digest(), "one form, whatever the order"


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"null",
        b'{"roster":{}}',
        b'{"roster":[],"strategy":"x"}',
        b'{"roster":{"a":"AA=="}, "strategy":"x"}',
        b'{"strategy":"x","roster":{"a":"AA=="}}',
        b'{"roster":{"a":"AA=="},"strategy":"x","more":1}',
        b'{"roster":{"a":"A"},"strategy":"x"}',
        b'{"roster":{"a":1},"strategy":"x"}',
        b'{"roster":{"a":"AA==","a":"AA=="},"strategy":"x"}',
        b'{"roster":{},"strategy":1}',
        b"[" * 60_000,
        b'{"roster":{},"strategy":"' + b"x" * round.MOST_SETUP + b'"}',
        b"\xff\xfe",
    ],
    ids=lambda text: text[:24],
)
def test_what_is_not_a_setup_in_its_one_form_is_refused(text: bytes) -> None:
    with pytest.raises(SecAggSetupError):
        RoundSetup.decode(round.frame(text, b"start"))


def test_both_sides_build_the_same_session_from_the_same_facts() -> None:
    one = round.session(TERMS, START, ROSTER, QUORUM)
    other = round.session(TERMS, START.copy(), dict(reversed(ROSTER.items())), QUORUM)
    assert one.digest == other.digest


@pytest.mark.parametrize(
    ("terms", "start"),
    [
        (RoundParams("run-2", 0, CONFIG, TERMS.strategy), START),
        (RoundParams("run-1", 1, CONFIG, TERMS.strategy), START),
        (RoundParams("run-1", 0, CONFIG.replace(b"}", b" }"), TERMS.strategy), START),
        (RoundParams("run-1", 0, CONFIG, '{"name":"fedavg","cap":1.0}'), START),
        (TERMS, np.nextafter(START, np.float32(9), dtype=np.float32)),
        (TERMS, -0.0 * START),
    ],
)
def test_any_other_fact_makes_another_session(terms: RoundParams, start: np.ndarray) -> None:
    """Pasquini et al. 2022: a site that was shown another model must be in no sum with the others."""
    assert round.session(terms, start, ROSTER, QUORUM).digest != round.session(TERMS, START, ROSTER, QUORUM).digest


def test_a_ring_in_which_the_sum_could_wrap_is_no_session() -> None:
    wide = json.dumps({"ring_bits": 32, "value_bound": 1023.0, "scale": 20}).encode()
    with pytest.raises(ValueError, match="wrap"):
        round.session(RoundParams("run-1", 0, wide, TERMS.strategy), START, ROSTER, QUORUM)


def test_the_sealed_artifact_is_the_vector_that_the_hub_adds_and_anothers_message_is_none() -> None:
    sites = Sites(3)
    members, vectors = sites.members(), sites.vectors()
    requests = play(members, Server(sites.session), vectors, SumStep.MASK)
    name = sites.names[0]
    message = members[name].answer(SumStep.MASK, requests[name], vectors[name])
    words = round.masked_vector(sites.session, message)
    assert words.size == sites.ring.length
    assert (words != vectors[name].view(np.uint64)).all(), "masked"
    for spoilt in (b"", message[:-1], message + b"\0", bytes([message[0] ^ 1]) + message[1:]):
        with pytest.raises(ValueError):  # noqa: PT011 - every kind of wrong message is one
            round.masked_vector(sites.session, spoilt)
