from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict

import coordinator.federation.run_controller as controller
import coordinator.federation.site_checks as module
from coordinator.federation.job import JobError
from coordinator.federation.replies import pack, pack_payload
from coordinator.federation.site_checks import carried_bytes, seconds_of_round
from coordinator.round_codes import explain_code
from protos.federation import messages as wire
from protos.federation.site_check import PROBE, SiteCheck
from tests.support.coordinator_runs import (
    SITES,
    Federation,
    Twist,
    agents,
    conduct_here,
    configuration,
    job,
    secret_job,
    written,
)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    for one in (module, controller):
        monkeypatch.setattr(one, "conduct", conduct_here)


@agents
@pytest.mark.parametrize("asked", [job(), secret_job()], ids=["plain", "masked"])
def test_all_sites_are_asked_and_nothing_is_written_or_held(tmp_path: Path, asked: Any) -> None:
    fed = Federation(tmp_path)
    fed.wards["west"].online = False
    before = fed.store.state.size
    found = fed.runs.check(asked)
    assert (sorted(found.told), found.lost) == (["north", "south"], {"west": "offline"})
    assert all(one.could and one.plan == "none" for one in found.told.values()), found.told
    assert fed.store.state.size == before
    assert fed.grants() == []
    assert not list((tmp_path / "runs").iterdir())
    assert {kind for ward in fed.wards.values() for kind, *_ in ward.asked} == {"check"}
    carried = [one for one in fed.grid.traffic if len(one) > PROBE]
    assert len(carried) == 4  # the probe to both, and as much from both


@agents
def test_a_report_that_is_none_is_a_code_and_no_text(tmp_path: Path) -> None:
    fed = Federation(tmp_path)

    def twist(site: str, sent: Message, reply: Message) -> list[Message]:
        if site != "south":
            return [reply]
        lie = Array(np.frombuffer(b'{"version": "patient 4711"}\n', np.uint8))
        return [Message(RecordDict({wire.PAYLOAD: ArrayRecord({wire.DATA: lie})}), reply_to=sent)]

    fed.grid.twist = twist
    found = fed.runs.check(job())
    assert sorted(found.told) == ["north", "west"]
    assert found.lost == {"south": "schema"}


@agents
def test_a_site_in_a_run_is_not_asked(tmp_path: Path) -> None:
    fed = Federation(tmp_path)
    (tmp_path / "runs" / "other").mkdir()
    (tmp_path / "runs" / "other" / "job.json").write_text(job(run="other").to_json())
    with pytest.raises(JobError, match="in a run that goes on: other"):
        fed.runs.check(job())
    with pytest.raises(JobError, match="not enrolled: nobody"):
        fed.runs.check(job(sites=(*SITES, "nobody")))


def test_a_round_takes_what_is_computed_and_both_ways() -> None:
    one = SiteCheck("0.1.0", "none", "cpu", 100.0, 1000.0)
    assert seconds_of_round(job(), one, 500.0) == pytest.approx(100 + 780 / 1000 + 780 / 500)
    half = job(config=written({**configuration(), "update_precision": "bfloat16"}))
    assert seconds_of_round(half, one, 500.0) == pytest.approx(100 + 780 / 1000 + 390 / 500)
    assert seconds_of_round(secret_job(), one, 0.0) == pytest.approx(
        100 + 780 / 1000 + 780 / 1000
    )  # a ring of 32 bits


@agents
@pytest.mark.parametrize("canary", [False, True])
def test_a_run_that_has_begun_is_not_disturbed(tmp_path: Path, canary: bool) -> None:
    fed = Federation(tmp_path)
    launched = job()
    list(fed.runs.launch(launched))
    (tmp_path / "runs" / "run-1" / "end.json").unlink()
    with pytest.raises(JobError, match="run-1 has begun"):
        fed.runs.check(launched, canary)


HALF = job(config=written({**configuration(), "update_precision": "bfloat16"}))


def answering(change: Callable[[bytes], bytes], of: str = "south") -> Twist:
    """What a site answers, changed."""

    def twist(site: str, sent: Message, reply: Message) -> list[Message]:
        if site != of or reply.has_error():
            return [reply]
        said = change(reply.content[wire.PAYLOAD][wire.DATA].numpy().tobytes())  # type: ignore[index,union-attr]
        return [Message(RecordDict({wire.PAYLOAD: pack_payload(said)}), reply_to=sent)]

    return twist


def numbers(width: str, value: Any) -> Callable[[bytes], bytes]:
    """The report, and other numbers than were made."""

    def change(said: bytes) -> bytes:
        return said[: said.index(b"\n") + 1] + np.full(195, value, width).tobytes()

    return change


@agents
@pytest.mark.parametrize(
    ("asked", "width"), [(job(), 4), (HALF, 2), (secret_job(), 4)], ids=["plain", "half", "masked"]
)
def test_a_canary_goes_the_way_of_a_round_and_nothing_of_it_stays(tmp_path: Path, asked: Any, width: int) -> None:
    fed = Federation(tmp_path)
    before, reads = fed.store.state.size, [ward.vault.reads for ward in fed.wards.values()]
    carried: list[int] = []

    def weigh(_site: str, sent: Message, reply: Message) -> list[Message]:
        said = reply.content[wire.PAYLOAD][wire.DATA].numpy().tobytes()  # type: ignore[index,union-attr]
        carried.extend([sent.content[wire.PAYLOAD][wire.DATA].shape[0], len(said) - said.index(b"\n") - 1])  # type: ignore[index,union-attr]
        return [reply]

    fed.grid.twist = weigh
    found = fed.runs.check(asked, canary=True)
    assert (sorted(found.told), found.lost, found.aggregated) == (sorted(SITES), {}, SITES)
    assert all(one.could for one in found.told.values())
    assert carried == [4 * 195, width * 195] * 3 == [*carried_bytes(asked)] * 3
    assert (fed.store.state.size, fed.grants()) == (before, [])
    assert not list((tmp_path / "runs").iterdir())
    assert [ward.vault.reads for ward in fed.wards.values()] == reads
    assert {(kind, step) for ward in fed.wards.values() for kind, _, step in ward.asked} == {("check", "canary")}


