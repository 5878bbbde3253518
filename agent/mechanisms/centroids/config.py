"""``centroids.toml``: public configuration of one release of DP centroids, parsed once, all problems at once.

It does not depend on patients, so it can be priced as it is: the noise levels are given, or follow from epsilon and
delta. Settings whose noise would drown the result are refused here, by public numbers, before anything is spent.
Networks and codebook are files next to it, public if ``site.toml`` vouches for their SHA-256 and private otherwise
(P6).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agent.mechanisms.centroids.codebook import codebook_from, codec_digest, fitted
from agent.mechanisms.centroids.mechanism import Centroids, Forecast, margin_for, noises_for
from agent.mechanisms.common.config import CohortTable, NetworksTable, Shelf, needed
from agent.mechanisms.common.dp_config import Prepared, PrivateFile, bounded, no_progress
from agent.mechanisms.common.stylegan_codec import StyledCodec
from agent.models.weights import WeightsError
from agent.toml_config import names_files
from policies.accounting.rounding import epsilon_text, format_rounded_up

FILE: Final = "codebook.safetensors"
_TABLES: Final = ("mechanism", "cohort", "networks", "privacy", "cells")
_SHARE: Final = 0.3  # of 1 / sigma^2, for the counts
_AT_ONCE: Final = 64  # public images between two words of progress


@dataclass(frozen=True, slots=True)
class CodecTable:
    """``[networks]``: files, relative to the configuration."""

    generator: str  # as of k-SALSA: a file of `train generator`, or KIND:FILE
    codebook: str  # a file of `train codebook`, of these two networks
    encoder: str = ""  # a file of `train encoder`
    passes: int | None = None  # of refinement; left out: as many as the encoder was trained with
    device: str = "cpu"  # cpu, cuda or cuda:NUMBER

    def __post_init__(self) -> None:
        """Refuse what no codec is made of."""
        names_files(codebook=self.codebook)
        self.networks()

    def networks(self) -> NetworksTable:
        """The two that draw."""
        return NetworksTable(self.generator, self.encoder, self.passes, device=self.device)


@dataclass(frozen=True, slots=True)
class PrivacyTable:
    """``[privacy]``: epsilon and delta, from which both noises follow; or both noises."""

    epsilon: float | None = None  # of counts and sums together, by loss distributions
    delta: float | None = None  # beside epsilon
    count_share: float | None = None  # of the budget, as parts of 1 / sigma^2
    count_noise: float | None = None  # standard deviation, in votes
    noise_multiplier: float | None = None  # of the sums, in units of the radius

    def __post_init__(self) -> None:
        """One way or the other."""
        asked = (self.epsilon is not None, self.delta is not None, self.count_share is not None)
        written = (self.count_noise is not None, self.noise_multiplier is not None)
        if not ((all(asked[:2]) and not any(written)) or (all(written) and not any(asked))):
            raise ValueError(
                "give either epsilon and delta (optionally count_share), or count_noise and noise_multiplier"
            )

    def noises(self) -> tuple[float, float]:
        """Of the counts, and of the sums.

        Raises:
            NoiseNotFoundError, ValueError: there are none for this epsilon and delta.
        """
        if self.count_noise is not None and self.noise_multiplier is not None:
            return self.count_noise, self.noise_multiplier
        assert self.epsilon is not None
        assert self.delta is not None
        return noises_for(self.epsilon, self.delta, _SHARE if self.count_share is None else self.count_share)


@dataclass(frozen=True, slots=True)
class CellsTable:
    """``[cells]``: what is counted, and which cells are drawn."""

    classes: tuple[str, ...]  # labels to draw
    public_patients: int  # about how many the site has, as may be known to all: never a count of this cohort
    k: int = 11  # a cell's noisy count must be k and the margin at least
    margin: int | None = None  # left out: so that no cell of fewer than k passes, but one time in a hundred
    images_per_patient: int = 2  # inverted, drawn at random from the patient's

    def __post_init__(self) -> None:
        """What the mechanism does not see."""
        bounded(self.public_patients)


def read_centroids(
    path: Path, vouched: frozenset[str], say: Callable[[str, str], None] = no_progress
) -> Prepared[Centroids]:
    """Read a release's configuration, its networks and its codebook.

    Args:
        path: of the TOML file.
        vouched: SHA-256 of the files that the site says are public.
        say: told what takes some time: a step, and a detail of it.
    Raises:
        SiteConfigError: not TOML, or with missing, unknown or senseless keys, all at once; or noise would drown the
        images. WeightsError: a file cannot be read, or does not fit.
    """
    file = PrivateFile.of(path, _TABLES, Centroids.name)
    tables = file.tables
    cohort = needed(tables, "cohort", CohortTable)
    networks = needed(tables, "networks", CodecTable)
    privacy = needed(tables, "privacy", PrivacyTable)
    cells = needed(tables, "cells", CellsTable)
    if cells:
        file.labels(cohort, cells.classes, "cells.classes")
        file.drawn(cells.classes, "cells.classes")
        file.public(privacy.delta if privacy else None, cells.public_patients)
    file.refuse()
    assert cohort
    assert networks
    assert privacy
    assert cells
    with file.in_words(vouched) as shelf:
        if asked := _asked(privacy):
            say("price", f"finding the noises for {asked}")
        mechanism = _mechanism(shelf, networks, privacy, cells)
        forecast = mechanism.forecast(cells.public_patients)
        forecast.demand()
        selection = replace(cohort, labels=frozenset(cells.classes)).selection(mechanism.shape)
        return Prepared(mechanism, selection, _told(mechanism, forecast, privacy))


def _mechanism(shelf: Shelf, networks: CodecTable, privacy: PrivacyTable, cells: CellsTable) -> Centroids:
    raw = shelf.file(networks.codebook)
    codebook = codebook_from(raw, shelf.believed(raw))
    count_noise, noise_multiplier = privacy.noises()
    margin = margin_for(codebook.cells, len(cells.classes), count_noise) if cells.margin is None else cells.margin
    mechanism = Centroids(
        codec=shelf.codec(networks.networks()),
        codebook=codebook,
        classes=cells.classes,
        count_noise=count_noise,
        noise_multiplier=noise_multiplier,
        k=cells.k,
        margin=float(margin),
        images_per_patient=cells.images_per_patient,
    )
    _tried(mechanism)
    return mechanism


def _tried(mechanism: Centroids) -> None:
    """A cell's centre drawn and inverted again: what an encoder cannot do is known before anything is priced.

    Raises:
        ValueError: it gives no finite code. Of a patient's image that would be taken in silence.
    """
    codec, codebook = mechanism.codec, mechanism.codebook
    drawn = codec.decode(codebook.restored(codebook.centres[:1].astype(np.float64)))
    codec.encode(drawn.astype(np.float32) / np.float32(255))


def _asked(privacy: PrivacyTable) -> str:
    """The price that a release file names; "" where it names the noises."""
    if privacy.epsilon is None or privacy.delta is None:
        return ""
    return f"epsilon {epsilon_text(privacy.epsilon)} at delta {format_rounded_up(privacy.delta)}"


def _told(mechanism: Centroids, forecast: Forecast, privacy: PrivacyTable) -> tuple[str, ...]:
    codebook = mechanism.codebook
    promised = f"{asked}, " if (asked := _asked(privacy)) else ""
    return (
        f"{promised}noise {mechanism.count_noise:g} on counts, {mechanism.noise_multiplier:g} on sums",
        f"{codebook.cells} cells in {codebook.dims} dimensions; those of about {forecast.least:.0f} patients or more "
        f"are drawn, and the noise on the mean of {forecast.cell:.0f} is {forecast.error:.2f} of the radius",
    )


def read_codec(generator: str, encoder: str, sha256: str, device: str) -> StyledCodec:
    """The codec that a codebook is made with.

    Args:
        generator: a file of `train generator`; or KIND:FILE, a published one.
        encoder: a file of `train encoder`; "" beside a published ReStyle.
        sha256: of a published file, as its authors tell it; else "".
        device: to encode on.
    Raises:
        WeightsError: a file cannot be read, or is another one.
        ValueError: they do not fit together.
    """
    if ":" in generator and not sha256:
        raise WeightsError("get the SHA-256 of the generator from its authors, and give it with --sha256")
    return Shelf(Path(), frozenset({sha256} - {""})).codec(NetworksTable(generator, encoder, device=device))


def make_codebook(
    codec: StyledCodec,
    images: NDArray[np.uint8],
    sizes: tuple[int, int],
    rng: np.random.Generator,
    say: Callable[[int, int], None] = lambda _done, _all: None,
) -> bytes:
    """A codebook's file, of public images (n, r, r[, 3]) by a codec.

    Args:
        codec: whose codes they become.
        images: nobody's patients; those of one value from edge to edge are passed over.
        sizes: cells and dimensions.
        rng: of the search.
        say: told how many of how many are inverted.
    Raises:
        ValueError: too few images, or images that cannot be inverted.
    """
    shown = images[[bool(np.ptp(image) > 0) for image in images]]
    if not len(shown):
        raise ValueError("all public images are empty")
    codes = []
    for start in range(0, len(shown), _AT_ONCE):
        codes.append(codec.encode(shown[start : start + _AT_ONCE].astype(np.float32) / np.float32(255)))
        say(min(start + _AT_ONCE, len(shown)), len(shown))
    return fitted(np.concatenate(codes), sizes, codec_digest(codec), {}, rng)
