"""The rules of the house, held by reading imports and names."""

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

CORE_LINE = (
    "errors algorithm io config data models distributed rollout reporting ppo checkpointing "
    "supervised training trl classic diagnose"
).split()
"""Packages of ppo_core: each imports itself and what stands before it."""

PIPELINE_LINE = (
    "settings storage inputs demo launch tracking judges registry results evaluation "
    "reward_validation cost reports promotion preflight stages"
).split()
"""The same for flows/pipeline."""

DEPLOYED = {"deployment", "flow_parts", "human_feedback", "retraining", "step_wrapper"}
"""Packages and modules of flows that may import the pipeline, which knows none of them."""

INSIDE_METAFLOW = {"metaflow._vendor", "metaflow.plugins", "metaflow.runtime"}
"""Private parts of Metaflow that the pipeline does without."""

MOST_ENTRIES, MOST_PACKAGES = 14, 16
"""Entries of a package, and of one that holds packages. `__init__.py`, `__main__.py` and
`OLD_PATHS` do not count."""

OLD_PATHS = {"classic.py"}
"""Modules that keep the public path of names that were moved."""

CORE = sorted((ROOT / "ppo_core").rglob("*.py"))
ALL = [*CORE, *sorted((ROOT / "flows").rglob("*.py"))]

ALONE = {
    "mlflow": {
        "flows/human_feedback/read_traces.py",
        "flows/pipeline/registry",
        "flows/pipeline/tracking",
        "flows/serving",
    },
    "boto3": {"flows/pipeline/storage", "flows/retraining/alarms.py"},
    "accelerate": {"ppo_core/distributed"},
    "deepspeed": {"ppo_core/distributed"},
}
"""The only packages that may import a library."""

CHANGE_THE_PROCESS = {
    "ppo_core/models/loading.py",
}
"""Modules whose import changes a logger: they serve scripts of users, which run no command of ours,
and the cache keys of all trained models have their code."""

REGISTRIES = {
    "flows/pipeline/storage/workspace.py: _fetched",
}
"""Mutable containers at module level that are left. No new one may join them."""

CHANGES = (
    "add append appendleft clear discard extend insert pop popitem remove setdefault update".split()
)
"""Methods that change a container."""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imported(path: Path) -> frozenset[str]:
    """Full names of all modules and names that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def libraries(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported(path)}


def siblings(path: Path, package: str) -> set[str]:
    """Subpackages and modules of `package` that a file imports."""
    prefix = f"{package}."
    return {name.split(".")[1] for name in imported(path) if name.startswith(prefix)}


def subpackage(path: Path, package: Path) -> str:
    return path.relative_to(package).parts[0].removesuffix(".py")


@pytest.mark.parametrize(
    ("folder", "package", "line"),
    [("ppo_core", "ppo_core", CORE_LINE), ("flows/pipeline", "pipeline", PIPELINE_LINE)],
)
def test_a_package_imports_only_what_stands_before_it(folder: str, package: str, line: list[str]):
    upward = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        own = subpackage(path, ROOT / folder)
        if own in ("__init__", "__main__"):
            continue
        later = set(line[line.index(own) + 1 :])
        upward += [f"{name_of(path)} -> {found}" for found in siblings(path, package) & later]
    assert not upward


def test_the_core_knows_no_flow_no_registry_and_no_store():
    above = {"metaflow", "mlflow", "boto3", "flows", "pipeline", "serving"}
    assert not {name_of(path): found for path in CORE if (found := libraries(path) & above)}


def test_the_formulas_import_torch_and_themselves_only():
    for path in (ROOT / "ppo_core/algorithm").glob("*.py"):
        assert libraries(path) - set(sys.stdlib_module_names) <= {"torch", "ppo_core"}, path
        assert siblings(path, "ppo_core") <= {"algorithm"}, path


@pytest.mark.parametrize("phase", ["rollout/sample_responses", "ppo/scoring", "ppo/update"])
def test_the_phases_do_not_import_each_other(phase: str):
    others = {"rollout.sample_responses", "ppo.scoring", "ppo.update", "training.trainer"}
    found = imported(ROOT / "ppo_core" / f"{phase}.py")
    assert not found & {f"ppo_core.{name}" for name in others - {phase.replace("/", ".")}}


def test_a_library_is_imported_by_its_own_package_alone():
    assert not [
        f"{name_of(path)} imports {library}"
        for path in ALL
        for library in ALONE.keys() & libraries(path)
        if not name_of(path).startswith(tuple(ALONE[library]))
    ]


def test_the_consumer_needs_nothing_of_the_flow():
    for path in (ROOT / "flows" / "serving").glob("*.py"):
        assert libraries(path) & {"flows", "pipeline", "metaflow", "ppo_core"} <= {"ppo_core"}
        # The models only within `load_champion`: see the test of what its import takes.
        assert siblings(path, "ppo_core") <= {"errors", "config", "models"}


def test_the_flow_calls_stages_only():
    assert siblings(ROOT / "flows" / "rlhf.py", "pipeline") == {"stages"}


def test_the_pipeline_knows_neither_deployment_nor_retraining():
    for path in (ROOT / "flows/pipeline").rglob("*.py"):
        assert not libraries(path) & {*DEPLOYED, "metaflow_glue"}, path
        named = {".".join(name.split(".")[:2]) for name in imported(path)}
        assert not named & INSIDE_METAFLOW, path


def test_deployment_and_retraining_do_not_know_each_other():
    for package in ("deployment", "retraining"):
        for path in (ROOT / "flows" / package).rglob("*.py"):
            assert not libraries(path) & (DEPLOYED - {package, "human_feedback"})


def modules(folder: str) -> dict[str, Path]:
    paths = (ROOT / folder).rglob("*.py")
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}


@pytest.mark.parametrize("folder", ["ppo_core", "flows"])
def test_no_two_modules_import_each_other(folder: str):
    found = modules(folder)
    prefix = "" if folder == "ppo_core" else "flows."
    imports = {
        name: {prefix + other for other in imported(path)} & set(found)
        for name, path in found.items()
    }
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join((*way[way.index(name) :], name))
        if name not in done:
            for other in sorted(imports[name]):
                visit(other, (*way, name))
            done.add(name)

    for name in sorted(found):
        visit(name, ())


def executed_by_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements at module level, also in blocks, except inside `if __name__ == "__main__"`."""
    for node in body:
        if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
            continue
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for block in ("body", "orelse", "finalbody", "handlers"):
                yield from executed_by_import(getattr(node, block, []))


