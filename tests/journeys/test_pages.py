"""Every page of deploy/docs, typed in the order of a hospital beside both sides' services: nobody stops anything.

Each line of a block of commands is typed as it is printed, with the words filled in that the page leaves open, or it
is in a list here with the reason. A line that is in neither fails the test: a new page cannot escape.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from deploy.demo.scene import SITES
from protos.service.control_client import service_fault
from tests.support.pages_world import PagesWorld, pages_world
from tests.support.peers import HEAD, PLUGIN, lacking

pytestmark = pytest.mark.timeout(1200)

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "deploy" / "docs"
FENCED: Final = re.compile(r"^( *)```(\S*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
NO_COMMANDS: Final = {"text", "toml", "json", "yaml", "python", "{toctree}", "{include}"}
_PROGRAM: Final = r"(?:lazaret-\w+|python3?|make|systemctl|docker|kubectl|helm|apt) (?! )"
PROGRAM: Final = re.compile(f"^ *{_PROGRAM}", re.MULTILINE)

# Pages whose `sh` blocks a test of their own types, whole and in order: beside which services is said there.
TYPED_WHOLE: Final = {
    "first-release.md": "tests/journeys/test_readme.py",
    "install.md": "tests/journeys/test_bundle.py",
    "notebook.md": "tests/agent/test_client_notebook.py",
    "round-trip.md": "tests/journeys/test_round_trip.py",
    "rounds.md": "tests/journeys/test_rounds_tutorial.py",
    "walk.md": "tests/journeys/test_readme.py",
}
_HOURS: Final = "trains for hours on a processor: queued beside the service, as jobs.md says, and cancelled"
_FULL_DEMO: Final = "needs networks that know these patients again, or 36 heads: typed by `make demo-full`"
_VETTING: Final = "a table [vetting] needs two verifiers that know people again, and 35 patients: tests/agent/release"
_TUTORIAL: Final = "the same of the tutorial's own files, typed by tests/journeys/test_rounds_tutorial.py"
_BUNDLES: Final = (
    "needs a bundle, or a model: typed by tests/agent/cli/test_task_bundle.py and test_task_to_bundle.py"
)
_MODEL: Final = "needs a model: typed by tests/journeys/test_round_trip.py, and by tests/agent/cli/test_predict.py"
_CHECKOUT: Final = "of a checkout, not of an installation: CI types it"
# Lines that cannot be run here, by page and first words.
NOT_HERE: Final[Mapping[tuple[str, str], str]] = {
    ("bundles.md", "lazaret-agent task from-bundle"): _BUNDLES,
    ("bundles.md", "lazaret-coordinator pool export"): _BUNDLES,
    ("bundles.md", "lazaret-agent task to-bundle"): _BUNDLES,
    ("bundles.md", "python -m monai.bundle"): _BUNDLES,
    ("developer.md", "make "): _CHECKOUT,
    ("distill.md", "python -m deploy.reproduction"): "reads data sets that nobody may hand out, or trains for hours",
    ("synthesis.md", "python -m deploy.reproduction"): "reads data sets that nobody may hand out",
    ("distill.md", "lazaret-agent --home site-a release distill"): _FULL_DEMO,
    ("faces.md", "lazaret-agent --home site-a release remodel"): _FULL_DEMO,
    ("predict.md", "lazaret-agent predict"): _MODEL,
    ("predict.md", "lazaret-agent evaluate"): _MODEL,
    ("rounds.md", "lazaret-agent release model"): "typed by tests/agent/cli/test_release_model.py, with its files",
    ("rounds.md", "lazaret-agent run"): _TUTORIAL,
    ("rounds.md", "lazaret-coordinator round simulate"): _TUTORIAL,
    ("synthesis.md", "lazaret-agent --home site-b release anonfaces"): _FULL_DEMO,
    ("synthesis.md", "lazaret-agent --home site-b release ksame"): _VETTING,
    ("synthesis.md", "lazaret-agent --home site-b release ksalsa --config ksalsa.toml --sheet"): _VETTING,
}


@dataclass(frozen=True, slots=True)
class How:
    """What is special about one line: what stands before it, what is added to it, and how it ends."""

    before: Callable[[PagesWorld], None] = lambda _: None
    added: str = ""
    status: int = 0
    then: Callable[[PagesWorld], None] = lambda _: None
    needs: tuple[str, ...] = ()  # programs and files of Debian


def _queued(world: PagesWorld) -> None:
    """A training was queued: end it."""
    number = re.findall(r"job (\d+) is queued", world.said)[-1]
    world.type(f"lazaret-agent jobs cancel {number}")


def _trained(network: str = "", file: str = "") -> How:
    return How(
        before=lambda world: world.learned(network, file) if network else None, added=" --detach", then=_queued
    )


_ARCHIVE: Final = ("Orthanc", "storescu", PLUGIN)
_HEAD: Final = (HEAD,)
_DEFACE: Final = "lazaret-agent deface head.nii.gz bare.nii.gz --method"
HOW: Final[Mapping[tuple[str, str], How]] = {
    ("consoles.md", "lazaret-coordinator --home DIR login trust"): How(before=PagesWorld.hand_over),
    ("distill.md", "lazaret-agent train autoencoder"): _trained(),
    ("distill.md", "lazaret-agent train verifier    --pictures public --out nets/verifier"): _trained(
        "autoencoder", "autoencoder.safetensors"
    ),
    ("distill.md", "lazaret-agent train verifier    --pictures public --out nets/unseen"): _trained(),
    ("distill.md", "lazaret-agent train aligner"): _trained(),
    ("enrolment.md", "lazaret-coordinator approve site-a"): How(
        before=PagesWorld.other_signs, then=PagesWorld.joined
    ),
    ("enrolment.md", "lazaret-coordinator ledger sign enrol"): How(before=PagesWorld.join),
    ("faces.md", f"{_DEFACE} quickshear"): How(before=PagesWorld.scans, needs=_HEAD),
    ("faces.md", f"{_DEFACE} deface"): How(before=PagesWorld.other_method, needs=_HEAD),
    ("faces.md", "lazaret-agent train"): _trained(),
    ("faces.md", "lazaret-agent deface study"): How(needs=_HEAD),
    ("opt-out.md", "lazaret-agent opt-out add"): How(before=PagesWorld.one_patient, needs=_ARCHIVE),
    ("pacs.md", "lazaret-agent --home SITE ingest --dicomweb"): How(needs=_ARCHIVE),
    ("pacs.md", "lazaret-agent --home SITE ingest --pacs"): How(before=PagesWorld.archives, needs=_ARCHIVE),
    ("pool.md", "lazaret-coordinator --home DIR pool architecture --task"): How(before=PagesWorld.task_file),
    ("pool.md", "lazaret-coordinator --home DIR pool architecture"): How(before=PagesWorld.architecture),
    ("private.md", "lazaret-agent train"): _trained(),
    ("refused.md", "lazaret-agent quarantine show"): How(before=PagesWorld.one_refused),
    ("refused.md", "lazaret-agent quarantine retry"): How(status=1),  # nobody has mended the cause: refused again
    ("reports.md", "lazaret-verify certificate.pdf --key FINGERPRINT --from"): How(before=PagesWorld.a_release),
    ("rounds.md", "lazaret-agent task check chest-triage.toml"): How(before=PagesWorld.task_file),
    ("rounds.md", "lazaret-coordinator round stop"): How(before=PagesWorld.run_begins),
    ("synthesis.md", "lazaret-agent train encoder"): _trained("generator", "generator.safetensors"),
    ("synthesis.md", "lazaret-agent train"): _trained(),
    ("verify.md", "lazaret-coordinator --home coordinator report certificate"): How(before=PagesWorld.a_release),
    ("verify.md", "python3 lazaret-verify.pyz"): How(before=PagesWorld.exported),
}
# The words that a page leaves open, and what the reader fills in.
FILLED: Final[Mapping[str, Mapping[str, str]]] = {
    "consoles.md": {"DIR": "coordinator"},
    "enrolment.md": {"site-a": "site-d"},
    "keep-running.md": {"/mnt/backup": "backup"},
    "pacs.md": {"SITE": "site-a"},
    "pool.md": {
        **{"DIR": "coordinator", "export OUT": "export pool-1", "average OUT": "average mean-1"},
        **{"export MODEL": "export model-1", "--model RUN": "--model digits-1", "TASK.toml": "chest-triage.toml"},
        **{
            "--approve TASK": "--approve triage",
            "RUN RUN": "digits-1 digits-2",
            "CR": "OT",
            "FILE": "blank.safetensors",
            "NAME": "small",
        },
    },
    "proxy.md": {"DIR": "site-x"},
    "rounds.md": {"--run NAME": "--run digits-1", "watch NAME": "watch digits-1"},
    "verify.md": {"officer-1": "dpo-1"},
}
ORDER: Final = (
    *("developer", "enrolment", "proxy", "consoles", "pacs", "first-release", "refused", "jobs", "synthesis"),
    *("private", "distill", "faces", "rounds", "pool", "verify", "reports", "opt-out", "keep-running"),
)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a block of commands, and what the page shows below its block."""

    page: str
    text: str
    shown: str = field(default="")

    def of(self, table: Mapping[tuple[str, str], object]) -> list[tuple[str, str]]:
        """The keys of a table that mean this line."""
        return [key for key in table if key[0] == self.page and self.text.startswith(key[1])]


