"""Training C-DeID-GAN: the printed losses, the brain embedded, kill -9 costs nothing, nobody is in their own fold."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agent.defacing.deid_gan.layers import pooled, pyramid
from agent.defacing.deid_gan.network import VolumeGanConfig, drawn, remodeller_from
from agent.defacing.deid_gan.remodeller_training import TooFewHeadsError, examples, population_from, train_remodeller
from agent.defacing.deid_gan.training import (
    Example,
    VolumeGanTrainer,
    cuts,
    discriminator_loss,
    embedded,
    generator_loss,
    moved,
    train_volume_gan,
)
from agent.defacing.head import HeadScan
from agent.defacing.privacy_transform import Coarse, population_of, scaled, transform, whole_head
from agent.errors import DivergedError, OtherRunError
from agent.models.training_loop import CHECKPOINT, TrainingProgress, load_state, save_state, torch_generator
from deploy.demo.heads import heads
from deploy.demo.train_networks import kept_network
from tests.support.killed_training import KilledError, killed_at
from tests.support.volume_gans import TINY, config, example, some


def trainer(**changes: Any) -> VolumeGanTrainer:
    return VolumeGanTrainer(some(), config(**changes))


def test_the_losses_are_as_printed() -> None:
    real, made = torch.randn(2, 7, generator=torch_generator(0)).double()
    of_g = sum(2.0 * (float(r) - float(f) + 1.0) ** 2 for r, f in zip(real, made, strict=True)) / 7
    of_d = sum(2.0 * (float(f) - float(r) + 1.0) ** 2 for r, f in zip(real, made, strict=True)) / 7
    assert float(generator_loss(real, made)) == pytest.approx(of_g)
    assert float(discriminator_loss(real, made)) == pytest.approx(of_d)
    # pairs, and not averages: the other order of the made heads is another loss
    assert float(generator_loss(real, made.flip(0))) != pytest.approx(of_g)
    # D has won where the real one is 1 ahead, and G where the made one is
    assert float(discriminator_loss(made + 1.0, made)) == 0.0
    assert float(generator_loss(real, real + 1.0)) == 0.0


def test_the_brain_is_embedded_at_every_scale() -> None:
    e = example(0)
    gammas = pyramid(torch.from_numpy(e.gamma.stack())[None], TINY.sides, torch_generator(0))
    real = [pooled(torch.from_numpy(e.volume)[None, None], side) for side in TINY.sides]
    made = [torch.rand(part.shape, generator=torch_generator(i)) for i, part in enumerate(real)]
    for x, g, gamma, seen in zip(real, made, gammas, embedded(real, made, gammas), strict=True):
        b = gamma[:, 1:2]
        assert torch.equal(seen, b * x + (1 - b) * g)
        assert torch.equal(seen[b == 1], x[b == 1])
        assert torch.equal(seen[b == 0], g[b == 0])
        assert 0 < float(b.mean()) < 1
    assert torch.equal(made[-1], torch.rand(made[-1].shape, generator=torch_generator(2)))  # G's own is left alone


def test_a_step_moves_each_network_by_its_own_loss_alone() -> None:
    own = trainer()
    x = torch.from_numpy(np.stack([e.volume for e in own.examples[:2]]))[:, None]
    gamma = torch.from_numpy(np.stack([e.gamma.stack() for e in own.examples[:2]]))
    before = {name: {n: t.clone() for n, t in getattr(own, name).state_dict().items()} for name in own.networks}

    def same(name: str) -> bool:
        return all(torch.equal(t, before[name][n]) for n, t in getattr(own, name).state_dict().items())

    own._judge(x, gamma, torch_generator(0))
    assert same("generator")
    assert not same("discriminator")
    before["discriminator"] = {n: t.clone() for n, t in own.discriminator.state_dict().items()}
    own._learn(x, gamma, torch_generator(0))
    assert same("discriminator")
    assert not same("generator")
    assert all(p.requires_grad for p in own.discriminator.parameters())


def test_the_optimiser_is_adamp_as_published() -> None:
    """One step of Heo et al.'s Algorithm 2 with betas (0, 0.99) on one weight, done by hand."""
    own = trainer()
    for optimizer in own.optimizers.values():
        assert type(optimizer).__name__ == "AdamP"
        (group,) = optimizer.param_groups
        assert (group["lr"], group["betas"]) == (2e-3, (0.0, 0.99))
        assert "weight_decay" not in group
    weight = own.generator.scales[0].stem.weight
    before = weight.detach().clone().double()
    told: list[Tensor] = []
    handle = weight.register_hook(lambda grad: told.append(grad.detach().clone().double()))
    own.step(torch_generator(0))
    handle.remove()
    grad = told[-1]
    update = grad / (
        grad.abs() + 1e-7
    )  # the first step, both moments corrected; epsilon stands before the correction
    cosine = torch.nn.functional.cosine_similarity(grad.flatten(1), before.flatten(1), dim=1).abs()
    flat = before.flatten(1)
    if float(cosine.max()) < 0.1 / math.sqrt(flat.shape[1]):
        unit = flat / flat.norm(dim=1, keepdim=True)
        update = update - ((update.flatten(1) * unit).sum(1, keepdim=True) * unit).reshape(update.shape)
    else:
        whole_cosine = torch.nn.functional.cosine_similarity(grad.flatten(), before.flatten(), dim=0).abs()
        if float(whole_cosine) < 0.1 / math.sqrt(flat.numel()):
            unit = before / before.norm()
            update = update - (update * unit).sum() * unit
    assert torch.allclose(weight.detach().double(), before - 2e-3 * update, atol=2e-6)


