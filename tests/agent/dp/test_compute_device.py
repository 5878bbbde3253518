"""Where rounds are computed: said, refused where it is demanded, never chosen in silence. Memory that runs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from agent.dp import clipping
from agent.dp.clipping import (
    PatientMemoryError,
    PrivacyUnit,
    RowLosses,
    bookkeeping_engine,
    loop_engine,
    vmap_engine,
)
from agent.dp.compute_device import (
    AUTO,
    CPU,
    CUDA,
    SiteCompute,
    accelerator_failed,
    memory_gib,
)
from agent.dp.dpsgd import PrivateSgd, TrainingTask, train_privately
from agent.errors import SiteConfigError
from agent.release.maker_errors import error_of
from policies.accounting.claims import SubsampledGaussian
from protos.operations.confinement import AVAILABLE, REQUIRED
from tests.support.entropy import UnsafeSeededEntropy
from tests.support.real_networks import network, row_losses, units_for

Step = Callable[[nn.Module, RowLosses, Sequence[PrivacyUnit], float], Tensor]


@pytest.mark.parametrize(
    ("wanted", "demand", "there", "device", "why"),
    [
        (AUTO, AVAILABLE, True, CUDA, "rounds are computed by the accelerator"),
        (CUDA, AVAILABLE, True, CUDA, "rounds are computed by the accelerator"),
        (CPU, REQUIRED, True, CPU, "rounds are computed by the processor"),
        (AUTO, AVAILABLE, False, CPU, "the processor: this machine has no accelerator that PyTorch can use"),
        (AUTO, REQUIRED, True, CPU, 'the processor: confinement = "required", and what an accelerator computes'),
    ],
)
def test_what_was_decided_is_said(wanted: str, demand: str, there: bool, device: str, why: str) -> None:
    found = SiteCompute(wanted, demand == REQUIRED, available=lambda: there)
    assert found.plan.device == device
    assert why in found.why


@pytest.mark.parametrize(("demand", "there"), [(AVAILABLE, False), (REQUIRED, True)])
def test_a_demanded_accelerator_that_cannot_be_had_is_refused_by_the_key(demand: str, there: bool) -> None:
    with pytest.raises(SiteConfigError, match=r'site.toml: device = "cuda": .*set device = "auto" or "cpu"'):
        SiteCompute(CUDA, demand == REQUIRED, available=lambda: there)


def test_a_lost_accelerator_is_left_for_the_processor_only_where_the_site_said_auto() -> None:
    auto, fixed = (SiteCompute(wanted, available=lambda: True) for wanted in (AUTO, CUDA))
    assert "from now on rounds are computed by the processor" in auto.lost()
    assert "no round is computed by the processor" in fixed.lost()
    assert (auto.plan.device, fixed.plan.device) == (CPU, CUDA)
    assert accelerator_failed(torch.AcceleratorError("gone"))
    assert not accelerator_failed(torch.OutOfMemoryError("full"))
    assert not accelerator_failed(RuntimeError("another"))


def test_a_prediction_is_told_where_it_is_computed_and_which_word_to_change() -> None:
    found = SiteCompute(AUTO, available=lambda: True, of="predictions")
    assert (found.plan.device, found.why) == (CUDA, "predictions are computed by the accelerator")
    with pytest.raises(SiteConfigError, match=r'^--device "cuda": .*set device = "auto" or "cpu"'):
        SiteCompute(CUDA, available=lambda: False, of="predictions", key="--device")


def test_the_sentences_of_memory_and_accelerator_pass_out_of_the_confined_process() -> None:
    told = (
        "task 'lungs': training.images_per_patient, training.views, input.size: one patient needs more than the "
        f"{memory_gib(CPU):.1f} GiB of memory of cpu"
    )
    assert str(error_of("TaskMemoryError", told, ("'lungs'",))) == told
    assert str(error_of("AcceleratorLostError", "driver text")) == "the accelerator failed while a round was computed"


# -- memory that runs out


def _short(patch: pytest.MonkeyPatch, most: int, fault: Exception) -> list[int]:
    """A machine on which no pass of more than ``most`` rows fits; the rows of each pass that was tried."""
    tried: list[int] = []
    losses = clipping.row_losses_of

    def of(loss: RowLosses, model: nn.Module, rows: tuple[Tensor, ...]) -> Tensor:
        tried.append(len(rows[0]))
        if len(rows[0]) > most:
            raise fault
        return losses(loss, model, rows)

    patch.setattr(clipping, "row_losses_of", of)
    return tried


FAULTS = [
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    MemoryError(),
]


@pytest.mark.parametrize(
    ("name", "fault"), [*(("small-cnn", fault) for fault in FAULTS), ("resnet18", FAULTS[0]), ("vit-s16", FAULTS[0])]
)
def test_memory_that_runs_out_halves_the_chunks_and_changes_nothing(
    name: str, fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, units = network(name), units_for(name, (1, 2, 3, 1, 1))
    clean = bookkeeping_engine(8, most_rows=16)(model, row_losses, units, 0.1)
    small = bookkeeping_engine(2, most_rows=4)(model, row_losses, units, 0.1)
    tried = _short(monkeypatch, 4, fault)
    engine = bookkeeping_engine(8, most_rows=16)
    engine.fit(model, row_losses, units[2], 0.1)
    found = engine(model, row_losses, units, 0.1)
    assert float((found - clean).norm()) <= 1e-4 * float(clean.norm())
    assert torch.equal(found, small), "as if it had begun so: no chunk of another shape is in it"
    assert max(tried) > 4
    tried.clear()
    engine(model, row_losses, units, 0.1)
    assert max(tried) == 4, "it stays so"


def test_memory_that_runs_out_among_patients_ends_the_sum_and_changes_no_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever needed most of it would else choose the shape in which all the others are computed."""
    model, units = network("resnet18"), units_for("resnet18", (1,) * 12)
    engine = bookkeeping_engine(4, most_rows=8)
    engine.fit(model, row_losses, units[0], 0.1)
    whole = engine(model, row_losses, units, 0.1)
    tried = _short(monkeypatch, 2, FAULTS[0])
    with pytest.raises(torch.OutOfMemoryError):
        engine(model, row_losses, units, 0.1)
    assert max(tried) == 4
    monkeypatch.undo()
    assert torch.equal(engine(model, row_losses, units, 0.1), whole)


