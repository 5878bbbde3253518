"""Quality rules that a head must pass before it is changed. In doubt, the head is refused.

Each rule compares one number of :class:`QualityMeasures` with a limit and names a code of
:mod:`agent.volumes.errors`. The limits separate a real head from volumes that are not heads:
``tests/agent/defacing/test_quality.py`` measures both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from agent.defacing.brain_extraction import Atlas, Register, around, dice, extract
from agent.defacing.head import HeadScan
from agent.defacing.head_mask import head_mask
from agent.domain import Volume
from agent.volumes.errors import NotDefacedError
from agent.volumes.grid import check, oriented, spacing

if TYPE_CHECKING:
    from agent.defacing.head import HeadScan

# 0.5 to 0.6 for the real head in T1 at any grain, turn or bias tried, 0.34 in made FLAIR; 0.05 to 0.12 for bottles,
# shells and knees. Made T2 shows hardly more, 0.09: that is enough only with a skull around it, as those lack.
LIKENESS: Final = 0.2
FAINT: Final = 0.07
HEAD_ML: Final = (1800.0, 12000.0)  # what the image shows: 4100 of the real one, without mouth, chin and neck
# Within the skull 1469 (sd 102) mL in men, 1289 (111) in women (Matsumae et al. 1996, J Neurosurg 84:982); brain
# alone 791 to 1500 (doi 10.1007/s00276-010-0650-4). Our estimate holds the fluid between the folds; heads that were
# scaled to the template, as the real one of our tests (1740), are larger than life.
BRAIN_ML: Final = (900.0, 2000.0)
BARE: Final = 0.75  # brain per head: 0.44 for the real head, 0.9 and more once the skull is off
AGREEMENT: Final = 0.88  # Dice; 0.94 and more on the real head in every state tried
SYMMETRY: Final = 0.90  # Dice with the mirror image in the template's space; 0.95 on the real head
# Scalp and skull: 9.5 mm and more above what we keep of the real head; in infants half of adults' (Beauchamp et al.
# 2011, PLoS ONE 6:e24981).
SKIN_MM: Final = 4.0
SKIN_LEVEL_MM: Final = -45.0  # of the template: lower lie the neck and the plane that cuts it, where brain meets air
AT_SKIN: Final = 0.005  # share of the brain's surface that may lie closer all the same
LEVEL_MM: Final = -70.0  # of the template: what leaves the image lower is neck, jaw or shoulder
BRAIN_CUT_CM2: Final = 1.0  # of brain in the outermost voxels of the image, but for the side of the neck
STEM_CUT_CM2: Final = 75.0  # at that side: the stem and the lowest cerebellum; half a brain shows twice that
HEAD_CUT_CM2: Final = 40.0  # of head in any other side: an ear or the tip of a nose may be cut, a cheek not
EYES_MM: Final = (
    (-45.0, 45.0),
    (52.0, 76.0),
    (-52.0, -22.0),
)  # of the template: both orbits and the root of the nose
EYES_SEEN: Final = 0.98  # share of that box that lies in the image
EYES_THERE: Final = 0.6  # share of it that is head: what was de-faced before has lost it


@dataclass(frozen=True, slots=True)
class QualityMeasures:
    """What the rules look at."""

    likeness: float
    head_ml: float
    brain_ml: float  # of the estimate
    bare: float  # brain per head
    agreement: float
    symmetry: float
    at_skin: float  # share of the surface of what is kept that lies closer to air than SKIN_MM
    brain_cut_cm2: float  # the most in one side of the image
    stem_cut_cm2: float  # in the side of the neck
    head_cut_cm2: float  # the most in one side
    eyes_seen: float
    eyes_there: float


def measure(head: HeadScan) -> QualityMeasures:
    """Measure a head. No number is a judgement yet."""
    mm = spacing(head.volume.affine)
    ml = float(np.prod(mm)) / 1000
    brain, lies = head.brain, head.brain.to_template @ head.volume.affine
    down = _neck_side(lies)
    sides = {side: _area_cm2(brain.tight, side, mm, None) for side in _SIDES}
    upper = {side: _area_cm2(head.skin, side, mm, lies) for side in _SIDES if side != down}
    seen, there = _eyes(head.skin, lies)
    head_ml, brain_ml = float(head.skin.sum()) * ml, float(brain.tight.sum()) * ml
    return QualityMeasures(
        likeness=brain.likeness,
        head_ml=head_ml,
        brain_ml=brain_ml,
        bare=brain_ml / head_ml if head_ml > 0 else float("nan"),
        agreement=brain.agreement,
        symmetry=_symmetry(brain.tight, lies),
        at_skin=_at_skin(brain.mask, head.skin, mm, lies),
        brain_cut_cm2=max(area for side, area in sides.items() if side != down),
        stem_cut_cm2=sides[down],
        head_cut_cm2=max(upper.values()),
        eyes_seen=seen,
        eyes_there=there,
    )


def judge(head: HeadScan) -> None:
    """Every rule, the most telling first.

    Raises:
        NotDefacedError: ``no_head``, ``brain_extracted``, ``part_of_head``, ``brain_volume``, ``brain_disagreement``,
            ``brain_asymmetric``, ``brain_at_skin``, ``no_face``.
    """
    code = broken(measure(head))
    if code:
        raise NotDefacedError(code)


def broken(found: QualityMeasures) -> str:
    """The first rule that these numbers break, or "". A number that is none breaks its rule."""
    rules = (
        ("no_head", found.likeness >= LIKENESS or (found.likeness >= FAINT and found.at_skin <= AT_SKIN)),
        ("brain_extracted", found.bare <= BARE),
        ("no_head", HEAD_ML[0] <= found.head_ml <= HEAD_ML[1]),
        ("part_of_head", found.brain_cut_cm2 <= BRAIN_CUT_CM2),
        ("part_of_head", found.stem_cut_cm2 <= STEM_CUT_CM2),
        ("part_of_head", found.head_cut_cm2 <= HEAD_CUT_CM2),
        ("no_face", found.eyes_seen >= EYES_SEEN),
        ("brain_disagreement", found.agreement >= AGREEMENT),
        ("brain_volume", BRAIN_ML[0] <= found.brain_ml <= BRAIN_ML[1]),
        ("brain_asymmetric", found.symmetry >= SYMMETRY),
        ("no_face", found.eyes_there >= EYES_THERE),
        ("brain_at_skin", found.at_skin <= AT_SKIN),
    )
    return next((code for code, held in rules if not held), "")


_SIDES: Final = tuple((axis, end) for axis in range(3) for end in (0, -1))


def _neck_side(lies: NDArray[np.float64]) -> tuple[int, int]:
    """The side of the grid that faces downwards in the template."""
    axes = lies[:3, :3] / np.linalg.norm(lies[:3, :3], axis=0)
    return min(_SIDES, key=lambda side: float(axes[2, side[0]]) * (1 if side[1] else -1))


def _area_cm2(
    mask: NDArray[np.bool_], side: tuple[int, int], mm: NDArray[np.float64], lies: NDArray[np.float64] | None
) -> float:
    """Of a mask in the outermost plane of one side; with ``lies`` only what is above ``LEVEL_MM``."""
    axis, end = side
    plane = mask.take(end, axis=axis)
    if lies is not None:
        where = np.insert(np.argwhere(plane), axis, end % mask.shape[axis], axis=1)
        count = int((where @ lies[2, :3] + lies[2, 3] > LEVEL_MM).sum())
    else:
        count = int(plane.sum())
    return count * float(np.delete(mm, axis).prod()) / 100


def _symmetry(mask: NDArray[np.bool_], lies: NDArray[np.float64]) -> float:
    """Dice of the mask and its image left for right, each voxel carried over through the template."""
    mirror = np.linalg.inv(lies) @ np.diag([-1.0, 1.0, 1.0, 1.0]) @ lies
    turned = ndimage.affine_transform(
        mask.astype(np.uint8), mirror[:3, :3], mirror[:3, 3], order=0, mode="grid-constant", cval=0
    )
    return dice(mask, np.asarray(turned, bool))


def _at_skin(
    mask: NDArray[np.bool_], skin: NDArray[np.bool_], mm: NDArray[np.float64], lies: NDArray[np.float64]
) -> float:
    """Share of the mask's surface near air. Where the image ends is no air: the head goes on there."""
    if not bool(mask.any()) or bool(skin.all()):
        return float("nan")
    box = around(mask, mm, SKIN_MM)  # air further away does not matter
    surface = np.argwhere(mask[box] & ~ndimage.binary_erosion(mask[box], border_value=1))
    heights = (surface + [side.start for side in box]) @ lies[2, :3] + lies[2, 3]
    surface = surface[heights > SKIN_LEVEL_MM]
    if not len(surface):
        return float("nan")
    if bool(skin[box].all()):
        return 0.0
    deep = ndimage.distance_transform_edt(skin[box], sampling=mm)[tuple(surface.T)]
    return float((deep < SKIN_MM).mean())


