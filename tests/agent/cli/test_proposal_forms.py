"""Every form is the configuration that its command reads: no key too many, none missing, all defaults taken."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.cli import options
from agent.cli.proposal_forms import TABLES, forms
from agent.mechanisms.centroids.config import read_centroids
from agent.mechanisms.distillation.config import read_distill
from agent.mechanisms.federated.config import ModelSite, read_model
from agent.mechanisms.kanonymous_config import read_synthesis
from agent.mechanisms.privimage.config import read_privimage
from agent.mechanisms.remodel.config import read_remodel
from agent.models.weights import WeightsError
from agent.service.proposal_form import NETWORKS, ProposalForm, fill
from policies.ledger.entries import Opened

FORMS = {form.name: form for form in forms()}
NONE: frozenset[str] = frozenset()
SITE = ModelSite(Opened("site-a/rdp", 1, 4, "8.0", "4e-06"), lambda _: None, lambda _: "")
READERS: dict[str, Callable[[Path], Any]] = {
    "ksalsa": lambda path: read_synthesis(path, "ksalsa", NONE),
    "anonfaces": lambda path: read_synthesis(path, "anonfaces", NONE),
    "privimage": lambda path: read_privimage(path, NONE),
    "centroids": lambda path: read_centroids(path, NONE),
    "distill": lambda path: read_distill(path, NONE, name="distill"),
    "distill-dp": lambda path: read_distill(path, NONE, name="distill-dp"),
    "model": lambda path: read_model(path, SITE),
    "remodel": lambda path: read_remodel(path, NONE),
}
REQUIRED = {
    "cohort.modality": "OT", "cohort.shape": "4, 4, 4", "cohort.spacing": "1, 1, 1.5", "classes": "0, 1",
    "conditions": "a, b", "cells.classes": "0, 1", "cells.public_patients": "500", "privacy.steps": "10",
    "privacy.sampling_rate": "0.1", "privacy.public_patients": "500", "privacy.epsilon": "2", "privacy.delta": "1e-5",
    "evaluate.noise": "20", "evaluate.held_out": "20",
    "semantics.keep": "2", "semantics.noise": "4", "teacher.steps": "10", "student.steps": "10",
}  # fmt: skip


def offered(home: Path) -> None:
    """Ten files that are no networks, and a folder."""
    (home / NETWORKS / "pictures").mkdir(parents=True)
    for number in range(10):
        (home / NETWORKS / f"{number}.safetensors").write_bytes(b"no network %d" % number)


def filled_in(form: ProposalForm) -> dict[str, tuple[str, ...]]:
    """With all that is usual, everything that is required, and another file in every place."""
    typed = {one.name: (one.default,) for one in form.fields() if one.default}
    typed |= {one.name: (REQUIRED[one.name],) for one in form.fields() if one.name in REQUIRED}
    files = [one for one in form.fields() if one.kind == "file" and not one.name.startswith("--")]
    typed |= {one.name: (f"networks/{n}.safetensors",) for n, one in enumerate(files)}
    return typed | {one.name: ("networks/pictures",) for one in form.fields() if one.kind == "folder"}


@pytest.mark.parametrize("name", sorted(READERS))
def test_a_form_that_is_filled_in_is_read_up_to_its_networks_which_are_none(name: str, tmp_path: Path) -> None:
    offered(tmp_path)
    typed = filled_in(form := FORMS[f"release-{name}"])
    if name == "anonfaces":
        typed["networks.recognisers"] = ("networks/8.safetensors", "networks/9.safetensors")
    filled = fill(form, typed, tmp_path)
    assert not filled.problems
    assert set(READERS) | {"ksame"} == set(TABLES)
    for copy, source in filled.copies.items():
        (tmp_path / copy).write_bytes(source.read_bytes())
    path = tmp_path / f"0-{name}.toml"
    path.write_text(filled.texts[path.name])
    with pytest.raises(Exception, match=r"safetensors|network|atlas|vouch") as told:
        READERS[name](path)
    said = "public_components" in str(told.value) or (name == "model" and "not TOML" in str(told.value))
    assert isinstance(told.value, WeightsError) or said, told.value


@pytest.mark.parametrize("name", sorted(FORMS))
def test_the_words_of_every_form_are_words_of_the_command(name: str, tmp_path: Path) -> None:
    offered(tmp_path)
    typed = filled_in(FORMS[name])
    typed |= {one.name: ("networks/0.safetensors",) for one in FORMS[name].fields() if one.kind == "file"}
    typed |= {key: value for key, value in {"--k": ("5",), "--modality": ("OT",), "--cells": ("4",)}.items() if key in
              {one.name for one in FORMS[name].fields()}}  # fmt: skip
    words = fill(FORMS[name], typed, tmp_path).words
    arguments: argparse.Namespace = options.build_parser().parse_args(["--home", str(tmp_path), *words])
    assert arguments.command == " ".join(FORMS[name].command)


def test_every_command_that_reads_patients_or_trains_has_a_form() -> None:
    parser = options.build_parser()
    (commands,) = (one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
    for kind in ("release", "train"):
        (inner,) = (one for one in commands.choices[kind]._actions if isinstance(one, argparse._SubParsersAction))
        made = {form.command[1] for form in FORMS.values() if form.command[0] == kind}
        assert set(inner.choices) - {"send", "inspect", "withdraw"} == made


def test_every_field_of_a_form_says_what_it_is() -> None:
    silent = [f"{name} {one.name}" for name, form in FORMS.items() for one in form.fields() if not one.help]
    assert [one for one in silent if not one.split()[1].startswith(("model.", "teacher.", "--"))] == []
