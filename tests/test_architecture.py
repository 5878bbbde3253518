"""What no module may do: unpickle, evaluate, seed globally, name a machine. And the wire is what protoc makes."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parent.parent
PRODUCT = sorted(
    p for top in ("agent", "coordinator", "policies", "protos", "deploy") for p in (ROOT / top).rglob("*.py")
)
OURS = [p for p in PRODUCT if not p.name.endswith(("_pb2.py", "_pb2_grpc.py"))]
CORE = [
    p
    for p in OURS
    if (
        p.relative_to(ROOT).parts[:2]
        in {
            *(
                ("agent", x)
                for x in ("mechanisms", "dp", "microaggregation", "vetting", "domain.py", "field_of_view.py")
            ),
            ("coordinator", "admission.py"),
        }
        and not p.name.endswith(("config.py", "options.py"))
    )  # reads what a person wrote, or types
    or p.relative_to(ROOT).as_posix()
    in {
        *(f"agent/release/{x}.py" for x in ("pipeline", "recovery", "approval", "k_search")),
        *(f"agent/federation/{x}.py" for x in ("participant", "secure_aggregation")),
        *(f"agent/defacing/{x}.py" for x in ("deface", "remodel")),
        *(f"coordinator/federation/{x}.py" for x in ("job", "aggregation", "vectors")),
    }
]


def calls(tree: ast.AST) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


def imports(tree: ast.AST) -> set[str]:
    found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return found | {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}


def banned(source: str) -> set[str]:
    """What the source does that nothing here may do (P13)."""
    tree = ast.parse(source)
    wrong = {
        m
        for m in imports(tree)
        if m.split(".")[0] in {"pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
    }
    wrong |= calls(tree) & {"eval", "exec", "compile", "__import__", "importlib.import_module", "np.random.seed"}
    wrong |= {c for c in calls(tree) if c.endswith(("yaml.load", "read_pickle"))}
    # a generator of one's own may be seeded, in a call of its own; nobody's global one may
    wrong |= {c for c in calls(tree) if c.endswith("manual_seed") and not c.startswith("torch.Generator(")}
    wrong |= {
        "torch.load"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
        if not any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
    }
    keywords = [k for node in ast.walk(tree) if isinstance(node, ast.Call) for k in node.keywords]
    wrong |= {"allow_pickle" for k in keywords if k.arg == "allow_pickle" and ast.unparse(k.value) != "False"}
    return wrong | {"shell=True" for k in keywords if k.arg == "shell" and ast.unparse(k.value) != "False"}


# in ps315 they are the standard's
WORDS = [p for p in OURS if p.name in ("options.py", "bundle_options.py") and p.parent.name != "ps315"]


@pytest.mark.parametrize("path", WORDS, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_words_of_the_commands_are_made_of_argparse_alone(path: Path) -> None:
    plain = {"__future__", "argparse", "collections.abc", "datetime", "pathlib", "re", "types", "typing"}
    ours = {"agent.defacing.config", "agent.mechanisms.common.option_types", "agent.mechanisms.kanonymous"}
    ours |= {"protos.operations.command_line", "agent.cli"}  # of which it is bundle_options alone, the next of these
    packages = {
        "policies.governance",
        "agent.prediction",
        "agent.models.bundles",
        *(f"agent.mechanisms.{p.parent.name}" for p in WORDS),
    }
    assert imports(ast.parse(path.read_text())) <= plain | ours | packages
    assert not calls(ast.parse(path.read_text())) & {"open", "print"}


@pytest.mark.parametrize("path", OURS, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_is_unpickled_evaluated_or_seeded(path: Path) -> None:
    assert banned(path.read_text()) == ({"pickle"} if path == HANDED else set())


HANDED = ROOT / "agent" / "release" / "sealed_making.py"  # what the agent hands its own confined child, and no other


def test_what_a_making_is_handed_is_pickled_by_the_agent_and_opened_by_its_confined_child_alone() -> None:
    users = {p.relative_to(ROOT).as_posix(): imports(ast.parse(p.read_text())) for p in OURS}
    assert {name for name, found in users.items() if "agent.release.sealed_making" in found} == {
        "agent/release/maker_main.py",
        "agent/release/maker_process.py",
    }
    child, parent = ((ROOT / "agent" / "release" / f"maker_{name}.py").read_text() for name in ("main", "process"))
    assert "opened(" not in parent
    assert "sealed(" not in child
    assert child.index("confine(Allowed") < child.index("_made(line, memory)") < child.index("import opened")


@pytest.mark.parametrize(
    "bad",
    ["import pickle", "from pickle import loads", "torch.load(f)", "eval('1')", "np.load(f, allow_pickle=True)",
     "torch.manual_seed(0)", "torch.load(f, weights_only=False)", "g.manual_seed(0)",
     "importlib.import_module(name)", "subprocess.run(x, shell=True)"],
)  # fmt: skip
def test_the_ban_sees_what_it_bans(bad: str) -> None:
    assert banned(bad)


@pytest.mark.parametrize("path", CORE, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_core_has_no_clock_disk_network_or_logger(path: Path) -> None:
    tree = ast.parse(path.read_text())
    edges = {
        "time",
        "datetime",
        "socket",
        "pathlib",
        "logging",
        "structlog",
        "grpc",
        "flwr",
        "sqlite3",
        "apsw",
        "subprocess",
    }
    assert not {m for m in imports(tree) if m.split(".")[0] in edges}
    assert not calls(tree) & {"open", "print"}


def test_no_file_names_a_machine_or_has_an_unsafe_shortcut() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    machine = re.compile(r"(?<![\w.])/(?:work|root|home/\w+|opt(?!/lazaret))/")  # the last: where it installs
    for name in tracked:
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".proto", ".txt", ".html", ".json", ""} and path.is_file():
            text = path.read_text(errors="ignore")
            assert not machine.search(text), name
            if not name.startswith("tests/"):
                assert "Unsafe" not in text or name.startswith("deploy/docs"), name


def test_the_committed_wire_code_is_what_protoc_makes(tmp_path: Path) -> None:
    from grpc_tools import protoc

    command = [
        "protoc",
        f"-I{ROOT}",
        f"--python_out={tmp_path}",
        f"--pyi_out={tmp_path}",
        f"--grpc_python_out={tmp_path}",
    ]
    assert protoc.main([*command, "protos/v1/gateway.proto"]) == 0
    for made in (tmp_path / "protos" / "v1").iterdir():
        assert made.read_text() == (ROOT / "protos" / "v1" / made.name).read_text(), f"run `make protos`: {made.name}"


def test_torchvision_is_nowhere_in_the_dependency_tree() -> None:
    for name in ("pyproject.toml", "constraints.txt"):
        lines = [line for line in (ROOT / name).read_text().splitlines() if not line.strip().startswith("#")]
        assert "torchvision" not in "\n".join(lines)


def test_the_coordinator_and_the_verifier_import_no_torch() -> None:
    code = "import sys, coordinator.cli.main, coordinator.daemon, policies.audit.verify; "
    code += "assert 'torch' not in sys.modules"
    quiet = (
        "import pathlib, tempfile, protos.federation.flower_environment as q; "
        "q.configure_environment(pathlib.Path(tempfile.mkdtemp())); "
    )
    subprocess.run([sys.executable, "-c", quiet + code], cwd=ROOT, check=True)


def test_every_policy_preset_in_use_by_the_demo_vets_its_components() -> None:
    for path in (ROOT / "policies" / "review" / "presets").glob("*.toml"):
        assert 'components = ["public"]' in path.read_text()


# ---------------------------------------------------------------- circles, and the length of a file


def circles(graph: grimp.ImportGraph) -> list[set[str]]:
    """Sets of modules that import one another, directly or through others: Tarjan's components of two or more."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for imported in graph.find_modules_directly_imported_by(module):
            if imported not in index:
                visit(imported)
            if imported in stack:
                low[module] = min(low[module], low[imported])
        if low[module] == index[module]:
            at = stack.index(module)
            if len(stack) - at > 1:
                found.append(set(stack[at:]))
            del stack[at:]

    for module in sorted(graph.modules):
        if module not in index:
            visit(module)
    return found


def test_no_modules_import_one_another_in_a_circle_imports_for_types_included() -> None:
    graph = grimp.build_graph("agent", "coordinator", "policies", "protos", "deploy", cache_dir=None)
    assert len(graph.modules) > 600
    assert circles(graph) == []


def test_a_circle_of_modules_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "made_up_circle"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "one.py").write_text("from made_up_circle import two\n")
    (package / "two.py").write_text("def late() -> None:\n    from made_up_circle import three\n")
    types = "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from made_up_circle.one import name\n"
    (package / "three.py").write_text(types)
    (package / "four.py").write_text("from made_up_circle import one\n")
    monkeypatch.syspath_prepend(tmp_path)
    graph = grimp.build_graph("made_up_circle", cache_dir=None)
    assert circles(graph) == [{f"made_up_circle.{name}" for name in ("one", "two", "three")}]


def test_no_product_file_has_more_than_600_lines() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in OURS}
    assert {name: length for name, length in lengths.items() if length > 600} == {}
