"""Local style alignment: each cluster's centroid is moved until its image has the textures of the members.

k-SALSA, section 3.2, Eq. 1-7 and Algorithm 1, lines 5-17, for many clusters at once. The generator modulates
activations, so codes of different clusters go through it in one batch. Values of the sources are computed once for
each cluster, not in each step; only the codes get a gradient; a converged cluster leaves and the next takes its
place.

**A patient counts once.** In the paper x^(i) is one person's only image. Here i is a patient: where it has v images,
each enters Eq. 7 with weight 1/v, so that nobody's texture weighs more for being photographed more often. Averaging
the Grams of a patient's images instead would mix patches that do not show the same place.

**Scale and lambda.** Eq. 7 sums raw Gram matrices over members and patches, so the paper's lambda means something for
one network, layer, image size and k only (the published code runs weights 1e2 and 1e-6, not the paper's lambda). With
N = channels x pixels of a window, Eq. 7's loss is L_sum = N^2 k p L_mean, where L_mean takes S / N and the mean over
patients and patches. lambda L_c + (1 - lambda) s L and lambda' L_c + (1 - lambda') L have the same minimum when
lambda' = lambda / (lambda + (1 - lambda) s). ``relative``, the default, goes one step further and
divides by the cluster's mean ||S_source||^2, which removes the network's own units: 1 is what an image without any
texture would cost, and one lambda serves every extractor.

**How far a code may go.** The published rate of 0.1 over 100 steps is no size without the generator that it was found
for: of a small one it carries codes to where nothing was ever trained, and the grade is lost. So the rate counts in
:func:`agent.models.stylegan.restyle.scatter`, the public spread of the generator's codes, and its default is small, a
deviation from the paper. It was chosen at 32 px, judged on phantoms that are in no reported figure (see
:class:`deploy.reproduction.experiment.Settings`); for a large generator nobody has. ``PUBLISHED`` is the paper's.

Local style: Gram matrices of the patches of a feature map, their correspondence, and how far they are apart.

k-SALSA, section 3.2, Eq. 1-3 and 7. A Gram matrix is symmetric, so its upper triangle is kept, off-diagonal entries
times sqrt(2): Euclidean products and distances of these vectors are the Frobenius ones of the matrices, at half the
memory. Everything here is float32 or wider, whatever the features are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Final, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import avg_pool2d, normalize, pad

from agent.domain import Clusters, Cohort
from agent.models.features.feature_net import FeatureNet
from agent.models.image_tensors import resized, to_tensor
from agent.models.stylegan.network import Generator
from agent.models.stylegan.restyle import scatter
from protos.common.errors import TrainingError

Metric = Literal["cos", "mse"]
_TINY: Final = 1e-12


@dataclass(frozen=True, slots=True)
class Grid:
    """Where the windows lie: ``side`` x ``side`` of them tile the map; ``overlap`` > 1 slides them by a part."""

    side: int = 4  # 4 x 4 = 16 patches (k-SALSA, supplement B); 1: one patch, the global style of Table 4
    overlap: int = 1  # stride = window / overlap; the published code has 1, the text says "sliding window"

    def __post_init__(self) -> None:
        """Refuse what is no grid."""
        if not (1 <= self.side <= 64 and 1 <= self.overlap <= 8):
            raise ValueError("a grid has 1 to 64 windows a side and an overlap of 1 to 8")

    @property
    def patches(self) -> int:
        """p, the number of windows."""
        return (self.overlap * (self.side - 1) + 1) ** 2

    def elements(self, channels: int, h: int, w: int) -> int:
        """The feature values in one window of a (channels, h, w) map: what a Gram matrix is divided by."""
        return channels * (h // self.side) * (w // self.side)


def local_styles(features: Tensor, grid: Grid) -> Tensor:
    """The local style features S of Eq. 1-2, divided by the number of values in a window (channels x pixels).

    The division makes S a mean, so that a loss does not grow with resolution or width; a cosine does not see it.
    Overlapping windows cost no more: a Gram matrix sums over pixels, so that of a window is the sum of its cells'.

    Args:
        features: (n, c, h, w).
        grid: the windows; side x overlap divides h and w.
    Returns:
        (n, p, c (c + 1) / 2): scaled upper triangles, the windows in row-major order.
    Raises:
        ValueError: the map cannot be cut into these windows.
    """
    n, c, h, w = features.shape
    g = grid.side * grid.overlap
    if h % g or w % g:
        raise ValueError("the grid does not divide the feature map: choose another grid or layer")
    if features.dtype not in (torch.float32, torch.float64):
        features = features.float()
    cells = features.reshape(n, c, g, h // g, g, w // g).permute(0, 2, 4, 1, 3, 5).reshape(n * g * g, c, -1)
    grams = (cells @ cells.transpose(1, 2)).reshape(n, g * g, c * c)
    row, column = torch.triu_indices(c, c, device=features.device)
    scale = (row != column).to(features.dtype).add(1.0).sqrt() / grid.elements(c, h, w)
    styles: Tensor = grams.index_select(2, row * c + column) * scale
    if grid.overlap > 1:
        maps = styles.transpose(1, 2).reshape(n, -1, g, g)
        styles = avg_pool2d(maps, grid.overlap, stride=1, divisor_override=1).flatten(2).transpose(1, 2)
    return styles


def correspondence(source: Tensor, target: Tensor, metric: Metric) -> Tensor:
    """a(i, j) of Eq. 3: the target patch that is most like each source patch, one matrix product for all pairs.

    Args:
        source: (b, r, d), the r = images x patches source patches of each of b clusters.
        target: (b, p, d).
        metric: ``cos`` as in Eq. 3, or ``mse`` (the nearest; Supplementary Table 5).
    Returns:
        (b, r) int64. No gradient passes: an index is no function to differentiate.
    """
    with torch.no_grad():
        if metric == "cos":
            # the source's own length multiplies a whole row, and moves no maximum
            likeness = source @ normalize(target, dim=2).transpose(1, 2)
        else:
            likeness = source @ target.transpose(1, 2) - 0.5 * target.square().sum(dim=2)[:, None, :]
        return likeness.argmax(dim=2)


def style_loss(source: Tensor, weight: Tensor, target: Tensor, match: Tensor, metric: Metric) -> Tensor:
    """Eq. 7 with a weight for every source patch: sum of ``weight`` x ||S_source - S_target,a||_F^2 of each cluster.

    All source patches matched to one target patch pull it to their weighted mean, so the sum over r patches is, but
    for a constant, one over p: sum_a n_a ||t_a - mean_a||^2 + scatter. The gradient is the same, and costs p, not r.

    Args:
        source: (b, r, d).
        weight: (b, r), zero for padding.
        target: (b, p, d); the gradient goes here.
        match: (b, r), from :func:`correspondence`.
        metric: ``mse`` as in Eq. 7, or ``cos``: 1 - cosine in place of the squared distance (Supplementary Table 5).
    Returns:
        (b,).
    """
    b, r, _ = source.shape
    taken = source.new_zeros(b, target.shape[1], r).scatter_(1, match[:, None, :], weight[:, None, :])  # (b, p, r)
    if metric == "cos":
        pulls = taken @ normalize(source, dim=2)
        return weight.sum(dim=1) - (normalize(target, dim=2) * pulls).sum(dim=(1, 2))
    count = taken.sum(dim=2)  # n_a
    mean = (taken @ source) / count.clamp_min(_TINY)[:, :, None]
    energy = (weight * source.square().sum(dim=2)).sum(dim=1)
    scatter = energy - (count * mean.square().sum(dim=2)).sum(dim=1)
    return (count * (target - mean).square().sum(dim=2)).sum(dim=1) + scatter.clamp_min(0.0)


Sources = Sequence[Sequence[Sequence[NDArray[np.float32]]]]  # cluster -> patient -> image, (h, w[, 3]) in [0, 1]
Scale = Literal["relative", "mean", "sum"]
Content = Literal["centroid", "members"]
Matching = Literal["best", "same"]
Unit = Literal["spread", "code"]
_EPS: Final = 1e-8  # Adam's


class AlignmentNotFiniteError(TrainingError, ValueError):
    """A feature or a loss is not a number, so nothing is made. The text does not name the patient (P14)."""

    def __init__(self) -> None:
        """Say only that nothing is made."""
        super().__init__("a feature or a loss is not finite: nothing is made")


@dataclass(frozen=True, slots=True)
class Alignment:
    """Public configuration of one alignment. Scale, rate and steps apart, defaults are k-SALSA's (B)."""

    grid: Grid = field(default_factory=Grid)  # of patches whose styles are compared
    layer: int = 1  # of the style network's maps; the first follows the second convolution, as in the paper
    lam: float = 0.05  # lambda of Eq. 5: content's share; 1: content only, 0: style only (Table 4)
    scale: Scale = "relative"  # "sum" is Eq. 7 to the letter
    content: Content = "centroid"  # Eq. 6: F(G(w0)); "members": near to what the published code does
    matching: Matching = "best"  # Eq. 3; "same": patch j with patch j, Table 4's "no alignment"
    align_by: Metric = "cos"  # COS-MSE of Supplementary Table 5
    compare_by: Metric = "mse"  # the matched patches, in the loss
    steps: int = 25  # T
    rate: float = 0.0022  # of Adam
    unit: Unit = "spread"  # what a rate of 1 is: the generator's own scatter, or "code", 1 as it stands
    betas: tuple[float, float] = (0.9, 0.99)  # of Adam
    ramp_up: float = 0.05  # shares of T, as the published code runs it; 0 and 0: a constant rate, as the paper says
    ramp_down: float = 0.25  # share of T at the end
    tolerance: float = 0.0  # stop when the loss has not fallen by this share in ``patience`` steps; 0: always T steps
    patience: int = 10  # steps without progress before it stops
    batch: int = 16  # clusters at once
    until: int | None = None  # resolution at which the loss looks; None: the generator's own
    bf16: bool = False  # networks in bfloat16, Grams and losses in float32: for GPUs

    def __post_init__(self) -> None:
        """Refuse what cannot run. Written so that NaN is refused."""
        words = ((self.scale, Scale), (self.content, Content), (self.matching, Matching), (self.unit, Unit))
        if not all(word in get_args(known) for word, known in words):
            raise ValueError("scale, content, matching and unit are words of their lists")
        if not {self.align_by, self.compare_by} <= set(get_args(Metric)):
            raise ValueError("a metric is cos or mse")
        shares = (self.lam, self.ramp_up, self.ramp_down, self.tolerance)
        if not all(0.0 <= share <= 1.0 for share in shares) or not self.ramp_up + self.ramp_down <= 1.0:
            raise ValueError("lambda, ramps and tolerance are shares, and the ramps fit into the run")
        if not (0.0 < self.rate < math.inf and all(0.0 <= beta < 1.0 for beta in self.betas)):
            raise ValueError("a learning rate is positive and betas lie in [0, 1)")
        if not (min(self.steps, self.batch, self.layer) >= 1 and self.patience >= 2):
            raise ValueError("steps, batch and layer are at least 1 and patience at least 2")


