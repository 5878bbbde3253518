"""The sum of per-patient gradients, each clipped over all parameters together: the engines of DP-SGD.

Abadi et al. 2016, Algorithm 1, with the patient as the unit (design P2): one gradient for each patient, of the mean
loss over all of its rows (images, and noise draws of images: Dockhorn et al. 2023, section 3.2), bounded as one.
The engines are equal up to rounding. Their result is private: it is given to ``noise.noisy_sum`` and to nobody else.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from agent.dp.gradient_recorder import (
    MARGIN,
    GradientRecorder,
    NoGradientRuleError,
    clip_factors,
    scaled_sum,
    squared_norms,
)
from agent.dp.per_example_gradients import UnitBatch
from protos.common.errors import TrainingError, out_of_memory

MOST_ROWS: Final = 4096  # of one pass, if nobody says less
PROBES: Final = 3  # batches that are compared: weights that start at zero hide others until noise moves them

RowLosses = Callable[[nn.Module, tuple[Tensor, ...]], Tensor]
"""(model, rows) -> (n,): the loss of each row, of that row alone. It draws nothing: all noise is in the rows."""


class UnsuitableModelError(TrainingError, ValueError):
    """The model would carry patients' data past the noise, or an engine cannot train it, or has nothing to train."""


class PatientMemoryError(TrainingError, RuntimeError):
    """Not even one patient's rows fit in memory. Its cause is what ran out of it."""


@dataclass(frozen=True, slots=True, eq=False)
class PrivacyUnit:
    """Everything that one patient brings to one step of the training."""

    rows: tuple[Tensor, ...]  # tensors (n, ...) of equal n >= 1, such as images and targets; row i is one example

    def __post_init__(self) -> None:
        """As many of one as of the other."""
        if not self.rows or any(row.ndim == 0 for row in self.rows):
            raise ValueError("a unit needs rows")
        if not 1 <= min(map(len, self.rows)) == max(map(len, self.rows)):
            raise ValueError("a unit needs at least one row, and equally many in each of its tensors")

    def __len__(self) -> int:
        """How many rows."""
        return len(self.rows[0])


class ClippedSum(Protocol):
    """An engine: the sum over units of the clipped gradients, (d,) float64, on the host."""

    def __call__(self, model: nn.Module, loss: RowLosses, units: Sequence[PrivacyUnit], clip: float) -> Tensor:
        """Sum the units' gradients, each of L2 norm at most ``clip`` over all parameters together.

        Every unit is asked for once, by its index; once more where memory ran out and all is begun again in smaller
        chunks. ``model`` is left as it was.

        Raises:
            PatientMemoryError: not even one unit fits in memory.
        """
        ...


@contextmanager
def full_precision() -> Iterator[None]:
    """Products of whole float32 numbers on every device, by algorithms that nobody timed; all as before afterwards.

    PyTorch lets graphics cards round the numbers of a convolution to 10 bits (TF32), and with ``cudnn.benchmark`` it
    picks algorithms by the shape of a chunk. One patient more or less changes the shapes of the others' chunks, and
    with it the last bits of their gradients: these must be small enough for ``MARGIN``.
    """
    cudnn: Any = torch.backends.cudnn
    wanted: list[tuple[Any, str, object]] = [(cudnn, "benchmark", False), (cudnn, "allow_tf32", False)]
    # "allow_tf32" off alone would mean what ``torch.backends.fp32_precision`` says
    wanted += [(kind, "fp32_precision", "ieee") for kind in (cudnn.conv, cudnn.rnn)]
    products = torch.get_float32_matmul_precision()
    before = [(where, name, getattr(where, name)) for where, name, _ in wanted]
    try:
        torch.set_float32_matmul_precision("highest")
        for where, name, value in wanted:
            setattr(where, name, value)
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        for where, name, value in before:
            setattr(where, name, value)


def loop_engine(model: nn.Module, loss: RowLosses, units: Sequence[PrivacyUnit], clip: float) -> Tensor:
    """The reference engine: one ordinary backward pass for each patient; any module, little memory."""
    parameters = trainable(model)
    total = torch.zeros(count(parameters), dtype=torch.float64)
    with full_precision():
        for unit in _each(units):
            try:
                rows = tuple(row.clone() for row in _there(unit.rows, parameters[0].device))  # it may work in place
                value = row_losses_of(loss, model, rows).mean()
                gradients = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
                total += clipped_sum_of([gradient[None] for gradient in gradients], clip)
            except (RuntimeError, MemoryError) as fault:
                if not out_of_memory(fault):
                    raise
                raise PatientMemoryError(_TOO_LARGE) from fault
    return total


