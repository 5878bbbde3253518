"""A hospital's own model as it is typed in deploy/docs/rounds.md, from the page's files to the pool's card."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agent import runtime
from agent.cli import release_resumable
from agent.deidentify.record import Record
from coordinator.cli.main import main as coordinator
from coordinator.pools.architectures import approve_task
from policies.tasks.task import task_from_toml
from protos.artifacts.byte_source import BytesSource
from protos.artifacts.strict_safetensors import Architecture, check_weights, unpack_weights
from tests.support.command_line import Typed, at, typed
from tests.support.federation_world import Site
from tests.support.release_site import enrolled_site
from tests.support.unchanged import opened_once, untouched
from tests.support.vault_records import record

__all__ = ["typed"]  # a fixture
PAGE = (Path(__file__).parents[3] / "deploy" / "docs" / "rounds.md").read_text()
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TASK = next(text for kind, text in FENCED.findall(PAGE) if kind == "toml" and 'name = "chest-triage"' in text)
CONFIG = next(text for kind, text in FENCED.findall(PAGE) if kind == "toml" and 'mechanism = "model"' in text)
LINES = [
    re.sub(r" +#.*", "", line).split()[1:]
    for kind, text in FENCED.findall(PAGE)
    for line in text.splitlines()
    if line.startswith("lazaret-agent release model")
]
PATIENTS = 40


def shot(number: int) -> Record:
    """A picture of one patient: brighter where it is ill."""
    pixels = np.random.default_rng(number).random((32, 32)) / 2 + 0.4 * (number % 2)
    return replace(record(number, number, ("healthy", "ill")[number % 2]), pixels=pixels.astype(np.float32))


@pytest.fixture
def ward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """An enrolled site; the page's files are in the current folder, for the modality that the site has."""
    monkeypatch.setattr(release_resumable, "gate", lambda *_: None)  # it has its own tests
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chest-triage.toml").write_text(TASK.replace('"DX"', '"OT"'))
    (tmp_path / "model.toml").write_text(CONFIG)
    with enrolled_site(tmp_path, [shot(n) for n in range(PATIENTS)]) as site:
        yield site


def test_the_pages_two_lines_price_train_and_release_a_model_which_the_pool_shows_with_its_card(
    typed: Typed, ward: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dry, real = LINES
    opened_once(ward)
    with monkeypatch.context() as unread, untouched(ward):
        unread.setattr(runtime, "task_cohort", lambda *_: pytest.fail("read"))
        said = typed(*at(ward), *dry)
    assert said.status == 0, said.err
    assert "one model" in said.out
    told = re.search(r"the ledger charges (\S+)", said.out)
    assert told
    assert 3.9 < float(told[1]) <= 4.0

    task = task_from_toml((tmp_path / "chest-triage.toml").read_text(), "")
    home = ward.federation.home
    approve_task(home, task, 130, 10)  # as the operator's launch of a run of it does
    said = typed(*at(ward), *real)
    assert said.status == 0, said.err
    assert "admitted at level A" in said.out
    raw = (tmp_path / "chest-triage.safetensors").read_bytes()
    shown = Architecture.shown_by(BytesSource(raw))
    check_weights(BytesSource(raw), shown)
    held = unpack_weights(raw, shown)
    assert (held["flat"].shape, held["sums"].shape) == ((130,), (20,))
    assert held["flat"].any()
    assert json.loads(shown.told)["config"]["task"] == task.digest
    spent = ward.federation.store.state.accounts["site-a/rdp"].spent
    assert spent > 0

    (name,) = ward.federation.store.state.releases
    export = ["--home", str(home.root), "pool", "export", str(tmp_path / "out"), "--model", name]
    assert coordinator(export) == 0, capsys.readouterr().err
    card = json.loads((tmp_path / "out" / "card.json").read_bytes())["model"]
    assert card["task"]["sha256"] == task.digest
    assert [look["looked_at"] for look in card["evaluation"]] == ["when it was trained"]


def test_a_model_of_a_task_that_the_operator_does_not_know_is_refused_and_its_blank_is_what_he_approves(
    typed: Typed, ward: Site, tmp_path: Path
) -> None:
    blank = typed(*at(ward), "release", "model", "--config", "model.toml", "--blank", "blank.safetensors")
    assert blank.status == 0, blank.err
    assert not ward.federation.store.state.grants
    said = typed(*at(ward), *LINES[1])
    assert said.status == 1
    assert "no approved architecture" in said.out + said.err
    command = ["--home", str(ward.federation.home.root), "pool", "architecture", str(tmp_path / "blank.safetensors")]
    assert coordinator([*command, "--approve", "triage"]) == 0
    again = typed(*at(ward), *LINES[1])
    assert again.status == 0, again.err
