"""The sum of per-patient gradients, each clipped over all parameters together: the engines of DP-SGD.

Abadi et al. 2016, Algorithm 1, with the patient as the unit (design P2): one gradient for each patient, of the mean
loss over all of its rows (images, and noise draws of images: Dockhorn et al. 2023, section 3.2), bounded as one.
The engines are equal up to rounding. Their result is private: it is given to ``noise.noisy_sum`` and to nobody else.

One backward pass for many patients: record each layer's inputs, and compute each patient's gradient from them.

Book-keeping (Bu et al. 2023, "Differentially Private Optimization on Large Model at Small Cost"): while one
backward pass runs for all units of a chunk, the weights want no gradient, so that only those of activations are
computed; each layer's input and output gradient give every unit's gradient by its weights (``per_unit``).
"""

from __future__ import annotations

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

from agent.dp.per_example_gradients import RULES, UnitBatch, suitable, unit_gradients
from protos.common.errors import TrainingError


class NoGradientRuleError(TrainingError, ValueError):
    """The model cannot be trained this way; the text names types of modules."""


class GradientRecorder:
    """The layers of a model, with what they record during one backward pass."""

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        """Find the layers whose weights are trained.

        Raises:
            NoGradientRuleError: a trained parameter belongs to a module that no rule is for.
        """
        self._parameters, self._wanted = parameters, set(parameters)
        own = {m: {p for p in m.parameters(recurse=False) if p in self._wanted} for m in model.modules()}
        if wrong := sorted({type(m).__name__ for m, found in own.items() if found and not suitable(m)}):
            known = ", ".join(kind.__name__ for kind in RULES)
            raise NoGradientRuleError(f"no gradient of each patient for {', '.join(wrong)}: only for plain {known}")
        self._layers = [m for m, found in own.items() if found]
        self._found: dict[nn.Parameter, Tensor] = {}
        self._backward = False

    def gradients(self, losses: Callable[[], Tensor], batch: UnitBatch) -> list[Tensor]:
        """The gradient of each unit's mean loss, (u, *shape) for every parameter in order.

        The model is left as it was, also when something in it fails.

        Args:
            losses: runs the model on all rows: (rows,), the loss of each.
            batch: whose rows these are.
        Raises:
            NoGradientRuleError: a layer is used in a way that the rules do not cover.
        """
        device = self._parameters[0].device
        anchor = torch.zeros((), device=device, requires_grad=True)  # every layer's output leads back to it
        after = partial(self._after, anchor, batch)
        handles: list[RemovableHandle] = []
        try:
            handles += (layer.register_forward_hook(after, with_kwargs=True) for layer in self._layers)
            for parameter in self._parameters:
                parameter.requires_grad_(False)
            with torch.enable_grad():
                told = losses()
                weights = [1.0 / count for count in batch.counts for _ in range(count)]
                value = (told * torch.tensor(weights, device=told.device, dtype=told.dtype)).sum()
            self._backward = True
            torch.autograd.grad(value, anchor, allow_unused=True)  # and to nothing else: no .grad is touched
            empty = (len(batch.counts),)
            return [self._found.get(p, p.new_zeros(empty + p.shape)) for p in self._parameters]
        finally:
            self._backward, self._found = False, {}
            for parameter in self._parameters:
                parameter.requires_grad_(True)
            for handle in handles:
                handle.remove()

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
        if not self._backward:
            raise NoGradientRuleError("the loss takes a gradient itself (a gradient penalty)")
        for name, gradient in unit_gradients(module, a, g, batch).items():
            parameter = getattr(module, name)
            if parameter in self._found:  # a layer called twice, or a tied weight: one gradient, one norm
                self._found[parameter] += gradient
            elif parameter in self._wanted:
                self._found[parameter] = gradient


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