def changes_the_process(node: ast.stmt) -> bool:
    """Whether a statement can do more than define a name of its module."""
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Constant)
    targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else []
    changed = any(isinstance(target, ast.Attribute | ast.Subscript) for target in targets)
    return changed or isinstance(node, ast.For | ast.While | ast.With)


def changed_containers(tree: ast.Module) -> set[str]:
    """Names at module level that the module changes after the assignment, or that begin empty."""
    empty = ("[]", "{}", "set()", "list()", "dict()")
    names: dict[str, str] = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        names |= {
            one.id: ast.unparse(value) for one in targets if isinstance(one, ast.Name) and value
        }
    changed = {name for name, value in names.items() if value in empty and name.startswith("_")}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if attribute in CHANGES:
                changed.add(name)
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
                changed.add(name)
            case ast.Global(names=found):
                changed.update(found)
    return changed & set(names)


def test_an_import_changes_nothing_of_the_process():
    found = {
        name_of(path): [
            ast.unparse(node)
            for node in executed_by_import(parsed(path).body)
            if changes_the_process(node)
        ]
        for path in ALL
    }
    assert {name for name, effects in found.items() if effects} <= CHANGE_THE_PROCESS, found


def test_no_module_keeps_a_registry():
    found = {
        f"{name_of(path)}: {name}" for path in ALL for name in changed_containers(parsed(path))
    }
    assert found == REGISTRIES


@pytest.mark.parametrize("folder", ["ppo_core", "flows"])
def test_no_public_class_or_function_has_the_name_of_another(folder: str):
    homes = defaultdict(list)
    for path in (ROOT / folder).rglob("*.py"):
        for node in parsed(path).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(name_of(path))
    # A command has a `main` each.
    assert not {name: found for name, found in homes.items() if len(found) > 1 and name != "main"}


@pytest.mark.parametrize("folder", ["ppo_core", "flows"])
def test_a_package_has_as_many_entries_as_one_can_oversee(folder: str):
    entries = defaultdict(set)
    for path in (ROOT / folder).rglob("*.py"):
        parts = path.relative_to(ROOT).parts
        for depth in range(1, len(parts)):
            entries["/".join(parts[:depth])].add(parts[depth])
    uncounted = {"__init__.py", "__main__.py"} | OLD_PATHS
    counts = {package: len(found - uncounted) for package, found in entries.items()}
    limits = dict.fromkeys(("ppo_core", "flows", "flows/pipeline"), MOST_PACKAGES)
    assert not {
        package: count
        for package, count in counts.items()
        if count > limits.get(package, MOST_ENTRIES)
    }


@pytest.mark.parametrize(
    "statement",
    [
        "import ppo_core",
        "import runpy; runpy.run_path('flows/rlhf.py')",
        "from pipeline import stages; stages.given_settings",
    ],
)
def test_the_library_and_the_flow_are_parsed_without_torch(statement: str):
    code = (
        f"import sys; sys.path[:0] = ['.', 'flows']; {statement}; "
        "print([name for name in ('torch', 'transformers', 'mlflow') if name in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "[]"
