"""The engines of DP-SGD: what one patient can move, whether they agree, and what they refuse."""

import math
import warnings
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus import GradSampleModule
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from agent.dp import clipping, gradient_recorder
from agent.dp.clipping import (
    PrivacyUnit,
    UnsuitableModelError,
    bookkeeping_engine,
    loop_engine,
    refuse_batch_statistics,
    trainable,
    vmap_engine,
)
from agent.models.training_loop import seeded
from tests.support.families import FAMILIES, Family, classified, convolutions, discriminator, linear, monai_unet

ENGINES = {
    "looped": loop_engine,
    "chunked": vmap_engine(2),
    "bookkept": bookkeeping_engine(3),
    "bookkept, unchecked": bookkeeping_engine(8),
}
PAIRS = [
    (engine, family) for engine in ENGINES for family in FAMILIES if not (engine[0] == "b" and family == "linear")
]


@pytest.fixture
def probes():
    """For a test of the comparison with ``loop_engine``."""


@pytest.fixture(autouse=True)
def _no_probes(monkeypatch, request):
    """That comparison would refuse what other tests want to see."""
    if "probes" not in request.fixturenames:
        monkeypatch.setattr(clipping, "PROBES", 0)


def _reach(engine, family, units, clip=0.7):
    """How far the sum moves when each patient is removed."""
    full = engine(family.model, family.loss, units, clip)
    assert torch.isfinite(full).all()
    rest = [units[:i] + units[i + 1 :] for i in range(len(units))]
    return [float((full - engine(family.model, family.loss, some, clip)).norm()) for some in rest]


def _toy(family):
    """Five patients: ragged, one infinite, one NaN, one hugely scaled."""
    units = family.units((1, 2, 3, 2, 1, 2), scale=5.0)
    units[1] = PrivacyUnit((torch.full_like(units[1].rows[0], math.inf), *units[1].rows[1:]))
    units[3] = PrivacyUnit((torch.full_like(units[3].rows[0], math.nan), *units[3].rows[1:]))
    units[5] = PrivacyUnit((units[5].rows[0] * 1e6, *units[5].rows[1:]))
    return units


@pytest.mark.parametrize(("engine", "family"), PAIRS)
def test_removing_any_patient_moves_the_sum_by_at_most_the_clip(engine, family):
    # P2, brute force over all neighbours of a toy cohort
    found = FAMILIES[family]()
    moves = _reach(ENGINES[engine], found, _toy(found))
    assert max(moves) <= 0.7
    # who is not finite counts as zero; other company may change the last bits of the others' gradients
    assert max(moves[1], moves[3]) <= (0.0 if engine == "looped" else 1e-6)
    assert max(moves) > 0.69  # the clip binds, else this would prove nothing


@pytest.mark.parametrize(("engine", "family"), PAIRS)
def test_one_patient_alone_and_nobody_at_all_are_batches_like_any(engine, family):
    found = FAMILIES[family]()
    assert _reach(ENGINES[engine], found, found.units((2,), scale=50.0), 0.1)[0] <= 0.1
    assert not ENGINES[engine](found.model, found.loss, [], 0.7).any()


@pytest.mark.parametrize(("engine", "family"), PAIRS)
def test_a_patient_that_is_not_finite_changes_nothing_for_the_others(engine, family):
    found = FAMILIES[family]()
    units = _toy(found)
    whole = ENGINES[engine](found.model, found.loss, units, 0.7)
    sound = ENGINES[engine](found.model, found.loss, [units[i] for i in (0, 2, 4, 5)], 0.7)
    assert float((whole - sound).norm()) <= 1e-6
    assert sound.any()


def _each_image(model, loss, units, clip):
    """Per-image clipping sold as per patient."""
    single = [PrivacyUnit(tuple(row[i : i + 1] for row in unit.rows)) for unit in units for i in range(len(unit))]
    return loop_engine(model, loss, single, clip)


def _averaged_first(model, loss, units, clip):
    """The gradients of two different patients averaged before the clip, and counted for both."""
    pairs = [units[i : i + 2] for i in range(0, len(units), 2)]
    joined = [
        PrivacyUnit(tuple(torch.cat(rows) for rows in zip(*(u.rows for u in pair), strict=True))) for pair in pairs
    ]
    return sum(
        (len(pair) * loop_engine(model, loss, [unit], clip) for pair, unit in zip(pairs, joined, strict=True)),
        loop_engine(model, loss, [], clip),
    )


