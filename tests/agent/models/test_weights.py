"""Network files: one form, nothing unpickled, no more memory than the file brings."""

from __future__ import annotations

import json
import resource
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import save

from agent.models.features.extractors import features_from
from agent.models.recognition.recogniser import recogniser_from
from agent.models.stylegan.network import PRESETS, generator_from
from agent.models.stylegan.restyle import encoder_from
from agent.models.weights import HEADER, WeightsError, built, fill, pack, unpack
from tests.support.networks import files, recogniser_file

TINY = asdict(PRESETS["tiny32"])


def header(value: object) -> bytes:
    return save({"a": torch.zeros(1)}, {HEADER: json.dumps(value)})


def test_a_network_reads_back_and_the_same_network_is_the_same_bytes() -> None:
    raw = pack("thing", {"n": 1}, {"steps": 2}, {"b": torch.ones(2), "a": torch.zeros(3)})
    assert raw == pack("thing", {"n": 1}, {"steps": 2}, {"a": torch.zeros(3), "b": torch.ones(2)})
    found = unpack(raw, "thing")
    assert (found.kind, dict(found.config), dict(found.notes)) == ("thing", {"n": 1}, {"steps": 2})
    assert {name: t.tolist() for name, t in found.state.items()} == {"a": [0, 0, 0], "b": [1, 1]}


@pytest.mark.parametrize(
    "raw",
    [b"", b"\0" * 8, b"\xff" * 64, save({"a": torch.zeros(1)}), save({"a": torch.zeros(1)}, {HEADER: "{"}),
     header([]), header({"kind": "thing"}), header({"kind": "other", "config": {}, "notes": {}}),
     header({"kind": "thing", "config": [], "notes": {}}), header("[" * 9000),
     (len(b'{"__metadata__":null}').to_bytes(8, "little") + b'{"__metadata__":null}'),
     pack("thing", {}, {}, {"a": torch.tensor([float("nan")])})],
)  # fmt: skip
def test_what_is_no_network_of_ours_is_refused(raw: bytes) -> None:
    with pytest.raises(WeightsError):
        unpack(raw, "thing")


@pytest.mark.parametrize(
    "wrong",
    [{"z_dim": 5_000_000}, {"z_dim": 10**10}, {"channel_max": 1 << 20, "channel_base": 1 << 20}, {"z_dim": 1e30},
     {"z_dim": 64.5}, {"z_dim": True}, {"resolution": 1 << 30}, {"mapping_layers": 10**6}, {"w_dim": "64"}, {"x": 1}],
)  # fmt: skip
def test_sizes_in_a_file_cost_no_memory_and_no_fault(wrong: dict[str, object]) -> None:
    raw = pack("generator", {**TINY, **wrong}, {}, {"synthesis.b4.const": torch.zeros(1)})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(WeightsError):
        generator_from(raw)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


@pytest.mark.parametrize("reader", [generator_from, encoder_from, recogniser_from, features_from])
def test_every_reader_refuses_a_file_whose_tensors_are_not_those_of_its_sizes(reader) -> None:  # type: ignore[no-untyped-def]
    for kind, raw in (("generator", files()[0]), ("encoder", files()[1]), ("recogniser", recogniser_file(1))):
        told = unpack(raw, kind)
        state = dict(told.state)
        name = sorted(state)[0]
        for changed in (
            {**state, name: torch.zeros(7)},
            {n: t for n, t in state.items() if n != name},
            {**state, "x": torch.zeros(1)},
        ):
            with pytest.raises(WeightsError):
                reader(pack(kind, told.config, told.notes, changed))


def test_a_module_is_built_from_a_file_without_moving_anybodys_generator() -> None:
    before = torch.get_rng_state()
    linear = torch.nn.Linear(3, 2)
    torch.set_rng_state(before)
    module = built(lambda: torch.nn.Linear(3, 2), linear.state_dict())
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(module.weight, linear.weight)
    assert not module.weight.requires_grad
    with pytest.raises(WeightsError, match="weight"):
        fill(torch.nn.Linear(3, 3), linear.state_dict())
