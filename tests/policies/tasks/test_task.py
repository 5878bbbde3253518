"""A task file is read whole or refused with every problem at once, and has one canonical form."""

from __future__ import annotations

import pickle
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.tasks.bounds import TaskError
from policies.tasks.networks import NetworkSpec
from policies.tasks.task import LOSSES, MOST_TEXT, Task, Training, task_from_json, task_from_table, task_from_toml

CLASSES = """
[task]
name = "digits"
kind = "classification"
[labels]
classes = ["zero", "one"]
[input]
modality = "OT"
size = [32, 32]
[training]
public_patients = 500
[network]
name = "linear"
"""
FINDINGS = """
[task]
name = "chest-findings"
kind = "multi-label"
seed = 7
[labels]
table = "findings"
columns = ["effusion", "nodule"]
[input]
modality = "DX"
body_part = "CHEST"
size = [64, 64]
transforms = [{ name = "NormalizeIntensity" }]
[loss]
weights = [1.0, 4]
[training]
public_patients = 500
views = 2
augmentation = [{ name = "RandFlip", spatial_axis = 1 }]
[network]
name = "small-cnn"
trained = "last-blocks"
blocks = 1
[network.options]
width = 8
"""
NUMBERS = """
[task]
name = "bone-age"
kind = "regression"
[labels]
table = "ages"
columns = ["age"]
low = [0]
high = [240]
[input]
modality = "DX"
size = [64, 64]
[training]
public_patients = 500
[network]
name = "small-cnn"
"""
MASKS = """
[task]
name = "lesions"
kind = "segmentation"
[labels]
classes = ["lesion"]
[input]
modality = "CT"
size = [48, 48, 48]
spacing = [2, 2, 2]
window = [-1000, 400]
[training]
public_patients = 100
[network]
name = "segresnet"
"""
FILES = {"classification": CLASSES, "multi-label": FINDINGS, "regression": NUMBERS, "segmentation": MASKS}


def changed(kind: str, **values: Any) -> dict[str, Any]:
    """The file's tables with other values: ``training__clip=2.0``; None: the key is left out."""
    tables: dict[str, Any] = tomllib.loads(FILES[kind])
    for place, value in values.items():
        section, key = place.split("__")
        tables.setdefault(section, {})[key] = value
        if value is None:
            del tables[section][key]
    return tables


def problems(kind: str, **values: Any) -> tuple[str, ...]:
    with pytest.raises(TaskError) as refusal:
        task_from_table(changed(kind, **values), "t.toml")
    return refusal.value.problems


@pytest.mark.parametrize("kind", LOSSES)
def test_a_task_reads_back_from_its_canonical_json_and_from_a_pickle(kind: str) -> None:
    task = task_from_toml(FILES[kind], "t.toml")
    assert task.kind == kind
    assert task_from_json(task.to_json()) == task
    assert task_from_json(task.to_json()).to_json() == task.to_json()
    assert pickle.loads(pickle.dumps(task)) == task


def test_outputs_are_classes_columns_or_segments_and_the_background() -> None:
    outputs = {kind: task_from_toml(text, "t.toml").outputs for kind, text in FILES.items()}
    assert outputs == {"classification": 2, "multi-label": 2, "regression": 1, "segmentation": 2}
    several = changed("multi-label", labels__columns=["finding"], labels__classes=["a", "b"])
    assert task_from_table(several).outputs == 2


def test_what_is_left_out_is_written_out_before_it_is_hashed() -> None:
    short = task_from_toml(CLASSES, "t.toml")
    long = task_from_table(changed("classification", training__clip=1.0, loss__name="cross-entropy", task__seed=0))
    assert (short, short.digest) == (long, long.digest)
    assert '"steps_per_round":5' in short.to_json()
    assert len(short.digest) == 64


def test_a_whole_number_and_the_same_float_are_one_task() -> None:
    digests = {task_from_table(changed("classification", training__clip=clip)).digest for clip in (2, 2.0)}
    assert len(digests) == 1


def test_every_change_of_a_value_is_another_digest() -> None:
    base = task_from_toml(FINDINGS, "t.toml")
    changes: list[dict[str, Any]] = [
        {"task__seed": 8},
        {"labels__columns": ["nodule", "effusion"]},
        {"input__size": [64, 32]},
        {"input__transforms": []},
        {"loss__weights": []},
        {"training__rounds": 3},
        {"training__views": 1},
        {"network__blocks": 2},
    ]
    digests = {task_from_table(changed("multi-label", **change)).digest for change in changes}
    assert len({base.digest, *digests}) == len(changes) + 1