def _each_layer(model, loss, units, clip):
    """Every parameter clipped by itself, to the whole bound."""
    parameters, total = trainable(model), []
    for parameter in parameters:
        for other in parameters:
            other.requires_grad_(other is parameter)
        total.append(loop_engine(model, loss, units, clip))
    for parameter in parameters:
        parameter.requires_grad_(True)
    return torch.cat(total)


@pytest.mark.parametrize("broken", [_each_image, _averaged_first, _each_layer])
def test_a_sum_that_is_not_clipped_by_patient_would_be_seen_red_by_those_tests(broken):
    found = convolutions()
    assert max(_reach(broken, found, found.units((4, 1, 3, 4), scale=20.0))) > 0.7 * 1.2


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shape", [lambda x: x[:, None], lambda x: x.mean(), lambda x: x[1:], lambda x: x.repeat(2)])
def test_losses_that_are_not_one_number_for_each_row_are_refused(engine, shape):
    # opacus' ghost clipping multiplies (n,) and (n, 1) to (n, n) here, and sums up to n times the bound
    found = convolutions()
    with pytest.raises(UnsuitableModelError, match="one number for each row"):
        ENGINES[engine](found.model, lambda m, rows: shape(classified(m, rows)), found.units((2, 3)), 0.7)


@pytest.mark.parametrize("engine", [e for e in ENGINES if e != "looped"])
@pytest.mark.parametrize("make", [partial(monai_unet, 8), discriminator, convolutions])
def test_the_engines_agree(engine, make):
    found = make()
    for counts in ((1, 2, 2, 1), (1, 1, 1), (4, 4)):
        units = found.units(counts, seed=sum(counts))
        reference = loop_engine(found.model, found.loss, units, 0.05)
        difference = ENGINES[engine](found.model, found.loss, units, 0.05) - reference
        assert float(difference.norm() / reference.norm()) <= 1e-5


def test_the_gpu_engine_trains_bare_parameters_and_the_kept_one_refuses_them():
    found = linear()
    units = found.units((1, 2, 5, 2))
    reference = loop_engine(found.model, found.loss, units, 0.5)
    assert float((vmap_engine(3)(found.model, found.loss, units, 0.5) - reference).abs().max()) <= 1e-7
    with pytest.raises(UnsuitableModelError, match="LinearSoftmax"):
        bookkeeping_engine(3)(found.model, found.loss, units, 0.5)