def vmap_engine(size: int, most_rows: int = MOST_ROWS) -> ChunkedSum:
    """An engine for GPUs: ``torch.func.vmap`` over at most ``size`` patients with equally many rows.

    The model must be one that ``torch.func`` can trace, and must draw nothing (no dropout). Patients wait for others
    until they have ``most_rows`` rows together. In the first batches of a model two patients' sum is compared with
    ``loop_engine``.

    Raises:
        UnsuitableModelError: (the engine) the comparison failed.
    """

    def prepare(shapes: _Shapes, model: nn.Module, loss: RowLosses, clip: float) -> _OfPart:
        together, device = _Together(model, loss), trainable(model)[0].device
        weights = {name: p.detach() for name, p in together.named_parameters() if p.requires_grad}

        def value(weights: dict[str, Tensor], rows: tuple[Tensor, ...], share: Tensor) -> Tensor:
            losses: Tensor = torch.func.functional_call(together, weights, rows)
            return (losses * share).sum()

        gradient = torch.func.vmap(torch.func.grad(value), in_dims=(None, 0, 0))

        def of_part(part: Sequence[PrivacyUnit]) -> Tensor:
            rows, batch = shapes.filled(part)
            there = tuple(batch.by_unit(row) for row in _there(rows, device))
            share = batch.by_unit(batch.weights(next(iter(weights.values()))))
            found = gradient(weights, there, share)
            return clipped_sum_of([found[name] for name in weights], clip, share.any(dim=1))

        return of_part

    return by_chunks(size, most_rows, prepare)


def bookkeeping_engine(size: int, most_rows: int = MOST_ROWS) -> ChunkedSum:
    """An engine with one backward pass for at most ``size`` patients at once (agent/dp/gradient_recorder.py).

    They have at most ``most_rows`` rows together, or are one patient: all of them must fit in memory.

    It needs more than the others do: plain layers, called as modules, and rows that do not meet and keep their order.
    Where that can be told beforehand it is refused; and in the first batches of a model two patients' sum is compared
    with ``loop_engine``. A model that reorders rows by what is in them may pass, and must not be trained so.

    Raises:
        UnsuitableModelError: (the engine) no rule for a module, or the comparison failed.
    """

    def prepare(shapes: _Shapes, model: nn.Module, loss: RowLosses, clip: float) -> _OfPart:
        parameters = trainable(model)
        book = GradientRecorder(model, parameters)

        def of_part(part: Sequence[PrivacyUnit]) -> Tensor:
            rows, batch = shapes.filled(part)
            there = _there(rows, parameters[0].device)
            return book.clipped_sum(lambda: row_losses_of(loss, model, there), batch, clip)

        return of_part

    return by_chunks(size, most_rows, prepare)


_OfPart = Callable[[Sequence[PrivacyUnit]], Tensor]  # the units of one chunk -> (d,)
Prepare = Callable[["_Shapes", nn.Module, RowLosses, float], _OfPart]  # shapes, model, loss and clip


def by_chunks(size: int, most_rows: int, prepare: Prepare) -> ChunkedSum:
    """The engine that takes one chunk after the other, and is compared with ``loop_engine`` at first."""
    return ChunkedSum(_Shapes(size, most_rows), prepare)


