"""A dry run says what the release would be refused for at once, and writes nothing."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from agent.domain import Selection
from agent.errors import CohortTooSmallError
from agent.release.packaging import ReleaseFormat
from agent.release.pipeline import release_heads
from agent.release.preflight import ReleaseRequest, of_clusters, of_heads, preflight_review
from agent.release.vetting_statement import TooFewToVetError
from agent.storage import projects
from tests.support.command_line import Typed, at, typed
from tests.support.federation_world import Site
from tests.support.release_site import held, killed, ksame_words, site
from tests.support.remodelled_heads import examine, heads_world, remodel
from tests.support.site_world import SHAPE, site_world
from tests.support.site_world import ksame as mechanism
from tests.support.unchanged import opened_once, untouched

__all__ = ["site", "typed"]  # fixtures


def noted(site: Site, name: str, value: object) -> None:
    with closing(projects.open_vault(site.home, "main")) as vault:
        vault.write_note(name, value)


def rules(typed: Typed, site: Site, folder: Path, *more: object, k: str = "5") -> tuple[int, list[str]]:
    """Exit status and rules of a dry run, which leaves everything as it was."""
    words = ksame_words(folder, "--dry-run", "--json", *more)
    words[words.index("5")] = k
    opened_once(site)  # a killed process leaves a log, which the next one takes in
    with untouched(site):
        said = typed(*at(site), *words)
    assert said.line["would_go"] == (not said.line["findings"])
    return said.status, [finding["rule"] for finding in said.line["findings"]]


def test_more_patients_behind_a_picture_than_there_are(typed: Typed, site: Site, tmp_path: Path) -> None:
    assert rules(typed, site, tmp_path, k="30") == (1, ["cohort"])
    words = ksame_words(tmp_path)
    words[words.index("5")] = "30"
    assert (typed(*at(site), *words).status, held(site)) == (1, (0, 0)), "and so says the release"


def test_a_k_that_was_not_tried(typed: Typed, site: Site, tmp_path: Path) -> None:
    noted(site, "searched", {"OT": [4, 6]})
    assert rules(typed, site, tmp_path) == (1, ["menu"])
    assert "this k was not tried" in typed(*at(site), *ksame_words(tmp_path)).out


def test_an_older_vault(typed: Typed, site: Site, tmp_path: Path) -> None:
    assert typed(*at(site), *ksame_words(tmp_path)).status == 0
    noted(site, "releases", [])
    assert "older_vault" in rules(typed, site, tmp_path)[1]


@pytest.mark.parametrize("moment", ["making", "keeping"])
def test_what_was_interrupted_goes_on_by_its_grant_and_another_does_not(
    typed: Typed, site: Site, tmp_path: Path, moment: str
) -> None:
    killed(site, tmp_path, moment)
    assert rules(typed, site, tmp_path, k="6") == (1, ["unfinished", "budget"])
    assert rules(typed, site, tmp_path, "--anew") == (1, ["budget"]), "given up, its grant is spent"
    assert rules(typed, site, tmp_path) == (0, []), "its price is held already"
    assert (typed(*at(site), *ksame_words(tmp_path)).status, held(site)) == (0, (0, 1))


def test_what_was_interrupted_and_has_too_few_patients_by_now_says_the_way_out_as_the_release_does(
    typed: Typed, site: Site, tmp_path: Path
) -> None:
    killed(site, tmp_path, "making")
    with closing(projects.open_vault(site.home, "main")) as vault:
        for study in {head.study for head in vault.heads()}:
            vault.hold(study)
    words = ksame_words(tmp_path)
    opened_once(site)
    dry, release = typed(*at(site), *words, "--dry-run", "--json"), typed(*at(site), *words)
    ((rule, told),) = [(finding["rule"], finding["detail"]) for finding in dry.line["findings"]]
    assert (dry.status, release.status, held(site)) == (1, 1, (1, 0))
    assert (rule, "discard it with --anew" in told) == ("unfinished", True)
    assert told in " ".join(release.err.split())


def test_no_head_and_too_few_to_vet(tmp_path: Path) -> None:
    """Where no command has a small enough case: by the iterator that every dry run asks."""
    s = site_world(tmp_path)
    ask = ReleaseRequest(remodel(), "MR", "form")
    told = [f.detail for f in preflight_review(s.site, ask, of_heads(s.site, remodel(), "MR")) if f.rule == "cohort"]
    assert told == ["there are no eligible patients"]
    (tmp_path / "heads").mkdir()
    site, vault, store = heads_world(tmp_path / "heads")
    vault.heads = ()
    with pytest.raises(CohortTooSmallError):
        release_heads(site, remodel(), "MR", examine, np.random.default_rng(1))
    assert not store.state.grants, "and the release spends nothing on it"
    rule = Selection("OT", SHAPE)
    foreseen = of_clusters(s.site, mechanism(), rule, ReleaseFormat())
    said = [
        [*preflight_review(s.site, ReleaseRequest(mechanism(), rule, "form", vetted), foreseen)]
        for vetted in (False, True)
    ]
    assert said[0] == []
    assert [f.detail for f in said[1]] == [str(TooFewToVetError())]
    assert (s.vault.reads, s.vault.notes) == (0, {})


def test_what_was_made_and_waits_is_not_made_again(typed: Typed, site: Site, tmp_path: Path) -> None:
    killed(site, tmp_path, "before-submit")
    assert rules(typed, site, tmp_path) == (1, ["budget", "cohort"]), "its patients are in the one that waits"
