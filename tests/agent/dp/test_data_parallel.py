"""Two processes of one site: the same model as one process makes, and nothing at all when one of them fails."""

import multiprocessing

import numpy as np
import pytest

from agent.dp.clipping import loop_engine
from tests.support import data_parallel_process as parallel
from tests.support.entropy import UnsafeSeededEntropy


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What both processes leave, one training after the other."""
    made = tmp_path_factory.mktemp("abreast")
    context = multiprocessing.get_context("spawn")
    both = [context.Process(target=parallel.part, args=(rank, made)) for rank in range(parallel.WORLD)]
    for process in both:
        process.start()
    for process in both:
        process.join(200)
    assert [process.exitcode for process in both] == [0, 9]
    return made


def _left(folder, fault):
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(f"{fault}-"))


def test_two_processes_make_the_model_of_one_and_one_of_them_keeps_the_checkpoint(folder):
    assert _left(folder, "none") == ["none-0.checkpoint", "none-0.npy", "none-1.npy"]
    one, two = (np.load(folder / f"none-{rank}.npy") for rank in range(2))
    assert np.array_equal(one, two)  # the noise is the same in both, and was added once
    alone = parallel.trained(loop_engine, UnsafeSeededEntropy(5))
    assert np.abs(alone).max() > 0.1
    assert np.abs(one - alone).max() < 1e-5


def test_both_go_on_from_the_checkpoint_of_the_first(folder):
    assert _left(folder, "through") == ["through-0.npy", "through-1.npy"]
    weights = [np.load(folder / name) for name in ("none-0.npy", "through-0.npy", "through-1.npy")]
    assert np.array_equal(weights[0], weights[1])  # at its end already: nothing is drawn or computed again
    assert np.array_equal(weights[0], weights[2])


def test_when_a_process_dies_the_other_stops_and_gives_nothing(folder):
    assert _left(folder, "dies") == ["dies-0.stopped"]


@pytest.mark.parametrize("fault", ["patients", "weights"])
def test_processes_with_other_patients_or_weights_stop_and_give_nothing(folder, fault):
    assert _left(folder, fault) == [f"{fault}-0.outofstep", f"{fault}-1.outofstep"]