class ChunkedSum:
    """The engine that takes one chunk after the other: its shape hangs on one size and a patient's own rows alone."""

    def __init__(self, shapes: _Shapes, prepare: Prepare) -> None:
        """With chunks of these shapes, until :meth:`fit` finds them too large."""
        self._shapes, self._prepare, self._probe = shapes, prepare, _Probe()

    def fit(self, model: nn.Module, loss: RowLosses, widest: PrivacyUnit, clip: float) -> None:
        """Halve the chunks until they fit in memory, with made patients, before a patient's rows are here.

        Never by patients: whoever needed most memory would choose the shape of everybody's chunk, and in another
        shape the others' gradients move in their last bits, which a kink can make a thousandth. So memory that runs
        out later ends the sum. The public constants are untouched.

        Args:
            model: it is left as it was.
            loss: of its rows.
            widest: a made patient with as many rows as one may have.
            clip: the L2 bound.
        Raises:
            PatientMemoryError: not even one such patient fits.
        """
        one = PrivacyUnit(tuple(row[:1] for row in widest.rows))
        while True:
            try:
                of_part = self._prepare(self._shapes, model, loss, clip)
                for unit in (one, widest):
                    of_part([unit] * self._shapes.places(len(unit)))
                if PROBES:  # so much the comparison takes, too
                    _compared(self._prepare, model, loss, clip, _cut([widest, widest], self._shapes.most_rows))
            except (RuntimeError, MemoryError) as fault:
                self._shapes = _smaller(self._shapes, fault)
            else:
                return
            if torch.cuda.is_available():  # what the failed pass held is gone with its frames by now
                torch.cuda.empty_cache()

    def __call__(self, model: nn.Module, loss: RowLosses, units: Sequence[PrivacyUnit], clip: float) -> Tensor:
        """See :class:`ClippedSum`."""
        total = None
        try:
            of_part = self._prepare(self._shapes, model, loss, clip)
            with full_precision():
                for part in self._probe.watched(self._shapes, _each(units), self._prepare, (model, loss, clip)):
                    total = of_part(part) if total is None else total.add_(of_part(part))
        except NoGradientRuleError as fault:
            raise UnsuitableModelError(f"{fault}; `loop_engine` can train it") from fault
        return torch.zeros(count(trainable(model)), dtype=torch.float64) if total is None else total


def _smaller(shapes: _Shapes, fault: Exception) -> _Shapes:
    """Half the size, if memory ran out.

    Raises:
        PatientMemoryError: it is one patient already.
        Exception: the fault, which is another.
    """
    if not out_of_memory(fault):
        raise fault
    if (smaller := shapes.halved()) is None:
        raise PatientMemoryError(_TOO_LARGE) from fault
    return smaller


_TOO_LARGE: Final = "one patient's rows do not fit in memory"


@dataclass(frozen=True, slots=True, eq=False)
class _Probe:
    """The comparison of an engine with ``loop_engine``, on two patients of each of the first ``PROBES`` batches."""

    _seen: WeakKeyDictionary[nn.Module, int] = field(default_factory=WeakKeyDictionary)

    def watched(
        self,
        shapes: _Shapes,
        units: Iterable[PrivacyUnit],
        prepare: Prepare,
        training: tuple[nn.Module, RowLosses, float],
    ) -> Iterator[list[PrivacyUnit]]:
        """The units in parts, as they come; on the way the first two units are compared, in one part or not.

        Only a batch whose two patients have a gradient counts: another shows nothing.

        Raises:
            UnsuitableModelError: the engine gives something else than ``loop_engine``.
        """
        model = training[0]
        wanted = 2 if self._seen.get(model, 0) < PROBES else 0
        pair: list[PrivacyUnit] = []
        for part in shapes.chunks(units):
            if len(pair) < wanted:
                pair += part[: wanted - len(pair)]
                if len(pair) == wanted:
                    shown = _compared(prepare, *training, _cut(pair, shapes.most_rows))
                    self._seen[model] = self._seen.get(model, 0) + shown
            yield part


