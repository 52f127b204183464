"""The first step of a run: what it records in the run's folder."""

from pathlib import Path

import pytest

from pipeline.inputs.flow_run import SETTINGS_FILE
from pipeline.settings.make_settings import make_settings
from pipeline.stages.start import start_run
from ppo_core.errors import TrainingError
from tests.helpers.inputs.pipeline_inputs import tiny_table
from tests.helpers.servers.full_disk import full_disk
from tests.helpers.servers.mlflow_store import tracking_to
from tests.helpers.servers.servers import shared_server


def test_a_full_disk_leaves_no_cut_settings_file(tmp_path: Path):
    settings = make_settings(tiny_table(tmp_path), {})
    with tracking_to(shared_server().url):
        first = start_run(settings, settings, "RLHF", "disk-1", [])
        size = (first.folder / SETTINGS_FILE).stat().st_size
        with full_disk(size - 1), pytest.raises(TrainingError, match=rf"{SETTINGS_FILE}' cannot"):
            start_run(settings, settings, "RLHF", "disk-2", [])
    assert not (first.folder.with_name("disk-2") / SETTINGS_FILE).exists()
