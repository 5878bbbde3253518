"""What a federated run asks of a hospital's line, and what it costs to ask for less.

``update_bytes_vs_float32``: an update of 11 million parameters as a site's link sends it, all of Flower's objects and
the sealed statement counted, in bfloat16 over float32. Masked updates are of the ring's words: they stand beside it.

Beside it: what bfloat16 costs in accuracy. Three sites of 500 patients train written digits with local noise by real
rounds, twice with the same draws of noise and patients: once each update is rounded, once it is not. A difference is
the rounding's alone.

``predict_vs_plain_inference`` and its like: see :mod:`tests.benchmarks.predict_inference`. ``slow_link_vs_bytes`` and
``rounds_lost_to_cuts``: see :mod:`tests.benchmarks.slow_line`; they stand there where this runs as root.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import mean
from typing import Any, Final

import numpy as np
import torch
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from agent.federation.run_mechanism import update_bytes
from agent.federation.supernode import records_of
from agent.federation.tasks import Reply, RoundAnswer
from agent.mechanisms.federated.mechanism import NO_FILES
from policies.tasks.networks import NetworkSpec
from protos.artifacts.bfloat16 import BFLOAT16, FLOAT32, Numbers, rounded, widened
from protos.artifacts.strict_safetensors import vector_bytes
from tests.benchmarks import predict_inference, slow_line
from tests.benchmarks.federated import DIGITS, SEEDS, accuracy, digit_persons, digit_task, setting
from tests.benchmarks.report import Report, Row
from tests.benchmarks.round_size import MIDDLE
from tests.support.entropy import UnsafeSeededEntropy
from tests.support.federated_study import Prepared, mechanism_of, trained

_STATEMENT: Final = 2_048  # bytes of a sealed statement, about
_EPSILONS: Final = (8.0, 1.0)
_MIB: Final = float(1 << 20)


def update_sizes(parameters: int = MIDDLE) -> tuple[list[Row], float]:
    """Bytes of one update on the line, by precision; and their ratio."""
    vector = np.random.default_rng(0).standard_normal(parameters).astype(np.float32)
    short = rounded(vector)
    forms: dict[str, Numbers] = {FLOAT32: vector, BFLOAT16: short}
    sent = {name: _sent(numbers) for name, numbers in forms.items()}
    rows = [Row(f"an update of {parameters:,} in {name}", size / _MIB, "MiB") for name, size in sent.items()]
    for bits in (32, 64):
        size = vector_bytes(parameters, "ring", f"U{bits}")
        rows.append(Row(f"a masked one, ring of {bits} bits", size / _MIB, "MiB"))
    error = np.abs(widened(short) - vector) / np.abs(vector)
    rows.append(Row("largest relative error of a number, in units of 2^-8", float(error.max()) * 256, "ratio"))
    return rows, sent[BFLOAT16] / sent[FLOAT32]


def _sent(numbers: Numbers) -> int:
    records = records_of(Reply(b"t", "train", RoundAnswer(bytes(_STATEMENT), numbers)))
    return sum(len(part.deflate()) for part in get_all_nested_objects(records).values())


def precision_accuracy() -> list[Row]:
    """Accuracy on digits with updates of both precisions, and the largest difference of one training."""
    task, rows = digit_task(NetworkSpec("linear")), list[Row]()
    found: dict[tuple[float, str], list[float]] = {}
    for seed in SEEDS[:2]:
        persons = digit_persons(seed)
        prepared = Prepared.of(task, NO_FILES)
        for epsilon in _EPSILONS:
            launched = setting(task, DIGITS, "local", epsilon)
            for name in (FLOAT32, BFLOAT16):
                job = replace(launched, update_precision=name).job(prepared.network.parameters)
                assert update_bytes(mechanism_of(job)) <= vector_bytes(job.parameters)
                vector = trained(job, persons.sites, prepared, UnsafeSeededEntropy(seed))
                said: tuple[Any, Any] = prepared.answers(task, vector, persons.test)
                found.setdefault((epsilon, name), []).append(accuracy(*said))
    for (epsilon, name), each in found.items():
        rows.append(Row(f"digits, local noise, epsilon {epsilon:g}, {name}", mean(each), "accuracy"))
    apart = [
        abs(a - b)
        for epsilon in _EPSILONS
        for a, b in zip(found[epsilon, FLOAT32], found[epsilon, BFLOAT16], strict=True)
    ]
    return [*rows, Row(f"most that rounding moves one of {len(apart)} trainings", max(apart), "accuracy")]


def main() -> Report:
    """Measure; five minutes of one processor, and a quarter of an hour of a slow line."""
    torch.set_num_threads(1)
    rows, ratio = update_sizes()
    predicted, against = predict_inference.rows()
    carried, lost = slow_line.slow_line()
    every = (*rows, *precision_accuracy(), *predicted, *carried)
    return Report(every, {"update_bytes_vs_float32": ratio, **against, **lost})
