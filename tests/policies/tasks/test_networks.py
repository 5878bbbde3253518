from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.tasks.bounds import TaskError
from policies.tasks.networks import NETWORKS, NetworkSpec

PUBLIC = "a" * 64


@st.composite
def specs(draw: st.DrawFn) -> NetworkSpec:
    """Any network but one of several parts."""
    name = draw(st.sampled_from(sorted(NETWORKS.keys() - {"frozen-features"})))
    kind = NETWORKS[name]
    multiple = {key: bound.multiple for key, bound in kind.options.items()}
    options = {
        key: draw(st.integers(-(-bound.low // multiple[key]), bound.high // multiple[key])) * multiple[key]
        for key, bound in kind.options.items()
    }
    if name == "vit-s16":
        options["heads"] = draw(st.sampled_from([1, 2, 4, 8, 16]))
    weights = "" if name == "linear" else draw(st.sampled_from(["", PUBLIC]))
    if not weights:
        options = {key: value for key, value in options.items() if key not in ("head", "fixed_norms")}
    trained = draw(st.sampled_from(kind.trained))
    most = kind.blocks({**{key: bound.default for key, bound in kind.options.items()}, **options})
    blocks = {"last-blocks": draw(st.integers(1, max(1, most))), "lora": draw(st.integers(0, most))}.get(trained, 0)
    rank = 4 * draw(st.integers(1, 16)) if trained == "lora" else 0
    return NetworkSpec(name, options, trained, blocks, rank, weights)


@given(specs())
def test_a_network_reads_back_from_its_canonical_json_and_from_a_pickle(spec: NetworkSpec) -> None:
    assert NetworkSpec.from_json(spec.to_json()) == spec
    assert NetworkSpec.from_table(spec.to_table()) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_every_network_has_defaults_and_names_them_in_its_canonical_form() -> None:
    for name in NETWORKS.keys() - {"frozen-features"}:
        spec = NetworkSpec(name)
        assert spec.options.keys() == NETWORKS[name].options.keys()
        assert NetworkSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize(
    ("table", "problems"),
    [
        ({}, ["network.name: must be one of"]),
        ({"name": "efficientnet"}, ["network.name: must be one of"]),
        ({"name": "linear", "module": "os"}, ["network.module: unknown key"]),
        (
            {"name": "resnet18", "options": {"width": 0, "depth": 3}},
            ["options.depth: unknown", "options.width: must"],
        ),
        ({"name": "resnet18", "options": {"width": True}}, ["network.options.width: must be a whole number"]),
        ({"name": "resnet18", "options": {"width": 8.0}}, ["network.options.width: must be a whole number"]),
        ({"name": "linear", "options": {"pooled": 5}}, ["network.options.pooled: must be", "a multiple of 4"]),
        ({"name": "segresnet", "options": {"width": 12}}, ["network.options.width: must be", "a multiple of 8"]),
        ({"name": "resnet18", "blocks": 2}, ["network.blocks: must be 0 where all is trained"]),
        ({"name": "resnet18", "trained": "last-blocks"}, ["network.blocks: must be a whole number in [1, 4]"]),
        ({"name": "resnet18", "trained": "last-blocks", "blocks": 5}, ["network.blocks: must be"]),
        (
            {"name": "resnet18", "trained": "lora"},
            ["network.rank: must be a whole number in [4, 64], a multiple of 4"],
        ),
        ({"name": "resnet18", "trained": "half"}, ["network.trained: must be one of"]),
        ({"name": "resnet18", "trained": 1, "blocks": "2"}, ["trained: must be a text", "blocks: must be a whole"]),
        ({"name": "linear", "trained": "head"}, ["network.trained: must be one of all for linear"]),
        ({"name": "linear", "weights": PUBLIC}, ["network.weights: linear has none"]),
        ({"name": "resnet18", "weights": "http://x"}, ["network.weights: must be a SHA-256"]),
        ({"name": "resnet18", "options": {"head": 1}}, ["network.options.head: needs weights"]),
        ({"name": "resnet18", "options": {"fixed_norms": 1}}, ["network.options.fixed_norms: needs weights"]),
        ({"name": "vit-s16", "options": {"width": 64}}, ["network.options.width: must be a multiple of"]),
        ({"name": "resnet18", "parts": [{"name": "resnet18"}]}, ["network.parts: only frozen-features"]),
        ({"name": "frozen-features"}, ["network.parts: must be 1 to 8 networks"]),
        ({"name": "frozen-features", "parts": 3}, ["network.parts: must be a list"]),
        ({"name": "frozen-features", "parts": [{"name": "resnet18"}]}, ["network.parts.0.weights: missing"]),
        (
            {
                "name": "frozen-features",
                "options": {"evened": 1},
                "parts": [{"name": "resnet18", "weights": "a" * 64}],
            },
            ["network.options.evened: needs options.centred = 1"],
        ),
        (
            {"name": "frozen-features", "parts": [{"name": "unet", "weights": PUBLIC}, {"name": 3}]},
            ["network.parts.1.name: must be one of"],
        ),
        (
            {"name": "frozen-features", "parts": [{"name": "unet", "weights": PUBLIC, "trained": "head"}]},
            ["parts.0.name: unet has no features", "parts.0.trained: a part of frozen-features"],
        ),
        ("linear", ["network: must be a table"]),
    ],
)
def test_what_is_not_on_the_list_is_refused_with_every_key(table: Any, problems: list[str]) -> None:
    with pytest.raises(TaskError) as refused:
        NetworkSpec.from_table(table)
    for problem in problems:
        assert problem in str(refused.value)


def test_another_form_of_the_same_network_is_refused() -> None:
    text = NetworkSpec("linear").to_json()
    for other in (text.replace(":", ": ", 1), text.replace('"pooled":8', '"pooled":8,"pooled":8'), "[]", "{"):
        with pytest.raises(TaskError):
            NetworkSpec.from_json(other)


def test_a_site_hears_of_every_public_file_once() -> None:
    parts = tuple(NetworkSpec("small-cnn", weights=digest) for digest in (PUBLIC, "b" * 64, PUBLIC))
    assert NetworkSpec("frozen-features", parts=parts).public_files == (PUBLIC, "b" * 64)
    assert NetworkSpec("small-cnn", weights=PUBLIC).public_files == (PUBLIC,)
    assert NetworkSpec("small-cnn").public_files == ()


def test_the_page_tells_every_network_with_its_options_and_input() -> None:
    page = (Path(__file__).parents[3] / "deploy" / "docs" / "networks.md").read_text()
    rows = [row.split("|")[1:-1] for row in page.splitlines() if row.startswith("| `")]
    told = {name.strip().strip("`"): (dims, options) for name, _, dims, options in rows}
    assert told.keys() == NETWORKS.keys()
    for name, kind in NETWORKS.items():
        dims, options = told[name]
        assert options.strip() == ", ".join(f"`{key}` {bound.default}" for key, bound in kind.options.items())
        if name != "frozen-features":
            assert dims.strip() == ", ".join(f"{n}-D" for n in kind.dimensions)


def test_a_network_that_does_not_fit_the_input_is_told_before_it_is_built() -> None:
    assert NetworkSpec("unet").misfits((64, 64), masks=True) == []
    assert NetworkSpec("unet").misfits((48, 48, 48), masks=True) == []
    assert "a multiple of 16" in NetworkSpec("unet").misfits((48, 50), masks=True)[0]
    assert "name: unet does not give a number for each picture" in NetworkSpec("unet").misfits((64, 64), masks=False)
    assert "takes 2-D input" in NetworkSpec("vit-s16").misfits((32, 32, 32), masks=False)[0]
    assert "needs 32 pixels a side" in NetworkSpec("densenet121").misfits((16, 16), masks=False)[0]
    parts = (NetworkSpec("resnet18", weights=PUBLIC),)
    assert NetworkSpec("frozen-features", parts=parts).misfits((8, 8), masks=False)[0].startswith("parts.0.name: ")
