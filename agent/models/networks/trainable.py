"""A network as a task has it: from its public start or its seed, with the part that is trained set apart.

What travels in the rounds is the trained part alone, as what was added to its start: every site builds the same start
from the same task, and a run begins at zeros everywhere. Two sites with the same versions of the libraries have the
same start bit for bit; with others, they have the same one but for rounding.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agent.models.networks.architectures import Shape, Stage, StagedNetwork, architecture, to_zeros
from agent.models.networks.low_rank import add_low_rank
from agent.models.networks.public_weights import WeightFiles, read_weights
from agent.models.networks.suitability import check_network
from agent.models.training_loop import seeded
from policies.tasks.bounds import refuse
from policies.tasks.networks import NETWORKS, NetworkSpec

_NORMS = (nn.GroupNorm, nn.LayerNorm, nn.modules.instancenorm._InstanceNorm)


class SideBySide(StagedNetwork):
    """The features of several frozen networks, one after the other, and one linear layer on all of them."""

    net: nn.Linear

    def __init__(self, parts: Sequence[StagedNetwork], outputs: int) -> None:
        """The layer begins at zeros."""
        super().__init__()
        self.parts = nn.ModuleList(parts)
        heads: list[Any] = [part.head for part in parts]
        features = sum(head.in_features for head in heads)
        self.net = nn.Linear(features, outputs)
        to_zeros(self.net)

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
            self.net.weight.copy_(torch.cat([head.weight for head in heads], dim=1) / len(heads))
            self.net.bias.copy_(torch.stack([head.bias for head in heads]).mean(dim=0))

    def _features(self, x: Tensor) -> Tensor:
        found = [reduce(lambda y, stage: stage.run(y), part.stages, x) for part in self.networks]
        return torch.cat(found, dim=1)


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
    _start: NDArray[np.float32] = field(repr=False)  # (p,)

    @property
    def parameters(self) -> int:
        """How many numbers are trained, and travel: p."""
        return len(self._start)

    def prepare(self, inputs: Tensor) -> Tensor:
        """The frozen stages before the first one that is trained: (n, channels, *size) -> (n, ...).

        Once for each picture. Each goes through alone, so that no bit of it hangs on the pictures beside it.
        """
        stages = self.module.stages[: self.trained.first]
        if not stages:
            return inputs
        rows = []
        with torch.no_grad():
            for row in torch.split(inputs, 1):
                rows.append(reduce(lambda x, stage: stage.run(x), stages, row))
        return torch.cat(rows)

    def vector(self) -> NDArray[np.float32]:
        """The trained numbers minus their start, (p,): zeros before the first step."""
        return _flat(self.module) - self._start

    def load(self, vector: NDArray[np.float32]) -> None:
        """Put the trained numbers where :meth:`vector` says.

        Raises:
            ValueError: another length, or a number that is not finite.
        """
        if vector.shape != self._start.shape or not bool(np.isfinite(vector).all()):
            raise ValueError(f"the trained part of the network has {self.parameters} finite numbers")
        there = torch.from_numpy(self._start + vector.astype(np.float32))
        with torch.no_grad():
            parameters = _trained(self.module)
            for parameter, part in zip(parameters, torch.split(there, [p.numel() for p in parameters]), strict=True):
                parameter.copy_(part.view_as(parameter))


def build(
    spec: NetworkSpec, channels: int, size: tuple[int, ...], outputs: int, seed: int, weights: WeightFiles
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
    refuse(spec.misfits(size, masks=NETWORKS[spec.name].masks))
    with torch.device("meta"):  # nothing is drawn, and nothing takes room
        twin = _network(spec, shape)
        public = _public(twin, spec, weights)
        check_network(twin, (channels, *size), _choose(twin, spec))
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
        return [
            _tensors(part, named.weights, files, with_head=bool(spec.options["head"]))
            for part, named in zip(network.networks, spec.parts, strict=True)
        ]
    if not spec.weights:
        return []
    return [_tensors(network, spec.weights, files, with_head=bool(spec.options["head"]))]


def _tensors(network: StagedNetwork, digest: str, files: WeightFiles, *, with_head: bool) -> _State:
    own = {name: tuple(tensor.shape) for name, tensor in network.net.state_dict().items()}
    head = {id(tensor) for tensor in network.head.state_dict(keep_vars=True).values()}
    outputs = {name for name, tensor in network.net.state_dict(keep_vars=True).items() if id(tensor) in head}
    return read_weights(digest, files, own, frozenset() if with_head else frozenset(outputs))


def _begin(network: StagedNetwork, spec: NetworkSpec, public: Sequence[_State]) -> None:
    """Put the public weights where they belong. A linear head that no file brings begins at zeros."""
    if isinstance(network, SideBySide):
        for part, state in zip(network.networks, public, strict=True):
            part.net.load_state_dict(state, strict=False)
        if spec.options["head"]:
            network.begin_at_heads()
    elif public:
        network.net.load_state_dict(public[0], strict=False)
        if not spec.options["head"] and isinstance(network.head, nn.Linear):
            to_zeros(network.head)


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