def lines_of_pages() -> Iterator[Line]:
    """Every line of every block of commands that is typed here, page by page in the order of a hospital."""
    pages = sorted(DOCS.rglob("*.md"), key=lambda path: (_place(path), path))
    for path in pages:
        text = path.read_text()
        for block in FENCED.finditer(text):
            if block[2]:
                continue
            below = FENCED.search(text, block.end())
            between = text[block.end() : below.start()].strip() if below and below[2] == "text" else "\n\n"
            shown = textwrap.dedent(below[3]) if below and "\n\n" not in between else ""
            lines = [line for line in textwrap.dedent(block[3]).splitlines() if line.strip()]
            for line in lines:
                yield Line(str(path.relative_to(DOCS)), line, shown if line is lines[-1] else "")


def _place(path: Path) -> int:
    return ORDER.index(path.stem) if path.stem in ORDER else len(ORDER)


_VARIES: Final = re.compile(r"(?P<gap>\s+)|(?P<hex>\b[0-9a-f]{8,}\b)|(?P<number>\d[\d.,]*)|(?P<left_out>…)")
_SHAPES: Final = {"gap": r"\s+", "hex": r"[0-9a-f]{8,}", "number": r"\d[\d.,]*", "left_out": r".*"}


def shape(line: str) -> re.Pattern[str]:
    """A line that a page shows, with any numbers, digests, and widths of columns."""
    text, place, parts = line.strip(), 0, []
    for found in _VARIES.finditer(text):
        parts += [re.escape(text[place : found.start()]), _SHAPES[str(found.lastgroup)]]
        place = found.end()
    return re.compile("".join(parts) + re.escape(text[place:]))


