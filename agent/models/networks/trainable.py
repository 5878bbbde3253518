"""A network as a task has it: from its public start or its seed, with the part that is trained set apart.

What travels in the rounds is the trained part alone, less a head of the site's own, as what was added to its start:
every site builds the same start from the same task, and a run begins at zeros everywhere. Two sites with the same
versions of the libraries have the same start bit for bit; with others, they have the same one but for rounding.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agent.models.networks.architectures import Shape, Stage, StagedNetwork, architecture, to_zeros
from agent.models.networks.low_rank import add_low_rank
from agent.models.networks.public_weights import COVARIANCE, MEANS, WeightFiles, read_weights
from agent.models.networks.suitability import check_network
from agent.models.training_loop import seeded
from agent.models.weights import WeightsError
from policies.tasks.bounds import refuse
from policies.tasks.networks import NETWORKS, NetworkSpec

_VOLUMES = 5  # dimensions of a batch of them
_NORMS = (nn.GroupNorm, nn.LayerNorm, nn.modules.instancenorm._InstanceNorm)


class SideBySide(StagedNetwork):
    """The features of several frozen networks, one after the other, and one linear layer on all of them."""

    net: nn.Linear

    def __init__(self, parts: Sequence[StagedNetwork], outputs: int) -> None:
        """The layer begins at zeros, and the features are as they are."""
        super().__init__()
        self.parts = nn.ModuleList(parts)
        heads: list[Any] = [part.head for part in parts]
        features = sum(head.in_features for head in heads)
        self.net = nn.Linear(features, outputs)
        to_zeros(self.net)
        self.moved = nn.ModuleList(nn.Identity() for _ in parts)

    @property
    def networks(self) -> list[StagedNetwork]:
        """Those whose features stand side by side."""
        return [cast(StagedNetwork, part) for part in self.parts]

    @property
    def stages(self) -> Sequence[Stage]:
        """All networks but their heads."""
        return [Stage(self._features, (self.parts,))]

    @property
    def head(self) -> nn.Module:
        """All that is trained."""
        return self.net

    def begin_at_heads(self) -> None:
        """The mean of the networks' own answers."""
        heads: list[Any] = [part.head for part in self.networks]
        with torch.no_grad():
            for head, moved in zip(heads, self.moved, strict=True):
                if isinstance(moved, AboutZero):
                    head.bias += head.weight @ moved.means
                    head.weight.copy_(head.weight @ moved.back)
            self.net.weight.copy_(torch.cat([head.weight for head in heads], dim=1) / len(heads))
            self.net.bias.copy_(torch.stack([head.bias for head in heads]).mean(dim=0))

    def _features(self, x: Tensor) -> Tensor:
        found = [reduce(lambda y, stage: stage.run(y), part.stages, x) for part in self.networks]
        return torch.cat([moved(rows) for moved, rows in zip(self.moved, found, strict=True)], dim=1)


class AboutZero(nn.Module):
    """Features less their public means; evened, they spread more evenly, as the noise of a step does.

    Each eigenvector of the public covariance is divided by the fourth root of its variance, to which a tenth of the
    mean variance is added: halfway to white. Measured on faint chest phantoms with a site's own noise, AUC at epsilon
    8 and 3: 0.864 and 0.857 with the means taken off alone, 0.869 and 0.861 evened, 0.867 and 0.858 white. Pictures
    that are much noisier than the public ones lose by it: what the public covariance calls small is their noise.
    """

    means: Tensor  # (f,)
    turn: Tensor  # (f, f), symmetric
    back: Tensor  # (f, f), its inverse

    def __init__(self, means: Tensor, covariance: Tensor | None) -> None:
        """Of public pictures.

        Args:
            means: (f,) of the features.
            covariance: (f, f); None: they are not evened.
        Raises:
            ValueError: no feature varies.
        """
        super().__init__()
        if covariance is None:
            covariance = torch.eye(len(means))
        variances, axes = torch.linalg.eigh(covariance.double())
        usual = float(variances.clamp(min=0.0).mean())
        if not usual > 0.0:
            raise ValueError("no feature varies")
        roots = ((variances.clamp(min=0.0) / usual + 0.1) / 1.1).pow(0.25)
        for name, made in (("means", means), ("turn", (axes / roots) @ axes.T), ("back", (axes * roots) @ axes.T)):
            self.register_buffer(name, made.float())

    def forward(self, rows: Tensor) -> Tensor:
        """(n, f) -> (n, f)."""
        return (rows - self.means) @ self.turn


