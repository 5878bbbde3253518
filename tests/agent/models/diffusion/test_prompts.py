import dataclasses
import hashlib
import inspect
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agent.models.diffusion.prompts import (
    LONGEST,
    MOST,
    TEMPLATES,
    Conditions,
    UnknownWordError,
    Vocabulary,
    conditions_from,
)
from deploy.phantoms.chest import report
from protos.artifacts.shards import plain

NAMES = ("none", "edema", "edema+effusion")
CHEST = Conditions(NAMES, ("frontal chest radiograph with {}", "chest showing {}"))


def test_a_labels_findings_are_its_parts_at_the_plus():
    assert CHEST.parts == (("none",), ("edema",), ("edema", "effusion"))
    assert CHEST.findings == ("edema", "effusion", "none")
    assert CHEST.count == 3
    said = ("frontal chest radiograph with edema and effusion", "chest showing edema and effusion")
    assert CHEST.prompts("edema+effusion") == said
    assert (
        Conditions(("3", "drusen", "Diabetic Retinopathy")).prompts("Diabetic Retinopathy")[2]
        == "diabetic retinopathy"
    )


def test_the_default_templates_name_no_modality():
    words = {word for template in TEMPLATES for word in template.replace("{}", "").split()}
    assert words == {"image", "with", "showing"}


def test_a_prompts_tokens_spell_it_in_the_words_of_templates_and_labels():
    words = ("and", "chest", "edema", "effusion", "frontal", "none", "radiograph", "showing", "with")
    assert CHEST.vocabulary == Vocabulary(words)
    tokens = CHEST.tokens(torch.tensor([2, -1, 0]))
    assert tokens.shape == (3, CHEST.length)
    assert tokens.dtype == torch.int64
    spelled = [" ".join(words[t - 1] for t in row if t) for row in tokens.tolist()]
    assert spelled == ["frontal chest radiograph with edema and effusion", "", "frontal chest radiograph with none"]
    assert not tokens[1].any()  # no condition
    assert torch.equal(CHEST.vocabulary.tokens(spelled, CHEST.length), tokens)