def filled(page: str, text: str, world: PagesWorld) -> str:
    """A line with what its page leaves open, and without its comment."""
    text = re.sub(r" +# .*$", "", text)
    for word, told in {**FILLED.get(page, {}), **world.filled}.items():
        text = re.sub(rf"(?<![\w/.-]){re.escape(word)}(?![\w-])", told, text)
    return text


@pytest.mark.slow
def test_every_line_of_the_pages_works_as_printed_beside_both_services(tmp_path: Path) -> None:
    with pages_world(tmp_path) as world:
        for line in lines_of_pages():
            how = next((HOW[key] for key in line.of(HOW)), How())
            if line.of(NOT_HERE) or (how.needs and lacking(*how.needs)):
                continue
            how.before(world)
            world.type(filled(line.page, line.text, world) + how.added, status=how.status)
            for shown in line.shown.splitlines():
                found = shape(filled(line.page, shown, world)).search(world.said)
                assert found, f"{line.page}: {shown!r} is not in {world.said}"
            how.then(world)
        faults = {home: service_fault(world.work / home) for home in ("coordinator", *SITES)}
        assert set(faults.values()) == {None}, f"all serve to the end, and are well: {faults}"


def test_every_key_of_the_tables_means_a_line_that_a_page_shows() -> None:
    lines = list(lines_of_pages())
    for table in (NOT_HERE, HOW):
        for key in table:
            assert any(key in line.of(table) for line in lines), key
    twice = [line for line in lines if line.of(NOT_HERE) and line.of(HOW)]
    assert not twice
    for page, words in FILLED.items():
        text = (DOCS / page).read_text()
        assert all(word in text for word in words), page


def test_no_command_of_a_page_stands_where_nobody_types_it() -> None:
    """A block has a language that is known; only blocks of commands have commands; `sh` is typed whole elsewhere."""
    whole = set()
    for path in DOCS.rglob("*.md"):
        page, text = str(path.relative_to(DOCS)), path.read_text()
        for block in FENCED.finditer(text):
            assert block[2] in {"", "sh"} | NO_COMMANDS, f"{page}: {block[2]}"
            assert block[2] not in NO_COMMANDS or not PROGRAM.search(block[3]), f"{page}: {block[3]}"
            whole |= {page} if block[2] == "sh" else set()
        assert not re.search(rf"^ {{4,}}{_PROGRAM}", FENCED.sub("", text), re.MULTILINE), page
    assert whole == set(TYPED_WHOLE)
    for page, test in TYPED_WHOLE.items():
        source = (ROOT / test).read_text()
        assert page in source, f"{test} does not type {page}"