class TrainedPart(nn.Module):
    """A network from its first stage that is trained: the gradient of each patient is of this module."""

    def __init__(self, network: StagedNetwork, first: int) -> None:
        """Without the ``first`` stages."""
        super().__init__()
        self.network, self.first = network, first

    def forward(self, rows: Tensor) -> Tensor:
        """What comes out of the frozen stages -> (n, outputs, ...)."""
        for stage in self.network.stages[self.first :]:
            rows = stage.run(rows)
        scores: Tensor = self.network.head(rows)
        return scores


@dataclass(frozen=True, slots=True, eq=False)
class TrainableNetwork:
    """A network, what of it is trained, and from where."""

    module: StagedNetwork  # pictures -> outputs
    trained: TrainedPart  # rows of ``prepare`` -> outputs; it shares the module's parameters
    _start: NDArray[np.float32] = field(repr=False)  # (p + h,)
    _own: NDArray[np.bool_] | None = field(default=None, repr=False)  # (p + h,), a site's own head; None: all travels

    def with_own_head(self) -> TrainableNetwork:
        """The same network, whose head stays at the site."""
        head = set(self.module.head.parameters())
        own = np.concatenate([np.full(p.numel(), p in head) for p in _trained(self.module)])
        return replace(self, _own=own)

    @property
    def parameters(self) -> int:
        """How many numbers are trained and travel: p."""
        return len(self._start) - self._own_numbers

    def to(self, device: str) -> Self:
        """Move the network to a device, where it is computed from now on."""
        self.module.to(device)
        return self

    def outputs(self, inputs: Tensor) -> Tensor:
        """(n, channels, *size) -> (n, outputs, ...), on the host both."""
        with torch.no_grad():
            scores: Tensor = self.trained(self.prepare(inputs).to(self._device)).cpu()
        return scores

    @property
    def _device(self) -> torch.device:
        return next(self.module.parameters()).device

    def prepare(self, inputs: Tensor) -> Tensor:
        """The frozen stages before the first one that is trained: (n, channels, *size) -> (n, ...), on the host both.

        Once for each picture. Each goes through alone, so that no bit of it hangs on the pictures beside it. A volume
        goes through twice at once: PyTorch convolves a single small one on a processor by another algorithm, which
        takes up to eight times as long.
        """
        stages = self.module.stages[: self.trained.first]
        if not stages:
            return inputs
        rows, times = [], 2 if inputs.ndim == _VOLUMES and self._device.type == "cpu" else 1
        with torch.no_grad():
            for row in torch.split(inputs, 1):
                same = row.to(self._device).repeat(times, *[1] * (row.ndim - 1))
                rows.append(reduce(lambda x, stage: stage.run(x), stages, same)[:1].cpu())
        return torch.cat(rows)

    def vector(self) -> NDArray[np.float32]:
        """The trained numbers that travel minus their start, (p,): zeros before the first step."""
        moved = self._moved()
        return moved if self._own is None else moved[~self._own]

    def own_head(self) -> NDArray[np.float32] | None:
        """The head that stays at the site minus its start, (h,); None where the head is shared."""
        return None if self._own is None else self._moved()[self._own]

    @property
    def _own_numbers(self) -> int:
        return 0 if self._own is None else int(self._own.sum())

    def _moved(self) -> NDArray[np.float32]:
        return _flat(self.module) - self._start

    def load(self, vector: NDArray[np.float32], head: NDArray[np.float32] | None = None) -> None:
        """Put the trained numbers where :meth:`vector` says, and a head of the site's own at ``head``.

        Args:
            vector: (p,).
            head: (h,); None: at its start.
        Raises:
            ValueError: another length, or a number that is not finite.
        """
        for given, count in ((vector, self.parameters), (head, self._own_numbers)):
            if given is not None and not (given.shape == (count,) and bool(np.isfinite(given).all())):
                raise ValueError(f"the trained part of the network has {count} finite numbers")
        if self._own is not None:
            moved = np.zeros_like(self._start)
            moved[~self._own] = vector
            if head is not None:
                moved[self._own] = head
            vector = moved
        there = torch.from_numpy(self._start + vector.astype(np.float32))
        with torch.no_grad():
            parameters = _trained(self.module)
            for parameter, part in zip(parameters, torch.split(there, [p.numel() for p in parameters]), strict=True):
                parameter.copy_(part.view_as(parameter))