@agents
@pytest.mark.parametrize(
    ("asked", "change", "code"),
    [
        (job(), numbers("<f4", np.nan), "not_finite"),
        (HALF, numbers("<u2", 0x7F80), "not_finite"),
        (secret_job(), numbers("<i4", (4 << 20) + 1), "schema"),
        (job(), lambda said: said[:-4], "size"),
        (job(), numbers("<f8", 0.0), "size"),
        (HALF, numbers("<f4", 0.0), "size"),
        (secret_job(), lambda said: said + b"\0", "size"),
        (job(), lambda said: said[: said.index(b"\n") + 1], "size"),
        (job(), lambda said: said.replace(b"\n", b" ", 1), "schema"),
        (job(), lambda said: said + bytes(4 << 20), "schema"),
    ],
)
def test_a_part_of_another_form_names_its_site_and_the_others_are_aggregated(
    tmp_path: Path, asked: Any, change: Callable[[bytes], bytes], code: str
) -> None:
    fed = Federation(tmp_path)
    fed.grid.twist = answering(change)
    found = fed.runs.check(asked, canary=True)
    assert (found.lost, sorted(found.told), found.aggregated) == (
        {"south": code},
        ["north", "west"],
        ("north", "west"),
    )


@agents
def test_an_agent_that_knows_no_canary_is_named_and_the_others_do_it(tmp_path: Path) -> None:
    """It declines an order with a key that it does not know, as malformed."""
    fed = Federation(tmp_path)

    def older(site: str, sent: Message, reply: Message) -> list[Message]:
        assert sent.content[wire.ORDER].keys() - {wire.SECONDS, wire.APPROVE_BY} == {"run", "round", "config", "step"}
        error = Error(wire.CODES["malformed"], "")
        return [Message(error, reply_to=sent) if site == "south" else reply]

    fed.grid.twist = older
    found = fed.runs.check(job(), canary=True)
    assert (found.lost, found.aggregated) == ({"south": "no_canary"}, ("north", "west"))
    assert "knows no canary" in explain_code("no_canary")[0]


@agents
def test_parts_of_which_the_jobs_strategy_makes_no_model_are_not_aggregated(tmp_path: Path) -> None:
    fed = Federation(tmp_path)
    fed.wards["west"].online = False
    found = fed.runs.check(job(strategy='{"name":"trimmed-mean","trim":1}', min_sites=3), canary=True)
    assert (sorted(found.told), found.lost, found.aggregated) == (["north", "south"], {"west": "offline"}, ())


@agents
def test_a_site_whose_round_fails_says_why_and_sends_no_part(tmp_path: Path) -> None:
    fed = Federation(tmp_path)

    def no_room(*_: object, **__: object) -> None:
        raise MemoryError

    south = fed.wards["south"].part.participant
    south.site = replace(south.site, run=no_room)
    found = fed.runs.check(job(), canary=True)
    assert (found.told["south"].wrong, found.lost, found.aggregated) == (("memory",), {}, ("north", "west"))


@agents
def test_what_answers_a_canary_is_no_update_of_a_round(tmp_path: Path) -> None:
    """A site, or who sits between, gives the answer to a canary where an update is asked for."""
    fed = Federation(tmp_path)
    kept: dict[str, bytes] = {}

    def keep(site: str, _sent: Message, reply: Message) -> list[Message]:
        kept[site] = reply.content[wire.PAYLOAD][wire.DATA].numpy().tobytes()  # type: ignore[index,union-attr]
        return [reply]

    fed.grid.twist = keep
    fed.runs.check(job(), canary=True)
    made = kept["south"]
    vector = np.frombuffer(made[made.index(b"\n") + 1 :], "<f4")
    forms = [
        RecordDict({wire.PAYLOAD: pack_payload(made)}),
        RecordDict({wire.ANSWER: ConfigRecord({wire.ENVELOPE: b""}), wire.PARAMETERS: pack(vector)}),
        RecordDict({wire.ANSWER: ConfigRecord({wire.ENVELOPE: made[:100]}), wire.PARAMETERS: pack(vector)}),
    ]

    def pose(site: str, sent: Message, reply: Message) -> list[Message]:
        if site != "south" or sent.metadata.message_type != wire.TRAIN:
            return [reply]
        return [Message(forms.pop(), reply_to=sent)]

    fed.grid.twist = pose
    events = list(fed.runs.launch(job()))
    assert [event.sites for event in events if event.state == "closed"] == [("north", "west")] * 3
    assert [event.sites for event in events if event.state == "refused"] == [("south",)] * 3
    assert forms == []
    released = {site for _, _, site in fed.store.state.aggregated}
    assert released == {"north", "west"}
