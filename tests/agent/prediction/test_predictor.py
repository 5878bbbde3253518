"""Where a person's command computes predictions."""

from __future__ import annotations

import pytest
import torch

from agent.dp.compute_device import AcceleratorLostError
from agent.prediction.predictor import of_accelerator


def test_what_an_accelerator_fails_at_is_a_sentence_without_the_drivers_text_and_no_other_fault_is() -> None:
    for fault, what in (
        (torch.AcceleratorError("PLANTED"), "it failed"),
        (torch.OutOfMemoryError("PLANTED"), "ran out"),
    ):
        sentence = rf"{what}. Nothing was written: .* --device cpu"
        with pytest.raises(AcceleratorLostError, match=sentence) as told, of_accelerator():
            raise fault
        assert "PLANTED" not in str(told.value)
    with pytest.raises(RuntimeError, match="another"), of_accelerator():
        raise RuntimeError("another")
