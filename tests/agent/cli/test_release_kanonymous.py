"""Releases behind which stand k patients, vetted as they are typed: the figures come first, and may refuse."""

from __future__ import annotations

import json
import stat
from contextlib import closing
from pathlib import Path

import pytest

from agent.microaggregation.released_clusters import place_of
from agent.service.site import project_of
from agent.storage import projects
from tests.support.chest_clinic import PATIENTS, chest_clinic
from tests.support.command_line import Typed, at, typed
from tests.support.federation_world import Site

__all__ = ["chest_clinic", "typed"]  # fixtures


@pytest.mark.parametrize("chest_clinic", ["max_reid_rate = 0.6"], indirect=True)
def test_a_vetted_release_shows_the_reviewer_everything_before_it_leaves(
    typed: Typed, chest_clinic: Site, tmp_path: Path
) -> None:
    sheet = tmp_path / "sheet.html"
    order = (*at(chest_clinic), "release", "ksalsa", "--config", tmp_path / "ksalsa.toml", "--sheet", sheet, "--json")
    said = typed(*order)
    assert said.status == 0, said.out + said.err
    review, verdict = map(json.loads, said.out.splitlines())
    assert (verdict["admitted"], verdict["level"]) == (True, "B")
    assert review["mechanism"] == "ksalsa"
    assert 1 <= review["review"]["left"] <= review["review"]["clusters"]
    assert review["review"]["power"]["caught"]["low"] >= 0.9
    assert stat.S_IMODE(sheet.stat().st_mode) == 0o600
    page = sheet.read_text()
    assert "This page shows images of patients" in page
    with closing(projects.open_vault(chest_clinic.home, "main")) as vault:
        names = {head.person for head in vault.heads()}
    log = (chest_clinic.home.root / "agent.log").read_text()
    assert len(names) == PATIENTS
    assert not [name for name in names if name in page + said.out + said.err + log]


def test_of_a_few_pictures_no_vetting_can_say_that_few_are_like_somebody(
    typed: Typed, chest_clinic: Site, tmp_path: Path
) -> None:
    """The upper end of an interval over eight pictures is more than any preset admits: that is heard, and kept."""
    before = chest_clinic.federation.store.state.size
    base = ("--basis", tmp_path / "basis.safetensors", "--modality", "OT", "--k", 5)
    for config, more, told in (
        ("ksame", (*base, "--vetting", tmp_path / "other.toml"), "verifier.safetensors is not the pinned verifier"),
        (
            "ksalsa",
            ("--config", tmp_path / "plain.toml", "--sheet", tmp_path / "s.html"),
            "which the configuration lacks",
        ),
        ("ksalsa", ("--config", tmp_path / "ksalsa.toml", "--sheet", tmp_path / "plain.toml"), "name a new file"),
    ):
        said = typed(*at(chest_clinic), "release", config, *more)
        assert (said.status, told in said.out + said.err) == (1, True), said.out + said.err
    assert chest_clinic.federation.store.state.size == before, "nothing was priced"
    said = typed(*at(chest_clinic), "release", "ksame", *base, "--vetting", tmp_path / "vetting.toml")
    told = " ".join(said.out.split())
    assert said.status == 1
    assert "images of 8 clusters compared with every comparable image" in told
    assert "planted near-duplicates that were caught, all: " in told
    assert "reid_rate: the rate must be measured, and at most 0.1" in told


def test_tune_says_that_it_looks_at_no_vetting(typed: Typed, chest_clinic: Site, tmp_path: Path) -> None:
    for config, told in (("ksalsa", True), ("plain", False)):
        order = (
            "tune",
            "--config",
            tmp_path / f"{config}.toml",
            "--menu",
            "5,9",
            "--out",
            tmp_path / f"{config}.html",
        )
        said = typed(*at(chest_clinic), *order)
        assert (said.status, "a search does not use [vetting]" in said.out) == (0, told), said.out + said.err


def test_a_release_is_sent_and_withdrawn_in_the_project_that_made_it(typed: Typed, chest_clinic: Site) -> None:
    """Its pictures lie there: in another project every picture of it would look as if it were retired."""
    projects.create(chest_clinic.home, "lung")
    with closing(projects.open_vault(chest_clinic.home, "lung")) as vault:
        vault.write_project_note(place_of("one", 0), {})
    home = chest_clinic.home
    assert (project_of(home, "one"), project_of(home, "another")) == ("lung", "main")
    for order in ("send", "withdraw"):
        said = typed(*at(chest_clinic), "release", order, "one")
        assert (said.status, "no release of that name is kept here" in said.out + said.err) == (1, True)
