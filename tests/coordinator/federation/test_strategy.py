"""The gated strategy on messages made by hand: what the honest other end never sends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.app.message import make_message
from flwr.supercore.task_identity import TaskIdentity

from coordinator.federation.replies import pack
from coordinator.federation.strategy import GatedStrategy, RoundFailedError, RoundModel, RoundPlan, RoundProgress
from protos.artifacts.arrays import pack_update, unpack_vector
from protos.artifacts.bfloat16 import BFLOAT16, rounded, widened
from protos.federation import flat_arrays
from protos.federation import messages as wire
from protos.federation.messages import PIECE
from protos.federation.round_times import RoundTerms

SITES = ("north", "south", "west")
PLAN = RoundPlan(
    run="r1",
    sites=SITES,
    rounds=1,
    first_round=0,
    model=RoundModel(np.zeros(4, np.float32)),
    config=b"{}",
    min_sites=1,
    least_grants=1,
    round_timeout_s=5.0,
    node_wait_s=0.0,
)


@dataclass
class Books:
    """A gate that grants and admits all and remembers."""

    seen: list[str] = field(default_factory=list)
    updates: dict[str, list[float]] = field(default_factory=dict)
    priced: list[tuple[dict[str, bytes], int]] = field(default_factory=list)
    denied: dict[str, str] = field(default_factory=dict)
    closed: list[tuple[int, RoundModel, tuple[str, ...]]] = field(default_factory=list)
    used: list[tuple[str, ...]] = field(default_factory=list)
    refused: list[dict[str, str]] = field(default_factory=list)
    events: list[RoundProgress] = field(default_factory=list)

    def reserve(self, sealed: Mapping[str, bytes], least: int) -> Mapping[str, str]:
        """Whoever is not denied is granted."""
        self.priced.append((dict(sealed), least))
        return self.denied

    def admit(self, site: str, round_index: int, envelope: bytes, artifact: bytes) -> str | None:
        """Yes."""
        self.seen.append(site)
        self.updates[site] = unpack_vector(artifact).tolist()
        return None

    def looked(self, round_index: int, sums: np.ndarray) -> None:
        """Nobody reads them here."""

    def round_done(
        self, round_index: int, model: RoundModel, used: tuple[str, ...], refused: Mapping[str, str]
    ) -> None:
        """Kept."""
        self.closed.append((round_index, model, used))
        self.used.append(used)
        self.refused.append(dict(refused))

    def progress(self, event: RoundProgress) -> None:
        """Known."""
        self.events.append(event)


class Sites:
    """A grid whose sites answer by a function; node ids are 10, 11, 12 in the order of `SITES`."""

    def __init__(self, answer: Callable[[str, Message], list[Message]]) -> None:
        self.answer = answer
        self.until = dict.fromkeys(SITES, 100.0)

    def get_nodes(self) -> list[Any]:
        """All sites are online."""
        return [SimpleNamespace(name=s, node_id=10 + i, online_until=self.until[s]) for i, s in enumerate(SITES)]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Give each message an identifier, as Flower does when it pushes, and collect the answers."""
        replies: list[Message] = []
        for position, message in enumerate(messages):
            site = SITES[message.metadata.dst_node_id - 10]
            message.metadata.__dict__["_message_id"] = f"{message.metadata.message_type}-{position}"
            replies += self.answer(site, message)
        return replies


def _good(message: Message, value: float = 1.0) -> Message:
    records: dict[str, Any] = {"answer": ConfigRecord({"envelope": b"e"})}
    if message.metadata.message_type in ("train", wire.EVALUATE):
        records["parameters"] = pack(np.full(4, value, np.float32))
    return Message(RecordDict(records), reply_to=message)


def _with(message: Message, **metadata: Any) -> Message:
    reply = _good(message, 100.0)
    for name, value in metadata.items():
        reply.metadata.__dict__[f"_{name}"] = value
    return make_message(reply.metadata, content=reply.content)


def _conduct(
    answer: Callable[[str, Message], list[Message]], plan: RoundPlan = PLAN, ledger: Books | None = None
) -> GatedStrategy:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    strategy = GatedStrategy(plan, ledger or Books())
    grid: Any = Sites(answer)
    strategy.price(grid)
    strategy.start(grid=grid, initial_arrays=pack(plan.model.vector), num_rounds=plan.rounds)
    return strategy


def _train_only(odd: Callable[[str, Message], list[Message]]) -> Callable[[str, Message], list[Message]]:
    return lambda site, m: odd(site, m) if m.metadata.message_type == "train" else [_good(m)]