def test_the_default_recipe_is_full_batches_and_few_steps() -> None:
    t = task_from_toml(CLASSES, "t.toml").training
    assert (t.sampling_rate, t.rounds * t.steps_per_round, t.learning_rate) == (1.0, 60, 0.0)
    assert t.expected_batch == 500.0


@given(st.integers(1, 10**7), st.floats(0.5, 100.0), st.floats(1.01, 10.0))
def test_the_default_rate_falls_with_the_noise_and_with_the_parameters(p: int, sigma: float, more: float) -> None:
    t = Training(public_patients=500)
    assert 0.0 < t.rate(p, sigma * more, 1.0) < t.rate(p, sigma, 1.0)
    assert t.rate(p + 1, sigma, 1.0) < t.rate(p, sigma, 1.0)


def test_a_rate_that_is_written_is_taken() -> None:
    assert Training(public_patients=500, learning_rate=0.25).rate(10**7, 50.0, 1.0) == 0.25
    assert Training(public_patients=500, reach=2.0).rate(10, 5.0, 9.0) == Training(500).rate(10, 5.0, 2.0)


@given(st.floats(0.0, 0.99), st.integers(1, 200))
def test_momentum_goes_as_far_in_a_round_as_steps_without_it(momentum: float, steps: int) -> None:
    found = [Training(500, steps_per_round=steps, momentum=m).rate(1, 1.0, 1.0) for m in (momentum, 0.0)]
    pace = far = 0.0
    for _ in range(steps):
        pace = momentum * pace + 1.0
        far += found[0] * pace
    assert far == pytest.approx(steps * found[1], rel=1e-9)


def test_a_linear_layer_may_go_farther_than_a_whole_network() -> None:
    tables = changed("classification", network__name="small-cnn")
    whole, head = (
        task_from_table({**tables, "network": {**tables["network"], "trained": t}}) for t in ("all", "head")
    )
    assert head.rate(100, 5.0) == 4 * whole.rate(100, 5.0)


def test_a_linear_layer_that_begins_at_public_heads_has_less_far_to_go() -> None:
    tables = changed("classification", network__name="small-cnn")
    network = {**tables["network"], "trained": "head", "weights": "0" * 64}
    begun, zeros = (task_from_table({**tables, "network": {**network, "options": {"head": n}}}) for n in (1, 0))
    assert 3 * begun.rate(100, 5.0) == pytest.approx(zeros.rate(100, 5.0))
    whole = task_from_table({**tables, "network": {**network, "trained": "all", "options": {"head": 1}}})
    assert whole.rate(100, 5.0) < begun.rate(100, 5.0)