PUBLISHED: Final = Alignment(steps=100, rate=0.1, unit="code")  # supplement B and the published code, the scale apart


@dataclass(frozen=True, slots=True, eq=False)
class Networks:
    """The generator and the two networks that see its images. All run on the generator's device."""

    generator: Generator
    style: FeatureNet
    content: FeatureNet


@dataclass(frozen=True, slots=True, eq=False)
class Aligned:
    """The representatives' codes, and how they were found. The losses are functions of patients: they stay inside."""

    ws: NDArray[np.float32]  # (m, num_ws, w_dim)
    steps: NDArray[np.int64]  # (m,) taken
    style: NDArray[np.float32]  # (m, T) Eq. 7 at the chosen scale, before every step; NaN after the last
    content: NDArray[np.float32]  # (m, T) Eq. 6


def sources_of(cohort: Cohort, clusters: Clusters) -> Sources:
    """Every image of every patient of every cluster; nothing is copied.

    Raises:
        ValueError: a cluster names a patient who is not in the cohort, or is empty.
    """
    images = {patient.pseudonym: tuple(image.pixels for image in patient.images) for patient in cohort.patients}
    if not all(cluster and all(patient in images for patient in cluster) for cluster in clusters.members):
        raise ValueError("every cluster must hold patients of the cohort")
    return tuple(tuple(images[patient] for patient in cluster) for cluster in clusters.members)


