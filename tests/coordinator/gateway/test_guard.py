"""The guard's own arithmetic, with a clock that the test moves; the same over the wire is in tests/attacks."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from coordinator.gateway import guard
from coordinator.gateway.calls import Call, CallRejectedError
from coordinator.gateway.guard import (
    AT_ONCE,
    BURST,
    CALLS_PER_S,
    ENTRIES,
    ENTRY_S,
    MOST_BYTES,
    ROLES,
    STRANGE_STRIKES,
    STRIKE_S,
    STRIKES,
    Guard,
)
from coordinator.gateway.quotas import IdleTimeout
from protos.identity.certificates import (
    OPERATOR,
    agent_name,
    certify,
    joining_name,
    leaf_of,
    make_intermediate,
    make_root,
)
from protos.protocol_version import USER_AGENT
from protos.v1 import gateway_pb2
from protos.v1.gateway_pb2_grpc import GatewayServicer, add_GatewayServicer_to_server

NOW = dt.datetime.now(dt.UTC)
PATIENCE = IdleTimeout()
CA = make_intermediate(make_root(NOW), NOW)
STOLEN = certify(ec.generate_private_key(ec.SECP256R1()).public_key(), agent_name("site-a"), CA, NOW)


class Ended(Exception):
    """How gRPC leaves a method that aborts."""


class Context:
    """What the guard needs of gRPC's context."""

    def __init__(self, name: str, life: dt.timedelta = dt.timedelta(hours=1), chain: bytes = b"") -> None:
        now = dt.datetime.now(dt.UTC)  # the tests of before may have taken longer than a certificate lives
        chain = chain or certify(ec.generate_private_key(ec.SECP256R1()).public_key(), name, CA, now, life=life)
        self.number = f"{leaf_of(chain).serial_number:x}"
        self.auth = {"ssl_tls_version": [b"TLSv1.3"], "x509_pem_cert": [chain]}
        self.said: tuple[grpc.StatusCode, str] | None = None
        self.cancelled, self.active = False, True

    def auth_context(self) -> dict[str, list[bytes]]:
        return self.auth

    def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.said = (code, details)
        raise Ended

    def set_trailing_metadata(self, pairs: tuple[tuple[str, str], ...]) -> None:
        self.trailing = pairs

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("user-agent", USER_AGENT),)

    def is_active(self) -> bool:
        return self.active

    def cancel(self) -> None:
        self.cancelled = True


class Hall:
    """A guard, and what it wrote down."""

    def __init__(self) -> None:
        self.time, self.admitted = 0.0, True
        self.denied: set[str] = set()  # certificates' numbers
        self.reported: list[tuple[str, str]] = []
        self.logged: list[dict[str, Any]] = []

        def note(event: str, **fields: Any) -> None:
            self.logged.append({"event": event, **fields})

        log = SimpleNamespace(warning=note, error=note, info=note)
        self.guard = Guard(
            lambda _site, number: self.admitted and number not in self.denied,
            lambda *words: self.reported.append(words),
            log,
            PATIENCE,
            lambda: self.time,
        )

    def call(
        self, context: Context, method: str = "Hello", act: Any = lambda _request, _call: "done", raw: bytes = b""
    ) -> Any:
        """One call with one message through the interceptor."""
        handler = grpc.unary_unary_rpc_method_handler(act, gateway_pb2.HelloRequest.FromString, str.encode)
        guarded = self.guarded(handler, method)
        return None if guarded is None else guarded.stream_unary(iter([raw]), context).decode()

    def guarded(self, handler: Any, method: str) -> Any:
        """What gRPC is given in place of a method's handler."""
        return self.guard.intercept_service(lambda _: handler, SimpleNamespace(method=f"/x/{method}"))

    def refusal(self, context: Context, *words: Any) -> str:
        """Why a call was turned away."""
        with pytest.raises(Ended):
            self.call(context, *words)
        assert context.said is not None
        return context.said[1]


@pytest.fixture
def hall() -> Hall:
    return Hall()


@pytest.fixture
def peer() -> Context:
    return Context(agent_name("site-a"))


