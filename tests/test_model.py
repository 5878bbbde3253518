"""The protocol of the two ledgers, searched in every interleaving by SPIN; each rule is also broken on purpose.

The model is ``model/budget.pml``. Each test compiles one variant of it and lets the checker visit every state.
"""

from __future__ import annotations

import pkgutil
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.peers import need

MODEL = Path(__file__).parent / "model" / "budget.pml"
DEPTH = 10_000  # steps; the longest path of the largest instance here has a few hundred
MEMORY_MB = 4096  # the checker's own bound: it then says that the search is not complete
PATIENCE_S = 1500
INVARIANTS = {
    "real_loss_above_the_limit",
    "site_does_not_cover_the_loss",
    "hub_does_not_cover_the_loss",
    "site_overspent",
    "hub_overspent",
    "released_under_a_freed_grant",
    "two_answers_to_one_key",
    "granted_over_a_forgotten_loss",
}

# what is broken -> the invariant that the checker must see fail
BREAKS: list[tuple[str, str]] = [
    ("RESTART_FREES", "site_does_not_cover_the_loss"),
    ("RESTART_FREES LIMIT=2", "released_under_a_freed_grant"),
    ("CANCEL_NOT_DURABLE", "site_overspent"),
    ("OUT_BEFORE_GRANT", "hub_does_not_cover_the_loss"),
    ("SENT_NOT_DURABLE NO_RESTORE", "site_does_not_cover_the_loss"),
    ("RESERVE_NOT_DURABLE", "site_does_not_cover_the_loss"),
    ("REJECTED_FREES", "site_does_not_cover_the_loss"),
    ("SITE_PAYS_ANSWERED ROUNDS=2 LIMIT=3", "site_does_not_cover_the_loss"),
    ("SITE_UNCHECKED", "site_overspent"),
    ("SITE_ROLLBACK", "site_does_not_cover_the_loss"),
    ("EXPIRY_FREES", "hub_does_not_cover_the_loss"),
    ("SETTLEMENT_FREES", "hub_does_not_cover_the_loss"),
    ("GRANT_NOT_DURABLE", "hub_does_not_cover_the_loss"),
    ("NO_KEYS", "two_answers_to_one_key"),
    ("HUB_PAYS_ADMITTED ROUNDS=2 LIMIT=3", "hub_does_not_cover_the_loss"),
    ("HUB_UNCHECKED", "hub_overspent"),
    ("RESTORE_UNFROZEN", "hub_does_not_cover_the_loss"),
    ("RESTORE_UNFROZEN ONLY_GRANTING LIMIT=2", "granted_over_a_forgotten_loss"),
    ("RECEIPTS_STALE", "hub_does_not_cover_the_loss"),
    ("RECEIPTS_OF_SENT_ONLY", "hub_does_not_cover_the_loss"),
    ("RECEIPTS_SKIP_REFUSED", "hub_does_not_cover_the_loss"),
    ("WAIVER_KEEPS_HELD ROUNDS=2 LIMIT=3", "hub_does_not_cover_the_loss"),
    # one intact ledger holds the limit (below); without any, patients pay
    ("SITE_UNCHECKED HUB_UNCHECKED ONLY_LOSS", "real_loss_above_the_limit"),
    ("SITE_ROLLBACK RESTORE_UNFROZEN ONLY_LOSS", "real_loss_above_the_limit"),
    ("SITE_ROLLBACK ONLY_LOSS", "real_loss_above_the_limit"),  # the receipts are gone with the site's ledger
]

WITNESSES: dict[str, str] = {
    "a release is admitted, and spent in both ledgers": "WITNESS=1",
    "the whole budget is used": "WITNESS=2 LIMIT=2",
    "a refused grant is freed, and another is released in its place": "WITNESS=3",
    "a restart spends a grant under which nothing was sent": "WITNESS=4",
    "a lease expires while the release is on its way": "WITNESS=5",
    "a forgotten grant is entered again, and a new one is given and released after it": "WITNESS=6 LIMIT=2",
    "a site that does not come back is written off": "WITNESS=7",
    "a run that ends early pays its part, and the rest is released under another grant": "WITNESS=8 ROUNDS=2 LIMIT=3",
}

# macros that are no break: they choose an instance, or narrow what is run or asked
STRUCTURE = {"GRANTS", "ROUNDS", "LIMIT", "WITNESS", "NO_RESTORE", "ONLY_LOSS", "ONLY_GRANTING"}
HARMLESS = {"RESTART_FREES_UNSENT"}


@dataclass(frozen=True, slots=True)
class Search:
    """What the checker said."""

    errors: int
    broken: str  # the assertion that failed; empty if none did
    states: float
    complete: bool
    output: str


@pytest.fixture(scope="module", autouse=True)
def _tools() -> None:
    need("spin", "gcc")


def search(
    work: Path, macros: str = "", optimise: str = "-O0", flags: Sequence[str] = (), depth: int = DEPTH
) -> Search:
    """Compile one variant of the model and visit every state of it, or those up to the first error."""
    shutil.copy(MODEL, work / MODEL.name)
    spin = ["spin", "-a", *(f"-D{macro}" for macro in macros.split()), MODEL.name]
    made = subprocess.run(spin, cwd=work, check=True, capture_output=True, text=True)
    assert "rror" not in made.stdout + made.stderr, made.stdout + made.stderr
    # NOREDUCE: the monitor sees every single step, so steps must not be merged
    gcc = ["gcc", optimise, "-w", "-DSAFETY", "-DNOREDUCE", f"-DMEMLIM={MEMORY_MB}", *flags, "-o", "pan", "pan.c"]
    subprocess.run(gcc, cwd=work, check=True)
    pan = ["./pan", f"-m{depth}", "-w22"]
    done = subprocess.run(pan, cwd=work, check=False, capture_output=True, text=True, timeout=PATIENCE_S)
    return read(done.stdout + done.stderr)


