"""What the flow costs around the work, and what it does not import."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from ppo_core.distributed.process import large_imports
from tests.benchmarks.flow_overhead import FlowOverhead, flow_table
from tests.helpers.paths import ROOT

MEASURED = FlowOverhead(
    flow={"start": 8.0, "train_policy": 40.0, "register": 6.0},
    script={"start": 2.0, "train_policy": 31.0},
    flow_seconds=60.0,
    script_seconds=36.0,
)


def test_the_overhead_is_what_the_flow_takes_longer_than_a_plain_process():
    # 60 - 36 = 24 s, of 600 s 4 %. Outside of the steps: 60 - 54 = 6 s against 36 - 33 = 3 s.
    assert MEASURED.seconds == 24.0
    assert MEASURED.share == pytest.approx(0.04)
    assert MEASURED.between_steps() == (6.0, 3.0)


def test_the_rows_of_the_table_add_up_to_its_last_one():
    console = Console(width=200)
    with console.capture() as capture:
        console.print(flow_table(MEASURED))
    text = capture.get()
    rows = [line.split("│")[1:-1] for line in text.splitlines() if "│" in line]
    overheads = {row[0].strip(): float(row[3]) for row in rows}
    assert overheads.pop("all") == sum(overheads.values()) == 24.0
    assert overheads["register"] == 6.0
    assert "24 s, 4.0% of a run of ten minutes" in text
    assert "38 s" in text


def test_imports_leave_the_collector_as_it_was_and_nothing_to_look_through():
    gc.unfreeze()
    with large_imports():
        assert not gc.isenabled()
        kept = [[] for _ in range(1000)]
    assert gc.isenabled()
    # Lists made inside are not among those that a collection goes through.
    frozen = {id(each) for each in kept}
    assert not frozen & {id(each) for each in gc.get_objects()}
    gc.unfreeze()


def test_an_import_that_fails_leaves_the_collector_on():
    with pytest.raises(ModuleNotFoundError), large_imports():
        import a_module_that_is_not_there  # noqa: F401
    assert gc.isenabled()


def test_a_model_from_the_cache_is_found_without_torch():
    work = (
        "from ppo_core.io.imported_modules import imported_modules; "
        "from pipeline import stages; from ppo_core.io.folder_cache import digest_of_code; "
        "from pipeline.inputs.model_digests import digest_of_model; "
        "digest_of_code(*imported_modules('ppo_core.__main__')); digest_of_model('.ci')"
    )
    assert imported_by(work, "torch", "transformers") == []


@pytest.mark.slow
def test_short_steps_import_no_mlflow():
    work = "import pipeline.stages.validation, pipeline.stages.evaluation, pipeline.stages.cards"
    assert imported_by(work, "mlflow") == []


def test_a_wrong_setting_is_reported_before_anything_large_is_imported():
    work = "import runpy; runpy.run_path('flows/rlhf.py'); import pipeline.settings.make_settings"
    assert imported_by(work, "mlflow", "torch", "transformers") == []


def test_a_short_step_is_tracked_without_mlflow(tmp_path: Path):
    work = (
        "from pathlib import Path; from pipeline.tracking.tracker import SHORT_SECONDS, Tracker\n"
        "runs = {'parent': 'p', 'load_policy': 's'}\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "with Tracker(folder, runs, 'load_policy', patience=SHORT_SECONDS) as tracker:\n"
        "    tracker.step.log_metrics({'loss': 1.0})\n"
    )
    assert imported_by(work, "mlflow") == []
    assert '"loss": 1.0' in (tmp_path / "journal.jsonl").read_text()


def test_models_and_tokenizers_are_checked_without_what_loads_weights():
    assert imported_by("import ppo_core.models.loading", "transformers.modeling_utils") == []


def imported_by(work: str, *modules: str) -> list[str]:
    """Those of the modules that a process has imported which does the work."""
    code = f"import sys\n{work}\nprint(*(name for name in {modules} if name in sys.modules))"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'flows'}"},
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout.split()
