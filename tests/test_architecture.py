"""The rules of the house, held by reading imports."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

CORE = sorted((ROOT / "ppo_core").rglob("*.py"))
PIPELINE = sorted((ROOT / "flows" / "pipeline").rglob("*.py"))
PURE = set("tensors kl kl_control rewards advantages losses moments truncation".split())
PHASES = {"rollout", "scoring", "update"}
STRANGERS = {"judges", "canaries", "win_rate", "reward_validation", "gates", "registry", "storage"}


def imported(path: Path) -> Iterator[str]:
    """Full names of all modules and names that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def packages(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported(path)}


def siblings(path: Path, package: str) -> set[str]:
    """Modules of `package` that a file imports."""
    prefix = f"{package}."
    return {name.split(".")[1] for name in imported(path) if name.startswith(prefix)}


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.name)
def test_1_the_core_knows_no_flow_no_registry_and_no_store(path: Path):
    assert not packages(path) & {"metaflow", "mlflow", "boto3", "flows", "pipeline"}


@pytest.mark.parametrize("name", sorted(PURE))
def test_2_the_mathematics_imports_torch_and_itself_only(name: str):
    path = ROOT / "ppo_core" / f"{name}.py"
    assert packages(path) - set(sys.stdlib_module_names) <= {"torch", "ppo_core"}
    assert siblings(path, "ppo_core") <= PURE


@pytest.mark.parametrize("name", sorted(PHASES))
def test_3_the_phases_do_not_import_each_other(name: str):
    others = PHASES - {name} | {"trainer"}
    assert not siblings(ROOT / "ppo_core" / f"{name}.py", "ppo_core") & others


def test_4_the_consumer_needs_nothing_of_the_flow():
    ours = packages(ROOT / "flows" / "champion.py") & {"flows", "pipeline", "metaflow", "ppo_core"}
    assert ours == {"ppo_core"}


def test_4_the_flow_calls_stages_only():
    assert siblings(ROOT / "flows" / "rlhf.py", "pipeline") == {"stages", "environment"}


@pytest.mark.parametrize("path", PIPELINE, ids=lambda path: path.name)
def test_4_the_parts_of_the_pipeline_do_not_know_each_other(path: Path):
    part = path.relative_to(ROOT / "flows" / "pipeline").parts[0].removesuffix(".py")
    if part in STRANGERS:
        assert not siblings(path, "pipeline") & (STRANGERS - {part})
    if path.stem != "stages":
        assert "stages" not in siblings(path, "pipeline")
    assert part == "registry" or "mlflow" not in packages(path)
    assert path.stem == "storage" or "boto3" not in packages(path)


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.name)
def test_the_engine_alone_knows_how_processes_meet(path: Path):
    assert path.stem in {"engine", "engine_deepspeed"} or not packages(path) & {
        "accelerate",
        "deepspeed",
    }


@pytest.mark.parametrize(
    "statement", ["import ppo_core", "import runpy; runpy.run_path('flows/rlhf.py')"]
)
def test_5_the_library_and_the_flow_are_parsed_without_torch(statement: str):
    code = (
        f"import sys; sys.path[:0] = ['.', 'flows']; {statement}; "
        "print([name for name in ('torch', 'transformers', 'mlflow') if name in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "[]"
