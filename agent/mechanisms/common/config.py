"""``ksalsa.toml`` and ``anonfaces.toml``: public configuration of one release, parsed once, all problems at once.

Nothing in it depends on a patient, so it is priced as it stands. Networks are files beside it; what a file says of
its own origin counts for nothing: it is public if ``site.toml`` vouches for its SHA-256, and private otherwise (P6).
A published file, written KIND:FILE, is read only if the site vouches for it.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Container
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import torch
from torch import nn

from agent.edges.home import BadSite
from agent.edges.tables import Tables, converter, names_files
from agent.edges.vetting import UNVETTED, JudgesTable, vetting_of
from agent.mechanisms.anonfaces import AnonFaces
from agent.mechanisms.ksalsa import KSalsa
from agent.nets.feature_net import FeatureNet, Frozen
from agent.nets.features import RandomFeatures, features_from
from agent.nets.official import OFFICIAL, Restyle, load_official
from agent.nets.restyle import PASSES
from agent.nets.siamese import KnowsNobody, Recogniser, recogniser_from
from agent.nets.stylegan import Generator
from agent.nets.weights import BadWeights, Origin, Provenance
from agent.nouns import Selection, Split
from agent.stages.align import Alignment, Networks, align
from agent.stages.augment import Views
from agent.stages.mix import Mixing
from agent.stages.reference import Vetting
from agent.stages.styled import StyledCodec, codec_from, fitted
from policies.claims import KAnonymous

RANDOM: Final = "random"  # in the place of a file: the fixed-seed network, which needs none
GENERATORS: Final = ("restyle", "stylegan2-ada")  # published files; the first holds its encoder too
EXTRACTORS: Final = tuple(sorted(frozenset(OFFICIAL) - frozenset(GENERATORS)))
_TABLES: Final = ("mechanism", "cohort", "clusters", "networks", "alignment", "views", "mixing", "vetting")
_SHARE: Final = re.compile(r"([^:]+):([1-9][0-9]{0,6})")
_DEVICE: Final = re.compile(r"cpu|cuda(?::[0-9]{1,2})?")
_MOST_BYTES: Final = 1 << 31  # of one network file
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CohortTable:
    """``[cohort]``: whose pictures."""

    modality: str
    fit: bool = True  # pictures of any size, cropped to the field and averaged down; else of exactly this size
    body_part: str = ""
    labels: frozenset[str] = frozenset()
    min_instances: int = 1
    split: str = ""  # its name
    parts: tuple[str, ...] = ()  # "train:4", "test:1"
    part: str = ""

    def __post_init__(self) -> None:
        """Refuse what selects nothing, whatever the size of the pictures."""
        self.selection((1, 1))

    def selection(self, shape: tuple[int, ...]) -> Selection:
        """The rule, for pictures of the generator's shape.

        Raises:
            ValueError: it makes no sense.
        """
        return Selection(
            self.modality,
            shape,
            self.body_part,
            self.labels,
            self._split(),
            self.part,
            self.min_instances,
            fit=self.fit,
        )

    def _split(self) -> Split | None:
        if not self.split:
            if self.parts or self.part:
                raise ValueError("parts are of a split: give the split a name")
            return None
        found = [_SHARE.fullmatch(one) for one in self.parts]
        shares = {match[1]: int(match[2]) for match in found if match}
        if len(shares) != len(self.parts):
            raise ValueError('parts are written "NAME:SHARE", each name once: parts = ["release:4", "held-out:1"]')
        return Split(self.split, shares)


def no_device(name: str) -> str:
    """Why no network can run there; "" when one can."""
    if not _DEVICE.fullmatch(name):
        return 'device: "cpu", "cuda" or "cuda:NUMBER"'
    if name != "cpu" and not (torch.device(name).index or 0) < torch.cuda.device_count():
        return f"device: this machine has no {name}"
    return ""


@dataclass(frozen=True, slots=True)
class ClustersTable:
    """``[clusters]``: how many patients behind a picture, and how many labels."""

    k: int = 11
    l_diversity: int = 2

    def __post_init__(self) -> None:
        """Refuse what no statement could claim."""
        KAnonymous(self.k, self.l_diversity, releases_per_patient=1)
        if not self.l_diversity <= self.k:
            raise ValueError("a cluster of k patients has at most k labels: l_diversity is larger")


@dataclass(frozen=True, slots=True)
class NetworksTable:
    """``[networks]``: files, relative to the configuration."""

    generator: str  # a file of `train generator`; or KIND:FILE of GENERATORS
    encoder: str = ""  # a file of `train encoder`; none beside "restyle:FILE", which holds its own
    passes: int | None = None  # of refinement; left out: as many as the encoder was trained with
    style: str = RANDOM  # or a file of `train features`; or KIND:FILE of EXTRACTORS
    content: str = RANDOM
    recognisers: tuple[str, ...] = ()  # of AnonFACES, two or more; of k-SALSA, the first is asked by `tune` alone
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Refuse a half of a pair, and a device that this machine does not have."""
        names_files(generator=self.generator, style=self.style, content=self.content)
        names_files(encoder=self.encoder or "none")
        for name in self.recognisers:
            names_files(recognisers=name)
        if (self.encoder == "") is not self.generator.startswith("restyle:"):
            raise ValueError('the generator needs an encoder beside it; "restyle:FILE" holds its own, and takes none')
        if not (self.passes is None or 1 <= self.passes <= 100):
            raise ValueError("passes: between 1 and 100")
        if told := no_device(self.device):
            raise ValueError(told)