# Of the bound: covers the rounding of norms and of float64 sums, and of the other patients' float32 gradients, whose
# last bits depend on who is computed beside them (1e-7 of the bound each, by looking; with ``loop_engine`` nothing).
# It would not cover TF32, whose last bits are 1e-3: see ``full_precision``.
MARGIN: Final = 1e-5
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
            value = _losses(loss, model, _there(unit.rows, parameters[0].device)).mean()
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
    _refuse_empty(size, most_rows)
    probe = _Probe(most_rows, equal=True)

    def clipped_sum(model: nn.Module, loss: RowLosses, units: Sequence[PrivacyUnit], clip: float) -> Tensor:
        together = _Together(model, loss)
        parameters = trainable(model)
        weights = {name: p.detach() for name, p in together.named_parameters() if p.requires_grad}

        def value(weights: dict[str, Tensor], rows: tuple[Tensor, ...]) -> Tensor:
            mean: Tensor = torch.func.functional_call(together, weights, rows)
            return mean

        gradient = torch.func.vmap(torch.func.grad(value), in_dims=(None, 0))

        def of_part(part: Sequence[PrivacyUnit]) -> Tensor:
            rows = tuple(torch.stack(tensors) for tensors in zip(*(unit.rows for unit in part), strict=True))
            found = gradient(weights, _there(rows, parameters[0].device))
            return _clipped_sum([found[name] for name in weights], clip)

        total = torch.zeros(count(parameters), dtype=torch.float64)
        with full_precision():
            for part in probe.watched(_alike(_each(units), size, most_rows), of_part, model, loss, clip):
                total += of_part(part)
        return total

    return clipped_sum


def bookkeeping_engine(size: int, most_rows: int = MOST_ROWS) -> ClippedSum:
    """An engine with one backward pass for at most ``size`` patients at once: see ``bookkeeping``.

    They have at most ``most_rows`` rows together, or are one patient: all of them must fit in memory.

    It needs more than the others do: plain layers, called as modules, and rows that do not meet. Where that can be
    told beforehand it is refused; and in the first batches of a model two patients' sum is compared with
    ``loop_engine``.

    Raises:
        UnsuitableModelError: (the engine) no rule for a module, or the comparison failed.
    """
    _refuse_empty(size, most_rows)
    probe = _Probe(most_rows)

    def clipped_sum(model: nn.Module, loss: RowLosses, units: Sequence[PrivacyUnit], clip: float) -> Tensor:
        parameters = trainable(model)
        total = torch.zeros(count(parameters), dtype=torch.float64)
        try:
            book = GradientRecorder(model, parameters)

            def of_part(part: Sequence[PrivacyUnit]) -> Tensor:
                rows = tuple(torch.cat(tensors) for tensors in zip(*(unit.rows for unit in part), strict=True))
                there = _there(rows, parameters[0].device)
                batch = UnitBatch(tuple(map(len, part)))
                return _clipped_sum(book.gradients(lambda: _losses(loss, model, there), batch), clip)

            with full_precision():
                for part in probe.watched(_successive(_each(units), size, most_rows), of_part, model, loss, clip):
                    total += of_part(part)
        except NoGradientRuleError as fault:
            raise UnsuitableModelError(f"{fault}; `loop_engine` can train it") from fault
        return total

    return clipped_sum