def test_a_generator_chooses_among_the_templates_and_nothing_else_does():
    labels, state = torch.ones(200, dtype=torch.int64), torch.get_rng_state()
    first, again = (CHEST.tokens(labels, torch.Generator().manual_seed(4)) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(state, torch.get_rng_state())
    either = {tuple(row) for row in CHEST.vocabulary.tokens(CHEST.prompts("edema"), CHEST.length).tolist()}
    assert {tuple(row) for row in first.tolist()} == either
    assert not CHEST.tokens(torch.full((9,), -1), torch.Generator().manual_seed(0)).any()
    assert CHEST.tokens(torch.zeros(0, dtype=torch.int64)).shape == (0, CHEST.length)


@pytest.mark.parametrize(
    "labels", [torch.tensor([3]), torch.tensor([-2]), torch.tensor([0.0]), torch.tensor(1), torch.ones(1, 1).long()]
)
def test_labels_of_no_condition_are_refused(labels):
    with pytest.raises(ValueError, match="label"):
        CHEST.tokens(labels)


def test_there_is_no_way_to_pass_text_for_a_picture():
    given_ = {f.name for f in dataclasses.fields(Conditions) if f.init}
    assert given_ == {"names", "templates", "length"}  # public configuration, all of it
    asked = {
        name: set(inspect.signature(method).parameters) - {"self"}
        for name, method in inspect.getmembers(Conditions, inspect.isfunction)
        if not name.startswith("_")
    }
    assert asked == {"tokens": {"labels", "generator"}, "prompts": {"name"}, "place": {"name"}, "told": set()}
    for text in ("edema, old fracture", "edema and effusion", ""):
        with pytest.raises(ValueError, match="not one of the conditions") as refused:
            CHEST.prompts(text)
        assert "fracture" not in str(refused.value)


def test_a_word_that_stands_only_in_a_report_at_the_site_cannot_be_expressed():
    canary = "zanzibar"
    written = f"{report(frozenset({'edema'}), np.random.default_rng(0))} {canary}"
    with pytest.raises(UnknownWordError) as refused:
        CHEST.vocabulary.tokens([canary], CHEST.length)
    assert canary not in str(refused.value)
    with pytest.raises(UnknownWordError):
        CHEST.vocabulary.tokens([f"chest showing {canary}"], CHEST.length)
    with pytest.raises(ValueError, match="word"):
        CHEST.vocabulary.tokens([written], LONGEST)
    every = torch.cat([CHEST.tokens(torch.arange(3), torch.Generator().manual_seed(s)) for s in range(20)])
    assert int(every.max()) < CHEST.vocabulary.size
    assert not any(canary in word for word in CHEST.vocabulary.words)
    # and where somebody configures it, it is there for all to read: in the file, and in the digest
    told = Conditions((*NAMES, canary), CHEST.templates)
    assert canary in told.told()["names"]
    assert told.digest != CHEST.digest


def test_the_digest_is_of_names_templates_and_length():
    told = {"length": 16, "names": list(NAMES), "templates": list(CHEST.templates)}
    text = json.dumps(told, sort_keys=True, separators=(",", ":"))
    assert CHEST.digest == hashlib.sha256(text.encode()).hexdigest()
    others = (
        Conditions(NAMES),
        Conditions(NAMES[::-1], CHEST.templates),
        Conditions(NAMES, CHEST.templates[::-1]),
        Conditions(NAMES, CHEST.templates, 17),
        Conditions((*NAMES, "effusion"), CHEST.templates),
    )
    assert len({CHEST.digest, *(other.digest for other in others)}) == 6
    assert conditions_from(json.loads(json.dumps(CHEST.told()))) == CHEST
    assert hash(conditions_from(CHEST.told())) == hash(CHEST)


@pytest.mark.parametrize(
    "names",
    [
        (), ("",), ("a", "a"), ("a", "A"), ("a b", "a  b"), ("a+b", "b+a"), ("a+b", "a and b"), ("a+",), ("+",),
        ("a+a",), ("a+A",), ("a+ ",), (" a",), ("a ",), ("a\n",), ("a\tb",), ("\x7f",), ("ödem",), ("a\u200bb",),
        ("x" * 33,), (3,), (None,), ["a"], tuple(map(str, range(MOST + 1))), tuple(f"{n:032d}" for n in range(2000)),
    ],
)  # fmt: skip
def test_names_that_are_empty_not_plain_or_not_told_apart_are_refused(names):
    with pytest.raises(ValueError, match=r"condition|too long"):
        Conditions(names)


@pytest.mark.parametrize(
    "templates",
    [(), ("chest",), ("{} {}",), ("{}", "{}"), ("{}\n",), ("thorax {} é",), ("{}" + "x" * 200,), (1,), ["{}"],
     ("{}",) * 17],
)  # fmt: skip
def test_templates_without_one_place_for_the_label_are_refused(templates):
    with pytest.raises(ValueError, match="template"):
        Conditions(NAMES, templates)


def test_a_prompt_that_is_too_long_is_refused_and_never_cut():
    longest = Conditions(NAMES, ("{} " + "a " * 60 + "a",), LONGEST)
    assert longest.tokens(torch.tensor([0, 2])).count_nonzero(dim=1).tolist() == [62, 64]
    with pytest.raises(ValueError, match="64 words at most"):
        Conditions(NAMES, ("{} " + "a " * 61 + "a",), LONGEST)
    for length in (0, 65, 2.0, True):
        with pytest.raises(ValueError, match=r"prompt has|64 tokens"):
            Conditions(NAMES, ("one two three {}",), length)
    with pytest.raises(ValueError, match="3 words at most"):
        Conditions(NAMES, ("one {}",), 3)


def test_as_many_conditions_as_may_be_are_told_apart():
    many = Conditions(tuple(map(str, range(MOST))), ("{}",), 1)
    tokens = many.tokens(torch.arange(MOST))
    assert len(torch.unique(tokens)) == MOST


def test_a_label_in_braces_is_a_word_and_no_format():
    assert Conditions(("{0.__class__}", "{}"), ("with {}",)).prompts("{0.__class__}") == ("with {0.__class__}",)


@given(st.text(st.characters(max_codepoint=0x17F), min_size=1, max_size=34))
def test_a_name_may_be_what_a_released_set_may_hold_as_a_label(name):
    parts = [part.split() for part in name.lower().split("+")]
    told_apart = all(parts) and len({tuple(part) for part in parts}) == len(parts)
    if plain(name) and name == name.strip() and told_apart:
        assert Conditions((name,)).prompts(name)[2] == " and ".join(" ".join(part) for part in parts)
    else:
        with pytest.raises(ValueError, match="condition"):
            Conditions((name,))


@pytest.mark.parametrize(
    "told",
    [
        {}, [], {"names": ["a"], "templates": ["{}"]}, {"names": "a", "templates": ["{}"], "length": 2},
        {"names": [["a"]], "templates": ["{}"], "length": 2}, {"names": ["a"], "templates": ["{}"], "length": "2"},
    ],
)  # fmt: skip
def test_a_file_that_tells_no_conditions_is_refused(told):
    with pytest.raises(ValueError, match=r"names|condition|tokens"):
        conditions_from(told)


@pytest.mark.parametrize("words", [(), ("b", "a"), ("a", "a"), ("A",), ("a b",), ("",), ("é",)])
def test_a_vocabulary_that_can_be_numbered_in_two_ways_is_refused(words):
    with pytest.raises(ValueError, match="word"):
        Vocabulary(words)