def read(output: str) -> Search:
    """The checker's report; a report without its last lines is a failure, not a clean search."""
    errors, states = re.search(r"errors: (\d+)", output), re.search(r"([\d.e+]+) states, stored", output)
    assert errors is not None, output
    assert states is not None, output
    broken = re.search(r"assertion violated \W*(\w+)==0", output)
    truncated = ("max search depth too small", "out of memory", "MEMLIM", "Search not completed")
    return Search(
        int(errors[1]),
        broken[1] if broken else "",
        float(states[1]),
        not any(words in output for words in truncated),
        output,
    )


def sound(found: Search) -> bool:
    """Everything was visited, and nothing was wrong."""
    return found.complete and found.errors == 0


@pytest.mark.parametrize(
    ("macros", "fewest"),
    [
        ("GRANTS=2 LIMIT=1", 3_000),
        ("GRANTS=2 LIMIT=2", 100_000),
        ("GRANTS=3 LIMIT=2", 500_000),
        ("GRANTS=2 ROUNDS=2 LIMIT=3", 250_000),
    ],
)
def test_no_interleaving_of_crashes_expiries_restores_and_messages_overspends(
    tmp_path: Path, macros: str, fewest: int
) -> None:
    found = search(tmp_path, macros, "-O2")
    assert sound(found), found.output
    assert found.states >= fewest, "a much smaller search is another model"


def test_every_step_of_the_model_is_taken(tmp_path: Path) -> None:
    """A model in which nothing can happen would be safe too."""
    output = search(tmp_path).output
    unreached = re.findall(r'^\tbudget\.pml:(\d+), state \d+, "(.*)"$', output.split("unreached in claim")[0], re.M)
    assert "unreached in proctype Site" in output
    assert {what for _, what in unreached} == {"-end-"}, unreached


@pytest.mark.parametrize("macros", WITNESSES.values(), ids=list(WITNESSES))
def test_the_model_can_do_what_the_product_does(tmp_path: Path, macros: str) -> None:
    found = search(tmp_path, macros)
    assert (found.errors, found.broken) == (1, "witnessed"), found.output


@pytest.mark.parametrize(("macros", "broken"), BREAKS, ids=[macros for macros, _ in BREAKS])
def test_a_broken_rule_is_found_unsafe(tmp_path: Path, macros: str, broken: str) -> None:
    found = search(tmp_path, macros)
    assert (found.errors, found.broken) == (1, broken), found.output


@pytest.mark.parametrize(
    "macros", ["SITE_UNCHECKED NO_RESTORE", "SITE_ROLLBACK NO_RESTORE", "HUB_UNCHECKED", "RESTORE_UNFROZEN"]
)
def test_one_intact_ledger_of_the_two_holds_the_limit(tmp_path: Path, macros: str) -> None:
    found = search(tmp_path, f"{macros} ONLY_LOSS")
    assert sound(found), found.output


@pytest.mark.parametrize("limit", [1, 2])
def test_only_the_durable_sent_entry_could_ever_allow_a_restart_to_free(tmp_path: Path, limit: int) -> None:
    """The other half of SENT_NOT_DURABLE: the same rule, and the entry durable, is safe without a restore."""
    found = search(tmp_path, f"RESTART_FREES_UNSENT NO_RESTORE LIMIT={limit}")
    assert sound(found), found.output


def test_a_search_that_was_cut_short_is_not_called_sound(tmp_path: Path) -> None:
    found = search(tmp_path, depth=30)
    assert found.errors == 0, "nothing is wrong in what was visited"
    assert not sound(found)


def test_every_break_and_every_invariant_of_the_model_is_in_this_file() -> None:
    text = MODEL.read_text()
    macros = set(re.findall(r"^#ifn?def ([A-Z_]+)$", text, re.M)) | set(re.findall(r"defined\(([A-Z_]+)\)", text))
    tried = {word.partition("=")[0] for macros_of, _ in BREAKS for word in macros_of.split()}
    assert macros - STRUCTURE - HARMLESS == tried - STRUCTURE
    assert set(re.findall(r"^hidden byte (\w+) = 1;", text, re.M)) == INVARIANTS | {"witnessed"}
    assert {broken for _, broken in BREAKS} == INVARIANTS


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE_S)
@pytest.mark.parametrize(
    ("macros", "fewest"), [("GRANTS=3 ROUNDS=2 LIMIT=3", 1_500_000), ("GRANTS=4 LIMIT=2", 2_000_000)]
)
def test_no_interleaving_of_a_larger_instance_overspends(tmp_path: Path, macros: str, fewest: int) -> None:
    found = search(tmp_path, macros, "-O2", ["-DCOLLAPSE"])
    assert sound(found), found.output
    assert found.states >= fewest, "a much smaller search is another model"


def test_the_table_from_model_to_code_names_what_there_is() -> None:
    """The README beside the model says which line is which code: each name resolves."""
    table = [line for line in (MODEL.parent / "README.md").read_text().splitlines() if line.startswith("|")]
    names = {name for line in table for name in re.findall(r"`((?:agent|policies|coordinator)\.[\w.]+)`", line)}
    assert len(names) > 8
    for name in names:
        pkgutil.resolve_name(name)
