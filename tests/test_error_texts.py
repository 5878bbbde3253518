"""What an error's text may hold, by the rule of ``protos.common.errors``: nothing that was read from a patient's
file.

Each function is looked at alone. What it reads from a file or finds in a folder is marked, by the calls in
``SOURCES``, and so are names that the code gives to what belongs to a patient (``OF_A_PATIENT``) and the text of an
error that a library made. The mark follows assignments, loops and strings. No text of an error may be made of what is
marked. What one function hands to another under another name is not seen: the leak scans of the journeys look at what
was printed.
"""

from __future__ import annotations

import ast
import builtins
from pathlib import Path
from typing import Final

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("agent", "coordinator", "policies", "protos", "deploy")
FILES = sorted(
    path
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
    if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
)


def words(text: str) -> frozenset[str]:
    """A set of names, written as a line of text."""
    return frozenset(text.split())


# calls that answer with what lies in a folder, or with what a table or an image says
SOURCES: Final = words(
    "glob rglob iterdir walk scandir listdir relative_to DictReader dcmread read_labels read_identities "
    "read_image_folder series_of studies"
)
# the same in the rooms that open patients' files; elsewhere a file is a configuration, a network or an envelope
PATIENTS_ROOMS: Final = ("agent/defacing", "agent/deidentify", "agent/ingest", "agent/pacs", "agent/volumes")
# import contracts keep pydicom and nibabel out of these: a library's text in them is about a document of our own
PATIENTLESS: Final = ("coordinator/", "policies/", "protos/")
OPENED: Final = words("contents decode read read_bytes read_text reader loads load")
OF_A_PATIENT: Final = words(
    "patient person persons pseudonym pseudonyms participant identity identities uid uids label labels row "
    "dataset study series instance accession PatientID PatientName StudyInstanceUID SeriesInstanceUID "
    "SOPInstanceUID AccessionNumber"
)
COUNTS: Final = words("len sum any all bool type isinstance range hash")  # say how many, never what
NUMBERS: Final = words("line_num shape dtype ndim size strerror errno __name__")
OURS: Final = "the ValueError is of a check of our own, whose text has numbers and the keys of a configuration"
SETTING: Final = "the value is a setting, an option or a name that we gave"
ALLOWED: Final = {  # module::function -> why its text may hold what is marked
    "agent/cli/deface.py::_settings": OURS,
    "agent/cli/evaluate.py::run": OURS,
    "agent/cli/evaluate.py::_set": "an ArtifactFormatError holds no name, and an OSError of an open file no path",
    "agent/cli/ingest.py::_query": "the query's own check says which option is wrong, and no value",
    "agent/cli/output.py::as_sentences": OURS + "; the images are public",
    "agent/cli/train.py::_asked": OURS,
    "agent/cli/train.py::_recogniser": "counts of people and images; the images are public",
    "agent/cli/tune.py::run": OURS,
    "agent/console/errors.py::errors_as_pages": "`sentence` takes only the strerror of an OSError",
    "agent/console/policy.py::approve": "a person is one who logs in to the console",
    "agent/console/releases.py::require_own_word": "a person is one who logs in to the console",
    "agent/service/job_proposals.py::_role": "a person is one who logs in to the console",
    "agent/federation/public_folder.py::_example": "a line of a public folder's table: no patient of the site",
    "agent/federation/public_folder.py::_seen": "a line of a public folder's table: no patient of the site",
    "agent/federation/secure_aggregation.py::_protocol": "of a coordinator's message; the text stays at the site",
    "agent/ingest/patient_lists.py::_participants": "names of columns that `--patient-column` and its like gave",
    "agent/ingest/retrieval.py::narrowed": "the query's own check says which option is wrong, and no value",
    "agent/mechanisms/centroids/codebook.py::codebook_from": OURS,
    "agent/models/bundles/configuration.py::read_bundle": "names in a public bundle's folder: no patient of the site",
    "agent/mechanisms/common/dp_config.py::in_words": OURS,
    "agent/mechanisms/federated/mechanism.py::from_json": OURS,
    "agent/mechanisms/kanonymous_config.py::read_synthesis": OURS,
    "agent/mechanisms/remodel/config.py::read_remodel": OURS,
    "agent/models/diffusion/stable_diffusion.py::stable_autoencoder": OURS,
    "agent/operations/backup.py::_rest": "the TOML files of the site's own directory",
    "agent/pacs/dimse/listener_process.py::start": "the text of our own worker's ConfinementError, before any sender",
    "agent/pacs/dimse/listener_process.py::_await": "the text of our own worker's ConfinementError",
    "agent/pacs/dimse/query_retrieve_scu.py::_associate": "a title of the configuration, and reasons as numbers",
    "coordinator/reports/overview.py::views": "the coordinator's own shelf: names of releases",
    "coordinator/storage/ledger_evidence.py::collect": "the coordinator's own folders of heads and releases",
    "deploy/reproduction/__main__.py::_scanned": "a ParticipantsTableError has no cell; an OSError gives strerror",
    "deploy/reproduction/deid_gan.py::attack": SETTING,
    "deploy/reproduction/deid_gan.py::_deviation": SETTING,
    "deploy/reproduction/deid_gan.py::compute": SETTING,
    "policies/ledger/backends/postgres.py::_check_server": "settings of a database",
    "policies/review/policy.py::preset": "the presets of this package",
    "protos/encryption/hpke.py::_from_text": SETTING,
    "protos/operations/backup.py::read": "names in a backup are those that Lazaret gave",
    "protos/web/router.py::_let_in": "a person is one who logs in to the console",
}
LIBRARYS: Final = {name for name in vars(builtins) if name.endswith(("Error", "Exception"))}