@dataclass(frozen=True, slots=True, eq=False)
class _Probe:
    """The comparison of an engine with ``loop_engine``, on two patients of each of the first ``PROBES`` batches."""

    most_rows: int  # of both together, or one of each
    equal: bool = False  # as many of the one as of the other
    _seen: WeakKeyDictionary[nn.Module, int] = field(default_factory=WeakKeyDictionary)

    def watched(
        self,
        parts: Iterable[list[PrivacyUnit]],
        engine: Callable[[Sequence[PrivacyUnit]], Tensor],
        model: nn.Module,
        loss: RowLosses,
        clip: float,
    ) -> Iterator[list[PrivacyUnit]]:
        """The parts as they come; on the way the first two units are compared, in one part or not.

        Only a batch whose two patients have a gradient counts: another shows nothing.

        Raises:
            UnsuitableModelError: the engine gives something else than ``loop_engine``.
        """
        wanted = 2 if self._seen.get(model, 0) < PROBES else 0
        pair: list[PrivacyUnit] = []
        for part in parts:
            if len(pair) < wanted:
                pair += part[: wanted - len(pair)]
                if len(pair) == wanted:
                    few = self._cut(pair)
                    shown = _compared(engine(few), loop_engine(model, loss, few, clip), trainable(model))
                    self._seen[model] = self._seen.get(model, 0) + shown
            yield part

    def _cut(self, pair: Sequence[PrivacyUnit]) -> list[PrivacyUnit]:
        """In one part, both must fit in memory: half of the rows of each show as much as all."""
        lengths = [len(unit) for unit in pair]
        least = max(lengths) if sum(lengths) <= self.most_rows else max(1, self.most_rows // 2)
        least = min(least, *lengths) if self.equal else least
        return [PrivacyUnit(tuple(row[:least] for row in unit.rows)) for unit in pair]


def _compared(ours: Tensor, theirs: Tensor, parameters: Sequence[nn.Parameter]) -> bool:
    """Whether two sums (d,) that are equal but for rounding showed anything: there was a gradient.

    Raises:
        UnsuitableModelError: they are not. A forgotten or mixed-up layer does not pass.
    """
    sizes = [parameter.numel() for parameter in parameters]
    for mine, reference in zip(torch.split(ours, sizes), torch.split(theirs, sizes), strict=True):
        if not (mine - reference).norm() <= 1e-2 * reference.norm() + 1e-4 * theirs.norm():
            raise UnsuitableModelError(
                "one pass for all patients gives other gradients than one pass for each. The model uses a weight "
                "outside its layer, mixes rows of different patients, or has a loss that draws random numbers. "
                "`loop_engine` can train it"
            )
    return bool(theirs.any())


class _Together(nn.Module):
    """The unit loss as a module, so that ``functional_call`` reaches a loss that calls the model as it likes."""

    def __init__(self, model: nn.Module, loss: RowLosses) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, *rows: Tensor) -> Tensor:
        return _losses(self._loss, self.model, rows).mean()


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
        UnsuitableModelError: there is none.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise UnsuitableModelError("the model has no parameter to train")
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


def _refuse_empty(size: int, most_rows: int) -> None:
    if not (size >= 1 and most_rows >= 1):
        raise ValueError("a chunk holds at least one patient, and one row")


def _each(units: Sequence[PrivacyUnit]) -> Iterator[PrivacyUnit]:
    """Every unit, by its index: ``Sequence.__iter__`` ends in silence where making a unit raises IndexError."""
    for index in range(len(units)):
        yield units[index]


def _alike(units: Iterable[PrivacyUnit], size: int, most_rows: int) -> Iterable[list[PrivacyUnit]]:
    """Lists of at most ``size`` units with equally many rows; each unit is asked for once."""
    waiting: dict[int, list[PrivacyUnit]] = {}
    for unit in units:
        group = waiting.setdefault(len(unit), [])
        group.append(unit)
        if len(group) == size or (len(group) + 1) * len(unit) > most_rows:
            yield waiting.pop(len(unit))
    yield from waiting.values()


def _successive(units: Iterable[PrivacyUnit], size: int, most_rows: int) -> Iterable[list[PrivacyUnit]]:
    """Lists of the next units, at most ``size``; each unit is asked for once."""
    part: list[PrivacyUnit] = []
    for unit in units:
        if part and (len(part) == size or sum(map(len, part)) + len(unit) > most_rows):
            yield part
            part = []
        part.append(unit)
    if part:
        yield part


def _clipped_sum(gradients: Sequence[Tensor], clip: float) -> Tensor:
    """Clip each unit's gradient to norm <= clip and add up: tensors (u, ...) for each parameter -> (d,) float64.

    A unit whose gradient is not finite counts as zero: one patient's broken gradient must neither void the model
    nor show that the patient was there.
    """
    flat = [gradient.reshape(len(gradient), -1) for gradient in gradients]
    norms = torch.stack([torch.linalg.vector_norm(part, dim=1, dtype=torch.float64) for part in flat]).norm(dim=0)
    factor = (clip / (norms * (1.0 + MARGIN) + 1e-30)).clamp(max=1.0)
    finite = torch.isfinite(norms)
    if not bool(finite.all()):  # 0 * NaN would be NaN
        kept, factor = finite.nonzero()[:, 0], factor[finite]
        flat = [part[kept] for part in flat]
    return torch.cat([factor @ part.double() for part in flat]).cpu()