def _cut(pair: Sequence[PrivacyUnit], most_rows: int) -> list[PrivacyUnit]:
    """In one part, both must fit in memory: half of the rows of each show as much as all."""
    longest = max(map(len, pair))
    least = longest if 2 * longest <= most_rows else 1 << max(1, most_rows // 2).bit_length() - 1
    return [PrivacyUnit(tuple(row[:least].clone() for row in unit.rows)) for unit in pair]


def _compared(prepare: Prepare, model: nn.Module, loss: RowLosses, clip: float, units: Sequence[PrivacyUnit]) -> bool:
    """Whether the engine's sum and ``loop_engine``'s, which are equal but for rounding, showed anything: a gradient.

    On a copy in float64 wherever there can be one. In float32 a right engine may be off by a hundredth in a layer,
    where rounding turns a ReLU or a maximum.

    Raises:
        UnsuitableModelError: they are not. A forgotten or mixed-up layer does not pass.
    """
    shapes = _Shapes(2, max(2, *(2 * len(unit) for unit in units)))  # no more rows than the two have
    twin, doubled, tolerance = model, list(units), 1e-2
    with contextlib.suppress(Exception):  # whatever cannot be copied is compared as it is
        twin, tolerance = copy.deepcopy(model).double(), 1e-5
        doubled = [PrivacyUnit(tuple(r.double() if r.is_floating_point() else r for r in u.rows)) for u in units]
    try:
        ours, theirs = prepare(shapes, twin, loss, clip)(doubled), loop_engine(twin, loss, doubled, clip)
    except (RuntimeError, TypeError) as fault:  # something in it is of another type
        if isinstance(fault, PatientMemoryError) or out_of_memory(fault):
            raise
        theirs, tolerance = loop_engine(model, loss, units, clip), 1e-2
        try:
            ours = prepare(shapes, model, loss, clip)(units)
        except RuntimeError as fault:
            if out_of_memory(fault):
                raise
            raise UnsuitableModelError(f"{_OTHERS} ({type(fault).__name__}). `loop_engine` can train it") from fault
    _refuse_company(prepare(shapes, model, loss, 1e30), units)
    sizes = [parameter.numel() for parameter in trainable(model)]
    for mine, reference in zip(torch.split(ours, sizes), torch.split(theirs, sizes), strict=True):
        if not (mine - reference).norm() <= tolerance * (reference.norm() + 1e-2 * theirs.norm()):
            raise UnsuitableModelError(_OTHERS + _WHY)
    return bool(theirs.any())


_OTHERS: Final = "one pass for all patients gives other gradients than one pass for each"
_WHY: Final = (
    ". The model uses a weight outside its layer, mixes rows of different patients, or has a loss that draws random "
    "numbers. `loop_engine` can train it"
)


def _refuse_company(of_part: _OfPart, units: Sequence[PrivacyUnit]) -> None:
    """Where the second patient is not finite, the first one's gradient must be as it is alone.

    However little rows meet, it would not be finite either, and count as nothing; a large one would make use of it.

    Raises:
        UnsuitableModelError: it is not.
    """
    least = min(map(len, units))  # in chunks of one shape
    first, second = (PrivacyUnit(tuple(row[:least].clone() for row in unit.rows)) for unit in units)
    rows = (torch.full_like(row, torch.nan) if row.is_floating_point() else row for row in second.rows)
    alone, beside = of_part([first]), of_part([first, PrivacyUnit(tuple(rows))])
    if not (alone - beside).norm() <= MARGIN * alone.norm():
        raise UnsuitableModelError(_OTHERS + _WHY)


class _Together(nn.Module):
    """The unit loss as a module, so that ``functional_call`` reaches a loss that calls the model as it likes."""

    def __init__(self, model: nn.Module, loss: RowLosses) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, *rows: Tensor) -> Tensor:
        return row_losses_of(self._loss, self.model, rows)


def refuse_batch_statistics(model: nn.Module) -> None:
    """Refuse layers that mix patients or remember them.

    Raises:
        UnsuitableModelError: batch normalisation of any kind, or instance normalisation with running statistics.
    """
    for module in model.modules():
        if isinstance(module, _NormBase) and (
            module.track_running_stats or not isinstance(module, nn.modules.instancenorm._InstanceNorm)
        ):
            raise UnsuitableModelError(f"{type(module).__name__} keeps statistics of patients: use GroupNorm")


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that a sum covers, in its order.

    Raises:
        UnsuitableModelError: there is none, or not as numbers of 32 or 64 bits, or with hooks.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise UnsuitableModelError("the model has no parameter to train")
    if wrong := {str(p.dtype) for p in parameters} - {"torch.float32", "torch.float64"}:
        raise UnsuitableModelError(
            f"parameters of {', '.join(sorted(wrong))} are too coarse for a bound: use float32"
        )
    if any(parameter._backward_hooks for parameter in parameters):
        raise UnsuitableModelError("a parameter has a hook of its own, which would change what is clipped")
    return parameters


def count(tensors: Sequence[Tensor]) -> int:
    """How many numbers they hold: d."""
    return sum(tensor.numel() for tensor in tensors)


