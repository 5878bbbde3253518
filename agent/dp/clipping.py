"""The sum of per-patient gradients, each clipped over all parameters together: the engines of DP-SGD.

Abadi et al. 2016, Algorithm 1, with the patient as the unit (design P2): one gradient for each patient, of the mean
loss over all of its rows (images, and noise draws of images: Dockhorn et al. 2023, section 3.2), bounded as one.
The engines are equal up to rounding. Their result is private: it is given to ``noise.noisy_sum`` and to nobody else.

Book-keeping (Bu et al. 2023, "Differentially Private Optimization on Large Model at Small Cost"): while one
backward pass runs for all units of a chunk, the weights want no gradient, so that only those of activations are
computed; each layer's input and output gradient give every unit's gradient by its weights, or its norm alone.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.hooks import RemovableHandle

from agent.dp.per_example_gradients import (
    RULES,
    UnitBatch,
    bias_gradients,
    gram_norms,
    has_few_positions,
    suitable,
    unit_gradients,
    whole_gradient,
)
from protos.common.errors import TrainingError


class NoGradientRuleError(TrainingError, ValueError):
    """The model cannot be trained this way; the text names types of modules."""


class GradientRecorder:
    """The layers of a model, with what they record during one backward pass."""

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        """Find the layers whose weights are trained, and what stands beside them once for every row.

        Raises:
            NoGradientRuleError: a trained parameter belongs to a module that no rule is for.
        """
        self._parameters, self._wanted = parameters, set(parameters)
        own = {
            m: {name: p for name, p in m.named_parameters(recurse=False) if p in self._wanted}
            for m in model.modules()
        }
        self._layers = [m for m, found in own.items() if found and suitable(m)]
        beside = [(m, name, p) for m, found in own.items() if not suitable(m) for name, p in found.items()]
        # such as a class token or positions: one row of it is added or put to each row of the batch
        self._bare = [(m, name, p) for m, name, p in beside if p.ndim > 1 and len(p) == 1]
        if wrong := sorted({type(m).__name__ for m, _, p in beside if p.ndim < 2 or len(p) != 1}):
            known = ", ".join(kind.__name__ for kind in RULES)
            raise NoGradientRuleError(f"no gradient of each patient for {', '.join(wrong)}: only for plain {known}")
        self._found: dict[nn.Parameter, _Recorded] = {}
        self._backward = False

    def clipped_sum(self, losses: Callable[[], Tensor], batch: UnitBatch, clip: float) -> Tensor:
        """The sum of the units' gradients of their mean losses, each of norm at most ``clip``: (d,) float64.

        The model is left as it was, also when something in it fails.

        Args:
            losses: runs the model on all rows: (rows,), the loss of each.
            batch: whose rows these are.
            clip: the bound.
        Raises:
            NoGradientRuleError: a layer is used in a way that the rules do not cover.
        """
        try:
            self._record(losses, batch)
            return self._summed(batch, clip)
        finally:
            self._found = {}

    def _record(self, losses: Callable[[], Tensor], batch: UnitBatch) -> None:
        """One pass forwards and one backwards; afterwards ``_found`` has what each parameter's gradients come of."""
        device = self._parameters[0].device
        anchor = torch.zeros((), device=device, requires_grad=True)  # every layer's output leads back to it
        after = partial(self._after, anchor, batch)
        handles: list[RemovableHandle] = []
        try:
            handles += (layer.register_forward_hook(after, with_kwargs=True) for layer in self._layers)
            for parameter in self._parameters:
                parameter.requires_grad_(False)
            with torch.enable_grad():
                for module, name, parameter in self._bare:
                    copies = parameter.detach().expand(batch.rows, *parameter.shape[1:]).clone()
                    take = partial(self._take_copies, batch, parameter)
                    module._parameters[name] = _Tap.apply(copies, anchor, copies[:0], take)  # type: ignore[no-untyped-call]
                told = losses()
                value = (told * batch.weights(told)).sum()
            self._backward = True
            torch.autograd.grad(value, anchor, allow_unused=True)  # and to nothing else: no .grad is touched
        finally:
            self._backward = False
            for module, name, parameter in self._bare:
                module._parameters[name] = parameter
            for parameter in self._parameters:
                parameter.requires_grad_(True)
            for handle in handles:
                handle.remove()

    def _summed(self, batch: UnitBatch, clip: float) -> Tensor:
        squares = torch.zeros(len(batch.counts), dtype=torch.float64, device=self._parameters[0].device)
        mass = torch.zeros_like(squares)  # the largest of a layer
        for found in self._found.values():
            square, weighs = found.squares(batch)
            squares += square
            mass = torch.maximum(mass, weighs)
        norms = squares.clamp(min=0.0).sqrt()
        factor = _factors(norms, clip)
        # one that cancels so far that not even float64 tells what is left counts as one that is not finite
        sound = torch.isfinite(squares) & (mass <= _CANCELLED * norms.clamp(min=clip))
        factor *= sound & torch.tensor([count > 0 for count in batch.counts], device=factor.device)
        none = _Recorded()  # of a parameter that was not used
        parts = [self._found.get(p, none).total(p, batch, factor) for p in self._parameters]
        return torch.cat([part.flatten().double() for part in parts]).cpu()

    def _after(
        self, anchor: Tensor, batch: UnitBatch, module: nn.Module, given: tuple[Any, ...], named: Any, out: Tensor
    ) -> Tensor | None:
        if not torch.is_grad_enabled():
            return None  # the loss takes no gradient through this call
        if len(given) != 1 or named or not len(given[0]) == len(out) == batch.rows:
            raise NoGradientRuleError(
                f"{type(module).__name__} must be called with one tensor that has a row for each of the batch's"
            )
        told: Tensor = _Tap.apply(out, anchor, given[0].detach(), partial(self._take, module, batch))  # type: ignore[no-untyped-call]
        return told

    def _take(self, module: nn.Module, batch: UnitBatch, a: Tensor, g: Tensor) -> None:
        self._refuse_penalty()
        weight: Any = module.weight
        if weight not in self._wanted or not has_few_positions(module, a, g, batch):
            for name, gradient in unit_gradients(module, a, g, batch).items():
                self._of(getattr(module, name)).add(gradient)
            return
        self._of(weight).calls.append((module, a, g))
        if module.bias is not None:
            self._of(module.bias).add(bias_gradients(module, g, batch))

    def _take_copies(self, batch: UnitBatch, parameter: nn.Parameter, _: Tensor, g: Tensor) -> None:
        self._refuse_penalty()
        self._of(parameter).add(batch.sums(g)[:, None])

    def _refuse_penalty(self) -> None:
        if not self._backward:
            raise NoGradientRuleError("the loss takes a gradient itself (a gradient penalty)")

    def _of(self, parameter: Any) -> _Recorded:
        if parameter not in self._wanted:
            return _Recorded()  # of no use
        return self._found.setdefault(parameter, _Recorded())


