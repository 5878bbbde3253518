"""``[vetting]`` of a release behind which stand k patients: pinned, vouched for, or refused with the reason."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from agent.errors import SiteConfigError
from agent.mechanisms.centroids.config import read_centroids
from agent.mechanisms.common.config import read_vetting
from agent.mechanisms.kanonymous_config import KAnonymousConfig, read_synthesis
from agent.mechanisms.privimage.config import read_privimage
from agent.mechanisms.remodel.config import read_remodel
from agent.models.weights import WeightsError
from agent.vetting.config import JudgesTable
from tests.support.distillation_networks import verifier_file
from tests.support.mechanism_documents import ANONFACES, DOCS, KSALSA, changed, lay_networks, sha, toml

FILES = {"verifier": verifier_file(0), "unseen": verifier_file(1)}
TABLE: Mapping[str, Any] = {
    **{part: f"{part}.safetensors" for part in FILES},
    **{f"{part}_sha256": sha(raw) for part, raw in FILES.items()},
}


def read(folder: Path, document: Mapping[str, Any], vouched: bool = True) -> KAnonymousConfig:
    digests, judges = lay_networks(folder), set(map(sha, FILES.values()))
    for part, raw in FILES.items():
        (folder / f"{part}.safetensors").write_bytes(raw)
    (folder / "release.toml").write_text(toml(document))
    return read_synthesis(folder / "release.toml", "", digests | judges if vouched else digests)


def refused(folder: Path, document: Mapping[str, Any], vouched: bool = True) -> str:
    with pytest.raises((SiteConfigError, WeightsError)) as caught:
        read(folder, document, vouched)
    return str(caught.value)


@pytest.mark.parametrize("document", [KSALSA, ANONFACES], ids=["ksalsa", "anonfaces"])
def test_it_is_left_out_or_names_both_verifiers(tmp_path: Path, document: Mapping[str, Any]) -> None:
    assert read(tmp_path, document).vetting is None
    made = read(tmp_path, changed(document, vetting={**TABLE, "top": 3, "false_matches": 0.02}))
    assert made.vetting
    digests = [made.vetting.verifier.origin.sha256, made.vetting.unseen.origin.sha256]
    assert digests == [sha(raw) for raw in FILES.values()]
    assert (made.vetting.top, made.vetting.false_matches, made.vetting.device) == (3, 0.02, "cpu")
    assert made.mechanism.components() == read(tmp_path, document).mechanism.components(), "it draws nothing"


def test_another_file_than_the_pinned_one_is_refused(tmp_path: Path) -> None:
    told = refused(tmp_path, changed(KSALSA, vetting={**TABLE, "unseen_sha256": "0" * 64}))
    assert f"unseen.safetensors is not the pinned unseen: its SHA-256 is {TABLE['unseen_sha256']}" in told


def test_a_verifier_that_nobody_vouches_for_vets_nothing(tmp_path: Path) -> None:
    told = refused(tmp_path, changed(KSALSA, vetting=TABLE), vouched=False)
    assert told.startswith("not yet vouched for: verifier.safetensors, unseen.safetensors: if they show no patient")


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"unseen_sha256": TABLE["verifier_sha256"]}, "verifier and unseen are the same file"),
        ({"verifier": None}, "vetting.verifier: missing"),
        ({"verifier_sha256": "1234"}, "verifier_sha256: the file's SHA-256, 64 hexadecimal digits in lower case"),
        ({"unseen": ""}, "unseen: must name a file"),
        ({"top": 0}, "top: 1 to 1000 patients"),
        ({"false_matches": 0.9}, "false_matches: a share above 0"),
        ({"threshold": 0.5}, "vetting: unknown keys: threshold"),
    ],
)
def test_a_table_that_makes_no_sense_is_a_sentence(tmp_path: Path, keys: Mapping[str, Any], told: str) -> None:
    text = refused(tmp_path, changed(KSALSA, vetting={**TABLE, **keys}))
    assert told in text, text


def test_a_file_of_its_own_is_for_a_release_that_is_typed(tmp_path: Path) -> None:
    for part, raw in FILES.items():
        (tmp_path / f"{part}.safetensors").write_bytes(raw)
    path, vouched = tmp_path / "vetting.toml", frozenset(map(sha, FILES.values()))
    path.write_text(toml({"vetting": TABLE}))
    assert read_vetting(path, vouched).verifier.origin.sha256 == TABLE["verifier_sha256"]
    for document, told in (({}, "vetting: missing"), ({"vetting": TABLE, "cohort": {}}, "unknown table: cohort")):
        path.write_text(toml(document))
        with pytest.raises(SiteConfigError, match=told):
            read_vetting(path, vouched)


@pytest.mark.parametrize(
    ("name", "reader", "told"),
    [
        ("privimage", read_privimage, "a look at the patients afterwards would void that (P7)"),
        ("centroids", read_centroids, "a look at the patients afterwards would void that (P7)"),
        ("remodel", read_remodel, "an attack of its own"),
    ],
)
def test_a_mechanism_whose_claim_a_vetting_would_void_says_so(
    tmp_path: Path, name: str, reader: Any, told: str
) -> None:
    """P7: read with the patients in it, a vetting is no post-processing of a release with an epsilon."""
    path = tmp_path / f"{name}.toml"
    path.write_text((DOCS / f"{name}.example.toml").read_text() + "\n[vetting]\ntop = 10\n")
    with pytest.raises((SiteConfigError, WeightsError)) as caught:
        reader(path, frozenset())
    assert told in str(caught.value)
    assert "unknown table" not in str(caught.value)


@pytest.mark.parametrize("name", ["ksalsa", "anonfaces"])
def test_the_examples_name_every_key_and_say_what_it_is_when_it_is_left_out(name: str) -> None:
    text = re.sub(r"^# (?=\[|\w+ = )", "", (DOCS / f"{name}.example.toml").read_text(), flags=re.MULTILINE)
    table = tomllib.loads(text)["vetting"]
    known = {one.name: one.default for one in fields(JudgesTable)}
    assert table.keys() == known.keys()
    assert all(table[key] == value for key, value in known.items() if value is not MISSING)
