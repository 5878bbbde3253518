"""What a confined call raises: which errors it may, and what they say."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Final

import pytest

from agent.errors import CohortTooSmallError, DivergedError
from agent.mechanisms.centroids.mechanism import NoCellError
from agent.mechanisms.privimage.semantic_query import DrownedHistogramError
from agent.models.networks.suitability import UnsuitableNetworkError
from agent.models.recognition.recogniser import RecogniserError
from agent.models.training_loop import CHECKPOINT
from agent.release.maker_errors import _WORDS, GAP, SENTENCES, MakerFaultError, error_of
from agent.vetting.exact_copies import RepeatedInputError
from agent.vetting.filter import KINDS
from policies.tasks.bounds import TaskError
from protos.common.errors import InvariantError, LazaretError

AGENT: Final = Path(__file__).resolve().parents[3] / "agent"
COMPUTES: Final = ("dp", "evaluation", "mechanisms", "microaggregation", "models", "vetting")
BEFOREHAND: Final = (  # in the agent, before anything is priced, or by a training on public images
    "the noise of {} votes would drown",
    "on people it was not trained on, ",
    "the verifier did not learn",
)


def raised() -> Iterator[tuple[str, str]]:
    """Class and text of every error of the list that is raised where something is computed; gaps where values are."""
    for folder in COMPUTES:
        for path in (AGENT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                match node:
                    case ast.Raise(exc=ast.Call(func=ast.Name(id=kind), args=[text])) if kind in SENTENCES:
                        parts = text.values if isinstance(text, ast.JoinedStr) else [text]
                        yield kind, "".join(str(p.value) if isinstance(p, ast.Constant) else GAP for p in parts)


@pytest.fixture(scope="module", autouse=True)
def known() -> None:
    """All of the agent is imported, and with it every class of its errors."""
    for name in (
        "agent.cli.main",
        "agent.cli.job_process",
        "agent.evaluation.released_set",
        "agent.mechanisms.registry",
        "agent.release.pipeline",
    ):
        import_module(name)


def test_the_sentences_are_those_that_are_raised() -> None:
    found = {one for one in raised() if not one[1].startswith(BEFOREHAND)}
    assert found == {(kind, sentence) for kind, sentences in SENTENCES.items() for sentence in sentences}
    assert {*KINDS, CHECKPOINT} <= set(_WORDS)


@pytest.mark.parametrize("kind", ["CohortTooSmallError", "NoCellError", "RepeatedInputError"])
def test_a_class_with_a_sentence_of_its_own_says_that(kind: str) -> None:
    known = {one.__name__: one for one in (CohortTooSmallError, NoCellError, RepeatedInputError)}[kind]
    error = error_of(kind, "Patient Smith")
    assert type(error) is known
    assert str(error) == str(known())


def test_a_gap_holds_numbers_and_words_of_the_configuration() -> None:
    good = [
        (DivergedError, "at step 7: loss not all finite"),
        (DivergedError, "at step 12: parameters are not finite; a smaller learning rate or more noise helps"),
        (
            RecogniserError,
            SENTENCES["RecogniserError"][0].format(
                0.9, 0.25, "in all 0.50, of the worst kind, flip, 0.30, by the verifier 1.00, by the unseen one -0.10"
            ),
        ),
        (DrownedHistogramError, SENTENCES["DrownedHistogramError"][0].format("'no, tumour', 'b'")),
    ]
    for known, text in good:
        error = error_of(known.__name__, text, ("'no, tumour'", "'b'"))
        assert (type(error), str(error)) == (known, text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Patient Smith",
        "at step 7: Smith not all finite",
        "at step 7777777777777777777: loss not all finite",
        "at step 7: loss not all finite\x1b[2J",
        f"at step {', '.join(['1'] * 10_000)}: loss not all finite",
        f"at step {'1 ' * 400}: loss not all finite",
    ],
)
def test_another_sentence_is_not_told(text: str) -> None:
    assert str(error_of("DivergedError", text)) == "at step ...: ... not all finite"


@pytest.mark.parametrize(
    ("known", "told"),
    [
        (TaskError, "`lazaret-agent task check FILE` says why"),
        (UnsuitableNetworkError, "a fault of this program"),
    ],
)
@pytest.mark.parametrize(
    "text", ["", "Patient Smith", "network.name: must be one of linear", "a.0 is trained and never used"]
)
def test_an_error_of_the_tasks_network_is_told_by_the_agents_own_sentence(
    known: type[Exception], told: str, text: str
) -> None:
    error = error_of(known.__name__, text)
    assert type(error) is known
    assert str(error).endswith(told)
    assert text == "" or text not in str(error)


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("ValueError", "ValueError"),
        ("ReviewRejectedError", "ReviewRejectedError"),
        ("LedgerIntegrityError", "LedgerIntegrityError"),
        ("NotSentError", "NotSentError"),
        ("SiteStorageError", "SiteStorageError"),
        ("WorkerError", "WorkerError"),
        ("TransformError", "TransformError"),  # of one picture: whoever trains or looks leaves that out
        ("MakerEndedError", "MakerEndedError"),
        ("Smith_19500101", "unknown"),
        ("\x1b[2J", "unknown"),
        ("SystemExit", "unknown"),
    ],
)
def test_what_is_not_on_the_list_is_a_fault_and_its_text_stays_there(kind: str, named: str) -> None:
    error = error_of(kind, "Patient Smith")
    assert type(error) is MakerFaultError
    assert isinstance(error, InvariantError)
    assert str(error) == f"internal fault ({named}) in the process that computes it"


def test_every_class_of_the_list_can_be_raised() -> None:
    for kind in SENTENCES:
        error = error_of(kind, "")
        assert type(error).__name__ == kind
        assert isinstance(error, LazaretError)
        assert str(error)
