"""The preset for 7B with weights of the published sizes, from its settings to a version."""

from pathlib import Path

import pytest
import tomli_w
import torch

from tests.flows.whole_flow.test_flow_processes import start
from tests.helpers.inputs.preset_inputs import tiny_preset, write_published_model

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.timeout(1800),
]

NAME = "qwen2.5-7b-lora"


def test_the_7b_preset_runs_from_start_to_registered_version(tmp_path: Path):
    table = tiny_preset(NAME, tmp_path, write_model=write_published_model)
    # Of a random reward model nothing can be expected.
    table |= {"accept_reward_model": True}
    table["ppo"] |= {"response_length": 64}
    (tmp_path / "preset.toml").write_text(tomli_w.dumps(table))
    run = start(tmp_path, "--config", "settings", "preset.toml", "run")
    assert run.wait() == 0, run.log()
    assert f"models:/{table['registered_model']}/1" in run.log()