def test_a_welcome_peer_is_let_through_and_leaves_no_call_behind(hall: Hall, peer: Context) -> None:
    assert hall.call(peer) == "done"
    assert (hall.guard.open_calls(), hall.reported, hall.logged) == (Counter(), [], [])


def test_a_peer_is_looked_up_at_every_call_and_not_once(hall: Hall, peer: Context) -> None:
    assert hall.call(peer) == "done"
    hall.admitted = False
    assert "revoked" in hall.refusal(peer)
    assert hall.reported == [("site-a", "revoked")]


def test_the_end_of_a_certificate_is_looked_at_at_every_call(hall: Hall) -> None:
    ended = Context(agent_name("site-a"), dt.timedelta(seconds=-1))
    assert hall.refusal(ended) == "the certificate is not valid now"
    assert hall.reported == [("site-a", "expired")]


def test_a_peer_has_a_burst_and_then_a_rate(hall: Hall, peer: Context) -> None:
    for _ in range(int(BURST)):
        hall.call(peer)
    assert "slow down" in hall.refusal(peer)
    hall.time += 1.0
    for _ in range(int(CALLS_PER_S)):
        hall.call(peer)
    assert "slow down" in hall.refusal(peer)
    assert hall.call(Context(agent_name("site-b"))) == "done"
    assert hall.reported == [], "a crowd is logged, and floods no ledger"


def bad(*_: object) -> None:
    """A method that refuses what a welcome peer has sent."""
    raise CallRejectedError(grpc.StatusCode.INVALID_ARGUMENT, "a chunk was expected", "bad_upload")


@pytest.mark.parametrize("method", sorted(ROLES))
def test_no_method_has_its_messages_read_or_written_by_grpc_itself(hall: Hall, method: str) -> None:
    """What gRPC would parse, it would parse before the guard is asked; and it keeps what it cannot parse."""
    kept: dict[str, Any] = {}
    server = SimpleNamespace(
        add_generic_rpc_handlers=lambda _: None,
        add_registered_method_handlers=lambda _, handlers: kept.update(handlers),
    )
    add_GatewayServicer_to_server(GatewayServicer(), server)
    assert kept.keys() == ROLES.keys()
    guarded = hall.guarded(kept[method], method)
    assert (guarded.request_deserializer, guarded.response_serializer) == (None, None)
    assert guarded.request_streaming, "else gRPC waits for the message, and refuses a call without one, by itself"
    assert guarded.response_streaming == kept[method].response_streaming
    assert (guarded.unary_unary, guarded.unary_stream) == (None, None)


NO_MESSAGES = {
    "noise": b"\xff" * 100,
    "truncated": b"\x0a\x10abc",
    "a length beyond the end": b"\x0a\xff\xff\xff\xff\x0f",
    "text that is none": b"\x0a\x02\xff\xfe",
    "groups in groups": b"\x0b" * 2000,
    "field number 0": b"\x00\x00",
}


@pytest.mark.parametrize("raw", NO_MESSAGES.values(), ids=NO_MESSAGES)
def test_bytes_that_are_no_message_are_a_refusal_like_any_other(hall: Hall, peer: Context, raw: bytes) -> None:
    def refused(context: Context, method: str) -> str:
        handler = grpc.unary_unary_rpc_method_handler(None, gateway_pb2.SealedRequest.FromString, str.encode)
        with pytest.raises(Ended):
            hall.guarded(handler, method).stream_unary(iter([raw]), context)
        assert context.said is not None
        return context.said[1]

    for _ in range(int(STRIKES)):
        assert refused(peer, "Reserve") == "the bytes are not a message"
    assert peer.said is not None
    assert peer.said[0] == grpc.StatusCode.INVALID_ARGUMENT
    assert "too many refused calls" in refused(peer, "Reserve")
    assert hall.reported == [("site-a", "bad_message")] * int(STRIKES)
    assert [line["rule"] for line in hall.logged] == ["bad_message"] * int(STRIKES) + ["rate"]


