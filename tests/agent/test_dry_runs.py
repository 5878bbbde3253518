"""A dry run says what the release would be refused for at once, and writes nothing."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from agent.edges import projects
from agent.foreseen import Asked, beforehand, of_clusters, of_heads
from agent.nouns import CohortTooSmall, Selection
from agent.pipeline import release_heads
from agent.vetted import TooFewToVet
from agent.wrapping import Wrapping
from tests.agent.test_kept_releases import filled, held, killed, ksame, ward
from tests.agent.test_pipeline import ksame as mechanism
from tests.agent.test_pipeline import stage
from tests.agent.test_remodel_release import examine
from tests.agent.test_remodel_release import mechanism as remodel
from tests.agent.test_remodel_release import stage as stage_of_heads
from tests.agent.test_synthesis_commands import Typed, at, typed
from tests.support.federation import Site
from tests.support.untouched import opened_once, untouched
from tests.support.wards import SHAPE

__all__ = ["filled", "typed", "ward"]  # fixtures, and what one of them needs


def noted(site: Site, name: str, value: object) -> None:
    with closing(projects.open_vault(site.home, "main")) as vault:
        vault.write_note(name, value)


def rules(typed: Typed, site: Site, folder: Path, *more: object, k: str = "5") -> tuple[int, list[str]]:
    """Exit status and rules of a dry run, which leaves everything as it was."""
    words = ksame(folder, "--dry-run", "--json", *more)
    words[words.index("5")] = k
    opened_once(site)  # a killed process leaves a log, which the next one takes in
    with untouched(site):
        said = typed(*at(site), *words)
    assert said.line["would_go"] == (not said.line["findings"])
    return said.status, [finding["rule"] for finding in said.line["findings"]]


def test_more_patients_behind_a_picture_than_there_are(typed: Typed, ward: Site, tmp_path: Path) -> None:
    assert rules(typed, ward, tmp_path, k="30") == (1, ["cohort"])
    words = ksame(tmp_path)
    words[words.index("5")] = "30"
    assert (typed(*at(ward), *words).status, held(ward)) == (1, (0, 0)), "and so says the release"


def test_a_k_that_was_not_tried(typed: Typed, ward: Site, tmp_path: Path) -> None:
    noted(ward, "searched", {"OT": [4, 6]})
    assert rules(typed, ward, tmp_path) == (1, ["menu"])
    assert "k is none of those" in typed(*at(ward), *ksame(tmp_path)).out


def test_an_older_vault(typed: Typed, ward: Site, tmp_path: Path) -> None:
    assert typed(*at(ward), *ksame(tmp_path)).status == 0
    noted(ward, "releases", [])
    assert "older_vault" in rules(typed, ward, tmp_path)[1]


@pytest.mark.parametrize("moment", ["making", "keeping"])
def test_what_was_interrupted_goes_on_by_its_grant_and_another_does_not(
    typed: Typed, ward: Site, tmp_path: Path, moment: str
) -> None:
    killed(ward, tmp_path, moment)
    assert rules(typed, ward, tmp_path, k="6") == (1, ["unfinished", "budget"])
    assert rules(typed, ward, tmp_path, "--anew") == (1, ["budget"]), "given up, its grant is spent"
    assert rules(typed, ward, tmp_path) == (0, []), "its price is held already"
    assert (typed(*at(ward), *ksame(tmp_path)).status, held(ward)) == (0, (0, 1))


def test_no_head_and_too_few_to_vet(tmp_path: Path) -> None:
    """Where no command has a small enough case: by the iterator that every dry run asks."""
    s = stage(tmp_path)
    ask = Asked(remodel(), "MR", "form")
    told = [f.detail for f in beforehand(s.site, ask, of_heads(s.site, remodel(), "MR")) if f.rule == "cohort"]
    assert told == ["there is nothing to make it of"]
    (tmp_path / "heads").mkdir()
    site, vault, store = stage_of_heads(tmp_path / "heads")
    vault.heads = ()
    with pytest.raises(CohortTooSmall):
        release_heads(site, remodel(), "MR", examine, np.random.default_rng(1))
    assert not store.state.grants, "and the release spends nothing on it"
    rule = Selection("OT", SHAPE)
    foreseen = of_clusters(s.site, mechanism(), rule, Wrapping())
    said = [[*beforehand(s.site, Asked(mechanism(), rule, "form", vetted), foreseen)] for vetted in (False, True)]
    assert said[0] == []
    assert [f.detail for f in said[1]] == [str(TooFewToVet())]
    assert (s.vault.reads, s.vault.notes) == (0, {})


def test_what_was_made_and_waits_is_not_made_again(typed: Typed, ward: Site, tmp_path: Path) -> None:
    killed(ward, tmp_path, "before-submit")
    assert rules(typed, ward, tmp_path) == (1, ["budget", "cohort"]), "its patients are in the one that waits"
