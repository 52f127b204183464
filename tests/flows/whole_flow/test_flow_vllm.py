"""A whole run whose responses and answers all come from a vLLM server."""

from pathlib import Path

import pytest
import tomli_w
from transformers import AutoModelForCausalLM

from tests.flows.whole_flow.test_flow_processes import start
from tests.helpers.inputs.pipeline_inputs import tiny_table
from tests.helpers.servers.vllm_server import vllm_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_rollouts_validation_and_win_rate_come_from_the_server(tmp_path: Path):
    table = tiny_table(tmp_path) | {"accept_reward_model": True}
    model = AutoModelForCausalLM.from_pretrained(table["policy"])
    with vllm_server(model) as server:
        table["ppo"] |= {
            "use_vllm": True,
            "vllm_server_base_url": server.url,
            "vllm_weights_dir": str(tmp_path / "weights"),
        }
        (tmp_path / "tiny.toml").write_text(tomli_w.dumps(table))
        run = start(tmp_path, "--config", "settings", "tiny.toml", "run")
        assert run.wait() == 0, run.log()
        # the validation, three updates, the answers of SFT and PPO, and two baselines of SFT
        assert len(server.loaded) == 1 + 3 + 2 + 2