def build(
    spec: NetworkSpec,
    channels: int,
    size: tuple[int, ...],
    outputs: int,
    seed: int,
    weights: WeightFiles,
) -> TrainableNetwork:
    """Build a network on the processor, in evaluation.

    Args:
        spec: what the task says.
        channels: of the pictures.
        size: of the pictures or volumes, (h, w) or (i, j, k).
        outputs: numbers that come out, of each picture or of each pixel.
        seed: of every weight that no public file has.
        weights: gives the file of a digest; see :mod:`agent.models.networks.public_weights`.
    Raises:
        TaskError: the network does not fit the pictures; with every problem, by its key.
        WeightsError: a file of public weights is missing, another one, or of another network.
        UnsuitableNetworkError: the network remembers, mixes or draws: a fault of this program.
    """
    shape = Shape(channels, size, outputs)
    twin, public = _planned(spec, shape, weights)
    with torch.device("meta"):
        check_network(twin, (channels, *size), _choose(twin, spec))
    return _filled(spec, shape, seed, public)


def build_trained(
    spec: NetworkSpec,
    channels: int,
    size: tuple[int, ...],
    outputs: int,
    seed: int,
    weights: WeightFiles,
) -> TrainableNetwork:
    """Build the network of a finished model, to use it: no gradient of a patient is taken.

    As :func:`build`, without the walk of :func:`check_network`, which takes seconds and is of training alone.

    Raises:
        TaskError, WeightsError: see :func:`build`.
    """
    shape = Shape(channels, size, outputs)
    refuse(spec.misfits(shape.size, masks=NETWORKS[spec.name].masks))
    return _filled(spec, shape, seed, _planned(spec, shape, weights)[1] if spec.public_files else [])


def _planned(spec: NetworkSpec, shape: Shape, weights: WeightFiles) -> tuple[StagedNetwork, list[_State]]:
    """The network without numbers, and its public tensors."""
    refuse(spec.misfits(shape.size, masks=NETWORKS[spec.name].masks))
    with torch.device("meta"):  # nothing is drawn, and nothing takes room
        twin = _network(spec, shape)
        return twin, _public(twin, spec, weights)


def _filled(spec: NetworkSpec, shape: Shape, seed: int, public: Sequence[_State]) -> TrainableNetwork:
    with seeded(seed):
        network = _network(spec, shape)
        _begin(network, spec, public)
        _choose(network, spec)
    held = [{p for module in stage.modules for p in module.parameters()} for stage in network.stages]
    trained = [any(p.requires_grad for p in parameters) for parameters in held]
    first = trained.index(True) if True in trained else len(trained)
    return TrainableNetwork(network, TrainedPart(network, first).eval(), _flat(network))


def _network(spec: NetworkSpec, shape: Shape) -> StagedNetwork:
    if spec.name != "frozen-features":
        return architecture(spec.name, spec.options, shape)
    parts = [architecture(part.name, part.options, shape) for part in spec.parts]
    return SideBySide(parts, shape.outputs).eval()


_State = dict[str, Tensor]