class Marks:
    """What is marked in one function."""

    def __init__(self, function: ast.AST, sources: frozenset[str], libraries: bool) -> None:
        self.sources, self.libraries, self.names = sources, libraries, set[str]()
        self.own = [node for node in walk(function)]
        for _ in range(8):  # until nothing is added; a chain of more than 8 names is in no function
            before = len(self.names)
            for node in self.own:
                self._follow(node)
            if len(self.names) == before:
                break

    def _follow(self, node: ast.AST) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                self._bind(targets, value)
            case ast.AnnAssign() | ast.NamedExpr() | ast.AugAssign() if node.value is not None:
                self._bind([node.target], node.value)
            case ast.withitem(context_expr=value, optional_vars=ast.expr() as target):
                self._bind([target], value)
            case ast.For(target=target, iter=values) | ast.comprehension(target=target, iter=values):
                self._loop(target, values)
            case ast.Call(func=ast.Attribute(value=ast.Name() as target, attr="append" | "add" | "extend")):
                for value in node.args:
                    self._bind([target], value)
            case ast.ExceptHandler(type=ast.expr() as kinds, name=str(name)):
                if self.libraries and set(names(kinds)) & LIBRARYS:
                    self.names.add(name)

    def _bind(self, targets: list[ast.expr], value: ast.expr) -> None:
        if self.on(value):
            for target in targets:
                self._mark(target)

    def _loop(self, target: ast.expr, values: ast.expr) -> None:
        match target, values:
            case ast.Tuple(elts=[_, target]), ast.Call(func=ast.Name(id="enumerate"), args=[values, *_]):
                self._loop(target, values)
            case ast.Tuple(elts=targets), ast.Call(func=ast.Name(id="zip"), args=several):
                for one, of in zip(targets, several, strict=False):
                    self._loop(one, of)
            case _:
                self._bind([target], values)

    def _mark(self, target: ast.expr) -> None:
        match target:
            case ast.Tuple(elts=several) | ast.List(elts=several):
                for each in several:
                    self._mark(each)
            case ast.Starred(value=inner) | ast.Subscript(value=inner):
                self._mark(inner)
            case ast.Name() | ast.Attribute():
                self.names.add(ast.unparse(target))

    def on(self, value: ast.expr) -> bool:
        """Whether ``value`` is made of what is marked."""
        match value:
            case ast.Name(id=name):
                return name in self.names or name in OF_A_PATIENT
            case ast.Attribute(value=inner, attr=name):
                marked = name in OF_A_PATIENT or ast.unparse(value) in self.names or self.on(inner)
                return name not in NUMBERS and marked
            case ast.Call(func=function):
                called = set(names(function)[-1:])
                return not called & COUNTS and (bool(called & self.sources) or self._any(value, function))
            case ast.Compare() | ast.Lambda():
                return False
        return self._any(value)

    def _any(self, value: ast.expr, function: ast.expr | None = None) -> bool:
        """Whether a part of ``value`` is marked that its own value is made of: no condition, no index, no loop."""
        match value:
            case ast.Call():
                inner = [function.value] if isinstance(function, ast.Attribute) else []
                parts = [*inner, *value.args, *(word.value for word in value.keywords)]
            case ast.IfExp():
                parts = [value.body, value.orelse]
            case ast.Subscript():
                parts = [value.value]
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                parts = [value.elt]
            case _:
                parts = [part for part in ast.iter_child_nodes(value) if isinstance(part, ast.expr)]
        return any(self.on(part) for part in parts)