def test_one_patient_that_does_not_fit_is_refused_and_another_error_is_none_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, units = network("small-cnn"), units_for("small-cnn", (3, 3))
    _short(monkeypatch, 0, FAULTS[0])
    for engine in (bookkeeping_engine(4), vmap_engine(4)):
        with pytest.raises(PatientMemoryError, match="one patient's rows do not fit in memory") as told:
            engine.fit(model, row_losses, units[0], 0.1)
        assert isinstance(told.value.__cause__, torch.OutOfMemoryError)
    _short(monkeypatch, 0, RuntimeError("something else"))
    with pytest.raises(RuntimeError, match="something else"):
        loop_engine(model, row_losses, units, 0.1)


class _Counted(UnsafeSeededEntropy):
    """How many bytes were drawn."""

    drawn = 0

    def take(self, count: int) -> bytes:
        self.drawn += count
        return super().take(count)


def test_the_noise_is_drawn_once_and_the_update_is_the_one_without_the_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    job = PrivateSgd(1.0, 2.0, 3, 0.1, 2, 6.0)
    found: list[tuple[Tensor, int, Any]] = []
    for short in (False, True):
        model, entropy = network("small-cnn"), _Counted(5)
        units = units_for("small-cnn", (1, 2, 1, 1, 2, 1))
        with monkeypatch.context() as patch:
            if short:
                _short(patch, 2, FAULTS[0])
            task = TrainingTask(model, row_losses, lambda ps: torch.optim.SGD(ps, lr=0.1))
            engine = bookkeeping_engine(8, most_rows=8)
            engine.fit(model, row_losses, units[1], job.clip)
            train_privately(task, units, job, entropy, engine)
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        claim = SubsampledGaussian(job.sampling_rate, job.noise_multiplier, job.steps)
        found.append((weights, entropy.drawn, claim))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-6)
    assert found[0][1:] == found[1][1:]