def test_a_joining_peer_that_sends_no_messages_runs_out_of_patience_and_speaks_for_no_site(hall: Hall) -> None:
    joining = Context(joining_name("site-a"))
    for _ in range(int(STRIKES)):
        assert "not a message" in hall.refusal(joining, "Join", bad, NO_MESSAGES["noise"])
    assert "too many refused calls" in hall.refusal(joining, "Join")
    assert hall.reported == []
    assert {(line["site"], line["role"]) for line in hall.logged} == {("site-a", "joining")}
    assert hall.call(Context(agent_name("site-a"))) == "done", "the agent's own patience is whole"


def test_no_number_of_refusals_keeps_an_operator_from_revoking(hall: Hall) -> None:
    operator = Context(OPERATOR)
    for _ in range(int(STRIKES) + 10):
        assert "not a message" in hall.refusal(operator, "Revoke", bad, NO_MESSAGES["noise"])
    hall.time += 10.0
    assert hall.call(operator, "Revoke") == "done"
    assert hall.reported == []


def test_a_call_without_its_message_is_refused_and_written_down(hall: Hall, peer: Context) -> None:
    handler = grpc.unary_unary_rpc_method_handler(lambda *_: "done", gateway_pb2.HelloRequest.FromString, str.encode)
    with pytest.raises(Ended):
        hall.guarded(handler, "Hello").stream_unary(iter(()), peer)
    assert peer.said == (grpc.StatusCode.INVALID_ARGUMENT, "this call needs one message")
    assert hall.reported == [("site-a", "bad_message")]


def test_an_unwelcome_peer_is_refused_before_its_message_is_waited_for(hall: Hall) -> None:
    def never() -> Iterator[bytes]:
        raise AssertionError("nothing was to be read")
        yield

    stolen, _ = thief(hall, "revoked")
    handler = grpc.unary_unary_rpc_method_handler(lambda *_: "done", gateway_pb2.HelloRequest.FromString, str.encode)
    with pytest.raises(Ended):
        hall.guarded(handler, "Hello").stream_unary(never(), stolen)
    assert stolen.said is not None
    assert "revoked" in stolen.said[1]


def test_a_certificate_that_ended_while_its_message_was_waited_for_makes_no_call(hall: Hall, peer: Context) -> None:
    def late() -> Iterator[bytes]:
        hall.admitted = False
        yield b""

    handler = grpc.unary_unary_rpc_method_handler(lambda *_: "done", gateway_pb2.HelloRequest.FromString, str.encode)
    with pytest.raises(Ended):
        hall.guarded(handler, "Hello").stream_unary(late(), peer)
    assert peer.said is not None
    assert "revoked" in peer.said[1]


def test_a_bad_message_in_the_middle_of_a_stream_ends_it_and_does_not_look_like_its_end(
    hall: Hall, peer: Context
) -> None:
    taken: list[Any] = []

    def collect(parts: Any, _call: Call) -> str:
        taken.extend(parts)
        return "complete"

    handler = grpc.stream_unary_rpc_method_handler(collect, gateway_pb2.UploadPart.FromString, str.encode)
    with pytest.raises(Ended):
        hall.guarded(handler, "Upload").stream_unary(iter([b"", NO_MESSAGES["noise"], b""]), peer)
    assert peer.said == (grpc.StatusCode.INVALID_ARGUMENT, "the bytes are not a message")
    assert hall.reported == [("site-a", "bad_message")]
    assert not hall.guard.open_calls()


def test_refusals_are_written_so_many_times_and_more_need_time(hall: Hall, peer: Context) -> None:
    for _ in range(int(STRIKES)):
        assert hall.refusal(peer, "Upload", bad) == "a chunk was expected"
    assert "too many refused calls" in hall.refusal(peer, "Upload", bad)
    assert "too many refused calls" in hall.refusal(peer)
    assert hall.reported == [("site-a", "bad_upload")] * int(STRIKES)
    hall.time += STRIKE_S
    assert hall.call(peer) == "done"


def thief(hall: Hall, how: str) -> tuple[Context, str]:
    """Another certificate of the same site, and the method that it calls to be turned away for that reason."""
    made = Context(agent_name("site-a"), dt.timedelta(seconds=-1) if how == "expired" else dt.timedelta(hours=1))
    if how == "revoked":
        hall.denied.add(made.number)
    return made, "Stop" if how == "wrong_role" else "Hello"