@dataclass(slots=True, eq=False)
class _Recorded:
    """What the gradients of one parameter come of. A layer called twice, or a tied weight: one gradient, one norm."""

    made: Tensor | None = None  # (u, *shape): each unit's
    calls: list[tuple[nn.Module, Tensor, Tensor]] = field(default_factory=list)  # layer, input, output gradient

    def add(self, gradients: Tensor) -> None:
        """Of one more use of the parameter."""
        self.made = gradients if self.made is None else self.made.add_(gradients)

    def squares(self, batch: UnitBatch) -> tuple[Tensor, Tensor]:
        """(u,) float64 twice: the squared norm of each unit's, and the mass where that comes of Gram matrices."""
        if len(self.calls) > 1 or self.made is not None:
            for module, a, g in self.calls:
                self.add(unit_gradients(module, a, g, batch)["weight"])
            self.calls = []
        if self.made is not None:
            square = squared_norms(self.made.flatten(1))
            return square, torch.zeros_like(square)
        return gram_norms(*self.calls[0], batch)

    def total(self, parameter: nn.Parameter, batch: UnitBatch, factor: Tensor) -> Tensor:
        """The sum of the units', each times its factor; one whose factor is 0 may not be finite."""
        if self.made is not None:
            return _scaled_sum(self.made.flatten(1), factor)
        if not self.calls:
            return torch.zeros_like(parameter)
        module, a, g = self.calls[0]
        if not bool(factor.all()):  # 0 * NaN would be NaN
            kept = factor > 0
            a, g = (torch.where(batch.each(kept, rows), rows, torch.zeros_like(rows)) for rows in (a, g))
        return whole_gradient(module, a, g.double() * batch.each(factor, g))


