"""Tables that the configurations of several mechanisms share."""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import torch
from torch import nn

from agent.domain import Selection, Split
from agent.errors import SiteConfigError
from agent.mechanisms.common.stylegan_codec import StyledCodec, codec_from, fitted
from agent.models.features.extractors import RandomFeatures, features_from
from agent.models.features.feature_net import FeatureNet, FrozenNetwork
from agent.models.published.loading import OFFICIAL, Restyle, load_official
from agent.models.recognition.recogniser import Recogniser, RecogniserError, recogniser_from
from agent.models.stylegan.network import Generator
from agent.models.stylegan.restyle import PASSES
from agent.models.weights import Origin, Provenance, WeightsError
from agent.toml_config import Tables, converter, names_files
from agent.vetting.config import UNVETTED, JudgesTable, vetting_of
from agent.vetting.reference import Vetting
from policies.accounting.claims import KAnonymous

RANDOM: Final = "random"  # in the place of a file: the fixed-seed network, which needs none


GENERATORS: Final = ("restyle", "stylegan2-ada")  # published files; the first holds its encoder too


EXTRACTORS: Final = tuple(sorted(frozenset(OFFICIAL) - frozenset(GENERATORS)))


_SHARE: Final = re.compile(r"([^:]+):([1-9][0-9]{0,6})")


_DEVICE: Final = re.compile(r"cpu|cuda(?::[0-9]{1,2})?")


_MOST_BYTES: Final = 1 << 31  # of one network file


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CohortTable:
    """``[cohort]``: the selected images."""

    modality: str  # DICOM modality of the images
    fit: bool = True  # images of any size, cropped to the field and averaged down; else of exactly this size
    body_part: str = ""  # DICOM Body Part Examined; "": any
    labels: frozenset[str] = frozenset()  # these only; none: any
    min_instances: int = 1  # of a series; a shorter one waits
    split: str = ""  # its name
    parts: tuple[str, ...] = ()  # "train:4", "test:1"
    part: str = ""  # of the split, that is released

    def __post_init__(self) -> None:
        """Refuse what selects nothing, whatever the size of the images."""
        self.selection((1, 1))

    def selection(self, shape: tuple[int, ...]) -> Selection:
        """The rule, for images of the generator's shape.

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
    """``[clusters]``: the patients and labels that each image stands for."""

    k: int = 11  # distinct patients behind every image
    l_diversity: int = 2  # distinct labels behind every image

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
    content: str = RANDOM  # as style
    recognisers: tuple[str, ...] = ()  # of AnonFACES, two or more; of k-SALSA, the first is asked by `tune` alone
    device: str = "cpu"  # cpu, cuda or cuda:NUMBER

    def __post_init__(self) -> None:
        """Refuse a half of a pair, and a device that this machine does not have."""
        names_files(generator=self.generator, style=self.style, content=self.content)
        names_files(encoder=self.encoder or "none")
        for name in self.recognisers:
            names_files(recognisers=name)
        if (self.encoder == "") is not self.generator.startswith("restyle:"):
            raise ValueError('the generator needs an encoder, except "restyle:FILE", which contains one')
        if not (self.passes is None or 1 <= self.passes <= 100):
            raise ValueError("passes: between 1 and 100")
        if told := no_device(self.device):
            raise ValueError(told)


@dataclass(frozen=True, slots=True)
class Shelf:
    """The folder of the configuration, with what the site vouches for."""

    folder: Path
    vouched: frozenset[str]

    def file(self, name: str) -> bytes:
        """A network file.

        Raises:
            WeightsError: it cannot be read, or is larger than any network.
        """
        path = self.folder / name
        try:
            if not path.stat().st_size <= _MOST_BYTES:
                raise WeightsError(f"{path.name} is larger than 2 GiB")
            return path.read_bytes()
        except OSError as error:
            raise WeightsError(f"{path.name}: {error.strerror}") from None

    def believed(self, raw: bytes) -> Provenance:
        """What a file counts as: the site's word, never its own."""
        return "public" if hashlib.sha256(raw).hexdigest() in self.vouched else "file"

    def published(self, kind: str, name: str) -> tuple[nn.Module, Origin]:
        """A published network, which the site vouches for.

        Raises:
            WeightsError: nobody does, or it is another file.
        """
        raw = self.file(name)
        digest = hashlib.sha256(raw).hexdigest()
        if digest not in self.vouched:
            told = "get its SHA-256 from its authors, and add it to site.toml's public_components"
            raise WeightsError(f"{Path(name).name}: {told}")
        net, _ = load_official(kind, raw, digest)
        return net, Origin("public", digest)

    def codec(self, table: NetworksTable) -> StyledCodec:
        """Generator and encoder, on their device."""
        kind, colon, name = table.generator.partition(":")
        if not colon:
            raw = self.file(table.generator), self.file(table.encoder)
            codec = codec_from(*raw, self.vouched, table.passes)
        elif kind not in GENERATORS:
            raise WeightsError(f"{kind} is not a generator; use one of {', '.join(GENERATORS)}")
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
            raise WeightsError(f"{kind} is not a feature network; use one of {', '.join(EXTRACTORS)}")
        net, origin = self.published(kind, name)
        assert isinstance(net, FrozenNetwork)
        net.origin = origin
        return net

    def recogniser(self, name: str) -> Recogniser:
        """A file of `train recogniser`."""
        raw = self.file(name)
        return recogniser_from(raw, self.believed(raw))


def document(path: Path, known: Container[str]) -> Tables:
    """A TOML file as tables, those that are not ``known`` among the problems.

    Raises:
        SiteConfigError: it is not TOML.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SiteConfigError(f"{path.name} cannot be read: file not found") from None
    except (OSError, UnicodeDecodeError):
        raise SiteConfigError(f"{path.name} is not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise SiteConfigError(f"{path.name}: not TOML: {error}") from None
    tables = Tables(raw, converter(path.resolve().parent))
    why = UNVETTED.get(str(raw.get("mechanism")), "")
    for key in raw:
        if key not in known:
            tables.problems.append(f"vetting: {why}" if why and key == "vetting" else f"unknown table: {key}")
    return tables


def read_vetting(path: Path, vouched: frozenset[str]) -> Vetting:
    """A file with the table ``[vetting]`` alone, for a release that is typed and has no other.

    Raises:
        SiteConfigError: not TOML, or with missing, unknown or senseless keys; all problems at once.
        WeightsError: a verifier cannot be read, is not the pinned one, or nobody vouches for it.
    """
    tables = document(path, ("vetting",))
    table = needed(tables, "vetting", JudgesTable)
    if tables.problems or table is None:
        raise SiteConfigError(f"{path.name}: " + "; ".join(tables.problems))
    try:
        return vetting_of(table, Shelf(path.resolve().parent, vouched), "cpu")
    except RecogniserError as error:
        raise SiteConfigError(f"{path.name}: {error}") from None


def needed(tables: Tables, name: str, kind: type[T]) -> T | None:
    """A table that may not be left out."""
    if name not in tables.raw:
        tables.problems.append(f"{name}: missing")
    return tables.table(name, kind)