def align(networks: Networks, w0: NDArray[np.float32], sources: Sources, plan: Alignment) -> Aligned:
    """Algorithm 1, lines 5-17: from every cluster's w0 (Eq. 4) to its w_avg.

    A cluster's result does not depend on which others share its batch (but for the last bits of float32). Nothing is
    random. With ``tolerance`` 0 the answer is w^(T); with early stop, the code of the lowest loss seen.

    Args:
        networks: frozen; their parameters get no gradient and do not change.
        w0: (m, num_ws, w_dim), the mean of the patients' codes.
        sources: the images of every cluster, in the order of w0.
        plan: the configuration.
    Raises:
        AlignmentNotFiniteError: a feature or a loss is NaN or infinite.
        ValueError: w0 and the sources do not fit, a cluster has fewer than two patients, one has no image, the grid
            does not divide the feature map, or the generator's codes have no spread to measure a rate in.
    """
    if w0.ndim != 3 or len(w0) != len(sources) or not len(w0):
        raise ValueError("one code (num_ws, w_dim) for each cluster")
    if not all(len(cluster) >= 2 and all(len(patient) for patient in cluster) for cluster in sources):
        raise ValueError("every cluster holds two patients or more, each with an image")
    if not bool(np.isfinite(w0).all()):
        raise AlignmentNotFiniteError
    with _frozen(networks.generator):
        return _run(_Problem(networks, plan), w0, sources)