def test_a_second_reply_to_the_same_message_is_not_counted() -> None:
    done = _conduct(_train_only(lambda site, m: [_good(m), _with(m)] if site == "west" else [_good(m)]))
    assert done.model.vector.tolist() == [1.0] * 4
    assert done.gate.used == [SITES]


def test_a_reply_that_names_another_source_is_refused() -> None:
    done = _conduct(_train_only(lambda site, m: [_with(m, src_node_id=10)] if site == "west" else [_good(m)]))
    assert done.gate.refused == [{"west": "wrong_source"}]
    assert done.model.vector.tolist() == [1.0] * 4


def test_a_reply_to_no_message_of_this_round_is_dropped() -> None:
    stray = _train_only(
        lambda site, m: [_with(m, reply_to_message_id="query.price-2")] if site == "west" else [_good(m)]
    )
    done = _conduct(stray)
    assert done.gate.refused == [{"west": "no_reply"}]


@pytest.mark.parametrize(
    ("code", "name"), [(5, "offline"), (3, "no_reply"), (1005, "budget"), (8, "failed"), (987654, "failed")]
)
def test_an_error_becomes_a_code_and_its_text_is_never_read(code: int, name: str) -> None:
    def odd(site: str, m: Message) -> list[Message]:
        return [Message(Error(code, "patient 4711"), reply_to=m)] if site == "west" else [_good(m)]

    done = _conduct(_train_only(odd))
    assert done.gate.refused == [{"west": name}]
    assert "4711" not in repr((done.granted, done.declined, done.gate))


@pytest.mark.parametrize(
    "records",
    [
        {},
        {"answer": ConfigRecord({"envelope": b"e"})},
        {"answer": ConfigRecord({"envelope": "text"}), "parameters": pack(np.ones(4, np.float32))},
        {"answer": ConfigRecord({"envelope": b"e", "n": 3}), "parameters": pack(np.ones(4, np.float32))},
        {"answer": ConfigRecord({"envelope": b"e" * (1 << 21)}), "parameters": pack(np.ones(4, np.float32))},
        {"answer": pack(np.ones(4, np.float32)), "parameters": pack(np.ones(4, np.float32))},
        {
            "answer": ConfigRecord({"envelope": b"e"}),
            "parameters": ArrayRecord({"a": pack(np.ones(4, np.float32))["flat"]}),
        },
        {"answer": ConfigRecord({"envelope": b"e"}), "parameters": ConfigRecord({"flat": b"x"})},
    ],
    ids=["empty", "no vector", "text", "extra key", "huge", "swapped", "other name", "not an array"],
)
def test_records_that_are_not_exactly_as_agreed_are_refused(records: dict[str, Any]) -> None:
    odd = _train_only(lambda site, m: [Message(RecordDict(records), reply_to=m)] if site == "west" else [_good(m)])
    done = _conduct(odd)
    assert done.gate.refused == [{"west": "schema"}]
    assert isinstance(done.gate, Books)
    assert done.gate.seen == ["north", "south"]


def test_an_array_whose_header_lies_about_its_size_is_refused() -> None:
    def odd(site: str, m: Message) -> list[Message]:
        reply = _good(m)
        if site == "west":
            array = reply.content.array_records["parameters"]["flat"]
            array.data = array.data.replace(b"(4,)", b"(9,)")
        return [reply]

    assert _conduct(_train_only(odd)).gate.refused == [{"west": "schema"}]


def test_a_site_without_a_grant_gets_no_parameters() -> None:
    asked: list[tuple[str, str]] = []

    def answer(site: str, m: Message) -> list[Message]:
        asked.append((site, m.metadata.message_type))
        if site == "west":
            return [Message(Error(1005, "budget"), reply_to=m)]
        return [_good(m)]

    done = _conduct(answer)
    assert ("west", "train") not in asked
    assert done.declined == {"west": "budget"}


def test_too_few_grants_end_the_run_before_any_training() -> None:
    kinds: set[str] = set()

    def answer(site: str, m: Message) -> list[Message]:
        kinds.add(m.metadata.message_type)
        return [_good(m)] if site == "north" else []

    with pytest.raises(RoundFailedError, match="pricing: too_few_grants") as failure:
        _conduct(answer, replace(PLAN, min_sites=2, least_grants=2))
    assert failure.value.refused == {"south": "no_reply", "west": "no_reply"}
    assert kinds == {"query.price"}


