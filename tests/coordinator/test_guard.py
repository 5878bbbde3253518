"""The guard's own arithmetic, with a clock that the test moves; the same over the wire is in tests/attacks."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from coordinator.edges import guard
from coordinator.edges.guard import (
    AT_ONCE,
    BURST,
    CALLS_PER_S,
    ENTRIES,
    ENTRY_S,
    MOST_BYTES,
    STRANGE_STRIKES,
    STRIKE_S,
    STRIKES,
    Call,
    Guard,
    Turned,
)
from protos.identity import OPERATOR, agent_name, certify, joining_name, leaf_of, make_intermediate, make_root
from protos.v1 import gateway_pb2 as pb

NOW = dt.datetime.now(dt.UTC)
CA = make_intermediate(make_root(NOW), NOW)
STOLEN = certify(ec.generate_private_key(ec.SECP256R1()).public_key(), agent_name("site-a"), CA, NOW)


class Ended(Exception):
    """How gRPC leaves a method that aborts."""


class Context:
    """What the guard needs of gRPC's context."""

    def __init__(self, name: str, life: dt.timedelta = dt.timedelta(hours=1), chain: bytes = b"") -> None:
        chain = chain or certify(ec.generate_private_key(ec.SECP256R1()).public_key(), name, CA, NOW, life=life)
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
        return ()

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
            lambda: self.time,
        )

    def call(self, context: Context, method: str = "Hello", act: Any = lambda _request, _call: "done") -> Any:
        """One unary call through the interceptor."""
        handler = grpc.unary_unary_rpc_method_handler(act)
        guarded = self.guard.intercept_service(lambda _: handler, SimpleNamespace(method=f"/x/{method}"))
        return None if guarded is None else guarded.unary_unary(pb.HelloRequest(), context)

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
    raise Turned(grpc.StatusCode.INVALID_ARGUMENT, "a chunk was expected", "bad_upload")


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
        next(hall.guard._each(call, iter([pb.HelloRequest()])))

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
        assert hall.guard.expel("site-b") == 0
        assert hall.guard.expel("site-a") == AT_ONCE
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


def test_each_message_of_a_stream_is_measured_and_its_peer_looked_up_again(hall: Hall, peer: Context) -> None:
    def count(parts: Any, _call: Call) -> int:
        taken = 0
        for _ in parts:
            taken += 1
            if taken == 2:
                hall.admitted = False
        return taken

    handler = grpc.stream_unary_rpc_method_handler(count)
    guarded = hall.guard.intercept_service(lambda _: handler, SimpleNamespace(method="/x/Upload"))
    with pytest.raises(Ended):
        guarded.stream_unary(iter([pb.UploadPart()] * 3), peer)
    assert peer.said == (grpc.StatusCode.PERMISSION_DENIED, "this certificate was revoked, or was never issued")
    hall.admitted = True
    large = pb.UploadPart(chunk=pb.Chunk(data=bytes(MOST_BYTES + 4096)))
    with pytest.raises(Ended):
        guarded.stream_unary(iter([large]), peer)
    assert hall.reported == [("site-a", "revoked"), ("site-a", "too_large")]