@pytest.mark.parametrize("make", [partial(convolutions, "zeros"), discriminator, partial(monai_unet, 8)])
def test_with_one_row_for_each_patient_the_sum_is_that_of_opacus(make):
    found = make()
    units = found.units([1] * 4)
    sums = [engine(found.model, found.loss, units, 0.3) for engine in ENGINES.values()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = GradSampleModule(found.model, loss_reduction="sum")
        rows = tuple(torch.cat(tensors) for tensors in zip(*(unit.rows for unit in units), strict=True))
        found.loss(wrapped, rows).sum().backward()
    samples = torch.cat([p.grad_sample.reshape(4, -1) for p in wrapped.parameters()], dim=1).double()
    factor = (0.3 / samples.norm(dim=1) / (1 + gradient_recorder.MARGIN)).clamp(max=1.0)
    expected = (samples * factor[:, None]).sum(dim=0)
    assert float(samples.norm(dim=1).max()) > 0.3
    for ours in sums:
        assert float((expected - ours).norm() / ours.norm()) <= 1e-5


def _agrees(model, loss, units, clip=0.3, size=4):
    reference = loop_engine(model, loss, units, clip)
    found = bookkeeping_engine(size)(model, loss, units, clip)
    assert float((found - reference).norm()) <= 1e-5 * float(reference.norm()) + 1e-9


def _scored(model, rows):
    return model(rows[0]).flatten(1).square().mean(dim=1)


COUNTS = st.sampled_from([(1, 1, 1), (2, 2), (4, 4, 4), (5,), (1, 3, 2), (4, 1)])


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_every_convolution_has_its_rule(data):
    pick = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    kind, dims = pick((nn.Conv1d, 1), (nn.Conv2d, 2), (nn.Conv3d, 3))
    groups, mode = pick(1, 2), pick("zeros", "reflect", "replicate", "circular")
    padding = pick(0, 1, 2, "same", "valid")
    stride = 1 if padding == "same" else pick(1, 2)
    size = dict(padding=padding, stride=stride, dilation=pick(1, 2), groups=groups, padding_mode=mode)
    with seeded(0):
        model = kind(2, 4, pick(1, 2, 3), bias=pick(True, False), **size)
    units = [PrivacyUnit((torch.randn(n, 2, *(7, 6, 5)[:dims]),)) for n in data.draw(COUNTS)]
    _agrees(model, _scored, units)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_convolution_the_other_way_has_its_rule(data):
    pick = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    kind, dims = pick((nn.ConvTranspose1d, 1), (nn.ConvTranspose2d, 2), (nn.ConvTranspose3d, 3))
    stride, dilation = pick(1, 2, 3), pick(1, 2)
    size = dict(stride=stride, dilation=dilation, padding=pick(0, 1), groups=pick(1, 2), bias=pick(True, False))
    with seeded(0):
        model = kind(2, 4, pick(1, 2, 3), output_padding=pick(*range(max(stride, dilation))), **size)
        units = [PrivacyUnit((torch.randn(n, 2, *(7, 6, 5)[:dims]),)) for n in data.draw(COUNTS)]
    _agrees(model, _scored, units)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_norm_without_a_gradient_is_that_of_the_gradient(data):
    """Layers with many weights and few positions: Gram matrices, and one gradient for all units."""
    pick = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    kind, dims = pick((nn.Conv1d, 1), (nn.Conv2d, 2), (nn.Conv3d, 3), (nn.Linear, 0))
    mode, padding, stride = pick("zeros", "reflect", "circular"), pick(0, 1, "same", "valid"), pick(1, 2)
    with seeded(0):
        if kind is nn.Linear:
            model, shape = nn.Linear(40, 50, bias=pick(True, False)), pick((40,), (2, 40), (2, 2, 40))
        else:
            size = dict(padding=padding, stride=1 if padding == "same" else stride, dilation=pick(1, 2))
            model = kind(20, 60, 2, bias=pick(True, False), padding_mode=mode, **size)
            shape = (20, *[3] * dims)
        units = [PrivacyUnit((torch.randn(n, *shape),)) for n in data.draw(COUNTS)]
    _agrees(model, _scored, units)
    _agrees(nn.Sequential(model, model) if kind is nn.Linear and shape[-1] == 50 else model, _scored, units, clip=1e3)


class _Placed(nn.Module):
    """Patches with a token and positions of the model's own, as a vision transformer has them."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 6))
        self.places = nn.Parameter(torch.randn(1, 5, 6))
        self.slope = nn.PReLU(5)
        self.norm = nn.InstanceNorm1d(5, affine=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        joined = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.places
        return self.head(self.norm(self.slope(joined)))


@pytest.mark.usefixtures("probes")
@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 2), (1, 3, 2)])
def test_a_parameter_that_every_row_gets_once_has_a_gradient_of_each_patient(counts):
    with seeded(0):
        model = _Placed()
        units = [PrivacyUnit((torch.randn(n, 4, 6),)) for n in counts]
    before = {name: id(p) for name, p in model.named_parameters()}
    _agrees(model, _scored, units)
    assert before == {name: id(p) for name, p in model.named_parameters()}


class _Tokens(nn.Module):
    """Whole numbers to scores, by a table whose row 0 is padding."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 6, padding_idx=0)
        self.norm = nn.LayerNorm((2, 6))
        self.head = nn.Linear(6, 3, bias=False)

    def forward(self, tokens):
        x = self.table(tokens).unflatten(1, (-1, 2))
        return self.head(self.norm(x))


@settings(max_examples=20, deadline=None)
@given(COUNTS, st.integers(0, 99))
def test_tables_norms_and_linear_layers_of_many_dimensions_have_their_rules(counts, seed):
    draw = torch.Generator().manual_seed(seed)
    with seeded(seed):
        model = _Tokens()
    _agrees(model, _scored, [PrivacyUnit((torch.randint(0, 7, (n, 4), generator=draw),)) for n in counts])
    with seeded(seed):
        flat = nn.Sequential(nn.Linear(5, 8), nn.GroupNorm(2, 8, affine=False), nn.Linear(8, 6), nn.GroupNorm(1, 6))
    _agrees(flat, _scored, [PrivacyUnit((torch.randn(n, 5, generator=draw),)) for n in counts])
    with seeded(seed):
        cube = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4, bias=False), nn.GELU())
    _agrees(cube, _scored, [PrivacyUnit((torch.randn(n, 2, 3, 5, generator=draw),)) for n in counts])