@pytest.mark.parametrize("how", ["revoked", "expired", "wrong_role"])
def test_an_unwelcome_certificate_uses_up_its_own_patience_and_not_its_sites(
    hall: Hall, peer: Context, how: str
) -> None:
    stolen, method = thief(hall, how)
    for _ in range(int(STRANGE_STRIKES)):
        assert "too many" not in hall.refusal(stolen, method)
    for _ in range(int(BURST) + 100):
        assert "too many" in hall.refusal(stolen, method)
    assert hall.reported == [("site-a", how)] * int(STRANGE_STRIKES)
    for _ in range(int(BURST)):
        assert hall.call(peer) == "done"
    assert "slow down" in hall.refusal(peer)


def test_an_unwelcome_certificate_is_paced_by_itself(hall: Hall, peer: Context) -> None:
    """Where its strikes come back, its rate still binds; and the site's own is whole."""
    stolen, _ = thief(hall, "revoked")
    for _ in range(int(BURST)):
        hall.refusal(stolen)
    assert hall.refusal(stolen) == "too many calls: slow down"
    assert hall.call(peer) == "done"


def test_a_certificate_that_is_turned_away_in_mid_stream_does_not_strike_its_site(hall: Hall, peer: Context) -> None:
    def revoked(_request: Any, call: Call) -> None:
        hall.denied.add(call.peer.number)
        next(hall.guard._each(call, iter([b""]), gateway_pb2.HelloRequest.FromString))

    for _ in range(int(STRIKES)):
        hall.denied.clear()
        assert "revoked" in hall.refusal(Context(agent_name("site-a"), chain=STOLEN), "Hello", revoked)
    assert hall.call(peer) == "done"
    assert hall.reported == [("site-a", "revoked")] * int(STRANGE_STRIKES)