def _eyes(skin: NDArray[np.bool_], lies: NDArray[np.float64]) -> tuple[float, float]:
    """How much of the box around the eyes lies in the image, and how much of it is head."""
    box = np.stack(np.meshgrid(*[np.arange(a, b + 1, 2.0) for a, b in EYES_MM], indexing="ij"), axis=-1).reshape(
        -1, 3
    )
    back = np.linalg.inv(lies)
    index = np.rint(box @ back[:3, :3].T + back[:3, 3]).astype(np.intp)
    held = ((index >= 0) & (index < np.array(skin.shape))).all(axis=1)
    return float(held.mean()), float(skin[tuple(index[held].T)].sum() / len(box))


def examined(volume: Volume, atlas: Atlas, register: Register, mask: NDArray[np.bool_] | None = None) -> HeadScan:
    """Find head and brain, and refuse what cannot be trusted.

    Args:
        volume: as it was read, any orientation.
        atlas, register: of :mod:`agent.defacing.template`.
        mask: a brain mask of the operator's own, on the *oriented* grid.

    Raises:
        NotDefacedError: with the rule that it broke.
    """
    check(volume)
    upright = oriented(volume)
    head = HeadScan(upright, head_mask(upright), extract(upright, atlas, register, mask))
    judge(head)
    return head