@dataclass(frozen=True, slots=True)
class Synthesised:
    """A configuration, read: what to make, and of whom."""

    mechanism: KSalsa | AnonFaces
    selection: Selection
    judges: tuple[Recogniser, ...] = ()  # whom a search for k asks; of AnonFACES, its own
    vetting: Vetting | None = None  # of what a release makes; None: it refuses copies and nothing else


@dataclass(frozen=True, slots=True)
class Shelf:
    """The folder of the configuration, with what the site vouches for."""

    folder: Path
    vouched: frozenset[str]

    def file(self, name: str) -> bytes:
        """A network file.

        Raises:
            BadWeights: it cannot be read, or is larger than any network.
        """
        path = self.folder / name
        try:
            if not path.stat().st_size <= _MOST_BYTES:
                raise BadWeights(f"{path.name} is larger than 2 GiB")
            return path.read_bytes()
        except OSError as error:
            raise BadWeights(f"{path.name}: {error.strerror}") from None

    def believed(self, raw: bytes) -> Provenance:
        """What a file counts as: the site's word, never its own."""
        return "public" if hashlib.sha256(raw).hexdigest() in self.vouched else "file"

    def published(self, kind: str, name: str) -> tuple[nn.Module, Origin]:
        """A published network, which the site vouches for.

        Raises:
            BadWeights: nobody does, or it is another file.
        """
        raw = self.file(name)
        digest = hashlib.sha256(raw).hexdigest()
        if digest not in self.vouched:
            told = "look up its SHA-256 at its authors', and put it into site.toml's public_components"
            raise BadWeights(f"{Path(name).name}: {told}")
        net, _ = load_official(kind, raw, digest)
        return net, Origin("public", digest)

    def codec(self, table: NetworksTable) -> StyledCodec:
        """Generator and encoder, on their device."""
        kind, colon, name = table.generator.partition(":")
        if not colon:
            raw = self.file(table.generator), self.file(table.encoder)
            codec = codec_from(*raw, self.vouched, table.passes)
        elif kind not in GENERATORS:
            raise BadWeights(f"{kind} draws no picture; known are {', '.join(GENERATORS)}")
        else:
            net, origin = self.published(kind, name)
            if isinstance(net, Restyle):
                origins = {"encoder": origin, "generator": origin}
                codec = StyledCodec(net.generator, net.encoder, table.passes or PASSES, 16, origins)
            else:
                assert isinstance(net, Generator)
                codec = fitted(net, origin, self.file(table.encoder), self.vouched, table.passes)
        codec.generator.to(table.device)
        codec.encoder.to(table.device)
        return codec

    def features(self, word: str) -> FeatureNet:
        """The word "random"; a file of `train features`; or KIND:FILE, a published network."""
        if word == RANDOM:
            return RandomFeatures()
        kind, colon, name = word.partition(":")
        if not colon:
            raw = self.file(word)
            return features_from(raw, self.believed(raw))
        if kind not in EXTRACTORS:
            raise BadWeights(f"{kind} looks at no picture; known are {', '.join(EXTRACTORS)}")
        net, origin = self.published(kind, name)
        assert isinstance(net, Frozen)
        net.origin = origin
        return net

    def recogniser(self, name: str) -> Recogniser:
        """A file of `train recogniser`."""
        raw = self.file(name)
        return recogniser_from(raw, self.believed(raw))


def read_synthesis(path: Path, name: str, vouched: frozenset[str]) -> Synthesised:
    """Read a release's configuration and every network that it names.

    Args:
        path: of the TOML file.
        name: of the mechanism that was asked for, which the file must be of; "": whichever it is of.
        vouched: SHA-256 of the files that the site says are public.
    Raises:
        BadSite: not TOML, or with missing, unknown or senseless keys; all problems at once.
        BadWeights: a network cannot be read, or does not fit.
    """
    tables = document(path, _TABLES)
    raw = tables.raw
    if raw.get("mechanism") not in ((name,) if name else tuple(_FOREIGN)):
        tables.problems.append(f"mechanism: must be {' or '.join([name] if name else _FOREIGN)}")
    cohort = needed(tables, "cohort", CohortTable)
    networks = needed(tables, "networks", NetworksTable)
    clusters = tables.table("clusters", ClustersTable) or ClustersTable()
    made = _options(tables, clusters, str(raw.get("mechanism")))
    vetting = tables.table("vetting", JudgesTable)
    if tables.problems or cohort is None or networks is None:
        raise BadSite(f"{path.name}: " + "; ".join(tables.problems))
    build = _ksalsa if raw["mechanism"] == KSalsa.name else _anonfaces
    try:
        shelf = Shelf(path.resolve().parent, vouched)
        mechanism = build(clusters, networks, shelf, made)
        judges = tuple(shelf.recogniser(one) for one in networks.recognisers)
        for judge in judges:
            judge.calibration.demand()
        looked = vetting_of(vetting, shelf, networks.device) if vetting else None
        return Synthesised(mechanism, cohort.selection(mechanism.shape), judges, looked)
    except BadWeights:
        raise
    except ValueError as error:
        raise BadSite(f"{path.name}: {error}") from None