def test_what_is_written_of_all_unwelcome_certificates_of_a_site_is_bounded(hall: Hall, peer: Context) -> None:
    for _ in range(int(ENTRIES // STRANGE_STRIKES) + 2):
        stolen, _ = thief(hall, "revoked")
        for _ in range(int(STRANGE_STRIKES)):
            hall.refusal(stolen)
    assert hall.reported == [("site-a", "revoked")] * int(ENTRIES)
    hall.refusal(thief(hall, "expired")[0])
    assert len(hall.reported) == int(ENTRIES)
    assert hall.refusal(peer, "Upload", bad) == "a chunk was expected"
    assert hall.reported[-1] == ("site-a", "bad_upload"), "the site's own refusals are still written"
    hall.time += ENTRY_S
    hall.refusal(thief(hall, "expired")[0])
    assert hall.reported[-1] == ("site-a", "expired")


def test_nothing_grows_without_bound_with_the_names_and_numbers_that_call(
    hall: Hall, peer: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "KEPT", 8)
    for index in range(60):
        hall.time += 100.0  # those of before are as fresh as new ones, and so forgotten
        hall.call(Context(joining_name(f"site-{index}")), "Join")
        hall.call(Context(agent_name(f"site-{index}")))
        hall.refusal(Context(agent_name(f"site-{index}")), "Stop")
    for kept in tables(hall.guard):
        assert len(kept) <= 8
    assert not hall.guard._calls
    assert hall.call(peer) == "done"


def test_a_crowd_of_unwelcome_certificates_displaces_nobody(
    hall: Hall, peer: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table that is full of those who used up some patience takes nobody in; theirs do not come back by it."""
    monkeypatch.setattr(guard, "KEPT", 8)
    hall.refusal(peer, "Upload", bad)
    first, _ = thief(hall, "revoked")
    for _ in range(int(STRANGE_STRIKES)):
        hall.refusal(first)
    for _ in range(30):
        assert hall.refusal(thief(hall, "revoked")[0])
    assert "too many" in hall.refusal(first), "its patience did not come back because others came"
    assert hall.call(peer) == "done"
    assert all(len(kept) <= 8 for kept in tables(hall.guard))


def tables(made: Guard) -> list[dict[str, object]]:
    """Everything that the guard keeps by a name or a number."""
    crowds = (made._welcome_ones, made._strangers)
    return [made._entries.kept, *(b.kept for crowd in crowds for b in (crowd.rates, crowd.strikes))]  # type: ignore[misc]


def test_a_peer_holds_so_many_calls_and_expelling_it_ends_each_of_them(hall: Hall, peer: Context) -> None:
    depth: list[int] = []

    def nested(_request: Any, _call: Call) -> str:
        depth.append(1)
        if len(depth) < AT_ONCE:
            return str(hall.call(peer, "Hello", nested))
        assert hall.guard.close_calls("site-b") == 0
        assert hall.guard.close_calls("site-a") == AT_ONCE
        return hall.refusal(Context(agent_name("site-a")))

    assert hall.call(peer, "Hello", nested) == "too many calls at once"
    assert peer.cancelled
    assert not hall.guard.open_calls()


@pytest.mark.parametrize(
    ("name", "method", "welcome"),
    [
        (agent_name("site-a"), "Hello", True),
        (agent_name("site-a"), "Join", False),
        (agent_name("site-a"), "Approve", False),
        (joining_name("site-a"), "Join", True),
        (joining_name("site-a"), "Renew", False),
        (OPERATOR, "Approve", True),
        (OPERATOR, "Reserve", False),
    ],
)
def test_a_method_is_for_one_role(hall: Hall, name: str, method: str, welcome: bool) -> None:
    context = Context(name)
    if welcome:
        assert hall.call(context, method) == "done"
    else:
        assert "may not make this call" in hall.refusal(context, method)


def test_a_method_without_a_role_is_nobodys(hall: Hall, peer: Context) -> None:
    assert hall.call(peer, "Anything") is None


def test_a_fault_leaves_as_a_number_and_its_text_stays(hall: Hall, peer: Context) -> None:
    def fault(*_: object) -> None:
        raise ValueError("MRN-ZEBRA")

    assert hall.refusal(peer, "Hello", fault).startswith("incident ")
    assert "ZEBRA" not in str(hall.logged)
    assert hall.logged[0]["fault"] == "ValueError"


ZEBRA = "patient MRN-ZEBRA in ward 7"


class Panic(BaseException):
    """What a library below Python may raise; no `Exception`."""


def fails(*_: object, **__: object) -> Any:
    """Something breaks, and its text would tell."""
    raise RuntimeError(ZEBRA)


@pytest.mark.parametrize("broken", ["_admits", "_clock", "_peer", "_begin"])
def test_what_breaks_in_the_guard_itself_leaves_as_a_number(hall: Hall, peer: Context, broken: str) -> None:
    setattr(hall.guard, broken, fails)
    assert hall.refusal(peer).startswith("incident ")
    assert ZEBRA not in str(hall.logged)


@pytest.mark.parametrize("fault", [RuntimeError, StopIteration, RecursionError, MemoryError, Panic])
def test_whatever_a_method_raises_its_text_stays(hall: Hall, peer: Context, fault: type[BaseException]) -> None:
    def act(*_: object) -> None:
        raise fault(ZEBRA)

    assert hall.refusal(peer, "Hello", act).startswith("incident ")
    assert ZEBRA not in str(hall.logged)
    assert not hall.guard.open_calls()


@pytest.mark.parametrize("place", ["method", "serialiser"])
def test_a_stream_of_replies_that_breaks_off_ends_with_a_number(hall: Hall, peer: Context, place: str) -> None:
    def replies(_request: Any, _call: Call) -> Iterator[str]:
        yield "first"
        if place == "method":
            raise RuntimeError(ZEBRA)
        yield "second"

    def write(text: str) -> bytes:
        if text == "second":
            raise RuntimeError(ZEBRA)
        return text.encode()

    handler = grpc.unary_stream_rpc_method_handler(replies, gateway_pb2.SessionRequest.FromString, write)
    stream = hall.guarded(handler, "Session").stream_stream(iter([b""]), peer)
    assert next(stream) == b"first"
    with pytest.raises(Ended):
        next(stream)
    assert peer.said is not None
    assert peer.said[1].startswith("incident ")
    assert ZEBRA not in str(hall.logged)
    assert not hall.guard.open_calls()


def test_a_reply_that_cannot_be_written_leaves_as_a_number(hall: Hall, peer: Context) -> None:
    handler = grpc.unary_unary_rpc_method_handler(lambda *_: "done", gateway_pb2.HelloRequest.FromString, fails)
    with pytest.raises(Ended):
        hall.guarded(handler, "Hello").stream_unary(iter([b""]), peer)
    assert peer.said is not None
    assert peer.said[1].startswith("incident ")
    assert ZEBRA not in str(hall.logged)


def test_a_stream_whose_peer_asks_no_further_is_forgotten(hall: Hall, peer: Context) -> None:
    handler = grpc.unary_stream_rpc_method_handler(
        lambda *_: iter("ab"), gateway_pb2.SessionRequest.FromString, str.encode
    )
    stream = hall.guarded(handler, "Session").stream_stream(iter([b""]), peer)
    assert next(stream) == b"a"
    assert hall.guard.open_calls() == {"Session": 1}
    stream.close()
    assert not hall.guard.open_calls()
    assert peer.said is None


def test_a_refusal_that_cannot_be_written_down_is_a_refusal_all_the_same(hall: Hall, peer: Context) -> None:
    vars(hall.guard).update(_report=fails)
    assert hall.refusal(peer, "Upload", bad) == "a chunk was expected"
    hall.admitted = False
    assert "revoked" in hall.refusal(peer)
    hall.guard.report("site-a", "node")
    missing = [line for line in hall.logged if line["event"] == "refusal_not_recorded"]
    assert [(line["rule"], line["fault"]) for line in missing] == [
        ("bad_upload", "RuntimeError"),
        ("revoked", "RuntimeError"),
        ("node", "RuntimeError"),
    ]
    assert ZEBRA not in str(hall.logged)


def test_when_the_log_fails_too_a_refusal_counts_and_a_fault_leaves_as_a_fixed_text(
    hall: Hall, peer: Context
) -> None:
    vars(hall.guard).update(_report=fails, _log=SimpleNamespace(warning=fails, error=fails))
    hall.guard.report("site-a", "node")
    for _ in range(int(STRIKES) - 2):
        assert hall.refusal(peer, "Upload", bad) == "a chunk was expected"
    assert hall.refusal(peer, "Upload", fails) == "the call failed, and the coordinator cannot log why"
    assert hall.refusal(peer, "Upload", bad) == "a chunk was expected"
    assert "too many refused calls" in hall.refusal(peer)
    assert not hall.guard.open_calls()


def test_a_text_that_utf_8_cannot_carry_leaves_without_what_it_cannot(hall: Hall, peer: Context) -> None:
    def refuse(*_: object) -> None:
        raise CallRejectedError(grpc.StatusCode.FAILED_PRECONDITION, "the site \ud800 is unknown", "join")

    assert hall.refusal(peer, "Hello", refuse) == "the site ? is unknown"


def test_each_message_of_a_stream_is_measured_and_its_peer_looked_up_again(hall: Hall, peer: Context) -> None:
    def count(parts: Any, _call: Call) -> int:
        taken = 0
        for _ in parts:
            taken += 1
            if taken == 2:
                hall.admitted = False
        return taken

    guarded = hall.guarded(
        grpc.stream_unary_rpc_method_handler(count, gateway_pb2.UploadPart.FromString, bytes), "Upload"
    )
    with pytest.raises(Ended):
        guarded.stream_unary(iter([b""] * 3), peer)
    assert peer.said == (grpc.StatusCode.PERMISSION_DENIED, "this certificate was revoked, or was never issued")
    hall.admitted = True
    large = gateway_pb2.UploadPart(chunk=gateway_pb2.Chunk(data=bytes(MOST_BYTES + 4096))).SerializeToString()
    with pytest.raises(Ended):
        guarded.stream_unary(iter([large]), peer)
    assert hall.reported == [("site-a", "revoked"), ("site-a", "too_large")]