def _public(network: StagedNetwork, spec: NetworkSpec, files: WeightFiles) -> list[_State]:
    """The tensors of each public file, of a network or of the parts of one."""
    if isinstance(network, SideBySide):
        states = [
            _tensors(part, named.weights, files, with_head=bool(spec.options["head"]))
            for part, named in zip(network.networks, spec.parts, strict=True)
        ]
        for named, state in zip(spec.parts, states, strict=True):
            for option, wanted in (("centred", MEANS), ("evened", COVARIANCE)):
                if spec.options[option] and wanted not in state:
                    raise WeightsError(
                        f"the file of public weights {named.weights[:12]}… does not bring {wanted}: "
                        f"leave out options.{option}, or train it with `lazaret-agent train network`"
                    )
        return states
    if not spec.weights:
        return []
    return [_tensors(network, spec.weights, files, with_head=bool(spec.options["head"]))]


def _tensors(network: StagedNetwork, digest: str, files: WeightFiles, *, with_head: bool) -> _State:
    own = {name: tuple(tensor.shape) for name, tensor in network.net.state_dict().items()}
    head = {id(tensor) for tensor in network.head.state_dict(keep_vars=True).values()}
    outputs = {name for name, tensor in network.net.state_dict(keep_vars=True).items() if id(tensor) in head}
    last = network.head
    spare = {}
    if isinstance(last, nn.Linear):
        spare = {MEANS: (last.in_features,), COVARIANCE: (last.in_features, last.in_features)}
    return read_weights(digest, files, own, frozenset() if with_head else frozenset(outputs), spare)


def _begin(network: StagedNetwork, spec: NetworkSpec, public: Sequence[_State]) -> None:
    """Put the public weights where they belong. A linear head that no file brings begins at zeros."""
    if isinstance(network, SideBySide):
        for part, state in zip(network.networks, public, strict=True):
            part.net.load_state_dict(state, strict=False)
        if spec.options["centred"]:
            for number, (named, state) in enumerate(zip(spec.parts, public, strict=True)):
                network.moved[number] = _about_zero(named.weights, state, evened=bool(spec.options["evened"]))
        if spec.options["head"]:
            network.begin_at_heads()
    elif public:
        network.net.load_state_dict(public[0], strict=False)
        if not spec.options["head"] and isinstance(network.head, nn.Linear):
            to_zeros(network.head)


def _about_zero(digest: str, state: _State, *, evened: bool) -> AboutZero:
    try:
        return AboutZero(state[MEANS], state[COVARIANCE] if evened else None)
    except ValueError:
        raise WeightsError(f"the file of public weights {digest[:12]}…: no feature varies") from None


def _choose(network: StagedNetwork, spec: NetworkSpec) -> set[str]:
    """Freeze everything but the part that is trained, and give the names of that part."""
    network.requires_grad_(requires_grad=False)
    chosen: list[nn.Parameter] = list(network.head.parameters())
    match spec.trained:
        case "all":
            chosen = list(network.parameters())
        case "last-blocks":
            chosen += _of(network.blocks[-spec.blocks :])
        case "bias-and-norms":
            chosen += [p for module in network.modules() for p in _shifts(module)]
        case "lora":
            inside = {m for block in network.blocks[-spec.blocks :] for one in block for m in one.modules()}
            narrow = add_low_rank(network, spec.rank, inside)
            chosen += [p for layer in narrow for p in layer.parameters()]
    wanted = set(chosen)
    for parameter in wanted:
        parameter.requires_grad_()
    return {name for name, parameter in network.named_parameters() if parameter in wanted}


def _of(blocks: Collection[tuple[nn.Module, ...]]) -> list[nn.Parameter]:
    return [p for block in blocks for module in block for p in module.parameters()]


def _shifts(module: nn.Module) -> list[nn.Parameter]:
    """All of a norm, and the bias of another layer."""
    own = dict(module.named_parameters(recurse=False))
    return list(own.values()) if isinstance(module, _NORMS) else [p for name, p in own.items() if name == "bias"]


def _trained(network: nn.Module) -> list[nn.Parameter]:
    """In the order in which a sum of gradients has them."""
    return [parameter for parameter in network.parameters() if parameter.requires_grad]


def _flat(network: nn.Module) -> NDArray[np.float32]:
    parts = [parameter.detach().flatten().float().cpu() for parameter in _trained(network)]
    flat: NDArray[np.float32] = torch.cat(parts).numpy()
    return flat