class _Tap(torch.autograd.Function):
    """The identity, which tells the gradient that comes back. The input is freed as the pass goes on."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, anchor: Tensor, a: Tensor, take: Callable[[Tensor, Tensor], None]) -> Tensor:
        ctx.mark_dirty(out)  # not a view: an activation may work in place on it
        ctx.save_for_backward(a)  # an input that is changed in place afterwards is an error
        ctx.take = take
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        (a,) = ctx.saved_tensors
        ctx.take(a, g)
        return g, None, None, None


# Of the bound: covers the rounding of norms and of float64 sums. In chunks of one shape no bit of another patient's
# gradient changes, and what is added up for a whole chunk is added in float64.
# It would not cover TF32, whose last bits are 1e-3: see ``full_precision``.
MARGIN: Final = 1e-5
_BLOCK: Final = 512  # numbers of one block of a norm
_CANCELLED: Final = 1e4  # of a unit's norm or the bound: with more, float64 rounding of a squared norm nears MARGIN
MOST_ROWS: Final = 4096  # of one pass, if nobody says less
PROBES: Final = 3  # batches that are compared: weights that start at zero hide others until noise moves them

RowLosses = Callable[[nn.Module, tuple[Tensor, ...]], Tensor]
"""(model, rows) -> (n,): the loss of each row, of that row alone. It draws nothing: all noise is in the rows."""


class UnsuitableModelError(TrainingError, ValueError):
    """The model would carry patients' data past the noise, or an engine cannot train it, or has nothing to train."""


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

        Every unit is asked for once, by its index. ``model`` is left as it was.
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
            rows = tuple(row.clone() for row in _there(unit.rows, parameters[0].device))  # it may work in place
            value = _losses(loss, model, rows).mean()
            gradients = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
            total += _clipped_sum([gradient[None] for gradient in gradients], clip)
    return total


def vmap_engine(size: int, most_rows: int = MOST_ROWS) -> ClippedSum:
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
            return _clipped_sum([found[name] for name in weights], clip, share.any(dim=1))

        return of_part

    return _by_chunks(_Shapes(size, most_rows), prepare)


