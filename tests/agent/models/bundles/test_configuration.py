"""A bundle's folder is data: programs and links that lead away are refused by name, and nothing explodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent.models.bundles.configuration import BundleError, Configuration, expressions, read_bundle
from tests.support.monai_bundles import classification, flat_segmentation, write_bundle


def _bundle(folder: Path, train: str, name: str = "train.json") -> Path:
    (folder / "configs").mkdir(parents=True)
    (folder / "configs" / name).write_text(train)
    return folder


def test_json_and_yaml_say_the_same(tmp_path: Path) -> None:
    one = read_bundle(write_bundle(tmp_path / "a", flat_segmentation()))
    two = read_bundle(write_bundle(tmp_path / "b", flat_segmentation(), form="yaml"))
    assert one.configs == two.configs
    assert set(one.configs) == {"inference", "metadata"}
    assert one.weights is None


def test_a_python_file_is_refused_by_name_wherever_it_lies(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "b", classification())
    (folder / "scripts").mkdir()
    (folder / "scripts" / "net.py").write_text("")
    (folder / "docs" / "run.sh").write_text("")
    with pytest.raises(BundleError) as refused:
        read_bundle(folder)
    assert [one.partition(":")[0] for one in refused.value.problems] == ["docs/run.sh", "scripts/net.py"]


def test_a_link_out_of_the_bundle_is_refused_by_name_and_one_within_is_followed(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "b", classification())
    (folder / "configs" / "inference.json").symlink_to(folder / "configs" / "train.json")
    assert "inference" in read_bundle(folder).configs
    (tmp_path / "secret.json").write_text("{}")
    (folder / "configs" / "other.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(BundleError, match=r"configs/other\.json: a link"):
        read_bundle(folder)


def test_the_file_is_named_and_not_quoted_whatever_is_wrong_with_it(tmp_path: Path) -> None:
    for number, (name, text) in enumerate(
        (
            ("train.json", "{"),
            ("train.json", '{"secret": 1, "secret": 2}'),
            ("train.json", '{"secret": NaN}'),
            ("train.json", '{"secret": 1e999}'),
            ("train.json", "[1]"),
            ("train.json", "[" * 100_000),
            ("train.json", '{"a":' * 40 + "1" + "}" * 40),
            ("train.json", '{"a": "' + "x" * (1 << 20) + '"}'),
            ("train.json", json.dumps({"a": [0] * 60_000})),
            ("train.yaml", "secret: [1"),
            ("train.yaml", "secret: 1\nsecret: 2"),
            ("train.yaml", "1: 2"),
            ("train.yaml", "secret: 2020-01-01"),
            ("train.yaml", "secret: !!python/object/apply:os.getcwd []"),
            ("train.yaml", "a: &x [1]\nsecret: [*x, *x]"),
        )
    ):
        with pytest.raises(BundleError) as refused:
            read_bundle(_bundle(tmp_path / str(number), text, name))
        assert "1]" not in str(refused.value), text[:20]
        assert len(str(refused.value)) < 200, text[:20]


def test_no_folder_no_configuration_and_two_of_one_name_are_one_sentence_each(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no folder"):
        read_bundle(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BundleError, match="no bundle"):
        read_bundle(tmp_path / "empty")
    folder = _bundle(tmp_path / "two", "{}")
    (folder / "configs" / "train.yaml").write_text("a: 1")
    with pytest.raises(BundleError, match="there are two of it"):
        read_bundle(folder)


def test_references_are_followed_in_both_signs_and_expressions_stay_texts() -> None:
    source = Configuration(
        {"a": {"b": [1, {"c": "@d"}]}, "d": "$1 + 1", "e": {"x": "@a::b::1", "y": "@a#b#0", "z": "a@b"}}
    )
    assert source.part("e") == {"x": {"c": "$1 + 1"}, "y": 1, "z": "a@b"}
    assert expressions(source.part("e"), "e") == ["e::x::c"]
    assert source.followed == {"a::b::1", "a::b::0", "d"}


@pytest.mark.parametrize(
    ("whole", "why"),
    [
        ({"a": "@b", "b": "@a"}, "back to itself"),
        ({"a": {"x": "@a"}}, "back to itself"),
        ({"a": "@b::0", "b": []}, "leads nowhere"),
        ({"a": "@b::99999999999", "b": [1]}, "leads nowhere"),
        ({"a": "@"}, "leads nowhere"),
        ({f"k{at}": [f"@k{at + 1}"] * 10 for at in range(10)} | {"k10": 1, "a": "@k0"}, "more than"),
        ({f"k{at}": {"x": f"@k{at + 1}"} for at in range(99)} | {"k99": 1, "a": "@k0"}, "more than"),
    ],
)
def test_references_end_and_do_not_explode(whole: dict[str, object], why: str) -> None:
    with pytest.raises(BundleError, match=why):
        Configuration(whole).part("a")
