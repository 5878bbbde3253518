"""A network's encoder and generator in the place of the linear ones: images to W+ codes, codes to images.

k-SALSA, section 3.3: "we use this encoder to invert every image in the input dataset, then use the latent codes both
to define the clusters ... and to find the Euclidean centroid". Codes are the whole W+ code laid flat, Euclidean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agent.models.image_tensors import to_bytes, to_tensor, to_unit
from agent.models.stylegan.network import Generator, generator_from
from agent.models.stylegan.restyle import (
    Encoder,
    Polish,
    average_code,
    check_fits,
    encoder_from,
    fingerprint,
    invert_images,
    polish,
    scatter,
)
from agent.models.stylegan.restyle_published import RestyleEncoder
from agent.models.weights import Origin
from protos.common.errors import RefusedError

_PARTS = frozenset({"encoder", "generator"})


class NothingShownError(RefusedError, ValueError):
    """An image has only one value. The text does not say which, or whose (P14)."""

    def __init__(self) -> None:
        """Report only that nothing is made: a patient with only such images adds nothing to an average of k."""
        super().__init__("an image is empty (all pixels are equal): nothing is made from the cohort")


@dataclass(frozen=True, slots=True, eq=False)
class StyledCodec:
    """An encoder with its generator (the ``Codec`` of :mod:`agent.mechanisms.common.linear_codec`).

    Deterministic: noise is constant, nothing is drawn, and an image's code does not depend on the images beside it,
    up to rounding.
    """

    generator: Generator
    encoder: Encoder | RestyleEncoder
    passes: int
    batch: int  # images at a time
    origins: Mapping[str, Origin]  # of "encoder" and "generator"
    polish: Polish | None = None  # hybrid inversion; not part of k-SALSA

    def __post_init__(self) -> None:
        """Refuse parts that do not fit together, and an origin that is not said."""
        check_fits(self.encoder, self.generator)
        if not (self.passes >= 1 and self.batch >= 1):
            raise ValueError("at least one pass, and one image in a batch")
        if self.origins.keys() != _PARTS:
            raise ValueError("a codec says where its encoder and its generator come from")

    @property
    def shape(self) -> tuple[int, ...]:
        """(r, r) of grey images, (r, r, 3) of RGB ones."""
        a = self.generator.architecture
        return (a.resolution, a.resolution) if a.channels == 1 else (a.resolution, a.resolution, 3)

    @property
    def width(self) -> int:
        """Numbers in a code: num_ws * w_dim."""
        return self.generator.architecture.num_ws * self.generator.architecture.w_dim

    @property
    def drawn_by(self) -> list[Any]:
        """What decides a code besides the networks: the passes and the polish, as JSON values."""
        return [self.passes, asdict(self.polish) if self.polish else None]

    @property
    def latent_average(self) -> NDArray[np.float32]:
        """The average latent as a code: (d,)."""
        return _flat(average_code(self.generator, 1)).reshape(-1)

    def encode(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        """Images (n, r, r[, 3]) in [0, 1] as codes (n, num_ws * w_dim).

        Raises:
            NothingShownError: an image of one value.
            ValueError: another shape, an intensity outside [0, 1], or a code that is not finite.
        """
        if images.shape[1:] != self.shape:
            raise ValueError("the images do not have the shape that the encoder takes")
        if images.size and not (float(images.min()) >= 0.0 and float(images.max()) <= 1.0):
            raise ValueError("intensities must be finite and lie in [0, 1]")
        if any(bool(np.ptp(image) == 0.0) for image in images):
            raise NothingShownError
        out = np.empty((len(images), self.width), np.float32)
        unit = 0.0 if self.polish is None else scatter(self.generator).item()
        for start in range(0, len(images), self.batch):
            part = to_tensor(images[start : start + self.batch]).to(self._device)
            ws = invert_images(self.encoder, self.generator, part, self.passes)
            if self.polish is not None:
                ws = polish(self.generator, part, ws, unit, self.polish)
            out[start : start + self.batch] = _flat(ws)
        if not bool(np.isfinite(out).all()):
            raise ValueError("the encoder gave a code that is not finite")
        return out

    def decode(self, codes: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Codes (m, num_ws * w_dim) as 8-bit images (m, r, r[, 3]).

        Raises:
            ValueError: another shape, or numbers that are not finite, in the codes or in the images.
        """
        out = np.empty((len(codes), *self.shape), np.uint8)
        ws = self.ws(codes)
        for start in range(0, len(codes), self.batch):
            with torch.no_grad():
                drawn = self.generator.synthesis(ws[start : start + self.batch], noise="const")
            if not bool(torch.isfinite(drawn).all()):
                raise ValueError("the generator gave an image that is not finite")
            out[start : start + self.batch] = to_bytes(to_unit(drawn))
        return out

    def ws(self, codes: NDArray[np.float32]) -> Tensor:
        """Codes (m, num_ws * w_dim) as the generator takes them: (m, num_ws, w_dim) float32, on its device.

        Raises:
            ValueError: another shape, or a code that is not finite.
        """
        if codes.ndim != 2 or codes.shape[1] != self.width:
            raise ValueError("the codes do not have the generator's width")
        if not bool(np.isfinite(codes).all()):
            raise ValueError("codes must be finite")
        a = self.generator.architecture
        plain = torch.from_numpy(np.array(codes, np.float32))  # a copy: the caller's numbers are not aliased
        return plain.reshape(-1, a.num_ws, a.w_dim).to(self._device)

    def components(self) -> dict[str, str]:
        """ "public" or "private", by name (P6)."""
        return {name: self.origins[name].component for name in sorted(_PARTS)}

    @property
    def _device(self) -> torch.device:
        return self.generator.w_avg.device