def bookkeeping_engine(size: int, most_rows: int = MOST_ROWS) -> ClippedSum:
    """An engine with one backward pass for at most ``size`` patients at once: see ``bookkeeping``.

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
            return book.clipped_sum(lambda: _losses(loss, model, there), batch, clip)

        return of_part

    return _by_chunks(_Shapes(size, most_rows), prepare)


_OfPart = Callable[[Sequence[PrivacyUnit]], Tensor]  # the units of one chunk -> (d,)
_Prepare = Callable[["_Shapes", nn.Module, RowLosses, float], _OfPart]  # shapes, model, loss and clip


def _by_chunks(shapes: _Shapes, prepare: _Prepare) -> ClippedSum:
    """The engine that takes one chunk after the other, and is compared with ``loop_engine`` at first."""
    probe = _Probe(shapes.most_rows)

    def clipped_sum(model: nn.Module, loss: RowLosses, units: Sequence[PrivacyUnit], clip: float) -> Tensor:
        total = torch.zeros(count(trainable(model)), dtype=torch.float64)
        try:
            of_part = prepare(shapes, model, loss, clip)
            with full_precision():
                for part in probe.watched(shapes.chunks(_each(units)), prepare, (model, loss, clip)):
                    total += of_part(part)
        except NoGradientRuleError as fault:
            raise UnsuitableModelError(f"{fault}; `loop_engine` can train it") from fault
        return total

    return clipped_sum


@dataclass(frozen=True, slots=True, eq=False)
class _Probe:
    """The comparison of an engine with ``loop_engine``, on two patients of each of the first ``PROBES`` batches."""

    most_rows: int  # of both together, or one of each
    _seen: WeakKeyDictionary[nn.Module, int] = field(default_factory=WeakKeyDictionary)

    def watched(
        self, parts: Iterable[list[PrivacyUnit]], prepare: _Prepare, training: tuple[nn.Module, RowLosses, float]
    ) -> Iterator[list[PrivacyUnit]]:
        """The parts as they come; on the way the first two units are compared, in one part or not.

        Only a batch whose two patients have a gradient counts: another shows nothing.

        Raises:
            UnsuitableModelError: the engine gives something else than ``loop_engine``.
        """
        model = training[0]
        wanted = 2 if self._seen.get(model, 0) < PROBES else 0
        pair: list[PrivacyUnit] = []
        for part in parts:
            if len(pair) < wanted:
                pair += part[: wanted - len(pair)]
                if len(pair) == wanted:
                    shown = _compared(prepare, *training, self._cut(pair))
                    self._seen[model] = self._seen.get(model, 0) + shown
            yield part

    def _cut(self, pair: Sequence[PrivacyUnit]) -> list[PrivacyUnit]:
        """In one part, both must fit in memory: half of the rows of each show as much as all."""
        longest = max(map(len, pair))
        least = longest if 2 * longest <= self.most_rows else 1 << max(1, self.most_rows // 2).bit_length() - 1
        return [PrivacyUnit(tuple(row[:least].clone() for row in unit.rows)) for unit in pair]


def _compared(
    prepare: _Prepare, model: nn.Module, loss: RowLosses, clip: float, units: Sequence[PrivacyUnit]
) -> bool:
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
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError):  # something in it is of another type
        theirs, tolerance = loop_engine(model, loss, units, clip), 1e-2
        try:
            ours = prepare(shapes, model, loss, clip)(units)
        except RuntimeError as fault:
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
    """Where the second patient is nobody, the first one's gradient must be the same to the last bit.

    However little rows meet, a patient whose numbers are not finite shows it, and a large one would make use of it.

    Raises:
        UnsuitableModelError: it is not.
    """
    least = min(map(len, units))  # in chunks of one shape
    first, second = (PrivacyUnit(tuple(row[:least].clone() for row in unit.rows)) for unit in units)
    rows = (torch.full_like(row, torch.nan) if row.is_floating_point() else row for row in second.rows)
    if not torch.equal(of_part([first]), of_part([first, PrivacyUnit(tuple(rows))])):
        raise UnsuitableModelError(_OTHERS + _WHY)


class _Together(nn.Module):
    """The unit loss as a module, so that ``functional_call`` reaches a loss that calls the model as it likes."""

    def __init__(self, model: nn.Module, loss: RowLosses) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, *rows: Tensor) -> Tensor:
        return _losses(self._loss, self.model, rows)


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


def _losses(loss: RowLosses, model: nn.Module, rows: tuple[Tensor, ...]) -> Tensor:
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
    (a ReLU, a maximum) can make a thousandth; in one shape it was nothing in every case that was tried.
    """

    size: int  # patients of a chunk, at most
    most_rows: int  # of a chunk, or one patient

    def __post_init__(self) -> None:
        """No chunk of nobody."""
        if not (self.size >= 1 and self.most_rows >= 1):
            raise ValueError("a chunk holds at least one patient, and one row")

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

    def _places(self, width: int) -> int:
        return max(1, min(self.size, self.most_rows // width))


def _each(units: Sequence[PrivacyUnit]) -> Iterator[PrivacyUnit]:
    """Every unit, by its index: ``Sequence.__iter__`` ends in silence where making a unit raises IndexError."""
    for index in range(len(units)):
        yield units[index]


def _clipped_sum(gradients: Sequence[Tensor], clip: float, counted: Tensor | None = None) -> Tensor:
    """Clip each unit's gradient to norm <= clip and add up: tensors (u, ...) for each parameter -> (d,) float64.

    A unit whose gradient is not finite counts as zero: one patient's broken gradient must neither void the model
    nor show that the patient was there. So do those that are not ``counted`` (u,).
    """
    flat = [gradient.reshape(len(gradient), -1) for gradient in gradients]
    factor = _factors(sum(map(squared_norms, flat), torch.zeros(())).sqrt(), clip)
    factor = factor if counted is None else factor * counted.to(factor)
    return torch.cat([_scaled_sum(part, factor) for part in flat]).cpu()


def squared_norms(part: Tensor) -> Tensor:
    """(u, d) -> (u,) float64. Norms of blocks in the tensor's own type, and of the blocks in float64.

    PyTorch's own float32 norm of 2.4 million numbers is wrong by 4.5e-5, which is more than ``MARGIN``; a float64 one
    of float32 numbers takes thirty times as long as this, which is wrong by 1e-6 at worst.
    """
    whole = part.shape[1] // _BLOCK * _BLOCK
    blocks = torch.linalg.vector_norm(part[:, :whole].reshape(len(part), -1, _BLOCK), dim=2)
    rest = torch.linalg.vector_norm(part[:, whole:], dim=1)
    squares: Tensor = blocks.double().square().sum(dim=1) + rest.double().square()
    return squares


def _factors(norms: Tensor, clip: float) -> Tensor:
    """(u,) float64: what each unit's gradient is multiplied with; 0 where the norm is not finite."""
    factor = (clip / (norms * (1.0 + MARGIN) + 1e-30)).clamp(max=1.0)
    return torch.where(torch.isfinite(norms), factor, 0.0)


def _scaled_sum(part: Tensor, factor: Tensor) -> Tensor:
    """(u, d), (u,) -> (d,) float64; one whose factor is 0 may not be finite."""
    if not bool(factor.all()):  # 0 * NaN would be NaN
        kept = factor.nonzero()[:, 0]
        part, factor = part[kept], factor[kept]
    total: Tensor = factor @ part.double()
    return total
