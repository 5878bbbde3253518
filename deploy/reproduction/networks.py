"""The networks of an experiment, each trained once on the public part, and what they make of the patients."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from agent.domain import Latents
from agent.mechanisms.common.linear_codec import Basis, fit_basis, invert
from agent.mechanisms.common.stylegan_codec import StyledCodec
from agent.models.features.extractors import RandomFeatures, features_from
from agent.models.features.feature_net import FeatureNet
from agent.models.features.simclr_training import RepresentationConfig, train_features
from agent.models.features.trunk import TrunkArchitecture
from agent.models.recognition.recogniser import Recogniser, RecogniserArchitecture, RecogniserError, recogniser_from
from agent.models.recognition.recogniser_training import RecognitionConfig, fit_recogniser
from agent.models.stylegan.network import Generator, generator_from
from agent.models.stylegan.restyle import encoder_from
from agent.models.stylegan.restyle_training import FILE as ENCODER
from agent.models.stylegan.restyle_training import InversionConfig, train_encoder
from agent.models.stylegan.training import GENERATOR, GanConfig, train_generator
from agent.models.weights import Origin, Provenance
from deploy.reproduction.experiment import Official, Rows, Work, cohort_of, name_of
from deploy.reproduction.feature_networks import FEATURES, Source
from protos.common.durable_files import replace_file

STYLE_SEED: Final = 1  # of the random features that align styles
JUDGE_SEED: Final = 101  # of those that measure fidelity: never the same
_BATCH: Final = 32  # images encoded or drawn at once
_WHOLE: Final = "network.safetensors"
_MOST_SIDE: Final = 64  # pixels that a recogniser or a learned feature network sees, at most


def provenance(work: Work) -> Provenance:
    """Of everything trained here."""
    return "private" if work.settings.as_published else "public"


def codec(work: Work, seed: int) -> StyledCodec:
    """Generator and encoder."""
    made: StyledCodec = work.held(f"codec {work.place('codec', seed)}", lambda: _codec(work, seed))
    return made


def _codec(work: Work, seed: int) -> StyledCodec:
    s, origin = work.settings, provenance(work)
    generator, generator_hash = _generator(work, seed)
    place = work.place("encoder", seed)
    if not (place / ENCODER).exists():
        plan = InversionConfig(
            pair_steps=s.pair_steps,
            image_steps=s.image_steps,
            batch=s.encoder_batch,
            passes=s.passes,
            rate=s.encoder_rate,
            bf16=s.device != "cpu",
            seed=seed % s.net_seeds,
            checkpoint_every=s.checkpoint_every,
        )
        pictures = work.samples.unit(work.trained_on(seed))
        train_encoder(generator, pictures, plan, place, work.told("encoder"), features(work, seed))
    encoder, told = encoder_from((place / ENCODER).read_bytes())
    origins = {"generator": Origin(origin, generator_hash), "encoder": Origin(origin, told.sha256)}
    return StyledCodec(generator, encoder.to(s.device), s.passes, _BATCH, origins, s.polish)


def _generator(work: Work, seed: int) -> tuple[Generator, str]:
    s, place = work.settings, work.place("generator", seed)
    if not (place / GENERATOR).exists():
        config = GanConfig(
            s.generator,
            s.generator_steps,
            seed % s.net_seeds,
            batch=s.generator_batch,
            gamma=s.gamma,
            precision="float32" if s.device == "cpu" else "bfloat16",
            device=s.device,
            checkpoint_every=s.checkpoint_every,
        )
        train_generator(work.samples.images[work.trained_on(seed)], config, place, work.told("generator"))
    generator, packed = generator_from((place / GENERATOR).read_bytes())
    return generator.to(s.device).eval().requires_grad_(requires_grad=False), packed.sha256


def features(work: Work, seed: int) -> FeatureNet:
    """MoCo, or what stands for it: features learned without labels; random ones where ``feature_steps`` is 0."""
    s = work.settings
    if s.content:
        return _official(work, s.content)
    if not s.feature_steps:
        return RandomFeatures(seed=seed % s.net_seeds)
    place = work.place("features", seed)
    if not (place / _WHOLE).exists():
        config = RepresentationConfig(
            "simclr-d0",
            TrunkArchitecture(min(s.side, _MOST_SIDE), _channels(work)),
            steps=s.feature_steps,
            batch=min(64, len(work.trained_on(seed))),
            seed=seed % s.net_seeds,
            checkpoint_every=s.checkpoint_every,
        )
        images, device = work.samples.images[work.trained_on(seed)], torch.device(s.device)
        raw = train_features(images, config, place, work.told("features"), device)
        replace_file(place / _WHOLE, raw)
    return features_from((place / _WHOLE).read_bytes(), provenance(work))


def recogniser(work: Work, seed: int, which: int) -> Recogniser:
    """The recognisers of an experiment: 0 and 1 guide a mechanism, 2 is the attacker's own.

    They differ in seed and width. However little one knows, it is taken: a table says how much that is.

    Raises:
        TooFewPeopleError: D0 has too few people with several images.
        RecogniserError: it tells nobody apart, so that it has no threshold.
    """
    s, place = work.settings, work.place(f"recogniser{which}", seed)
    if not (place / _WHOLE).exists():
        rows, config = recognition(work, seed, which)
        images, owners = work.samples.images[rows], work.samples.owners[rows]
        told, device = work.told(config.name), torch.device(s.device)
        try:
            raw = fit_recogniser(images, owners, config, place, told, device).file
        except RecogniserError as error:
            raise RecogniserError(
                f"{config.name}, one of the experiment's recognisers, tells nobody apart after {config.steps} steps: "
                "take more of the data set (--limit), or a larger --preset"
            ) from error
        replace_file(place / _WHOLE, raw)
    return recogniser_from((place / _WHOLE).read_bytes(), provenance(work))


def recognition(work: Work, seed: int, which: int) -> tuple[Rows, RecognitionConfig]:
    """What a recogniser learns, and how: everybody with two images or more in D0 is an identity."""
    s, rows = work.settings, work.trained_on(seed)
    people, counts = np.unique(work.samples.owners[rows], return_counts=True)
    rows = rows[np.isin(work.samples.owners[rows], people[counts >= 2])]
    trunk = TrunkArchitecture(min(s.side, _MOST_SIDE), _channels(work), width=(32, 24, 40)[which])
    config = RecognitionConfig(
        f"identity-{which}",
        RecogniserArchitecture(trunk, grid=min(4, trunk.left)),
        steps=s.recogniser_steps,
        seed=100 * which + seed % s.net_seeds,
        false_match_rate=s.false_match_rate,
        checkpoint_every=s.checkpoint_every,
    )
    return rows, config


def knowledge(work: Work, which: int) -> str:
    """How much a recogniser knows of people it never saw, once for each set of networks, as a note of a table."""
    sets = sorted({seed % work.settings.net_seeds for seed in work.settings.seeds})
    judges = [recogniser(work, seed, which).calibration for seed in sets]
    rates = "; ".join(f"matches {c.judged.matched.value:.3f}, mistakes {c.judged.mistaken.value:.3f}" for c in judges)
    try:
        for each in judges:
            each.demand()
    except RecogniserError:
        return f"identity-{which} KNOWS TOO FEW PEOPLE AGAIN to judge a release: of pairs it never saw it {rates}"
    return f"identity-{which}, of pairs it never saw, {rates}"


def style(work: Work) -> FeatureNet:
    """VGG19's second layer, or what stands for it: fixed random filters, a function of nobody."""
    given = work.settings.style
    return _official(work, given) if given else RandomFeatures(seed=STYLE_SEED)


