"""The networks that a task may name: an allow-list with bounded options, and nothing that could name code.

Every network is one of the field's, built at a site by installed classes (``agent/models/networks``). A task names
the network, its width and depth, which part of it is trained, and by its SHA-256 the public file that it starts from.

Widths are such that the rows of a linear layer's input are multiples of 16 bytes. On others a matrix product rounds a
row by its place in the batch, and so a patient by who is before it (seen on half of the rows of 50, 85, 255 and 6,405
numbers, and on none of 4 to 6,416 that are multiples of 4).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Self

from policies.tasks.bounds import TaskError, Whole, as_list, as_table, plain, read_values, refuse
from protos.common.canonical_json import canonical, json_object

MOST_PARTS: Final = 8  # public networks side by side
MOST_RANK: Final = 64
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_ANY: Final = ("all", "head", "last-blocks", "bias-and-norms", "lora")
_HEAD: Final = Whole(0, 1, 0)  # 1: begin at the head in the file of weights, 0: at zeros
_CENTRED: Final = Whole(0, 1, 0)  # 1: features less their public means, which the files bring, 0: as they are
_EVENED: Final = Whole(0, 1, 0)  # 1: the same, and spread more evenly by their public covariance
_FIXED: Final = Whole(0, 1, 0)  # 1: the file's batch norms as fixed scales and shifts, 0: group norms

Options = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class NetworkKind:
    """What is known of a network without building it."""

    dimensions: tuple[int, ...]  # of its input: 2, 3 or both
    options: Mapping[str, Whole]
    trained: tuple[str, ...] = _ANY  # which parts may be; the first if a task names none
    masks: bool = False  # gives a number for each pixel, and not for each picture
    blocks: Callable[[Options], int] = lambda _: 0  # of "last-blocks", at most: without the head and the first one
    side: Callable[[Options], int] = lambda _: 1  # of its input at least, in pixels
    multiple: Callable[[Options], int] = lambda _: 1  # of which every side of its input is one


_RESNET: Final = NetworkKind(
    (2,),
    {
        "width": Whole(4, 128, 64, multiple=4),
        "stride": Whole(1, 2, 1),  # of the first convolution
        "fixed_norms": _FIXED,
        "head": _HEAD,
    },
    blocks=lambda _: 4,
    side=lambda options: 16 * options["stride"],
)
NETWORKS: Final[Mapping[str, NetworkKind]] = {
    "linear": NetworkKind((2, 3), {"pooled": Whole(4, 32, 8, multiple=4)}, ("all",)),
    "frozen-features": NetworkKind((2, 3), {"head": _HEAD, "centred": _CENTRED, "evened": _EVENED}, ("head",)),
    "small-cnn": NetworkKind(
        (2, 3),
        {
            "width": Whole(8, 128, 16, multiple=8),
            "convolutions": Whole(2, 6, 4),
            "pooled": Whole(1, 4, 2),
            "head": _HEAD,
        },
        blocks=lambda options: options["convolutions"] - 1,
        side=lambda options: options["pooled"] << options["convolutions"],
    ),
    "resnet18": _RESNET,
    "resnet50": _RESNET,
    "densenet121": NetworkKind(
        (2, 3),
        {"growth": Whole(8, 64, 32, multiple=4), "fixed_norms": _FIXED, "head": _HEAD},
        blocks=lambda _: 4,
        side=lambda _: 32,
    ),
    "vit-s16": NetworkKind(
        (2,),
        {
            "width": Whole(16, 768, 384, multiple=16),
            "layers": Whole(1, 24, 12),
            "heads": Whole(1, 16, 6),
            "patch": Whole(2, 32, 16),
            "head": _HEAD,
        },
        blocks=lambda options: options["layers"],
        side=lambda options: options["patch"],
        multiple=lambda options: options["patch"],
    ),
    "unet": NetworkKind(
        (2, 3),
        {"width": Whole(4, 64, 16), "levels": Whole(2, 6, 5), "units": Whole(1, 4, 2), "head": _HEAD},
        masks=True,
        blocks=lambda options: 2 * options["levels"] - 3,
        side=lambda options: 2 << options["levels"] - 1,
        multiple=lambda options: 1 << options["levels"] - 1,
    ),
    "segresnet": NetworkKind(
        (2, 3),
        {"width": Whole(8, 64, 16, multiple=8), "levels": Whole(2, 5, 4), "head": _HEAD},
        masks=True,
        blocks=lambda options: 2 * options["levels"] - 2,
        side=lambda options: 1 << options["levels"] - 1,
        multiple=lambda options: 1 << options["levels"] - 1,
    ),
}
_KEYS: Final = ("name", "options", "trained", "blocks", "rank", "weights", "parts")


@dataclass(frozen=True, slots=True)
class NetworkSpec:
    """A network of :data:`NETWORKS`: how large, from which start, and which part of it is trained.

    Raises:
        TaskError: with every problem, by its key.
    """

    name: str
    options: Options = field(default_factory=dict, hash=False)  # what is left out has its default
    trained: str = ""  # "": as is usual for the network
    blocks: int = 0  # of "last-blocks": how many; of "lora": in how many of the last, 0: in all
    rank: int = 0  # of "lora"
    weights: str = ""  # SHA-256 of a file of public weights; "": drawn from the task's seed
    parts: tuple[NetworkSpec, ...] = ()  # of "frozen-features": the public networks

    def __post_init__(self) -> None:
        """Fill in the defaults, and refuse what cannot be built."""
        problems: list[str] = []
        kind = NETWORKS.get(self.name) if type(self.name) is str else None
        if kind is None:
            raise TaskError(f"name: must be one of {', '.join(sorted(NETWORKS))}")
        raw = as_table(self.options, "options", problems)
        values = read_values(raw, kind.options, "options.", problems)
        object.__setattr__(self, "options", MappingProxyType(values))
        object.__setattr__(self, "trained", self.trained or kind.trained[0])
        object.__setattr__(self, "parts", tuple(self.parts))
        if not problems:
            problems += self._between(kind)
        refuse(problems)

    def _between(self, kind: NetworkKind) -> list[str]:
        """What is wrong with values that fit one another or not; each is of its own range."""
        problems = []
        if self.name == "vit-s16" and self.options["width"] % self.options["heads"]:
            problems.append("options.width: must be a multiple of options.heads")
        if self.trained not in kind.trained:
            problems.append(f"trained: must be one of {', '.join(kind.trained)} for {self.name}")
        most = kind.blocks(self.options)
        blocks = {"last-blocks": Whole(1, most), "lora": Whole(0, most)}.get(self.trained, Whole(0, 0))
        rank = Whole(4, MOST_RANK, multiple=4) if self.trained == "lora" else Whole(0, 0)
        for key, bound in (("blocks", blocks), ("rank", rank)):
            if wrong := bound.problem(getattr(self, key)):
                problems.append(f"{key}: {wrong if bound.high else 'must be 0'} where {self.trained} is trained")
        if self.weights and not (type(self.weights) is str and _DIGEST.fullmatch(self.weights)):
            problems.append("weights: must be a SHA-256 of 64 lower-case hexadecimal digits, or empty")
        if self.weights and self.name in ("linear", "frozen-features"):
            problems.append(f"weights: {self.name} has none of its own")
        if self.options.get("head") and not self.weights and self.name != "frozen-features":
            problems.append("options.head: needs weights, whose head it begins at")
        if self.options.get("fixed_norms") and not self.weights:
            problems.append("options.fixed_norms: needs weights, whose scales and shifts it takes")
        return problems + self._of_parts()

    def _of_parts(self) -> list[str]:
        if self.name != "frozen-features":
            return ["parts: only frozen-features has parts"] if self.parts else []
        if not 1 <= len(self.parts) <= MOST_PARTS:
            return [f"parts: must be 1 to {MOST_PARTS} networks"]
        alone = self.options["evened"] and not self.options["centred"]
        problems = ["options.evened: needs options.centred = 1"] if alone else []
        for number, part in enumerate(self.parts):
            kind, where = NETWORKS[part.name], f"parts.{number}."
            if kind.masks or part.name in ("linear", "frozen-features"):
                problems.append(f"{where}name: {part.name} has no features to put side by side")
            if not part.weights:
                problems.append(f"{where}weights: missing")
            if (part.trained, part.blocks, part.rank) != (kind.trained[0], 0, 0):
                problems.append(
                    f"{where}trained: a part of frozen-features is not trained, leave out what names that"
                )
            if part.options.get("head"):
                problems.append(f"{where}options.head: say it once, in the options of frozen-features")
        return problems

    @property
    def public_files(self) -> tuple[str, ...]:
        """SHA-256 of every file of public weights that it needs, each once: a site must vouch for all of them."""
        named = [self.weights, *(digest for part in self.parts for digest in part.public_files)]
        return tuple(dict.fromkeys(digest for digest in named if digest))

    def misfits(self, size: Sequence[int], *, masks: bool) -> list[str]:
        """What is wrong with the network for an input of so many pixels a side; each begins with the key.

        Args:
            size: of the input, without its channels.
            masks: whether the task wants a number for each pixel.
        """
        kind, problems = NETWORKS[self.name], []
        if len(size) not in kind.dimensions:
            allowed = " or ".join(f"{n}-D" for n in kind.dimensions)
            problems.append(f"name: {self.name} takes {allowed} input, and the task's has {len(size)} dimensions")
        if kind.masks is not masks:
            wanted = "a mask" if masks else "a number for each picture"
            problems.append(f"name: {self.name} does not give {wanted}")
        least, multiple = kind.side(self.options), kind.multiple(self.options)
        if not all(side >= least and side % multiple == 0 for side in size):
            more = f", a multiple of {multiple}" if multiple > 1 else ""
            problems.append(f"name: {self.name} needs {least} pixels a side or more{more}")
        for number, part in enumerate(self.parts):
            problems += [f"parts.{number}.{problem}" for problem in part.misfits(size, masks=masks)]
        return problems

    @classmethod
    def from_table(cls, raw: object, where: str = "network.") -> Self:
        """From a table of TOML or JSON.

        Args:
            raw: the table; what is left out has its default.
            where: what stands before a key in a message.
        Raises:
            TaskError: with every problem, by its key.
        """
        problems: list[str] = []
        table = dict(as_table(raw, where, problems))
        problems += [f"{where}{key}: unknown key" for key in sorted(table.keys() - set(_KEYS))]
        parts = []
        for number, part in enumerate(as_list(table.pop("parts", ()), f"{where}parts", MOST_PARTS, problems)):
            try:
                parts.append(cls.from_table(part, f"{where}parts.{number}."))
            except TaskError as error:
                problems += error.problems
        kinds = {"trained": str, "weights": str, "blocks": int, "rank": int}
        for key, kind in kinds.items():
            if key in table and type(table[key]) is not kind:
                problems.append(f"{where}{key}: must be {'a text' if kind is str else 'a whole number'}")
                del table[key]
        given: Any = {key: table[key] for key in _KEYS if key in table}
        try:
            made = cls(**{"name": "", **given}, parts=tuple(parts))
        except TaskError as error:
            problems += [f"{where}{one}" for one in error.problems]
        refuse(problems)
        return made

    def to_table(self) -> dict[str, Any]:
        """Every key, with defaults, in JSON's types."""
        table: dict[str, Any] = {key: plain(getattr(self, key)) for key in _KEYS if key != "parts"}
        return {**table, "parts": [part.to_table() for part in self.parts]}

    def to_json(self) -> str:
        """The canonical JSON: what is hashed and signed as part of a task."""
        return canonical(self.to_table()).decode()

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what :meth:`to_json` wrote, in that form alone.

        Raises:
            TaskError: anything else.
        """
        try:
            raw = json_object(text)
        except ValueError:
            raise TaskError("network: not a JSON object of distinct keys and finite numbers") from None
        made = cls.from_table(raw)
        if made.to_json() != text:
            raise TaskError("network: not in its canonical form")
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as its canonical JSON: it is checked again where it is opened."""
        return type(self).from_json, (self.to_json(),)