class _Reused(nn.Module):
    """One layer called twice, two layers with one weight, one frozen weight, one layer that is not used."""

    def __init__(self):
        super().__init__()
        self.twice, self.one, self.other = (nn.Linear(4, 4) for _ in range(3))
        self.other.weight = self.one.weight
        self.last, self.unused = nn.Linear(4, 2), nn.Linear(3, 3)
        self.last.weight.requires_grad_(False)

    def forward(self, x):
        x = self.twice(self.twice(x).relu_())
        with torch.no_grad():
            shift = self.one(x)
        return self.last(self.other(self.one(x)) + shift)


def test_weights_that_are_used_more_than_once_are_added_before_the_norm_and_unused_ones_are_zero():
    with seeded(0):
        model = _Reused()
    units = [PrivacyUnit((torch.randn(n, 4),)) for n in (2, 1, 2)]
    _agrees(model, _scored, units)
    total = bookkeeping_engine(2)(model, _scored, units, 0.3)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    sizes = [p.numel() for p in trainable(model)]
    by_name = dict(zip(names, torch.split(total, sizes), strict=True))
    assert "last.weight" not in by_name
    assert not by_name["unused.weight"].any()
    assert by_name["last.bias"].any()
    assert float(total.norm()) <= 3 * 0.3


class _Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.second(checkpoint(lambda y: self.first(y).tanh(), x, use_reentrant=False))


def test_a_network_that_computes_activations_again_is_counted_once():
    with seeded(0):
        _agrees(_Checkpointed(), _scored, [PrivacyUnit((torch.randn(n, 4),)) for n in (2, 1)])


class _Scaled(nn.Linear):
    """An equalised learning rate: the weight that is used is not the parameter."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight * 0.1, self.bias)


def _replaced():
    layer = nn.Linear(4, 4)
    layer.forward = lambda x: nn.functional.linear(x, layer.weight * 2)
    return layer


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: _Scaled(4, 4), "_Scaled"),
        (lambda: nn.MultiheadAttention(4, 2), "MultiheadAttention"),
        (lambda: parametrizations.weight_norm(nn.Linear(4, 4)), "ParametrizationList"),
        (lambda: torch.nn.utils.weight_norm(nn.Linear(4, 4)), "Linear"),
        (lambda: nn.Embedding(4, 4, max_norm=1.0), "Embedding"),
        (lambda: nn.Embedding(4, 4, scale_grad_by_freq=True), "Embedding"),
        (lambda: nn.Embedding(4, 4, sparse=True), "Embedding"),
        (lambda: nn.RMSNorm(4), "RMSNorm"),
        (lambda: nn.Bilinear(4, 4, 4), "Bilinear"),
        (lambda: nn.LSTM(4, 4), "LSTM"),
        (_replaced, "Linear"),
    ],
)
def test_a_parameter_without_a_rule_is_refused_by_the_name_of_its_module(make, named):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.Linear(4, 4), make())
    with pytest.raises(UnsuitableModelError, match=rf"\b{named}\b.*loop_engine"):
        bookkeeping_engine(2)(model, _scored, [], 0.3)
    for module in model[1].modules():
        module.requires_grad_(False)
    bookkeeping_engine(2)(model, _scored, [], 0.3)  # frozen, it needs none


class _Borrowed(nn.Module):
    """A weight that is used without its layer."""

    def __init__(self):
        super().__init__()
        self.layer, self.out = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.out(nn.functional.linear(x, self.layer.weight))


class _Mixing(nn.Module):
    """Rows that meet, as in a discriminator's deviation over the batch (Karras et al. 2018)."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        return self.out(x - x.mean(dim=0)).exp()