def test_mirrored_and_turned_heads_keep_their_own_gamma() -> None:
    es = some(3)
    x = torch.from_numpy(np.stack([e.volume for e in es]))[:, None]
    masks = torch.from_numpy(np.stack([e.gamma.stack()[:2] for e in es]))
    new, gamma = moved(x, masks, config(turn=0.3), torch_generator(0))
    assert set(gamma[:, :2].unique().tolist()) == {0.0, 1.0}
    assert torch.equal(gamma[:, 2:], gamma[:, 1:2] * new)  # b o x of what it has become
    assert torch.allclose(gamma[:, :2].sum((2, 3, 4)), masks.sum((2, 3, 4)), rtol=0.1)
    assert not torch.equal(new, x)
    still, gamma = moved(x, masks, config(turn=0.0, mirror=False), torch_generator(0))
    assert torch.equal(still, x)
    assert torch.equal(gamma, torch.from_numpy(np.stack([e.gamma.stack() for e in es])))
    flipped = {
        bool(torch.equal(moved(x[:1], masks[:1], config(turn=0.0), torch_generator(s))[0], x[:1].flip(2)))
        for s in range(8)
    }
    assert flipped == {True, False}
    almost, _ = moved(x, masks, config(turn=1e-6, mirror=False), torch_generator(0))
    assert torch.allclose(almost, x, atol=1e-4)  # turned about the cube's centre


