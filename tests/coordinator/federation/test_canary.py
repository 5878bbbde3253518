from __future__ import annotations

import json

import numpy as np
import pytest

from coordinator.federation.aggregation import FedAvg, FedAvgM, Krum, TrimmedMean
from coordinator.federation.canary import PartForm, made_model, read_answer
from coordinator.federation.replies import InvalidReplyError
from protos.artifacts.bfloat16 import BFLOAT16, FLOAT32, rounded
from protos.federation.messages import PIECE
from protos.federation.site_check import MOST, SiteCheck
from protos.secagg.ring import Ring

START = np.zeros(3, np.float32)
RING = Ring(3, 32, 4.0, 20)
MASKED = json.dumps({"ring_bits": 32, "value_bound": 4.0, "scale": 20}).encode()


def form(config: bytes = b"{}", precision: str = FLOAT32) -> PartForm:
    return PartForm.of(config, 3, precision)


def test_a_model_starts_at_zero_and_has_no_two_pieces_alike() -> None:
    """Flower carries pieces that are alike once."""
    model = made_model(1 << 20)
    assert model.dtype == np.float32
    assert np.all(1.0 + model == 1.0)
    assert np.isfinite(model).all()
    raw = model.tobytes()
    assert len({raw[at : at + PIECE] for at in range(0, len(raw), PIECE)}) == 4
    assert len({bytes(PIECE) for _ in range(4)}) == 1  # of zeros one would travel


def test_a_report_is_read_and_what_follows_it_is_left() -> None:
    report = SiteCheck("0.1.0", "none", "cpu", 1.0, 2.0)
    told, rest = read_answer(report.to_bytes() + b"\n1\n2")
    assert (told, bytes(rest)) == (report, b"1\n2")
    for raw in (b"", b"\n", report.to_bytes(), report.to_bytes() + b"x", b" " * MOST + report.to_bytes() + b"\n"):
        with pytest.raises(InvalidReplyError, match="schema"):
            read_answer(raw)


@pytest.mark.parametrize("offset", [0, 1])  # a part lies behind a report of any length
def test_parts_are_read_as_they_were_made(offset: int) -> None:
    vector = np.array([1.0, -2.0, 0.5], np.float32)

    def read(of: PartForm, raw: bytes) -> np.ndarray:
        return of.read(memoryview(b"x" * offset + raw)[offset:])

    assert read(form(), vector.tobytes()).tolist() == vector.tolist()
    assert read(form(precision=BFLOAT16), rounded(vector).tobytes()).tolist() == vector.tolist()
    words = read(form(MASKED), RING.lift(RING.quantise(vector)).tobytes())
    assert RING.decode(RING.lower(words)).tolist() == vector.tolist()


def test_one_step_of_the_jobs_strategy_is_made_or_not() -> None:
    parts = [(site, np.full(3, i, np.float32)) for i, site in enumerate("abcde")]
    assert form().is_aggregated(parts, START, FedAvg())
    assert form().is_aggregated(parts, START, Krum(byzantine=1, multi=1))
    assert not form().is_aggregated(parts[:4], START, Krum(byzantine=1, multi=1))
    assert not form().is_aggregated([], START, FedAvg())
    huge = [(site, np.full(3, 3e38, np.float32)) for site in "ab"]
    assert not form().is_aggregated(huge, np.full(3, -3e38, np.float32), FedAvgM(server_lr=9.0, beta1=0.5))


def test_masked_parts_are_summed_in_the_ring_and_their_mean_advances_the_model() -> None:
    words = [
        ("a", RING.lift(np.array([1, -1, 4 << 20], np.int64))),
        ("b", RING.lift(np.array([-3, 1, 4 << 20], np.int64))),
    ]
    seen = []

    class Seen(FedAvg):
        def advance(self, start, delta, state):  # type: ignore[no-untyped-def]
            seen.append(delta)
            return FedAvg.advance(self, start, delta, state)

    assert form(MASKED).is_aggregated(words, START, Seen())
    assert (seen[0] * 2**20).tolist() == [-1.0, 0.0, 4 << 20]
    assert not form(MASKED).is_aggregated([], START, FedAvg())
    assert not form(MASKED).is_aggregated(words, START, TrimmedMean(trim=1))
    assert not form(MASKED).is_aggregated(words, START, FedAvg(weights={"a": 1.0, "b": 2.0}))