def row_losses_of(loss: RowLosses, model: nn.Module, rows: tuple[Tensor, ...]) -> Tensor:
    """One loss for each row; a shape like (n, 1) is refused, for it would broadcast against weights (n,)."""
    losses = loss(model, rows)
    if losses.shape != rows[0].shape[:1]:
        raise UnsuitableModelError(f"the loss must give one number for each row, not the shape {tuple(losses.shape)}")
    return losses


def _there(rows: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, ...]:
    return tuple(row.to(device) for row in rows)


@dataclass(frozen=True, slots=True)
class _Shapes:
    """The shapes of chunks. That of a patient's hangs on this patient's rows and on constants, never on the others.

    For only in a chunk of another shape does another patient move the last bits of this one's gradient, which a kink
    (a ReLU, a maximum) can make a thousandth. In one shape it was nothing on the networks of
    tests/support/real_networks.py; with ``vmap``, attention may round in another way beside one that is not finite.
    """

    size: int  # patients of a chunk, at most
    most_rows: int  # of a chunk, or one patient

    def __post_init__(self) -> None:
        """No chunk of nobody."""
        if not (self.size >= 1 and self.most_rows >= 1):
            raise ValueError("a chunk holds at least one patient, and one row")

    def halved(self) -> _Shapes | None:
        """Half as many patients and rows in a chunk; None: it is one patient already, without a copy of a row."""
        if self.size == self.most_rows == 1:
            return None
        return _Shapes(max(1, self.size // 2), max(1, self.most_rows // 2))

    def chunks(self, units: Iterable[PrivacyUnit]) -> Iterator[list[PrivacyUnit]]:
        """Lists of units that go into one chunk; each unit is asked for once."""
        waiting: dict[int, list[PrivacyUnit]] = {}
        for unit in units:
            width = self._width(len(unit))
            waiting.setdefault(width, []).append(unit)
            if len(waiting[width]) == self._places(width):
                yield waiting.pop(width)
        yield from waiting.values()

    def filled(self, part: Sequence[PrivacyUnit]) -> tuple[tuple[Tensor, ...], UnitBatch]:
        """The rows of a chunk, filled up with copies of its own units to the chunk's shape."""
        width = self._width(max(map(len, part)))
        empty = max(0, self._places(width) - len(part))
        chosen = [torch.arange(width).clamp(max=len(unit) - 1) for unit in part]
        units, picks = [*part, *[part[-1]] * empty], [*chosen, *[chosen[-1]] * empty]
        rows = (
            torch.cat([row[pick] for row, pick in zip(tensors, picks, strict=True)])
            for tensors in zip(*(unit.rows for unit in units), strict=True)
        )
        return tuple(rows), UnitBatch((*map(len, part), *[0] * empty), width)

    def _width(self, rows: int) -> int:
        """Rows that such a patient is given: few different numbers, so that few chunks are filled up."""
        return rows if rows > self.most_rows else min(self.most_rows, 1 << (rows - 1).bit_length())

    def places(self, rows: int) -> int:
        """How many patients of so many rows are in a chunk."""
        return self._places(self._width(rows))

    def _places(self, width: int) -> int:
        return max(1, min(self.size, self.most_rows // width))


def _each(units: Sequence[PrivacyUnit]) -> Iterator[PrivacyUnit]:
    """Every unit, by its index: ``Sequence.__iter__`` ends in silence where making a unit raises IndexError."""
    for index in range(len(units)):
        yield units[index]


def clipped_sum_of(gradients: Sequence[Tensor], clip: float, counted: Tensor | None = None) -> Tensor:
    """Clip each unit's gradient to norm <= clip and add up: tensors (u, ...) for each parameter -> (d,) float64.

    A unit whose gradient is not finite counts as zero: one patient's broken gradient must neither void the model
    nor show that the patient was there. So do those that are not ``counted`` (u,).
    """
    if any(gradient.element_size() < 4 for gradient in gradients):
        raise UnsuitableModelError("a gradient of 16 bits is too coarse for a bound")
    flat = [gradient.reshape(len(gradient), -1) for gradient in gradients]
    factor = clip_factors(sum(map(squared_norms, flat), torch.zeros(())).sqrt(), clip)
    factor = factor if counted is None else factor * counted.to(factor)
    return torch.cat([scaled_sum(part, factor) for part in flat]).cpu()