@contextmanager
def _frozen(generator: Generator) -> Iterator[None]:
    """No parameter asks for a gradient meanwhile: the backward pass makes none for the weights."""
    asked = [p for p in generator.parameters() if p.requires_grad]
    for parameter in asked:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in asked:
            parameter.requires_grad_(True)


@dataclass(slots=True, eq=False)
class _Active:
    """The clusters in work, one row each."""

    which: Tensor  # (b,) int64, their places in w0
    step: Tensor  # (b,) int64, steps taken
    w: Tensor  # (b, num_ws, w_dim)
    m: Tensor  # Adam's moments, like w
    v: Tensor
    best_w: Tensor  # like w
    best: Tensor  # (b,) the lowest loss that counted as a fall
    lowest: Tensor  # (b,) the lowest loss
    stale: Tensor  # (b,) steps since it fell
    source: Tensor  # (b, r, d) styles of all patches of all images, padded with zeros
    weight: Tensor  # (b, r): 1 / (patients x the patient's images x patches), 0 for padding
    factor: Tensor  # (b,): from the mean form of Eq. 7 to the scale of the plan
    target: Tensor  # (b, q, e): unit embeddings that Eq. 6 looks at, padded
    share: Tensor  # (b, q): their weights, summing to 1

    def rows(self, keep: Tensor) -> _Active:
        """Only these."""
        return _Active(*(getattr(self, f.name)[keep] for f in fields(self)))


