"""The page of metrics tells what the catalogue names and nothing else, and one fault spoils nothing of the rest."""

from __future__ import annotations

import pytest

from protos.operations.metrics import Metric, MetricError, MetricsPage, Samples, capped

CATALOGUE = (
    Metric("lazaret_things", "Things.", ("kind",)),
    Metric("lazaret_faults_total", "Faults.", (), "counter"),
)


def page(**sources: object) -> str:
    return MetricsPage("agent", "1.0", CATALOGUE, sources)().decode()  # type: ignore[arg-type]


def test_what_a_source_tells_is_on_the_page_with_help_and_type() -> None:
    def things(told: Samples) -> None:
        told.put("lazaret_things", 3, kind="a")
        told.put("lazaret_faults_total", 2)

    text = page(things=things)
    for line in (
        "# HELP lazaret_things Things.",
        "# TYPE lazaret_things gauge",
        'lazaret_things{kind="a"} 3.0',
        "# TYPE lazaret_faults_total counter",
        "lazaret_faults_total 2.0",
        'lazaret_source_faults{source="things"} 0.0',
        'lazaret_build_info{side="agent",version="1.0"} 1.0',
    ):
        assert line in text.splitlines()


@pytest.mark.parametrize(
    "bad",
    [
        lambda told: told.put("lazaret_other", 1),
        lambda told: told.put("lazaret_things", 1),
        lambda told: told.put("lazaret_things", 1, kind="a", patient="b"),
        lambda told: told.put("lazaret_things", float("nan"), kind="a"),
        lambda told: 1 / 0,
        lambda told: [told.put("lazaret_things", n, kind=str(n)) for n in range(20_000)],
    ],
)
def test_a_source_that_fails_or_tells_what_it_must_not_is_missing_as_a_whole(bad: object) -> None:
    def half(told: Samples) -> None:
        told.put("lazaret_things", 1, kind="half")
        bad(told)  # type: ignore[operator]

    text = page(bad=half, good=lambda told: told.put("lazaret_faults_total", 1))
    assert "lazaret_things{" not in text
    assert 'lazaret_source_faults{source="bad"} 1.0' in text
    assert 'lazaret_source_faults{source="good"} 0.0' in text
    assert "lazaret_faults_total 1.0" in text


def test_the_catalogue_itself_is_strict() -> None:
    with pytest.raises(MetricError):
        Samples({}).put("lazaret_things", 1)
    for name, kind in (("things", "gauge"), ("lazaret_x_total", "gauge"), ("lazaret_x", "counter")):
        with pytest.raises(ValueError, match="is no name"):
            Metric(name, "x", (), kind)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="twice"):
        MetricsPage("agent", "1", (*CATALOGUE, CATALOGUE[0]), {})


@pytest.mark.parametrize("value", ['"} 1\nlazaret_things{kind="forged', "\\", "\r\n", "\x1b[2J", "x" * 1000])
def test_a_label_cannot_forge_a_line(value: str) -> None:
    text = page(things=lambda told: told.put("lazaret_things", 1, kind=value))
    lines = [line for line in text.splitlines() if line.startswith("lazaret_things{")]
    assert len(lines) == 1
    assert lines[0].endswith("} 1.0")
    assert all(c.isprintable() for c in lines[0])
    assert len(lines[0]) < 300


def test_the_page_names_no_path_and_nothing_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZARET_CANARY", "canary-7")
    text = page()
    assert "/" not in "".join(line for line in text.splitlines() if not line.startswith("#"))
    assert "canary" not in text
    assert {line.split("{")[0].split(" ")[0].split("_")[0] for line in text.splitlines() if line[0] != "#"} == {
        "lazaret",
        "process",
    }


def test_a_label_has_few_values_and_the_sum_stays() -> None:
    counts = {f"rule-{n}": n for n in range(1, 101)}
    few = capped(counts, most=10)
    assert len(few) == 11
    assert sum(few.values()) == sum(counts.values())
    assert few["rule-100"] == 100
    assert capped({"a": 1}) == {"a": 1}