class _Drawing(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        return self.out(nn.functional.dropout(x, 0.5))


@pytest.mark.usefixtures("probes")
@pytest.mark.parametrize("make", [_Borrowed, _Mixing, _Drawing])
def test_what_one_backward_pass_would_get_wrong_in_silence_is_found_by_comparing(make, monkeypatch):
    with seeded(0):
        model = make()
        units = [PrivacyUnit((torch.randn(n, 4),)) for n in (2, 2, 1)]
    with pytest.raises(UnsuitableModelError, match=r"outside its layer.*loop_engine"):
        bookkeeping_engine(3)(model, _scored, units, 0.3)
    monkeypatch.setattr(clipping, "PROBES", 0)
    bookkeeping_engine(3)(model, _scored, units, 0.3)  # nothing else finds it


@pytest.mark.usefixtures("probes")
def test_a_model_is_compared_in_its_first_batches_and_then_no_more(monkeypatch):
    calls = []
    monkeypatch.setattr(clipping, "loop_engine", lambda *told: calls.append(1) or loop_engine(*told))
    found, engine = convolutions(), bookkeeping_engine(4)
    units = found.units((1, 2, 2))
    for _ in range(5):
        engine(found.model, found.loss, units, 0.3)
    assert len(calls) == clipping.PROBES
    with torch.no_grad():
        silent = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        nn.init.zeros_(silent[1].weight)
        nn.init.zeros_(silent[1].bias)
    for _ in range(5):  # no gradient at all shows nothing
        engine(silent, _scored, [PrivacyUnit((torch.randn(2, 4),))] * 2, 0.3)
    assert len(calls) == clipping.PROBES + 5


def _costs(monkeypatch, engine, counts, steps=4, **more):
    """How many patients the reference engine saw in each step, and the most rows of any pass."""
    found, passes, reference = convolutions(), [], []

    def spied(model, rows):
        passes.append(len(rows[0]))
        return found.loss(model, rows)

    def counted(model, loss, units, clip):
        reference[-1] += len(units)
        return loop_engine(model, loss, units, clip)

    monkeypatch.setattr(clipping, "loop_engine", counted)
    made = engine(32, **more)
    for step in range(steps):
        reference.append(0)
        made(found.model, spied, found.units(counts, seed=step), 0.3)
    return reference, max(passes)


@pytest.mark.usefixtures("probes")
@pytest.mark.parametrize("engine", [bookkeeping_engine, vmap_engine])
@pytest.mark.parametrize("counts", [(9, 9, 9), (9, 1, 9), (1, 9), (2, 2, 2, 2, 2, 2), (3, 1, 1)])
def test_two_patients_are_compared_in_each_of_the_first_batches_however_many_rows_they_have(
    monkeypatch, engine, counts
):
    # of patients with more than half of the rows of a pass no two are ever in one; a check without end costs double
    seen, rows = _costs(monkeypatch, engine, counts, most_rows=4)
    assert seen == [2, 2, 2, 0]
    assert rows <= max(4, *counts)  # the comparison must fit where the training does


@pytest.mark.usefixtures("probes")
@pytest.mark.parametrize("engine", [bookkeeping_engine, vmap_engine])
def test_one_patient_alone_is_not_compared_for_ever(monkeypatch, engine):
    assert _costs(monkeypatch, engine, (9,), most_rows=4)[0] == [0, 0, 0, 0]


@pytest.mark.usefixtures("probes")
@pytest.mark.parametrize("counts", [(9, 9, 9), (9, 1), (1, 1, 1)])
def test_a_wrong_engine_is_found_though_every_patient_fills_a_pass(counts):
    with seeded(0):
        model = _Borrowed()
        units = [PrivacyUnit((torch.randn(n, 4),)) for n in counts]
    with pytest.raises(UnsuitableModelError, match="`loop_engine` can train it"):
        bookkeeping_engine(3, most_rows=4)(model, _scored, units, 0.3)


class _Meeting(torch.autograd.Function):
    """The identity, whose rule for ``vmap`` lets patients meet."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g

    @staticmethod
    def vmap(info, in_dims, x):
        return x - x.mean(dim=in_dims[0], keepdim=True), in_dims[0]


class _MeetingInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        return self.out(_Meeting.apply(x)).exp()


@pytest.mark.usefixtures("probes")
@pytest.mark.parametrize("counts", [(2, 2), (1, 2, 3), (9, 9)])
def test_the_gpu_engine_is_compared_too(counts, monkeypatch):
    with seeded(0):
        model = _MeetingInside()
        units = [PrivacyUnit((torch.randn(n, 4),)) for n in counts]
    with pytest.raises(UnsuitableModelError, match=r"of different patients.*`loop_engine` can train it"):
        vmap_engine(3, most_rows=8)(model, _scored, units, 0.3)
    monkeypatch.setattr(clipping, "PROBES", 0)
    vmap_engine(3, most_rows=8)(model, _scored, units, 0.3)  # nothing else finds it


def test_a_gradient_penalty_is_refused_and_the_other_engines_can():
    found = convolutions("zeros")

    def penalised(model, rows):
        x = rows[0].requires_grad_(True)
        (by_x,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return by_x.square().flatten(1).sum(dim=1)

    units = found.units((1, 2))
    with pytest.raises(UnsuitableModelError, match="penalty"):
        bookkeeping_engine(2)(found.model, penalised, units, 0.3)
    assert loop_engine(found.model, penalised, units, 0.3).any()


class _Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        return self.out(x.transpose(0, 1)).transpose(0, 1)


class _Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        return self.out(input=x)


@pytest.mark.parametrize("make", [_Turned, _Named])
def test_a_layer_that_is_not_called_with_the_batchs_rows_is_refused(make):
    with pytest.raises(UnsuitableModelError, match="a row for each"):
        bookkeeping_engine(2)(make(), _scored, [PrivacyUnit((torch.randn(2, 3, 4),))] * 2, 0.3)


class _Overwriting(nn.Module):
    """The input of a layer is changed in place after the layer has read it."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 4)

    def forward(self, x):
        x = x * 1.0
        y = self.out(x)
        x.add_(1.0)
        return y + x


def test_an_input_that_is_overwritten_is_an_error():
    with pytest.raises(RuntimeError, match="inplace"):
        bookkeeping_engine(2)(_Overwriting(), _scored, [PrivacyUnit((torch.randn(2, 4),))], 0.3)


def _marks(model):
    return [
        (len(m._forward_hooks), len(m._backward_hooks), [(p.requires_grad, p.grad) for p in m.parameters()])
        for m in model.modules()
    ]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was_also_when_the_loss_fails(engine, fails):
    found = convolutions()
    found.model[0].bias.requires_grad_(False)
    other = nn.Parameter(torch.ones(()))  # of another network, such as a generator: it must not get a gradient
    before, weights = _marks(found.model), [p.clone() for p in found.model.parameters()]

    def loss(model, rows):
        losses = classified(model, rows) * other
        if fails:
            raise ArithmeticError
        return losses

    try:
        ENGINES[engine](found.model, loss, found.units((1, 2, 1)), 0.3)
    except ArithmeticError:
        assert fails
    assert _marks(found.model) == before
    assert other.grad is None
    assert all(torch.equal(old, new) for old, new in zip(weights, found.model.parameters(), strict=True))


def _flags():
    """All that decides how many bits of a float32 number a product keeps."""
    cudnn = torch.backends.cudnn
    kinds = (cudnn.conv, cudnn.rnn, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    return [
        *(cudnn.allow_tf32, cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32),
        *(torch.get_float32_matmul_precision(), *(kind.fp32_precision for kind in kinds)),
    ]


WHOLE = [False, False, False, "highest", "ieee", "ieee", "ieee", "ieee"]


@pytest.fixture
def hasty():
    """A process that asks for all the speed there is."""
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.benchmark, torch.get_float32_matmul_precision()
    cudnn.allow_tf32, cudnn.benchmark = True, True
    torch.set_float32_matmul_precision("medium")
    yield _flags()
    cudnn.allow_tf32, cudnn.benchmark = before[:2]
    torch.set_float32_matmul_precision(before[2])


@pytest.mark.usefixtures("probes")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("fails", [False, True])
def test_no_product_is_rounded_to_fewer_bits_and_afterwards_all_is_as_it_was(engine, fails, hasty):
    # TF32 has errors of 1e-3, which change with who else is in a chunk: MARGIN would not cover them
    found, seen = convolutions(), []

    def loss(model, rows):
        seen.append(_flags())
        if fails:
            raise ArithmeticError
        return found.loss(model, rows)

    try:
        ENGINES[engine](found.model, loss, found.units((1, 2, 1)), 0.3)
    except ArithmeticError:
        assert fails
    assert seen
    assert all(flags == WHOLE for flags in seen)
    assert _flags() == hasty
    assert "tf32" in hasty


@pytest.mark.gpu
@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("make", [vmap_engine, bookkeeping_engine])
@pytest.mark.parametrize("family", ["convolutions", "denoiser", "discriminator"])
def test_on_an_accelerator_too_a_patient_hardly_moves_the_gradients_of_the_others(make, family):
    found = FAMILIES[family]()
    found.model.cuda()
    units = found.units([1] * 24 + [4] * 8, scale=5.0)
    engine, broken = make(16), found.units((1,))[0]
    broken = PrivacyUnit((torch.full_like(broken.rows[0], math.nan), *broken.rows[1:]))  # counts as zero
    without = engine(found.model, found.loss, units, 0.7)
    # in one chunk more, in a chunk of another size, among others: what is left is rounding, and MARGIN covers it
    for at in (0, 8, 24):
        moved = float((engine(found.model, found.loss, [*units[:at], broken, *units[at:]], 0.7) - without).norm())
        assert moved <= 0.7 * gradient_recorder.MARGIN
    assert max(_reach(engine, found, units)) <= 0.7


class _Once(Sequence):
    """Units that may be asked for once each; with a broken one, which is never made."""

    def __init__(self, units, broken=None):
        self._units, self._broken, self.asked = units, broken, []

    def __len__(self):
        return len(self._units)

    def __getitem__(self, index):
        self.asked.append(index)
        return [][index] if index == self._broken else self._units[index]


@pytest.mark.usefixtures("probes")
@pytest.mark.parametrize("engine", ENGINES)
def test_every_unit_is_asked_for_once(engine):
    found = convolutions()
    units = found.units((1, 2, 1, 3, 1))
    once = _Once(units)
    total = ENGINES[engine](found.model, found.loss, once, 0.3)
    assert once.asked == list(range(len(units)))
    assert float((total - loop_engine(found.model, found.loss, units, 0.3)).norm()) <= 1e-6


@pytest.mark.parametrize("engine", ENGINES)
def test_a_unit_that_cannot_be_made_ends_the_step_and_is_not_the_end_of_the_batch(engine):
    # a Sequence's own iterator takes IndexError for its end: everybody behind would be left out in silence
    found = convolutions()
    with pytest.raises(IndexError):
        ENGINES[engine](found.model, found.loss, _Once(found.units((1, 2, 1)), broken=1), 0.3)


def test_a_chunk_of_nobody_is_refused():
    for make in (vmap_engine, bookkeeping_engine):
        for size in ((0,), (1, 0)):
            with pytest.raises(ValueError, match="at least one patient"):
                make(*size)


@pytest.mark.parametrize("make", [vmap_engine, bookkeeping_engine])
def test_no_pass_has_more_rows_than_allowed_but_for_one_patient_alone(make):
    found, passes = convolutions(), []

    def spied(model, rows):
        passes.append(len(rows[0]))
        return found.loss(model, rows)

    units = found.units((1, 1, 3, 9, 1, 2, 2))
    total = make(3, most_rows=4)(found.model, spied, units, 0.3)
    assert float((total - loop_engine(found.model, found.loss, units, 0.3)).norm()) <= 1e-6
    assert passes == ([4, 9, 1, 2] if make is vmap_engine else [4, 9, 3, 4])  # vmap shows the rows of one


def test_a_model_without_parameters_is_refused_by_every_engine():
    for engine in ENGINES.values():
        with pytest.raises(UnsuitableModelError, match="no parameter"):
            engine(nn.Flatten(), _scored, [], 1.0)


@pytest.mark.parametrize(
    "rows",
    [
        (),
        (torch.zeros(0, 3),),
        (torch.zeros(2, 3), torch.zeros(3)),
        (torch.zeros(()),),
        (torch.zeros(2), torch.zeros(())),
    ],
)
def test_a_unit_without_rows_or_with_unequal_ones_can_not_be_built(rows):
    with pytest.raises(ValueError, match="row"):
        PrivacyUnit(rows)


def test_instance_norm_without_memory_is_allowed():
    refuse_batch_statistics(nn.Sequential(nn.InstanceNorm2d(4), nn.GroupNorm(2, 4)))


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 6), max_size=7), st.integers(0, 1000), st.sampled_from([0.1, 10.0, 1e4]))
def test_the_engines_agree_on_any_cohort(counts, seed, scale):
    found: Family = convolutions()
    units = found.units(counts, seed, scale)
    reference = loop_engine(found.model, found.loss, units, 0.5)
    for engine in (vmap_engine(3), bookkeeping_engine(3)):
        assert float((engine(found.model, found.loss, units, 0.5) - reference).abs().max()) <= 1e-5
