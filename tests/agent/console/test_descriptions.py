"""What the site console says: never stronger than the claim, never an epsilon without its unit."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import pytest

from agent.console import descriptions, log_reader
from agent.console import policy as policy_pages
from agent.console.background_task import BackgroundTask
from agent.console.errors import errors_as_pages, sentence
from agent.mechanisms.registry import __file__ as mechanisms
from coordinator import claim_descriptions
from policies.accounting.claims import NoClaim
from policies.accounting.rounding import rounded_up
from policies.governance import amendments
from policies.ledger.entries import InvalidEntryError, Opened
from policies.ledger.state import Account
from policies.ledger.store import LedgerBusyError, LedgerStoppedError
from policies.review.mechanism_terms import TERMS
from policies.review.policy import parse, preset
from protos.web.router import PageError
from tests.support.ledger_world import BOTH, DP, K5, LOOKED, Hospital, policy

SITE = Hospital("site-a")


def every_word() -> str:
    """All sentences of the module, and all templates."""
    folder = Path(descriptions.__file__).parent
    return "\n".join(path.read_text() for path in [Path(descriptions.__file__), *folder.glob("*.html")])


def test_nothing_is_called_anonymous_and_no_epsilon_is_zero() -> None:
    text = re.sub(r"k-?anonym\w*", "", every_word().lower())
    assert "anonymous" not in text
    assert not re.search(r"(ε|epsilon) ?= ?0(\.0+)?\b", text)


def test_an_epsilon_is_said_with_unit_relation_and_delta_and_rounded_up() -> None:
    release = SITE.release("g1", mechanism="federated", claim=DP, epsilon_nano=1_234_567_891, delta="4e-06")
    assert descriptions.loss(release) == "ε = 1.24 at δ = 4e-06, per patient (add or remove one)"


@pytest.mark.parametrize(
    "changes",
    [
        {"claim": K5},
        {"claim": NoClaim(), "mechanism": "distill", "vetted_against": "private"},
        {"claim": DP, "epsilon_nano": 10, "delta": "4e-06", "vetted_against": "private"},  # P7: the look voids it
        {"claim": DP, "epsilon_nano": 10, "delta": "4e-06", "components": {"initial": "private", "centre": "public"}},
    ],
)
def test_a_release_without_a_guarantee_by_noise_shows_no_epsilon(changes: dict[str, object]) -> None:
    assert descriptions.loss(SITE.release("g1", **changes)) == ""


def test_k_is_said_in_patients_and_has_no_epsilon() -> None:
    told = descriptions.promise(K5)
    assert "5 different patients" in told
    assert "no epsilon" in told
    assert descriptions.promise(BOTH).startswith("2 uses")
    assert "Charged together: the training, and 3 looks" in descriptions.promise(LOOKED)
    assert "no guarantee" in descriptions.promise(NoClaim())


def test_figures_of_attacks_are_bounds_and_what_cannot_be_read_is_no_figure() -> None:
    rows = descriptions.attacks(SITE.release("g1", reid_rate="0.031", vetting_power="0.9", menu="5,8"))
    assert [row[1] for row in rows] == ["at most 3.1 %", "at least 90 %", "5, 8"]
    for odd in ("nan", "many", "inf"):
        (row,) = descriptions.attacks(SITE.release("g1", reid_rate=odd))
        assert row[1] == "at most a figure that cannot be read"
    assert descriptions.attacks(SITE.release("g1")) == ()


def test_a_reviewer_of_heads_is_told_of_faces_and_that_the_brain_still_links_them() -> None:
    heads = {"mechanism": "remodel", "claim": NoClaim(), "vetted_against": "private"}
    release = SITE.release("g1", **heads, reid_rate="0.04", vetting_power="0.92")
    rows = descriptions.attacks(release)
    assert [row[:2] for row in rows] == [
        ("Faces matched", "at most 4 %"),
        ("Unaltered faces matched", "at least 92 %"),
    ]
    assert descriptions.BRAIN == claim_descriptions.BRAIN
    assert descriptions.BRAIN in rows[0][2]
    assert descriptions.BRAIN in dict(descriptions.facts(release))["Method"]
    told = str(rows)
    assert "planted" not in told.lower()
    assert "verifier" not in told
    pictures = str(descriptions.attacks(SITE.release("g1", reid_rate="0.04", vetting_power="0.92")))
    assert "Planted copies caught" in pictures
    assert descriptions.BRAIN not in pictures


def test_mixed_pictures_are_not_called_averages_nor_faces() -> None:
    assert not re.search("average|face(?!S)", descriptions.MECHANISMS["anonfaces"].replace("AnonFACES", ""))


@pytest.mark.parametrize(("spent", "held"), [(400, 0), (0, 400), (200, 400)])
def test_no_epsilon_of_a_budget_stands_bare(spent: int, held: int) -> None:
    account = Account(Opened("site-a/rdp", 1000, 4, "8.0", "4e-06"), held=held, spent=spent)
    told = descriptions.budget(account)
    text = " ".join(map(str, told.values()))
    assert len(re.findall(r"ε = [\d.]+", text)) == 1 + bool(spent) + bool(held)
    assert all(
        text[found.end() :].startswith(" at δ = 4e-06, per patient (add or remove one)")
        for found in re.finditer(r"ε = [\d.]+", text)
    )


def test_every_method_of_the_law_has_a_name_here() -> None:
    assert set(descriptions.MECHANISMS) == set(TERMS)
    assert mechanisms


def test_what_is_left_is_rounded_down_and_what_is_gone_up() -> None:
    account = Account(Opened("site-a/rdp", 1000, 4, "8.0", "4e-06"), held=1, spent=332)
    share = descriptions.share(account)
    assert (share["spent"], share["held"], share["left"]) == (33.2, 0.1, 66.7)
    odd = Account(Opened("site-a/rdp", 3000, 4, "8.0", "4e-06"), held=1, spent=1)
    assert descriptions.share(odd)["spent"] + descriptions.share(odd)["held"] + descriptions.share(odd)["left"] <= 100
    assert descriptions.share(Account(Opened("site-a/k", 0, 0, "", "")))["left"] == 0
    assert descriptions.share(Account(Opened("site-a/k", 1, 0, "", ""), spent=3))["left"] == 0
    assert math.isclose(rounded_up(1.2300000000001, 2), 1.23)


# -- a draft of a policy


def test_all_problems_of_a_draft_are_said_at_once() -> None:
    made, wrong = policy_pages.problems(
        policy(epsilon=0, k_min=1, levels='["D"]', odd=1).replace("delta", "dleta"), 3
    )
    assert made is None
    assert {line.partition(":")[0] for line in wrong} == {"delta", "dleta", "epsilon", "k_min", "levels"}
    assert policy_pages.problems("= no TOML", 1)[1]


def test_a_delta_too_large_for_the_patients_is_a_problem() -> None:
    assert policy_pages.problems(policy(delta="1e-3"), 999)[1] == ()
    assert "number of this site's patients" in policy_pages.problems(policy(delta="1e-3"), 1000)[1][0]


@pytest.mark.parametrize(
    ("key", "value", "change"),
    [
        ("epsilon", 9.0, "looser"),
        ("epsilon", 7.0, "tighter"),
        ("k_min", 11, "tighter"),
        ("k_min", 4, "looser"),
        ("approvals", '["hospital"]', "tighter"),
        ("levels", '["A"]', "tighter"),
        ("levels", '["A", "B", "C"]', "looser"),
        ("readers", f'["{"ab" * 32}"]', "looser"),
        ("modalities", '["CT", "SC"]', "looser"),  # one more, though many fewer
    ],
)
def test_a_change_is_told_from_the_law_that_takes_the_strictest(key: str, value: object, change: str) -> None:
    before, after = parse(policy(), "a"), parse(policy(**{key: value}), "b")
    (row,) = [row for row in policy_pages.compare(before, after, before) if row.key == key]
    assert row.change == change
    assert amendments.loosened_keys(before, after) == ((key,) if change == "looser" else ())
    assert amendments.loosened_keys(before, before) == ()


def test_presets_loosen_as_their_names_say() -> None:
    known = {name: parse(preset(name), name) for name in ("internal", "controlled", "public")}
    assert amendments.loosened_keys(known["controlled"], known["internal"])
    assert set(policy_pages.MEANINGS) == {row.key for row in policy_pages.compare(*known.values())}


def test_a_proposal_is_of_one_text_and_of_one_place_in_history() -> None:
    texts = [amendments.amendment_serial(text, number) for text, number in itertools.product(("a", "b"), (0, 1))]
    assert len(set(texts)) == 4


# -- what goes wrong


def test_a_fault_is_said_in_our_words_and_an_unknown_one_without_its_text() -> None:
    assert "another command" in sentence(LedgerBusyError("x"))
    assert sentence(InvalidEntryError("two roles must approve")) == "two roles must approve"
    assert "DOE" not in sentence(RuntimeError("patient DOE^JOHN"))
    with pytest.raises(PageError) as caught, errors_as_pages():
        raise LedgerStoppedError("the disk failed")
    assert caught.value.status == 503
    with pytest.raises(RuntimeError), errors_as_pages():
        raise RuntimeError("patient DOE^JOHN")


def test_one_errand_at_a_time_and_its_fault_is_told_without_its_text() -> None:
    import threading

    gate, errand = threading.Event(), BackgroundTask()

    def act(progress: object) -> str:
        gate.wait(200)
        raise RuntimeError("patient DOE^JOHN")

    assert errand.begin("intake", "reading", act, sentence)
    assert not errand.begin("intake", "another", act, sentence)
    assert not errand.told().over
    gate.set()
    assert errand.wait(200)
    assert errand.told().failed
    assert "DOE" not in errand.told().result
    assert errand.begin("intake", "another", lambda _: "done", sentence)
    assert errand.wait(200)
    assert errand.told().result == "done"


def test_the_log_is_read_back_and_torn_or_strange_lines_are_passed_over(tmp_path: Path) -> None:
    log = tmp_path / "agent.log"
    assert log_reader.read(log) == []
    log.write_bytes(
        b'{"event": "pulled", "where": "main", "kept": 5, "count": 1, "timestamp": "2026-01-01T00:00:00Z"}\n'
        b'{"event": "pull_failed", "where": "main", "state": "no answer"}\n[1]\n{"event": 5}\n\xff\xfe\n'
        b'{"event": "ingested", "kept": "many", "where": "a\\u202eb"}\n{"event": "torn'
    )
    events = log_reader.read(log)
    assert [e.name for e in events] == ["pulled", "pull_failed", "ingested"]
    assert (events[2].kept, events[2].where) == (0, "")
    last = log_reader.last(events, "pulled", "pull_failed", where="main")
    assert last is not None
    assert last.fault