_FOREIGN: Final = {  # tables, and keys of [networks], that a mechanism does not know
    KSalsa.name: ("mixing",),
    AnonFaces.name: ("alignment", "views", "networks.style", "networks.content"),
}


def _options(tables: Tables, clusters: ClustersTable, name: str) -> dict[str, Any]:
    """What may be left out: of k-SALSA the alignment and the views, of AnonFACES the mixing."""
    raw, networks = tables.raw, tables.raw.get("networks")
    told = {*raw, *(f"networks.{key}" for key in (networks if isinstance(networks, dict) else ()))}
    tables.problems += [f"{key}: not of {name}" for key in _FOREIGN.get(name, ()) if key in told]
    if name == KSalsa.name:
        kinds: dict[str, type[Any]] = {"alignment": Alignment, "views": Views}
        return {key: tables.table(key, kind) for key, kind in kinds.items() if key in raw}
    mixing = raw.get("mixing", {})
    if isinstance(mixing, dict):
        if "k" in mixing:
            tables.problems.append("mixing.k: is set in [clusters]")
        mixing = {**mixing, "k": clusters.k}
    return {"mixing": tables.made(mixing, Mixing, "mixing")}


def document(path: Path, known: Container[str]) -> Tables:
    """A TOML file as tables, those that are not ``known`` among the problems.

    Raises:
        BadSite: it is not TOML.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadSite(f"{path.name} cannot be read: there is no such file") from None
    except (OSError, UnicodeDecodeError):
        raise BadSite(f"{path.name} cannot be read as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise BadSite(f"{path.name}: not TOML: {error}") from None
    tables = Tables(raw, converter(path.resolve().parent))
    why = UNVETTED.get(str(raw.get("mechanism")), "")
    for key in raw:
        if key not in known:
            tables.problems.append(f"vetting: {why}" if why and key == "vetting" else f"unknown table: {key}")
    return tables


def read_vetting(path: Path, vouched: frozenset[str]) -> Vetting:
    """A file with the table ``[vetting]`` alone, for a release that is typed and has no other.

    Raises:
        BadSite: not TOML, or with missing, unknown or senseless keys; all problems at once.
        BadWeights: a verifier cannot be read, is not the pinned one, or nobody vouches for it.
    """
    tables = document(path, ("vetting",))
    table = needed(tables, "vetting", JudgesTable)
    if tables.problems or table is None:
        raise BadSite(f"{path.name}: " + "; ".join(tables.problems))
    try:
        return vetting_of(table, Shelf(path.resolve().parent, vouched), "cpu")
    except KnowsNobody as error:
        raise BadSite(f"{path.name}: {error}") from None


def needed(tables: Tables, name: str, kind: type[T]) -> T | None:
    """A table that may not be left out."""
    if name not in tables.raw:
        tables.problems.append(f"{name}: missing")
    return tables.table(name, kind)


def _ksalsa(clusters: ClustersTable, table: NetworksTable, shelf: Shelf, made: dict[str, Any]) -> KSalsa:
    style, content = (shelf.features(word) for word in (table.style, table.content))
    mechanism = KSalsa(clusters.k, clusters.l_diversity, shelf.codec(table), style, content, **made)
    _tried(mechanism)
    return mechanism


def _tried(mechanism: KSalsa) -> None:
    """One step of the alignment, of two pictures of noise: what does not fit is known before anything is priced.

    Raises:
        ValueError: networks and alignment do not fit.
    """
    codec, dice = mechanism.codec, np.random.default_rng(0)
    networks = Networks(codec.generator, mechanism.style, mechanism.content)
    noise = [[dice.random(codec.shape, dtype=np.float32)] for _ in range(2)]
    start = codec.ws(codec.latent_average[None]).cpu().numpy()
    try:
        align(networks, start, [noise], replace(mechanism.alignment, steps=1))
    except (IndexError, RuntimeError, ValueError):
        told = "see the layer, the grid, and until"
        raise ValueError(f"these networks cannot be aligned with these settings: {told}") from None


def _anonfaces(clusters: ClustersTable, table: NetworksTable, shelf: Shelf, made: dict[str, Any]) -> AnonFaces:
    recognisers = tuple(shelf.recogniser(name) for name in table.recognisers)
    return AnonFaces(clusters.k, clusters.l_diversity, shelf.codec(table), recognisers, **made)