def test_a_run_that_was_killed_ends_with_the_same_weights(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    whole_run = train_volume_gan(some(), config(), tmp_path / "whole").state_dict()
    assert torch.equal(state, torch.get_rng_state())
    for at in (3, 6):
        folder = tmp_path / f"killed-{at}"
        with pytest.raises(KilledError):
            train_volume_gan(some(), config(), folder, killed_at(at))
        again = train_volume_gan(some(), config(), folder).state_dict()
        assert all(torch.equal(t, whole_run[n]) for n, t in again.items())
        assert (folder / CHECKPOINT).read_bytes() == (tmp_path / "whole" / CHECKPOINT).read_bytes()
    assert (tmp_path / "whole" / "samples-0000006.png").exists()
    for other in (config(seed=1), config(absolute=1.0), config(lr=1e-3), config(turn=0.0)):
        with pytest.raises(OtherRunError):
            train_volume_gan(some(), other, tmp_path / "whole")
    with pytest.raises(OtherRunError):
        train_volume_gan(some(5), config(), tmp_path / "whole")
    with pytest.raises(OtherRunError, match="longer"):
        train_volume_gan(some(), config(steps=2), tmp_path / "whole")


CHILD = """
import os, signal, sys
from pathlib import Path
from tests.support.volume_gans import config, some
from agent.defacing.deid_gan.training import train_volume_gan
train_volume_gan(some(), config(), Path(sys.argv[1]), lambda p: p.step == 5 and os.kill(os.getpid(), signal.SIGKILL))
"""


@pytest.mark.slow
def test_a_process_that_was_killed_with_signal_9_goes_on_to_the_same_checkpoint(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    done = subprocess.run([sys.executable, "-c", CHILD, str(tmp_path / "killed")], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    for name in ("killed", "whole"):
        train_volume_gan(some(), config(), tmp_path / name)
    assert (tmp_path / "killed" / CHECKPOINT).read_bytes() == (tmp_path / "whole" / CHECKPOINT).read_bytes()


def test_forgetting_the_optimisers_count_would_be_seen(tmp_path: Path) -> None:
    """AdamP's step count is in no tensor of its state; without it the second moment is corrected wrongly."""
    train_volume_gan(some(), config(steps=2), tmp_path)
    step, state = load_state((tmp_path / CHECKPOINT).read_bytes(), config().run(some()))
    assert step == 2
    draw = state.pop("loop.generator")
    after = []
    for count in (2, 0):
        own = trainer()
        own.restore(state)
        for optimizer in own.optimizers.values():
            assert optimizer.param_groups[0]["step"] == 2
            optimizer.param_groups[0]["step"] = count
        generator = torch.Generator()
        generator.set_state(draw)
        own.step(generator)
        after.append(own.generator.state_dict())
    assert any(not torch.equal(t, after[1][n]) for n, t in after[0].items())


def test_what_saves_memory_and_where_it_runs_changes_no_weight() -> None:
    made = []
    for changes in ({}, {"sparing": True}, {"devices": ("cpu", "cpu:0")}):
        own, draw = trainer(**changes), torch_generator(0)
        for _ in range(2):
            own.step(draw)
        made.append(own.averaged().state_dict())
    for other in made[1:]:
        assert all(torch.equal(t, other[n]) for n, t in made[0].items())
    names = {config(**c).run(some()) for c in ({}, {"sparing": True}, {"devices": ("cpu", "cuda")}, {"steps": 9})}
    assert len(names) == 1


def test_half_precision_learns_much_the_same() -> None:
    made = []
    for precision in ("float32", "bfloat16"):
        own = trainer(precision=precision)
        made.append(own.step(torch_generator(0)))
        assert all(p.dtype == torch.float32 for p in own.generator.parameters())
    assert made[1]["absolute"] == pytest.approx(made[0]["absolute"], rel=0.05)
    assert made[1] != made[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("devices", [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
def test_networks_on_accelerators_learn_as_on_a_processor(devices: tuple[str, str], tmp_path: Path) -> None:
    told = [trainer(devices=where).step(torch_generator(0)) for where in (("cpu", "cpu"), devices)]
    assert all(told[1][name] == pytest.approx(value, rel=1e-2) for name, value in told[0].items())
    how = config(steps=4, devices=devices, precision="bfloat16", sparing=True)
    net = train_volume_gan(some(), how, tmp_path)
    assert all(p.device.type == "cpu" and bool(torch.isfinite(p).all()) for p in net.parameters())


def test_everything_that_the_discriminator_reads_is_brought_to_its_device() -> None:
    """On torch's meta device there is nothing to read, and mixing it with a processor's tensors is an error."""
    own = trainer()
    own.place("cpu", "meta")
    e = own.examples[0]
    x, gamma = torch.from_numpy(e.volume)[None, None], torch.from_numpy(e.gamma.stack())[None]
    real, made, gammas = own._both(x, gamma, torch_generator(0))
    assert {t.device.type for t in (*real, *made, *gammas)} == {"meta"}
    assert own.discriminator(made, gammas).device.type == "meta"
    assert next(own.generator.parameters()).device.type == "cpu"


def test_it_learns_to_draw_the_head_around_a_brain_that_it_never_saw(tmp_path: Path) -> None:
    es, unseen = [example(i) for i in range(12)], example(99)
    how = config(steps=40, absolute=300.0, ema=0.9, checkpoint_every=40)
    told: list[TrainingProgress] = []
    net = train_volume_gan(es, how, tmp_path, told.append)
    assert set(told[-1].losses) == {"generator", "discriminator", "absolute"}
    assert not any(p.requires_grad for p in net.parameters())
    outside = ~unseen.gamma.brain
    errors = []
    for one in (net, VolumeGanTrainer(es, how).averaged()):
        made = drawn(one, torch.from_numpy(unseen.gamma.stack())[None], torch_generator(0))[0, 0].numpy()
        errors.append(float(np.abs(made - unseen.volume)[outside].mean()))
    assert errors[0] < 0.6 * errors[1]


def test_a_loss_that_is_no_number_stops_the_run(tmp_path: Path) -> None:
    train_volume_gan(some(), config(steps=2), tmp_path)
    _, state = load_state((tmp_path / CHECKPOINT).read_bytes(), config().run(some()))
    state["generator.scales.0.stem.bias"][0] = math.inf
    spoilt = save_state(config().run(some()), 2, state)
    (tmp_path / CHECKPOINT).write_bytes(spoilt)
    with pytest.raises(DivergedError):
        train_volume_gan(some(), config(), tmp_path)
    assert (tmp_path / CHECKPOINT).read_bytes() == spoilt


def test_heads_that_cannot_be_learned_are_refused(tmp_path: Path) -> None:
    e = example(0)
    for wrong in (e.volume.astype(np.float64), e.volume[:8], np.full_like(e.volume, np.nan), e.volume + 1.0):
        with pytest.raises(ValueError, match=r"volume"):
            Example(wrong, e.gamma, "p")
    with pytest.raises(ValueError, match="inside the brain"):
        Example(np.clip(e.volume + 0.1, 0.0, 1.0).astype(np.float32), e.gamma, "p")
    with pytest.raises(ValueError, match="two heads"):
        train_volume_gan(some(1), config(), tmp_path)
    with pytest.raises(ValueError, match="voxels a side"):
        train_volume_gan([example(i, 8) for i in range(3)], config(), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "wrong",
    [{"steps": 0}, {"seed": -1}, {"batch": 0}, {"lr": math.nan}, {"lr": 0.0}, {"ema": 1.0}, {"absolute": -1.0},
     {"absolute": math.nan}, {"turn": 1.0}, {"turn": math.nan}, {"precision": "float16"}, {"devices": ("cpu",)},
     {"checkpoint_every": 0}, {"say_every": 0}],
)  # fmt: skip
def test_a_training_that_cannot_be_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        config(**wrong)


def test_cuts_show_the_middle_planes_with_the_top_upwards() -> None:
    volume = np.zeros((4, 4, 4), np.float32)
    volume[2, 1, 3] = 1.0  # sagittal plane: second from the back, at the very top
    sagittal, coronal, axial = cuts(volume)
    assert sagittal[0, 1] == 255
    assert sagittal.sum() == 255
    assert coronal.sum() == axial.sum() == 0


def known(count: int) -> list[tuple[str, HeadScan]]:
    return list(heads(count))


def test_the_population_and_the_examples_are_those_of_the_heads() -> None:
    some_heads, coarse = known(3), Coarse()
    population = population_from(some_heads, 16, coarse)
    told = population_of([head for _, head in some_heads], 16, coarse.directions)
    assert population.count == 3
    assert np.allclose(population.support, told.support, atol=1e-4)
    assert np.allclose(population.skin, told.skin, atol=1e-6)
    for (person, head), made in zip(some_heads, examples(some_heads, 16, population, coarse), strict=True):
        gamma = transform(head, 16, population, coarse)
        assert made.person == person
        assert np.array_equal(made.gamma.stack(), gamma.stack())
        assert np.array_equal(made.volume[~gamma.brain], whole_head(head, 16)[~gamma.brain])
        assert np.array_equal(made.volume[gamma.brain], gamma.intensities[gamma.brain])
    with pytest.raises(TooFewHeadsError):
        population_from([], 16, coarse)


def test_a_remodeller_of_public_heads_draws_for_everybody(tmp_path: Path) -> None:
    some_heads = known(3)
    raw = train_remodeller(some_heads, config(steps=2), tmp_path)
    assert raw == train_remodeller(iter(some_heads), config(steps=2), tmp_path)
    read = remodeller_from(raw, "public")
    gamma = transform(some_heads[0][1], 16, read.population, read.coarse)
    assert read.draw(gamma, np.random.Generator(np.random.Philox(0))).shape == (16, 16, 16)
    with pytest.raises(TooFewHeadsError):
        train_remodeller([("one", head) for _, head in some_heads], config(steps=2), tmp_path / "one")
    wide = replace(config(), gan=VolumeGanConfig(16, (8, 8, 8), extent_mm=300.0))
    with pytest.raises(ValueError, match="256 mm"):
        train_remodeller(some_heads, wide, tmp_path / "wide")


def test_the_kept_network_draws_a_head_whose_size_follows_gamma() -> None:
    read = remodeller_from(kept_network("remodeller"), "public")
    head = next(heads(1, first=5_000))[1]
    gamma = transform(head, 32, read.population, read.coarse)
    sizes = [
        float((read.draw(scaled(gamma, alpha), np.random.Generator(np.random.Philox(0))) > 0.12).sum())
        for alpha in (0.85, 1.0, 1.15)
    ]
    assert sizes[0] < 0.85 * sizes[1]
    assert sizes[1] < sizes[2]  # what no longer fits in the cube is cut off, so that it grows less
