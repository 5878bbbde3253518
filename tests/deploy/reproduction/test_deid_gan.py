"""C-DeID-GAN's figures in small: that they run, are kept, compare like with like, and say what did not come out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from agent.defacing import head_mask
from agent.defacing.brain_extraction import Atlas, Brain
from agent.defacing.head import HeadScan
from agent.defacing.reidentification.features import Eye
from agent.domain import Volume
from agent.volumes.errors import NotDefacedError
from deploy.reproduction import deid_gan
from deploy.reproduction.deid_gan_heads import (
    BLURRED,
    BRAIN,
    HULL,
    PRESETS,
    REMODEL,
    UNALTERED,
    DeidSettings,
    DeidWork,
    Heads,
    Scanned,
    TooFewHeadsError,
    smaller,
)
from deploy.reproduction.measures.brain_age_network import AgeArchitecture
from deploy.reproduction.measures.brain_age_training import AgeConfig
from deploy.reproduction.tables import as_json, as_text
from tests.support.heads import scan

TINY = DeidSettings(
    averaged=2,
    public=12,
    tested=6,
    side=32,
    eye=Eye(side=24, views=("front", "left 60"), points=60),
    methods=("remodel", "deface", "strip"),
    segmented=1,
    age=AgeConfig(AgeArchitecture(16, width=0.125), steps=3, batch=4),
    same=False,
)


def known(person: int, visit: int) -> HeadScan:
    one = scan(person, visit)
    return HeadScan(one.volume, head_mask.head_mask(one.volume), Brain(one.brain, 1.0, one.to_template))


def never(volume: Volume, atlas: Atlas) -> NDArray[np.float64]:
    raise NotDefacedError("no_head")


def made_up(count: int = 20, refused: tuple[int, ...] = ()) -> Heads:
    def truth(person: int, visit: int) -> Callable[[], HeadScan]:
        def look() -> HeadScan:
            if person in refused:
                raise NotDefacedError("no_face")
            return known(person, visit)

        return look

    scans = tuple(
        Scanned(f"{p:03d}", str(v), 30.0 + 2 * p, lambda p=p, v=v: scan(p, v).volume, truth(p, v))
        for p in range(count)
        for v in (0, 1)
    )
    atlas = Atlas(np.ones((4, 4, 4), np.float32), np.ones((4, 4, 4), bool), np.eye(4))
    return Heads("made-up heads", scans, atlas, never)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both figures share what is kept."""
    return tmp_path_factory.mktemp("deid")


@pytest.mark.slow
def test_figure_3_has_every_method_its_controls_and_what_the_brain_gives_away(folder: Path) -> None:
    said: list[str] = []
    table = deid_gan.run("deid-figure3", made_up(), TINY, folder, said.append)
    assert table.rows == (UNALTERED, BLURRED, "remodel", "deface", "strip", HULL, BRAIN)
    assert table.of(UNALTERED, deid_gan.FIVE).mean >= 0.9
    assert table.of(UNALTERED, deid_gan.COUNT).mean == 6
    for row in table.rows:
        low, value, high = (table.of(row, name).mean for name in ("low", deid_gan.FIVE, "high"))
        assert 0 <= low <= value <= high <= 1
    assert deid_gan.SAME not in table.columns
    assert {v.claim.split(":")[0] for v in table.verdicts} >= {deid_gan.FIVE, deid_gan.AT_CHANCE}
    assert "brain alone links" in as_text(table)
    again: list[str] = []
    other = deid_gan.run("deid-figure3", made_up(), TINY, folder, again.append)
    assert as_json(other) == as_json(table)
    assert said
    assert not again  # nothing was computed twice


def test_figure_4_has_dice_age_time_and_the_untouched_brain(folder: Path) -> None:
    """Here nothing finds a brain, so no tissue overlaps: the table says so and does not hide the failure."""
    settings = replace(TINY, methods=("deface",))
    heads = made_up()
    work = DeidWork(heads, settings, folder / "four", lambda _: None)
    with pytest.raises(NotDefacedError):
        _ = work.once(heads.scans[0]).tissues
    work.folder.mkdir()
    for one in heads.scans:
        once = work.once(one)
        once.__dict__["tissues"] = _truth(one)  # of the unaltered head
        break
    told = work.told(heads.scans[0], "deface", 0)
    assert told[deid_gan.CHANGED] == 0.0
    assert told["gm"] == 0.0
    assert told["seconds"] > 0.0


def _truth(one: Scanned) -> object:
    from deploy.reproduction.measures.tissue_segmentation import Tissues

    found = scan(int(one.person), int(one.session))
    return Tissues(found.tissues, found.brain, found.brain & False, 0.064)


def test_who_is_refused_is_in_no_row_and_is_counted(tmp_path: Path) -> None:
    settings = replace(TINY, methods=("deface",))
    work = DeidWork(made_up(21), settings, tmp_path, lambda _: None)
    tested = work.parts(0).tested
    gone = int(tested[0])
    work = DeidWork(made_up(21, (gone,)), settings, tmp_path, lambda _: None)
    assert work.refused(0) == {f"{gone:03d}": "no_face"}
    assert deid_gan._identified(work, 0, UNALTERED)[deid_gan.COUNT] == len(tested) - 1
    assert "1 of them refused" in deid_gan._who(work)[0]


def test_nobody_is_in_two_parts_and_seeds_differ(tmp_path: Path) -> None:
    work = DeidWork(made_up(), TINY, tmp_path, lambda _: None)
    parts = work.parts(0)
    everybody = (*parts.averaged, *parts.public, *parts.tested)
    assert len(set(everybody)) == len(everybody) == 20
    assert work.parts(1).tested != parts.tested
    assert work.parts(0) == parts


def test_too_few_people_are_refused_and_one_session_is_no_second_visit(tmp_path: Path) -> None:
    heads = made_up()
    with pytest.raises(TooFewHeadsError, match="19 at least"):
        DeidWork(made_up(18), TINY, tmp_path, lambda _: None).parts(0)
    once = replace(heads, scans=tuple(s for s in heads.scans if s.session == "0"))
    with pytest.raises(TooFewHeadsError, match="0 people"):
        DeidWork(once, TINY, tmp_path, lambda _: None).parts(0)
    with pytest.raises(ValueError, match="twice"):
        replace(heads, scans=heads.scans + heads.scans[:1])


def test_settings_that_are_no_experiment_are_refused() -> None:
    with pytest.raises(ValueError, match="methods"):
        replace(TINY, methods=("none",))
    with pytest.raises(ValueError, match="too few"):
        replace(TINY, public=3)
    assert all(isinstance(one, DeidSettings) for one in PRESETS.values())
    few = smaller(PRESETS["heads3mm"], 30)
    assert few.averaged + few.public + few.tested == 30
    assert REMODEL in few.methods


def test_no_label_of_a_person_stands_in_a_key(tmp_path: Path) -> None:
    said: list[str] = []
    work = DeidWork(made_up(), replace(TINY, methods=("deface",)), tmp_path, said.append)
    work.look(work.visit("007", 0), UNALTERED, 0)
    assert said
    assert not any("007" in line for line in said)