def names(value: ast.expr) -> list[str]:
    """The plain names in an expression, the last one that is called at the end."""
    match value:
        case ast.Name(id=name):
            return [name]
        case ast.Attribute(value=inner, attr=name):
            return [*names(inner), name]
        case ast.Tuple(elts=several):
            return [name for each in several for name in names(each)]
    return []


def walk(function: ast.AST) -> list[ast.AST]:
    """The nodes of a function (or a module) without those of the functions in it."""
    found, waiting = [], list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop(0)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(node)
            waiting += ast.iter_child_nodes(node)
    return found


def told(source: str, name: str = "agent/volumes/x.py") -> list[tuple[str, str]]:
    """The functions of ``source`` and what marked things the errors that they make put into their text."""
    tree, found = ast.parse(source), []
    sources = SOURCES | (OPENED if name.startswith(PATIENTS_ROOMS) else frozenset())
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef)]
    for function in functions:
        marks = Marks(function, sources, libraries=not name.startswith(PATIENTLESS))
        made = [n.exc for n in marks.own if isinstance(n, ast.Raise) and isinstance(n.exc, ast.Call)]
        made += [n for n in marks.own if isinstance(n, ast.Call) and (names(n.func) or [""])[-1].endswith("Error")]
        for call in {id(call): call for call in made}.values():
            for part in (*call.args, *(word.value for word in call.keywords)):
                found += [
                    (getattr(function, "name", "<module>"), ast.unparse(value))
                    for value in (interpolated(part) or [part])
                    if marks.on(value)
                ]
    return found


def interpolated(text: ast.expr) -> list[ast.expr]:
    """What stands between the braces of an f-string."""
    return [node.value for node in ast.walk(text) if isinstance(node, ast.FormattedValue)]


def found() -> dict[str, list[str]]:
    """Every place of the product, with what its errors hold."""
    places: dict[str, list[str]] = {}
    for path in FILES:
        name = path.relative_to(ROOT).as_posix()
        for function, value in told(path.read_text(), name):
            places.setdefault(f"{name}::{function}", []).append(value)
    return places


def test_no_error_says_what_was_read_from_a_patients_file() -> None:
    places = found()
    assert {place: values for place, values in places.items() if place not in ALLOWED} == {}
    assert sorted(set(ALLOWED) - set(places)) == [], "not needed any more"


@pytest.mark.parametrize(
    "body",
    [
        'raise SomeError(f"{patient}: no")',
        'raise SomeError(f"no image of {record.PatientID}")',
        'for path in folder.rglob("*"):\n  raise SomeError(f"{path.name}: not an image")',
        'names = [p.relative_to(x) for p in all_]\n some = ", ".join(names)\n raise SomeError(f"such as {some}")',
        'bad = []\n for n, one in enumerate(csv.DictReader(s)):\n  bad.append(one["a"])\n raise SomeError(bad[0])',
        'places, seen = read_labels(where, names)\n unknown = sorted(set(seen))\n raise SomeError("%s" % unknown[0])',
        'try:\n  parse(raw)\n except (OSError, ValueError) as error:\n  raise SomeError(f"{error}") from None',
        'try:\n  parse(raw)\n except Exception as error:\n  return SomeError(str(error))',
        'with path.open() as file:\n  text = file.read()\n  raise SomeError("not " + text)',
        'self.last = dcmread(path)\n raise SomeError(f"{self.last.Modality} is not MR")',
    ],
)  # fmt: skip
def test_what_may_not_be_said_is_seen(body: str) -> None:
    assert told(f"def f(self, folder, where, raw):\n {body}\n")


@pytest.mark.parametrize(
    "body",
    [
        'raise SomeError(f"{folder.name}: not a folder")',
        'found = list(folder.rglob("*"))\n raise SomeError(f"{len(found)} files, and none is an image")',
        'for n, row in enumerate(csv.DictReader(s)):\n  raise SomeError(f"line {n + 2}: no patient")',
        'try:\n  parse(raw)\n except OSError as error:\n  raise SomeError(f"x: {error.strerror}") from None',
        'try:\n  parse(raw)\n except PatientListError as error:\n  raise SomeError(f"{error}") from None',
    ],
)  # fmt: skip
def test_counts_lines_and_what_was_typed_may_be_said(body: str) -> None:
    assert told(f"def f(self, folder, raw):\n {body}\n") == []