def judge(work: Work) -> FeatureNet:
    """Inception, or what stands for it: other random filters than those that align styles."""
    given = work.settings.judge
    return _official(work, given) if given else RandomFeatures(seed=JUDGE_SEED)


def content(work: Work) -> str:
    """The name of MoCo or of what stands for it, known before it is trained."""
    s = work.settings
    if s.content:
        return _official(work, s.content).name
    return "features learned on D0" if s.feature_steps else RandomFeatures(seed=0).name.rpartition("-s")[0]


def officials(work: Work) -> None:
    """Read every published network that was named, so that a wrong file is known before anything is trained.

    Raises:
        ValueError, WeightsError: it is not there, or not what it should be.
    """
    for given in (work.settings.style, work.settings.content, work.settings.judge):
        if given:
            _official(work, given)


def looked_with(work: Work) -> str:
    """Which networks look at images, and what they stand for, as a note of a table."""
    s = work.settings
    roles = (
        ("style", style(work).name, s.style, "VGG19"),
        ("content", content(work), s.content, "MoCo"),
        ("judge", judge(work).name, s.judge, "Inception"),
    )
    told = (f"{r}: {name} ({g.sha256[:12]})" if g else f"{r}: {name}, in place of {p}" for r, name, g, p in roles)
    other = "" if s.style and s.content and s.judge else "; numbers do not compare with the paper's, orders do"
    return f"{'; '.join(told)}{other}"


def _official(work: Work, given: Official) -> FeatureNet:
    def read() -> FeatureNet:
        path = work.folder / "official" / given.kind
        if given.kind not in FEATURES or not path.is_file():
            raise ValueError(f"put the published file of {given.kind} into the work folder as official/{given.kind}")
        return FEATURES[given.kind](Source(raw=path.read_bytes(), sha256=given.sha256))

    net: FeatureNet = work.held(f"official {given}", read)
    return net


def latents(work: Work, seed: int, rows: Rows) -> Latents:
    """One code in W+ for each patient of some rows."""
    people = np.unique(work.samples.owners[rows])
    key = f"codes {seed} {_which(rows)}"
    told = f"inverting the images of {len(people)} patients, seed {seed}"
    codes = work.arrays(key, lambda: {"codes": invert(cohort_of(work.samples, rows), codec(work, seed)).codes}, told)
    return Latents(codes["codes"], tuple(name_of(int(p)) for p in people))


def linear(work: Work, seed: int) -> Basis:
    """The basis of k-Same-PCA, of D0. Colour is laid beside: (h, 3 w)."""
    rows = work.trained_on(seed)
    flat = wide(work.samples.unit(rows))
    d = min(work.settings.basis, len(rows) - 1, flat.shape[1] * flat.shape[2])
    basis: Basis = work.held(f"basis {work.place('basis', seed)}", lambda: fit_basis(flat, d, "public"))
    return replace(basis, provenance="private") if work.settings.as_published else basis


def wide(images: NDArray[np.float32]) -> NDArray[np.float32]:
    """(n, h, w[, 3]) as (n, h, w) or (n, h, 3 w), for the linear codec."""
    return images.reshape(len(images), images.shape[1], -1)


def linear_codes(work: Work, seed: int, rows: Rows) -> Latents:
    """One PCA code for each patient of some rows."""
    people, which = np.unique(work.samples.owners[rows], return_inverse=True)
    codes = linear(work, seed).encode(wide(work.samples.unit(rows))).astype(np.float64)
    sums = np.zeros((len(people), codes.shape[1]))
    np.add.at(sums, which, codes)
    means = (sums / np.bincount(which)[:, None]).astype(np.float32)
    return Latents(means, tuple(name_of(int(p)) for p in people))


def _which(rows: Rows) -> str:
    return hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest()[:16]


def _channels(work: Work) -> int:
    return 1 if work.samples.images.ndim == 3 else 3