def codec_from(
    generator_raw: bytes, encoder_raw: bytes, vouched: frozenset[str], passes: int | None = None, batch: int = 16
) -> StyledCodec:
    """A codec from two files, which are believed only as far as the site vouches for them.

    Args:
        generator_raw: a generator's file.
        encoder_raw: its encoder's file.
        vouched: SHA-256 of files that the site's configuration calls public. What a file says of itself is a claim.
        passes: of refinement; None: as many as the encoder was trained with.
        batch: images at a time.
    Returns:
        The codec, frozen, on the CPU.
    Raises:
        WeightsError: a file is not what it should be.
        ValueError: they do not fit together, or the encoder was trained for another generator.
    """
    generator, packed = generator_from(generator_raw)
    return fitted(generator, _origin(packed.sha256, vouched), encoder_raw, vouched, passes, batch)


def fitted(
    generator: Generator,
    origin: Origin,
    encoder_raw: bytes,
    vouched: frozenset[str],
    passes: int | None = None,
    batch: int = 16,
) -> StyledCodec:
    """A codec of a generator that was read already, a published one for example, and an encoder's file.

    Args and errors: as of :func:`codec_from`. The generator is frozen.
    """
    encoder, packed = encoder_from(encoder_raw)
    generator.train(mode=False).requires_grad_(requires_grad=False)
    meant = packed.notes.get("generator", "")
    if meant and meant != fingerprint(generator):
        raise ValueError("the encoder was trained for another generator: use the encoder of this one")
    origins = {"encoder": _origin(packed.sha256, vouched), "generator": origin}
    return StyledCodec(generator, encoder, encoder.architecture.passes if passes is None else passes, batch, origins)


def _origin(sha256: str, vouched: frozenset[str]) -> Origin:
    """Public if the site says so; otherwise a file like any other, which may be a function of anybody."""
    return Origin("public" if sha256 in vouched else "file", sha256)


def _flat(ws: Tensor) -> NDArray[np.float32]:
    plain: NDArray[np.float32] = ws.detach().float().cpu().flatten(1).numpy()
    return plain