def _joined(parts: Sequence[_Active]) -> _Active:
    """All of them, padded to one width."""
    return _Active(*(_stacked([getattr(part, f.name) for part in parts]) for f in fields(_Active)))


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Along the first axis; the second is padded with zeros to the widest."""
    if tensors[0].ndim == 1:
        return torch.cat(list(tensors))
    wide = max(t.shape[1] for t in tensors)
    return torch.cat([pad(t, (0, 0) * (t.ndim - 2) + (0, wide - t.shape[1])) for t in tensors])


class _Problem:
    """The losses of one configuration, and what they need of a cluster."""

    def __init__(self, networks: Networks, plan: Alignment) -> None:
        self.networks, self.plan = networks, plan
        self.like = next(networks.generator.parameters())  # its device and type are those of the run
        self.rate = plan.rate * (float(scatter(networks.generator)) if plan.unit == "spread" else 1.0)

    def picture(self, w: Tensor) -> Tensor:
        with torch.autocast(self.like.device.type, torch.bfloat16, enabled=self.plan.bf16):
            images: Tensor = self.networks.generator.synthesis(w, noise="const", until=self.plan.until)
        return images

    def styles(self, images: Tensor) -> tuple[Tensor, int]:
        """(n, p, d) and N, the values in a window."""
        with torch.autocast(self.like.device.type, torch.bfloat16, enabled=self.plan.bf16):
            features = self.networks.style.maps(images, self.plan.layer)[-1]
        return local_styles(features, self.plan.grid), self.plan.grid.elements(*features.shape[1:])

    def embedding(self, images: Tensor) -> Tensor:
        """(n, e) of unit length, so that Eq. 6's product is a cosine."""
        with torch.autocast(self.like.device.type, torch.bfloat16, enabled=self.plan.bf16):
            embedded = self.networks.content.embed(images)
        return normalize(embedded.to(self.like.dtype), dim=1)

    def losses(self, active: _Active) -> tuple[Tensor, Tensor]:
        """(b,) each: Eq. 7 at the plan's scale, Eq. 6."""
        plan = self.plan
        images = self.picture(active.w)
        style = content = images.new_zeros(len(active.w), dtype=self.like.dtype)
        if plan.lam < 1.0:
            target, _ = self.styles(images)
            if plan.matching == "same":
                match = torch.arange(plan.grid.patches, device=target.device)
                match = match.repeat(active.source.shape[1] // plan.grid.patches).expand(len(target), -1)
            else:
                match = correspondence(active.source, target, plan.align_by)
            style = active.factor * style_loss(active.source, active.weight, target, match, plan.compare_by)
        if plan.lam > 0.0:
            cosines = (active.target @ self.embedding(images)[:, :, None])[:, :, 0]
            content = 1.0 - (active.share * cosines).sum(dim=1)
        return style, content

    def enter(self, places: Sequence[int], w0: NDArray[np.float32], sources: Sources) -> _Active:
        """Everything about these clusters that no step changes, made once."""
        with torch.no_grad():
            return _joined([self._one(place, w0[place], sources[place]) for place in places])

    def _one(self, place: int, w0: NDArray[np.float32], cluster: Sequence[Sequence[NDArray[np.float32]]]) -> _Active:
        plan, like = self.plan, self.like
        w = torch.from_numpy(w0).to(like)[None]
        images = to_tensor(np.stack([image for patient in cluster for image in patient])).to(like)
        if plan.until is not None:
            images = resized(images, plan.until)
        each = torch.tensor([1.0 / (len(cluster) * len(patient)) for patient in cluster for _ in patient]).to(like)
        p = plan.grid.patches
        source, weight, factor = like.new_zeros(1, p, 1), like.new_zeros(1, p), like.new_ones(1)
        if plan.lam < 1.0:
            styles, elements = self.styles(images)
            source = styles.to(like.dtype).reshape(1, -1, styles.shape[-1])
            weight = (each / p).repeat_interleave(p)[None]
            factor = self._factor(source, weight, len(cluster), elements)
        target, share = like.new_zeros(1, 1, 1), like.new_zeros(1, 1)
        if plan.lam > 0.0:
            centroid = plan.content == "centroid"
            target = self.embedding(self.picture(w) if centroid else images)[None]
            share = each.new_ones(1, 1) if centroid else each[None]
        if not all(bool(torch.isfinite(t).all()) for t in (source, factor, target)):
            raise AlignmentNotFiniteError
        none, zero = like.new_full((1,), math.inf), torch.zeros(1, dtype=torch.int64, device=like.device)
        state = (torch.zeros_like(w), torch.zeros_like(w), w.clone(), none, none.clone(), zero.clone())
        return _Active(zero + place, zero, w, *state, source, weight, factor, target, share)

    def _factor(self, source: Tensor, weight: Tensor, patients: int, elements: int) -> Tensor:
        """(1,): what the mean form is multiplied by. A cosine has no units, and is never divided by an energy."""
        raw = float(elements) ** 2 if self.plan.compare_by == "mse" else 1.0
        if self.plan.scale == "sum":
            return source.new_full((1,), raw * patients * self.plan.grid.patches)
        if self.plan.scale == "relative" and self.plan.compare_by == "mse":
            return 1.0 / (weight * source.square().sum(dim=2)).sum(dim=1)  # no texture at all: infinite, refused
        return source.new_ones(1)

    def rates(self, step: Tensor) -> Tensor:
        """(b,) learning rates of these steps: linear up, then a half cosine down, as the published code runs."""
        plan, t = self.plan, step.to(self.like.dtype) / self.plan.steps
        ramp = torch.ones_like(t)
        if plan.ramp_down > 0.0:
            ramp = 0.5 - 0.5 * torch.cos(math.pi * ((1.0 - t) / plan.ramp_down).clamp(max=1.0))
        if plan.ramp_up > 0.0:
            ramp = ramp * (t / plan.ramp_up).clamp(max=1.0)
        return self.rate * ramp

    def advance(self, active: _Active) -> tuple[Tensor, Tensor]:
        """One step of Adam for every cluster, each at its own count; the losses before it. Changes ``active``."""
        w = active.w.detach().requires_grad_()
        active.w = w
        style, content = self.losses(active)
        total = self.plan.lam * content + (1.0 - self.plan.lam) * style  # Eq. 5
        (slope,) = torch.autograd.grad(total.sum(), w)
        total, (one, two) = total.detach(), self.plan.betas
        lower = total < active.lowest
        active.best_w = torch.where(lower[:, None, None], w.detach(), active.best_w)
        active.lowest = torch.minimum(total, active.lowest)
        fell = total < active.best * (1.0 - self.plan.tolerance)
        active.best = torch.where(fell, total, active.best)
        active.stale = torch.where(fell, 0, active.stale + 1)
        active.m = one * active.m + (1.0 - one) * slope
        active.v = two * active.v + (1.0 - two) * slope.square()
        count = (active.step + 1).to(w.dtype)[:, None, None]
        denominator = (active.v / (1.0 - two**count)).sqrt() + _EPS
        stride = self.rates(active.step)[:, None, None] / (1.0 - one**count)
        active.w = w.detach() - stride * active.m / denominator
        active.step = active.step + 1
        return style.detach(), content.detach()


def _run(problem: _Problem, w0: NDArray[np.float32], sources: Sources) -> Aligned:
    plan, m = problem.plan, len(w0)
    out = Aligned(
        np.array(w0, np.float32),
        np.zeros(m, np.int64),
        np.full((m, plan.steps), np.nan, np.float32),
        np.full((m, plan.steps), np.nan, np.float32),
    )
    # clusters of like size together: less padding
    waiting = sorted(range(m), key=lambda j: -sum(len(patient) for patient in sources[j]))
    active = None
    while waiting or active is not None:
        room = plan.batch - (0 if active is None else len(active.which))
        if waiting and room:
            entered = problem.enter(waiting[:room], w0, sources)
            active, waiting = entered if active is None else _joined([active, entered]), waiting[room:]
        assert active is not None  # either something was in work or something entered
        at, which = active.step.cpu().numpy(), active.which.cpu().numpy()
        style, content = (t.cpu().numpy() for t in problem.advance(active))
        if not bool(np.isfinite(style).all() and np.isfinite(content).all() and torch.isfinite(active.w).all()):
            raise AlignmentNotFiniteError
        out.style[which, at], out.content[which, at] = style, content
        done = active.step >= plan.steps
        if plan.tolerance > 0.0:
            done |= active.stale >= plan.patience
        if bool(done.any()):
            left = active.which[done].cpu().numpy()
            out.ws[left] = (active.best_w if plan.tolerance > 0.0 else active.w)[done].float().cpu().numpy()
            out.steps[left] = active.step[done].cpu().numpy()
            active = None if bool(done.all()) else active.rows(~done)
    return out
