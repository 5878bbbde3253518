"""A form that was filled in becomes the file and the words that somebody would have typed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import tomllib
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.service.jobs import DONE, Event, Job, JobStore
from agent.service.proposal_form import (
    FormField,
    FormGroup,
    ProposalForm,
    fill,
    offered_files,
    place_problems,
    read_forms,
)

FORM = ProposalForm(
    ("release", "some"),
    "about",
    (
        FormGroup(
            "", "", (FormField("classes", "text", many=True), FormField("--k", "int"), FormField("--fast", "bool"))
        ),
        FormGroup(
            "nets",
            "",
            (
                FormField("nets.file", "file", choices=("random",), prefixes=("vgg",)),
                FormField("nets.file_sha256", "text"),
                FormField("nets.rate", "float"),
                FormField("nets.deep.count", "int"),
                FormField("nets.on", "bool"),
                FormField("nets.device", "text"),
                FormField("--basis", "file"),
            ),
        ),
        FormGroup("vetting", "", (FormField("vetting.top", "int"),), optional=True),
    ),
    config="--config",
    mechanism="some",
    out="--sheet",
    vetted=True,
)  # fmt: skip


def home(tmp_path: Path) -> Path:
    (tmp_path / "networks").mkdir(exist_ok=True)
    (tmp_path / "networks" / "a b.safetensors").write_bytes(b"a")
    return tmp_path


def told(tmp_path: Path, **typed: str) -> dict[str, object]:
    filled = fill(FORM, {name.replace("__", "."): (text,) for name, text in typed.items()}, home(tmp_path))
    return tomllib.loads(filled.texts["0-some.toml"])


def test_words_files_and_tables_are_those_of_the_command_line(tmp_path: Path) -> None:
    typed = {"classes": ("0, 1",), "--k": ("5",), "--fast": ("yes",), "nets.file": ("vgg:networks/a b.safetensors",)}
    typed |= {"nets.rate": ("1e-3",), "nets.deep.count": ("2",), "--basis": ("networks/a b.safetensors",)}
    typed |= {"use:vetting": ("yes",), "vetting.top": ("7",), "nets.device": ("cuda:1",)}
    filled = fill(FORM, typed, home(tmp_path))
    assert filled.problems == {}
    assert filled.words == (
        "release", "some", "--k=5", "--fast", "--basis=in/1-a b.safetensors", "--config=in/0-some.toml",
        "--sheet=out/sheet.html",
    )  # fmt: skip
    assert filled.copies == {"1-a b.safetensors": tmp_path / "networks" / "a b.safetensors"}
    assert filled.cuda
    assert tomllib.loads(filled.texts["0-some.toml"]) == {
        "mechanism": "some",
        "classes": ["0", "1"],
        "nets": {
            "file": "vgg:1-a b.safetensors", "rate": 0.001, "deep": {"count": 2}, "on": False, "device": "cuda:1",
        },
        "vetting": {"top": 7},
    }  # fmt: skip


def test_a_table_that_is_not_asked_for_is_left_out_and_so_is_its_sheet(tmp_path: Path) -> None:
    filled = fill(FORM, {"vetting.top": ("7",)}, home(tmp_path))
    assert "vetting" not in tomllib.loads(filled.texts["0-some.toml"])
    assert "--sheet=out/sheet.html" not in filled.words


def test_what_is_no_number_stays_a_text_for_the_reader_to_refuse(tmp_path: Path) -> None:
    nets = told(tmp_path, nets__rate="much", nets__deep__count="1.5")["nets"]
    assert nets == {"rate": "much", "deep": {"count": "1.5"}, "on": False}
    rate = told(tmp_path, nets__rate="nan")["nets"]["rate"]  # type: ignore[index]
    assert math.isnan(rate)


def test_a_file_is_pinned_as_it_is_where_no_digest_was_typed(tmp_path: Path) -> None:
    nets = told(tmp_path, nets__file="networks/a b.safetensors")["nets"]
    assert nets["file_sha256"] == hashlib.sha256(b"a").hexdigest()  # type: ignore[index]
    nets = told(tmp_path, nets__file="networks/a b.safetensors", nets__file_sha256="00")["nets"]
    assert nets["file_sha256"] == "00"  # type: ignore[index]
    assert told(tmp_path, nets__file="random")["nets"]["file"] == "random"  # type: ignore[index]


def test_a_file_that_is_gone_a_path_and_an_unknown_key_are_problems(tmp_path: Path) -> None:
    for name in (
        "networks/gone",
        "/etc/passwd",
        "networks/../keys/sign.key",
        "vgg:/etc/passwd",
        "other:networks/a b.safetensors",
    ):
        assert "is not there any more" in fill(FORM, {"nets.file": (name,)}, home(tmp_path)).problems["nets.file"]
    assert fill(FORM, {"nets.fiel": ("x",)}, home(tmp_path)).problems == {"nets.fiel": "there is no such key"}


TEXTS = st.text(st.characters(exclude_categories=("Cc", "Cs"), exclude_characters=",")).map(str.strip).filter(bool)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TEXTS, st.lists(TEXTS, min_size=1))
def test_any_text_comes_back_as_it_was_typed_and_becomes_no_second_key(
    tmp_path: Path, device: str, classes: list[str]
) -> None:
    filled = fill(FORM, {"nets.device": (device,), "classes": (",".join(classes),)}, home(tmp_path))
    made = tomllib.loads(filled.texts["0-some.toml"])
    assert made == {"mechanism": "some", "classes": classes, "nets": {"on": False, "device": device}}


@given(TEXTS)
def test_no_text_becomes_a_word_of_its_own(text: str) -> None:
    words = fill(FORM, {"--k": (text,)}, Path("/nowhere")).words
    assert len(words) == 4
    assert words[2].startswith("--k=")


def test_a_finished_training_offers_its_networks_and_another_does_not(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    for state in (DONE, "running"):
        number = store.add(Job(0, ("train", "encoder"), "main", (Event(1.0, state),))).number
        (store.folder(number) / "out" / "encoder").mkdir(parents=True)
        (store.folder(number) / "out" / "encoder" / "encoder.safetensors").write_bytes(b"e")
    assert list(offered_files(home(tmp_path))) == ["networks/a b.safetensors", "job 1/encoder/encoder.safetensors"]


def test_a_folder_of_many_images_offers_no_file(tmp_path: Path) -> None:
    (home(tmp_path) / "networks" / "eyes").mkdir()
    for number in range(201):
        (tmp_path / "networks" / "eyes" / f"{number}.png").touch()
    assert list(offered_files(tmp_path)) == ["networks/a b.safetensors"]


def test_problems_of_a_reader_stand_at_their_fields_and_a_sentence_stays_whole() -> None:
    said = "0-some.toml: nets.rate: must be a float; nets: write this, or that; not both; unknown table: x"
    placed, rest = place_problems(FORM, said)
    assert placed == {"nets.rate": "must be a float"}
    assert rest == ["nets: write this, or that; not both", "unknown table: x"]


def test_forms_come_back_from_json_as_they_were() -> None:
    assert read_forms(json.dumps([dataclasses.asdict(FORM)])) == (FORM,)