def test_a_silent_site_is_asked_again_only_after_a_sign_of_life() -> None:
    asked: list[int] = []
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    plan, ledger = replace(PLAN, rounds=4), Books()
    strategy = GatedStrategy(plan, ledger)

    def answer(site: str, m: Message) -> list[Message]:
        if m.metadata.message_type == "train" and site == "west":
            asked.append(int(m.metadata.group_id))
            if asked[-1] == 2:
                return [_good(m)]
            return []
        return [_good(m)]

    sites = Sites(answer)
    grid: Any = sites
    strategy.price(grid)
    arrays = pack(plan.model.vector)
    for number in range(1, 4):
        if number == 3:
            sites.until["west"] += 8.0
        replies = grid.send_and_receive(strategy.configure_train(number, arrays, ConfigRecord(), grid))
        strategy.aggregate_train(number, replies)
    assert asked == [0, 2]
    assert ledger.refused == [{"west": "no_reply"}, {"west": "offline"}, {}]


def test_a_silent_site_that_is_back_is_waited_for_until_its_next_heartbeat() -> None:
    """It came back within the round that it was silent in: the next one has it, and not the one after."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    plan, ledger = replace(PLAN, rounds=2, node_wait_s=30.0), Books()
    strategy, silent = GatedStrategy(plan, ledger), [True]

    def answer(site: str, m: Message) -> list[Message]:
        return [] if site == "west" and m.metadata.message_type == "train" and silent[0] else [_good(m)]

    sites = Sites(answer)
    grid: Any = sites
    strategy.price(grid)
    arrays = pack(plan.model.vector)
    nodes = sites.get_nodes
    for number in (1, 2):
        replies = grid.send_and_receive(strategy.configure_train(number, arrays, ConfigRecord(), grid))
        strategy.aggregate_train(number, replies)
        silent[0], looks = False, iter(range(9))

        def beating(looks: Any = looks) -> Any:
            if next(looks) == 1:
                sites.until["west"] += 8.0
            return nodes()

        sites.get_nodes = beating  # type: ignore[method-assign]
    assert ledger.refused == [{"west": "no_reply"}, {}]


@pytest.mark.parametrize(
    "wrong",
    [
        {"run": ""},
        {"sites": ()},
        {"sites": ("north", "north")},
        {"first_round": 1},
        {"first_round": -1},
        {"model": RoundModel(np.array([math.nan], np.float32))},
        {"model": RoundModel(np.empty(0, np.float32))},
        {"min_sites": 0},
        {"min_sites": 4, "least_grants": 4},
        {"least_grants": 0},
        {"least_grants": 4},
        {"round_timeout_s": math.nan},
        {"round_timeout_s": math.inf},
        {"node_wait_s": -1.0},
    ],
    ids=str,
)
def test_a_plan_that_cannot_be_carried_out_is_refused(wrong: dict[str, Any]) -> None:
    name = {"model": "vector", "first_round": "round"}.get(next(iter(wrong)), next(iter(wrong)))
    with pytest.raises(ValueError, match=name):
        replace(PLAN, **wrong)


def test_a_site_whose_budget_the_books_do_not_hold_gets_no_parameters() -> None:
    asked: list[tuple[str, str]] = []

    def answer(site: str, m: Message) -> list[Message]:
        asked.append((site, m.metadata.message_type))
        return [_good(m)]

    ledger = Books(denied={"south": "budget"})
    done = _conduct(answer, ledger=ledger)
    assert ledger.priced == [(dict.fromkeys(SITES, b"e"), 1)], "all sites at once"
    assert ("south", "train") not in asked
    assert (done.declined, sorted(done.granted)) == ({"south": "budget"}, ["north", "west"])


@pytest.mark.parametrize("code", ["Dr Müller says no", "", "x" * 65])
def test_a_refusal_that_is_no_code_and_books_that_break_grant_nobody(code: str) -> None:
    done = _conduct(lambda _site, m: [_good(m)], ledger=Books(denied={"south": code}))
    assert done.declined == {"south": "internal"}

    class Broken(Books):
        def reserve(self, sealed: Mapping[str, bytes], least: int) -> Mapping[str, str]:
            raise RuntimeError("patient 4711")

    with pytest.raises(RoundFailedError, match="too_few_grants") as failure:
        _conduct(lambda _site, m: [_good(m)], ledger=Broken())
    assert failure.value.refused == dict.fromkeys(SITES, "internal")


def test_nothing_is_reserved_while_sites_that_are_needed_may_still_come_back() -> None:
    """A reservation that failed would be final: the sites free what they hold for it."""
    ledger = Books()
    with pytest.raises(RoundFailedError, match="too_few_grants") as failure:
        _conduct(
            lambda site, m: [] if site == "west" else [_good(m)],
            replace(PLAN, min_sites=2, least_grants=3),
            ledger,
        )
    assert failure.value.refused == {"west": "no_reply"}
    assert ledger.priced == []


def test_what_the_gate_reviews_are_the_very_bytes_that_are_aggregated() -> None:
    values = {"north": 1.0, "south": 2.0, "west": 6.0}
    ledger = Books()
    done = _conduct(lambda site, m: [_good(m, values[site])], ledger=ledger)
    assert ledger.updates == {site: [value] * 4 for site, value in values.items()}
    assert done.model.vector.tolist() == [3.0] * 4
    ((index, model, used),) = ledger.closed
    assert (index, used) == (0, SITES)
    assert model.vector.tolist() == [3.0] * 4


def test_the_numbers_that_were_sent_are_not_kept_beside_the_model_until_the_round_is_over() -> None:
    done = _conduct(_train_only(lambda _, m: [_good(m, 5.0)]), replace(PLAN, rounds=2))
    ((_, first, _), (_, second, _)) = done.gate.closed  # type: ignore[attr-defined]
    assert first.vector.tolist() == second.vector.tolist() == [5.0] * 4
    model = np.arange(PIECE, dtype=np.float32)
    pieces = pack(model)[wire.FLAT].slice_array()
    assert all(np.shares_memory(np.frombuffer(piece.data, np.uint8), model) for _, piece in pieces[1:])  # type: ignore[attr-defined]


# --- updates of 16 bits

HALF = replace(PLAN, update_precision=BFLOAT16)
LONG = np.array([1.0, -2.0, 3.14159, 1e-30], np.float32)


def _bits(message: Message, bits: np.ndarray, name: str = "uint16") -> Message:
    array = Array(name, (int(bits.size),), "numpy.ndarray", flat_arrays.packed(bits))
    parameters = ArrayRecord({"flat": array})
    return Message(
        RecordDict({"answer": ConfigRecord({"envelope": b"e"}), "parameters": parameters}), reply_to=message
    )


def test_bits_of_bfloat16_are_reviewed_as_they_came_and_averaged_as_float32() -> None:
    reviewed = list[bytes]()

    class Reader(Books):
        def admit(self, site: str, round_index: int, envelope: bytes, artifact: bytes) -> str | None:
            reviewed.append(artifact)
            return None

    done = _conduct(_train_only(lambda _, m: [_bits(m, rounded(LONG))]), HALF, Reader())
    assert reviewed == [pack_update(rounded(LONG))] * 3
    assert len(reviewed[0]) == len(pack_update(LONG)) - 2 * LONG.size
    assert done.model.vector.dtype == np.float32
    np.testing.assert_array_equal(done.model.vector, widened(rounded(LONG)))


@pytest.mark.parametrize(
    ("plan", "sent", "code"),
    [
        (HALF, LONG, "schema"),
        (HALF, rounded(LONG)[:3], "schema"),
        (HALF, np.array([0x3F80, 0x7F80, 0, 0], np.uint16), "not_finite"),
        (HALF, np.array([0x3F80, 0xFFC1, 0, 0], np.uint16), "not_finite"),
        (PLAN, rounded(LONG), "schema"),
    ],
    ids=["float32", "short", "infinite", "not a number", "bits where float32 was agreed"],
)
def test_a_precision_that_was_not_agreed_or_bits_of_no_number_are_refused(
    plan: RoundPlan, sent: np.ndarray, code: str
) -> None:
    odd = _train_only(lambda site, m: [_bits(m, sent, sent.dtype.name)] if site == "west" else [_agreed(plan, m)])
    assert _conduct(odd, plan, Numb()).gate.refused == [{"west": code}]


def test_an_array_that_says_bits_and_holds_float32_is_refused() -> None:
    odd = _train_only(lambda site, m: [_bits(m, LONG, "uint16")] if site == "west" else [_agreed(HALF, m)])
    assert _conduct(odd, HALF, Numb()).gate.refused == [{"west": "schema"}]


def _agreed(plan: RoundPlan, message: Message) -> Message:
    numbers = rounded(LONG) if plan.update_precision == BFLOAT16 else LONG
    return _bits(message, numbers, numbers.dtype.name)


class Numb(Books):
    """Admits all, and reads nothing of it."""

    def admit(self, site: str, round_index: int, envelope: bytes, artifact: bytes) -> str | None:
        """Yes."""
        return None


# --- times, and runs that persons approve

TERMS = RoundTerms(3_600, 1_000)
WAITED = replace(PLAN, terms=TERMS, round_timeout_s=4_000.0, min_sites=1, least_grants=1)


def _declines(message: Message, code: str) -> Message:
    return Message(Error(wire.CODES[code], code), reply_to=message)


def _persons(waiting: Mapping[str, str], asked: list[tuple[str, str]]) -> Callable[[str, Message], list[Message]]:
    def answer(site: str, message: Message) -> list[Message]:
        asked.append((message.metadata.message_type, site))
        if message.metadata.message_type == wire.PLAN and site in waiting:
            return [_declines(message, waiting[site])]
        return [_good(message)]

    return answer


def _at(now: float, waiting: Mapping[str, str], asked: list[tuple[str, str]]) -> GatedStrategy:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    strategy = GatedStrategy(WAITED, Books(), now=lambda: now)
    grid: Any = Sites(_persons(waiting, asked))
    strategy.price(grid)
    strategy.start(grid=grid, initial_arrays=pack(WAITED.model.vector), num_rounds=1)
    return strategy


def test_nobody_is_priced_or_asked_to_train_while_persons_at_a_site_may_still_approve() -> None:
    asked: list[tuple[str, str]] = []
    with pytest.raises(RoundFailedError) as failure:
        _at(999.0, {"south": "waiting"}, asked)
    assert failure.value.reason == "not_approved_yet"
    assert failure.value.refused == {"south": "waiting"}
    assert asked == [(wire.PLAN, site) for site in SITES]


@pytest.mark.parametrize(("now", "code"), [(1_000.0, "waiting"), (0.0, "policy")])
def test_only_named_sites_that_approved_get_a_task(now: float, code: str) -> None:
    """The time is over, or a person has refused: the others begin, and that site hears no more of it."""
    asked: list[tuple[str, str]] = []
    done = _at(now, {"south": code}, asked)
    assert [one for one in asked if one[1] == "south"] == [(wire.PLAN, "south")]
    assert done.declined == {"south": code}
    assert set(done.granted) == {"north", "west"}


def test_where_no_policy_wants_approval_nobody_is_asked_about_a_plan() -> None:
    asked: list[tuple[str, str]] = []
    _conduct(_persons({}, asked), replace(WAITED, terms=RoundTerms(60)))
    assert {kind for kind, _ in asked} == {wire.PRICE, wire.TRAIN}


def test_each_message_has_its_own_time_and_says_how_long_a_round_may_take() -> None:
    seen: dict[str, tuple[float, Any]] = {}

    def answer(_: str, message: Message) -> list[Message]:
        order = message.content["order"]
        assert isinstance(order, ConfigRecord)
        seen[message.metadata.message_type] = message.metadata.ttl, order.get(wire.SECONDS)
        return [_good(message)]

    _conduct(answer, WAITED)
    assert seen == {wire.PLAN: (150.0, 3_600), wire.PRICE: (150.0, 3_600), wire.TRAIN: (4_000.0, 3_600)}
    _conduct(answer, replace(WAITED, rounds=2, looks=frozenset({1}), sums=4))
    assert seen[wire.EVALUATE] == (4_000.0, 3_600)
    _conduct(answer)
    assert seen[wire.TRAIN] == (5.0, None), "as before jobs named their times"


def test_no_price_is_held_for_a_run_that_a_required_site_cannot_begin() -> None:
    ledger = Books()
    with pytest.raises(RoundFailedError, match="pricing: required_site_missing") as failure:
        _conduct(lambda site, m: [] if site == "west" else [_good(m)], replace(PLAN, required=("west",)), ledger)
    assert failure.value.refused == {"west": "no_reply"}
    assert ledger.priced == []


@pytest.mark.parametrize("required", [(), ("north",), ("west",)])
def test_a_round_without_a_required_site_is_not_closed(required: tuple[str, ...]) -> None:
    ledger = Books()
    answer = _train_only(lambda site, m: [] if site == "west" else [_good(m)])
    if "west" not in required:
        assert _conduct(answer, replace(PLAN, required=required), ledger).model.vector.tolist() == [1.0] * 4
        assert ledger.used == [("north", "south")]
        return
    with pytest.raises(RoundFailedError, match="round 0: required_site_missing") as failure:
        _conduct(answer, replace(PLAN, required=required), ledger)
    assert failure.value.refused == {"west": "no_reply"}
    assert ledger.closed == []
