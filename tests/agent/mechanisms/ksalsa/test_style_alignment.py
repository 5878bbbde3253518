"""Local style alignment against a transcription of the paper's equations, loop by loop."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.domain import Clusters, Cohort, Image, Patient
from agent.mechanisms.ksalsa.style_alignment import (
    PUBLISHED,
    Alignment,
    AlignmentNotFiniteError,
    Grid,
    Networks,
    align,
    correspondence,
    local_styles,
    sources_of,
    style_loss,
)
from agent.models.features.extractors import RandomFeatures
from agent.models.stylegan.network import PRESETS, Generator
from agent.models.stylegan.restyle import scatter
from agent.models.training_loop import seeded
from agent.models.weights import Origin
from deploy.reproduction.averaging_methods import ABLATIONS

with seeded(5):
    GENERATOR = Generator(PRESETS["tiny32"]).eval()
NETWORKS = Networks(GENERATOR, RandomFeatures(0, width=8, depth=1), RandomFeatures(1, width=8, depth=2))
SHORT = replace(PUBLISHED, steps=6, ramp_up=0.0, ramp_down=0.0)


def _lambda(lam, factor):
    """The lambda that has the same minimum when the style loss is ``factor`` times smaller."""
    return lam / (lam + (1 - lam) * factor)


def _pictures(count, seed):
    """Pictures of the generator's own kind, (count, 32, 32, 3) in [0, 1]."""
    z = torch.randn(count, 64, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        drawn = GENERATOR(z)
    return ((drawn / 4 + 1) / 2).clamp(0, 1).permute(0, 2, 3, 1).contiguous().numpy()


def _problem(sizes, seed=0):
    """w0 (m, num_ws, w_dim) and the sources of clusters; ``sizes``: images of every patient of every cluster."""
    made = iter(_pictures(sum(sum(cluster) for cluster in sizes), seed))
    sources = [[[next(made) for _ in range(images)] for images in cluster] for cluster in sizes]
    z = torch.randn(len(sizes), 64, generator=torch.Generator().manual_seed(seed + 1))
    with torch.no_grad():
        w0 = GENERATOR.mapping(z).contiguous().numpy()
    return w0, sources


# --- the equations, naively ---------------------------------------------------------------------------------------


def naive_patches(features, side, overlap=1):
    """The windows of one (c, n, n) map, row by row."""
    size = features.shape[1] // side
    stride = size // overlap
    starts = range(0, features.shape[1] - size + 1, stride)
    return [features[:, i : i + size, j : j + size] for i in starts for j in starts]


def naive_gram(patch):
    """Eq. 1: every pair of channels, an inner product of their vectorisations."""
    c = patch.shape[0]
    return np.array([[np.dot(patch[u].ravel(), patch[v].ravel()) for v in range(c)] for u in range(c)])


def naive_cosine(a, b):
    return float((a * b).sum() / (np.linalg.norm(a) * np.linalg.norm(b)))


def naive_loss(sources, target, side, overlap=1):
    """Eq. 3 and 7: every member, every patch, the best target patch of all, squared Frobenius distance, summed."""
    of_target = [naive_gram(p) for p in naive_patches(target, side, overlap)]
    total = 0.0
    for source in sources:
        for patch in naive_patches(source, side, overlap):
            s = naive_gram(patch)
            a = max(range(len(of_target)), key=lambda j: naive_cosine(s, of_target[j]))
            total += float(((s - of_target[a]) ** 2).sum())
    return total


def _maps(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def _full(triangles, channels):
    """Scaled upper triangles as whole matrices."""
    row, column = np.triu_indices(channels)
    out = np.zeros((*triangles.shape[:-1], channels, channels))
    out[..., row, column] = triangles / np.where(row == column, 1, np.sqrt(2))
    out[..., column, row] = out[..., row, column]
    return out


@pytest.mark.parametrize(("side", "overlap"), [(4, 1), (1, 1), (2, 2), (3, 4)])
def test_local_styles_are_eq_1_divided_by_the_values_in_a_window(side, overlap):
    maps = _maps(2, 5, 24, 24)
    grid = Grid(side, overlap)
    found = _full(local_styles(torch.from_numpy(maps), grid).numpy(), 5)
    wanted = np.array([[naive_gram(p) for p in naive_patches(m, side, overlap)] for m in maps])
    assert found.shape[1] == grid.patches
    assert np.allclose(found, wanted / (5 * (24 // side) ** 2), atol=1e-12)


def test_triangles_keep_the_products_and_distances_of_the_matrices():
    styles = local_styles(torch.from_numpy(_maps(2, 6, 8, 8)), Grid(2))
    full = _full(styles.numpy(), 6)
    assert np.allclose((styles[0] @ styles[1].T).numpy(), np.einsum("iuv,juv->ij", full[0], full[1]))
    assert np.allclose((styles[0] - styles[1]).square().sum(1).numpy(), ((full[0] - full[1]) ** 2).sum((1, 2)))


@pytest.mark.parametrize("metric", ["cos", "mse"])
def test_the_correspondence_is_eq_3_for_every_pair(metric):
    source = local_styles(torch.from_numpy(_maps(3, 4, 8, 8)), Grid(4)).reshape(1, -1, 10)
    target = local_styles(torch.from_numpy(_maps(1, 4, 8, 8, seed=1)), Grid(4))
    wanted = []
    for s in source[0].numpy():
        if metric == "cos":
            wanted.append(max(range(16), key=lambda j: naive_cosine(s, target[0, j].numpy())))
        else:
            wanted.append(min(range(16), key=lambda j: float(((s - target[0, j].numpy()) ** 2).sum())))
    assert correspondence(source, target, metric)[0].tolist() == wanted
    assert len(set(wanted)) > 1


def _styled(maps, target, grid):
    source = local_styles(torch.from_numpy(maps), grid).reshape(1, -1, 10)
    weight = torch.full(source.shape[:2], 1.0, dtype=torch.float64)
    t = local_styles(target, grid)
    return source, weight, t


def test_the_style_loss_is_eq_7():
    maps, target = _maps(3, 4, 8, 8), _maps(4, 8, 8, seed=1)
    source, weight, t = _styled(maps, torch.from_numpy(target)[None], Grid(4))
    n = Grid(4).elements(4, 8, 8)
    found = style_loss(source, weight, t, correspondence(source, t, "cos"), "mse")
    assert float(found) * n**2 == pytest.approx(naive_loss(maps, target, 4), rel=1e-10)


def test_the_cosine_loss_is_one_minus_the_cosine_of_matched_patches():
    source, weight, t = _styled(_maps(3, 4, 8, 8), torch.from_numpy(_maps(1, 4, 8, 8, seed=1)), Grid(4))
    match = correspondence(source, t, "cos")
    wanted = sum(1 - naive_cosine(s.numpy(), t[0, int(a)].numpy()) for s, a in zip(source[0], match[0], strict=True))
    assert float(style_loss(source, weight, t, match, "cos")) == pytest.approx(wanted, rel=1e-10)


@pytest.mark.parametrize("metric", ["cos", "mse"])
def test_the_gradient_is_that_of_finite_differences(metric):
    maps = _maps(2, 4, 8, 8)
    target = torch.from_numpy(_maps(1, 4, 8, 8, seed=1)).requires_grad_()
    source, weight, t = _styled(maps, target, Grid(2))
    match = correspondence(source, t, "cos")
    assert torch.autograd.gradcheck(
        lambda x: style_loss(source, weight, local_styles(x, Grid(2)), match, metric), (target,), atol=1e-8
    )


@given(st.integers(0, 99), st.permutations(range(16)))
@settings(max_examples=20)
def test_shuffling_a_sources_patches_changes_nothing_with_alignment_and_something_without(seed, order):
    rng = np.random.default_rng(seed)
    source = torch.from_numpy(rng.random((1, 16, 10)))
    target = torch.from_numpy(rng.random((1, 16, 10)))
    weight = torch.full((1, 16), 1 / 16, dtype=torch.float64)
    shuffled = source[:, list(order)]

    def loss(s, match):
        return float(style_loss(s, weight, target, match, "mse"))

    aligned = loss(source, correspondence(source, target, "cos"))
    assert loss(shuffled, correspondence(shuffled, target, "cos")) == pytest.approx(aligned)
    same = torch.arange(16)[None]
    if list(order) != list(range(16)):
        assert loss(shuffled, same) != loss(source, same)


# --- the algorithm ------------------------------------------------------------------------------------------------


def _algorithm_1(w0, cluster, plan):
    """One cluster by Algorithm 1 as written, with torch's own Adam and every source weighed by its patient."""

    def grams(image):
        features = NETWORKS.style.maps(image, 1)[-1][0]
        size = features.shape[1] // 4
        cells = [
            features[:, i * size : (i + 1) * size, j * size : (j + 1) * size].flatten(1)
            for i in range(4)
            for j in range(4)
        ]
        return [f @ f.T for f in cells], features.shape[0] * size * size

    def seen(image):
        embedded = NETWORKS.content.embed(image)
        return embedded / embedded.norm(dim=1, keepdim=True)

    w = torch.tensor(w0[None], requires_grad=True)
    x0 = seen(GENERATOR.synthesis(w)).detach()
    adam = torch.optim.Adam([w], lr=plan.rate, betas=plan.betas)
    trace = []
    for _ in range(plan.steps):
        x = GENERATOR.synthesis(w)
        content = 1 - (x0 * seen(x)).sum()
        of_target, n = grams(x)
        style, energy = 0.0, 0.0
        for patient in cluster:
            for image in patient:
                tensor = torch.from_numpy(image).permute(2, 0, 1)[None] * 2 - 1
                for s in grams(tensor)[0]:
                    likeness = [float(((s * t).sum() / (s.norm() * t.norm())).detach()) for t in of_target]
                    share = 1 / (len(cluster) * len(patient) * 16)
                    nearest = of_target[int(np.argmax(likeness))]
                    style = style + share * ((s - nearest) / n).square().sum()
                    energy = energy + share * (s / n).square().sum()
        if plan.scale == "relative":
            style = style / energy
        if plan.scale == "sum":
            style = style * n**2 * len(cluster) * 16
        total = plan.lam * content + (1 - plan.lam) * style
        trace.append((float(style.detach()), float(content.detach())))
        (w.grad,) = torch.autograd.grad(total, w)
        adam.step()
    return w.detach().numpy()[0], np.array(trace)


def rescaled(lam: float, factor: float) -> float:
    """The lambda that has the same minimum when the style loss is ``factor`` times smaller."""
    return lam / (lam + (1.0 - lam) * factor)


@pytest.mark.parametrize("scale", ["relative", "mean", "sum"])
def test_a_cluster_goes_the_way_of_algorithm_1(scale):
    w0, sources = _problem([[1, 2], [1, 1, 1]])
    plan = replace(SHORT, steps=4, scale=scale, lam=_lambda(0.5, 1e6) if scale == "mean" else 0.5)
    found = align(NETWORKS, w0, sources, plan)
    for j in range(2):
        w, trace = _algorithm_1(w0[j], sources[j], plan)
        assert np.allclose(found.style[j], trace[:, 0], rtol=2e-3)
        assert np.allclose(found.content[j], trace[:, 1], atol=1e-4)
        moved = np.linalg.norm(w - w0[j])
        assert np.linalg.norm(found.ws[j] - w) < 0.05 * moved


def test_a_rate_is_measured_in_the_generators_own_spread():
    w0, sources = _problem([[1, 1]])
    size = float(scatter(GENERATOR))
    spread = align(NETWORKS, w0, sources, replace(SHORT, unit="spread", rate=0.05))
    assert np.array_equal(spread.ws, align(NETWORKS, w0, sources, replace(SHORT, rate=0.05 * size)).ws)
    assert not np.allclose(spread.ws, align(NETWORKS, w0, sources, replace(SHORT, rate=0.05)).ws, atol=1e-3)


def test_by_default_no_number_of_a_code_leaves_its_neighbourhood():
    w0, sources = _problem([[1, 1]])
    size, plan = float(scatter(GENERATOR)), Alignment()
    moved = np.abs(align(NETWORKS, w0, sources, plan).ws - w0).max()
    assert 0 < moved <= 1.2 * plan.steps * plan.rate * size < 0.1 * size
    assert np.abs(align(NETWORKS, w0, sources, replace(PUBLISHED, steps=25)).ws - w0).max() > 0.5 * size


def test_a_lambda_carries_over_from_one_scale_to_another():
    w0, sources = _problem([[1, 1, 1]])
    n = Grid(4).elements(8, 32, 32)
    raw = align(NETWORKS, w0, sources, replace(SHORT, scale="sum", lam=0.9999))
    mean = align(NETWORKS, w0, sources, replace(SHORT, scale="mean", lam=_lambda(0.9999, n**2 * 3 * 16)))
    # the first steps: Adam's epsilon is not scaled along
    assert np.allclose(raw.style[:, :4], mean.style[:, :4] * n**2 * 3 * 16, rtol=0.03)
    assert np.allclose(raw.content[:, :4], mean.content[:, :4], rtol=0.03, atol=1e-5)
    other = align(NETWORKS, w0, sources, replace(SHORT, scale="mean", lam=0.9999))
    assert not np.allclose(raw.style[:, :4], other.style[:, :4] * n**2 * 3 * 16, rtol=0.03)


def test_the_loss_falls_and_style_alone_moves_towards_the_sources():
    w0, sources = _problem([[1, 1, 1], [1, 1]])
    found = align(NETWORKS, w0, sources, ABLATIONS["style only"](replace(SHORT, steps=25)))
    assert (found.style[:, -1] < 0.7 * found.style[:, 0]).all()
    both = align(NETWORKS, w0, sources, replace(SHORT, steps=25))
    assert (both.style[:, -1] < both.style[:, 0]).all()
    assert (both.content < 1).all()
    assert (found.steps == 25).all()


def test_content_alone_stays_at_the_centroid():
    w0, sources = _problem([[1, 1]])
    found = align(NETWORKS, w0, sources, ABLATIONS["content only"](SHORT))
    assert abs(found.content[0, 0]) < 1e-5  # Eq. 6 is at its minimum, and what follows is Adam on rounding errors
    assert np.abs(found.content).max() < 0.1
    assert (found.style == 0).all()


def test_content_of_the_members_starts_away_from_the_centroid():
    w0, sources = _problem([[1, 1], [2, 1, 1]])
    plan = replace(SHORT, content="members", lam=1.0, steps=2)
    found = align(NETWORKS, w0, sources, plan)

    def seen(images):
        tensor = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2) * 2 - 1
        return torch.nn.functional.normalize(NETWORKS.content.embed(tensor), dim=1)

    for j in range(2):
        own = torch.nn.functional.normalize(
            NETWORKS.content.embed(GENERATOR.synthesis(torch.from_numpy(w0[j : j + 1])))
        )
        wanted = 1 - np.mean([float((seen(patient) @ own.T).detach().mean()) for patient in sources[j]])
        assert found.content[j, 0] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("name", sorted(ABLATIONS))
def test_every_ablation_runs_and_differs_from_the_whole(name):
    w0, sources = _problem([[1, 1]])
    whole = align(NETWORKS, w0, sources, replace(SHORT, lam=0.3))
    ablated = align(NETWORKS, w0, sources, ABLATIONS[name](replace(SHORT, lam=0.3)))
    assert np.isfinite(ablated.ws).all()
    assert not np.allclose(ablated.ws, whole.ws, atol=1e-4)


def test_a_clusters_result_does_not_depend_on_its_batch():
    w0, sources = _problem([[1, 1], [1, 1, 2], [1, 1, 1], [3, 1]])
    plan = replace(SHORT, steps=5)
    together = align(NETWORKS, w0, sources, plan)
    for batch in (1, 3):
        apart = align(NETWORKS, w0, sources, replace(plan, batch=batch))
        assert np.allclose(apart.style, together.style, rtol=1e-3)
        assert np.allclose(apart.ws, together.ws, atol=5e-3)  # Adam's first steps amplify the last bits: rate 0.1
    backwards = align(NETWORKS, w0[::-1].copy(), sources[::-1], plan)
    assert np.allclose(backwards.style[::-1], together.style, rtol=1e-3)
    alone = align(NETWORKS, w0[2:3], sources[2:3], plan)
    assert np.allclose(alone.style[0], together.style[2], rtol=1e-3)


def test_the_same_run_twice_gives_the_same_bytes_and_moves_no_global_generator():
    w0, sources = _problem([[1, 1], [1, 1, 1]])
    before = torch.get_rng_state()
    one, two = (align(NETWORKS, w0, sources, SHORT) for _ in range(2))
    assert one.ws.tobytes() == two.ws.tobytes()
    assert torch.equal(before, torch.get_rng_state())


def test_half_precision_ends_near_the_same_loss_and_gives_float32():
    w0, sources = _problem([[1, 1], [1, 1, 1]])
    plan = replace(SHORT, steps=8)
    full = align(NETWORKS, w0, sources, plan)
    half = align(NETWORKS, w0, sources, replace(plan, bf16=True))  # bfloat16 has 8 bits: 0.4 %
    assert half.ws.dtype == np.float32
    assert np.allclose(half.style[:, 0], full.style[:, 0], rtol=0.05)
    assert (half.style[:, -1] < half.style[:, 0]).all()
    assert half.style.tobytes() != full.style.tobytes()


def test_the_order_of_members_and_of_a_patients_images_changes_nothing():
    w0, sources = _problem([[2, 1, 1]])
    (cluster,) = sources
    other = [[cluster[2], cluster[0][::-1], cluster[1]]]
    one, two = (align(NETWORKS, w0, s, replace(SHORT, steps=3)) for s in (sources, other))
    assert np.allclose(one.style, two.style, rtol=1e-4)


def test_a_patient_photographed_twice_weighs_no_more():
    w0, sources = _problem([[1, 1]])
    ((a, b),) = sources
    once = align(NETWORKS, w0, [[a, b]], replace(SHORT, steps=3))
    twice = align(NETWORKS, w0, [[[*a, *a, *a], b]], replace(SHORT, steps=3))
    assert np.allclose(once.style, twice.style, rtol=1e-4)


def test_a_cluster_that_has_converged_leaves_and_the_next_takes_its_place():
    w0, sources = _problem([[1, 1], [1, 1, 1], [1, 2]])
    plan = replace(SHORT, steps=40, tolerance=0.2, patience=2, batch=2)
    found = align(NETWORKS, w0, sources, plan)
    assert (found.steps < 40).all()
    for j in range(3):
        assert np.isfinite(found.style[j, : found.steps[j]]).all()
        assert np.isnan(found.style[j, found.steps[j] :]).all()
        alone = align(NETWORKS, w0[j : j + 1], sources[j : j + 1], plan)
        assert alone.steps[0] == found.steps[j]
    # the code of the lowest loss seen: looked at again, its loss is that one
    again = align(NETWORKS, found.ws, sources, replace(plan, steps=1, lam=0.0))
    assert np.allclose(
        again.style[:, 0],
        [np.nanmin(0.95 * s + 0.05 * c) for s, c in zip(found.style, found.content, strict=True)],
        rtol=0.1,
    )


def test_a_generator_stays_as_it_was():
    w0, sources = _problem([[1, 1]])
    before = {name: p.clone() for name, p in GENERATOR.state_dict().items()}
    asked = [p.requires_grad for p in GENERATOR.parameters()]
    align(NETWORKS, w0, sources, SHORT)
    assert all(torch.equal(p, before[name]) for name, p in GENERATOR.state_dict().items())
    assert [p.requires_grad for p in GENERATOR.parameters()] == asked
    assert all(p.grad is None for p in GENERATOR.parameters())


def test_looking_at_half_the_resolution_moves_only_the_layers_below_it():
    w0, sources = _problem([[1, 1]])
    found = align(NETWORKS, w0, sources, replace(SHORT, until=16))
    moved = np.abs(found.ws - w0).max(axis=(0, 2)) > 0
    assert moved.tolist() == [True] * 6 + [False] * 2


class Broken:
    """Features that are not numbers: of the sources, or from a certain call on."""

    name = "broken"
    origin = Origin("random", "0" * 64)

    def __init__(self, after):
        self.after = after

    def maps(self, images, depth=None):
        self.after -= 1
        maps = NETWORKS.style.maps(images, depth)
        return maps if self.after >= 0 else [m * float("nan") for m in maps]

    def embed(self, images):
        return self.maps(images)[-1].flatten(1)


@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_features_that_are_no_numbers_are_refused(after):
    w0, sources = _problem([[1, 1], [1, 1]])
    with pytest.raises(AlignmentNotFiniteError, match="nothing is made"):
        align(replace(NETWORKS, style=Broken(after)), w0, sources, SHORT)
    with pytest.raises(AlignmentNotFiniteError):
        align(replace(NETWORKS, content=Broken(after)), w0, sources, replace(SHORT, lam=0.5))


def test_codes_that_are_no_numbers_and_lone_patients_are_refused():
    w0, sources = _problem([[1, 1]])
    with pytest.raises(AlignmentNotFiniteError):
        align(NETWORKS, w0 * np.nan, sources, SHORT)
    with pytest.raises(ValueError, match="two patients"):
        align(NETWORKS, w0, [sources[0][:1]], SHORT)
    with pytest.raises(ValueError, match="two patients"):
        align(NETWORKS, w0, [[sources[0][0], []]], SHORT)
    with pytest.raises(ValueError, match="one code"):
        align(NETWORKS, w0, [*sources, *sources], SHORT)
    with pytest.raises(ValueError, match="grid"):
        align(NETWORKS, w0, sources, replace(SHORT, grid=Grid(5)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"lam": float("nan")}, {"lam": 1.1}, {"rate": 0.0}, {"rate": float("nan")}, {"betas": (0.9, 1.0)},
        {"steps": 0}, {"batch": 0}, {"layer": 0}, {"patience": 1}, {"tolerance": float("nan")}, {"ramp_up": 0.9},
        {"scale": "none"}, {"content": "nobody"}, {"matching": ""}, {"align_by": "l1"}, {"compare_by": "l1"},
        {"unit": "metre"},
    ],
)  # fmt: skip
def test_a_configuration_that_cannot_run_is_refused(wrong):
    with pytest.raises(ValueError, match=r"share|word|metric|rate|at least"):
        Alignment(**wrong)


@pytest.mark.parametrize(("side", "overlap"), [(0, 1), (65, 1), (4, 0), (4, 9)])
def test_a_grid_that_is_none_is_refused(side, overlap):
    with pytest.raises(ValueError, match="grid"):
        Grid(side, overlap)


def test_sources_are_all_images_of_all_patients_and_of_nobody_else():
    images = [Image(np.full((2, 2), i / 9, np.float32), "") for i in range(4)]
    cohort = Cohort((Patient("a", (images[0], images[1])), Patient("b", (images[2],)), Patient("c", (images[3],))))
    sources = sources_of(cohort, Clusters((("c", "a"), ("b",))))
    assert [[[round(float(i.mean()) * 9) for i in p] for p in c] for c in sources] == [[[3], [0, 1]], [[2]]]
    with pytest.raises(ValueError, match="cohort"):
        sources_of(cohort, Clusters((("zz",),)))