@pytest.mark.parametrize(
    ("kind", "values", "told"),
    [
        ("classification", {"task__kind": "survival"}, "task.kind: must be one of"),
        ("classification", {"task__name": "Digits"}, "task.name: must be a short lower-case name"),
        ("classification", {"task__extra": 1}, "task.extra: unknown key"),
        ("classification", {"task__kind": None}, "task.kind: missing"),
        ("classification", {"other__key": 1}, "other: unknown table"),
        ("classification", {"labels__classes": ["a"]}, "labels.classes: at least two"),
        ("classification", {"labels__classes": ["a", "a"]}, "labels.classes: must hold each value once"),
        ("classification", {"labels__classes": ["a", "x\n"]}, "labels.classes: each must be a name"),
        ("classification", {"labels__classes": "ab"}, "labels.classes: must be a list"),
        ("classification", {"labels__columns": ["a"]}, "labels.columns: one column of the table"),
        ("classification", {"labels__low": [0.0], "labels__high": [1.0]}, "labels.low, high: public bounds"),
        ("multi-label", {"labels__table": ""}, "labels.table, columns: multi-label needs"),
        ("multi-label", {"labels__classes": ["a", "b"]}, "labels.classes: the values of a single column"),
        ("regression", {"labels__classes": ["a", "b"]}, "labels.classes: regression has none"),
        ("regression", {"labels__low": [240.0]}, "labels.low, high: each low must be below its high"),
        ("regression", {"labels__high": []}, "labels.low, high: public bounds"),
        ("regression", {"labels__high": [float("nan")]}, "labels.high: each must be a number"),
        ("segmentation", {"labels__columns": ["a"]}, "labels.table, columns: segmentation has masks"),
        ("segmentation", {"labels__classes": []}, "labels.classes: the segments"),
        ("segmentation", {"input__example": "study"}, "input.example: must be image"),
        ("classification", {"input__size": [32]}, "input.size: must be a list of 2 or 3 numbers"),
        ("classification", {"input__size": [4096, 4096, 4096]}, "input.size: at most"),
        ("classification", {"input__modality": "any"}, "input.modality: must be a modality's code"),
        ("classification", {"input__channels": 2}, "input.channels: must be 1 for grey or 3"),
        ("classification", {"input__spacing": [1, 1, 1]}, "input.spacing: one number for each axis"),
        ("classification", {"input__window": [1, 1]}, "input.window: the smaller number first"),
        ("classification", {"input__transforms": [{"name": "Lambda"}]}, "input.transforms.0.name: must be one of"),
        ("classification", {"input__transforms": [{"name": "RandFlip", "spatial_axis": 0}]}, "draws numbers"),
        ("classification", {"loss__name": "dice"}, "loss.name: must be one of cross-entropy"),
        ("classification", {"loss__name": "hinge"}, "loss.name: must be one of"),
        ("multi-label", {"loss__smoothing": 0.1}, "loss.smoothing: only cross-entropy"),
        ("multi-label", {"loss__weights": [1.0]}, "loss.weights: one for each of 2 outputs"),
        ("classification", {"training__clip": 0.0}, "training.clip: must be a number"),
        ("classification", {"training__clip": float("nan")}, "training.clip: must be a number"),
        ("classification", {"training__clip": True}, "training.clip: must be a number"),
        ("classification", {"training__rounds": 2.0}, "training.rounds: must be a whole number"),
        ("classification", {"training__public_patients": None}, "training.public_patients: missing"),
        ("classification", {"training__views": 2}, "training.views: more than 1 needs an augmentation"),
        ("classification", {"training__proximal": 2.0, "training__learning_rate": 1.0}, "training.proximal: at most"),
        ("classification", {"training__augmentation": [{"name": "ScaleIntensity"}]}, "draws no numbers"),
        (
            "classification",
            {"input__size": [32, 48], "training__augmentation": [{"name": "RandRotate90"}]},
            "training.augmentation.0.name: RandRotate90 needs equal first sides in input.size",
        ),
        ("classification", {"network__name": "alexnet"}, "network.name: must be one of"),
        ("classification", {"network__name": "unet"}, "network.name: unet does not give a number for each picture"),
        ("segmentation", {"network__name": "resnet18"}, "network.name: resnet18 takes 2-D input"),
    ],
)
def test_what_is_wrong_is_told_with_its_file_and_key(kind: str, values: dict[str, Any], told: str) -> None:
    assert any(problem.startswith("t.toml: ") and told in problem for problem in problems(kind, **values))


def test_a_quarter_turn_of_what_is_square_is_a_task() -> None:
    told = changed("classification", training__augmentation=[{"name": "RandRotate90"}])
    assert task_from_table(told, "t.toml").training.augmentation[0].name == "RandRotate90"


def test_a_task_that_names_no_network_trains_one_linear_layer() -> None:
    told = changed("classification")
    assert task_from_table({key: value for key, value in told.items() if key != "network"}).network.name == "linear"
    parts = [{"name": "resnet18", "weights": "a" * 64}]
    on_public = task_from_table({**told, "network": {"parts": parts}})
    assert (on_public.network.name, on_public.network.trained) == ("frozen-features", "head")


def test_every_problem_of_every_table_is_told_at_once() -> None:
    found = problems(
        "classification", task__name="", input__size=[1, 1], training__clip=-1.0, loss__name="x", network__name="y"
    )
    for key in ("task.name", "input.size", "training.clip", "loss.name", "network.name"):
        assert any(problem.startswith(f"t.toml: {key}: ") for problem in found), key


@pytest.mark.parametrize("text", ["[task", "a = " + "[" * 5000, "x" * (MOST_TEXT + 1)])
def test_what_is_no_toml_is_refused(text: str) -> None:
    with pytest.raises(TaskError, match=r"^t\.toml: "):
        task_from_toml(text, "t.toml")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"task":{"kind":"classification","kind":"regression"}}', "NaN"])
def test_what_is_no_json_of_a_task_is_refused(text: str) -> None:
    with pytest.raises(TaskError):
        task_from_json(text)


def test_a_task_that_is_built_is_checked_like_one_that_is_read() -> None:
    good = task_from_toml(CLASSES, "t.toml")
    with pytest.raises(TaskError, match=r"clip: must be a number in"):
        Training(public_patients=5, clip=float("inf"))
    with pytest.raises(TaskError, match=r"network\.name: segresnet"):
        Task("digits", good.kind, good.labels, good.input, good.loss, good.training, NetworkSpec("segresnet"))
