"""PPO of each preset for one GPU, with weights of the published sizes, in the memory of its GPU."""

import json
from pathlib import Path

import pytest
import torch

from pipeline.cost.memory.ppo_memory import peak_memory
from pipeline.cost.training_sizes import Processes, ppo_size
from pipeline.inputs.run_data import RunData
from pipeline.inputs.run_rewards import RunRewards
from pipeline.launch.job import JobModels, write_job
from pipeline.settings.make_settings import make_settings, read_preset
from ppo_core.models.loading import load_tokenizer
from ppo_core.ppo.schedule import make_schedule
from ppo_core.reporting.metrics_file import METRICS_FILE, read_metrics
from tests.flows.test_presets import LONGEST_PROMPT
from tests.helpers.inputs.pipeline_inputs import write_rows
from tests.helpers.inputs.preset_inputs import write_published_model
from tests.helpers.runs.forked_python import run_python

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.timeout(900),
]

GIB = 2**30

LIMITS = {"qwen2.5-0.5b-full": 21.0, "qwen2.5-7b-lora": 21.0, "pythia-1b-tldr": 78.0}
"""GiB that PyTorch can reserve on the GPU of a preset: what CUDA reports (22 or 79 GiB) without
1 GiB for CUDA's context."""

UPDATES = 2
"""The second update samples while the optimizer's states are in memory."""


@pytest.mark.parametrize("name", LIMITS)
def test_ppo_of_a_preset_needs_the_memory_that_is_computed(name: str, tmp_path: Path):
    longest = LONGEST_PROMPT.get(name, 1024)
    table = read_preset(name)
    rows = table["ppo"]["local_rollout_forward_batch_size"]
    for setting in ("policy", "reward_model"):
        table[setting] = write_published_model(table[setting].partition("@")[0], tmp_path)
    table["prompts"] = _write_prompts(table["policy"], rows, longest, tmp_path)
    table["ppo"] |= {"total_episodes": UPDATES * rows, "batch_size": rows}
    settings = make_settings(table, {"judge": "openai:gpt"})
    models = JobModels(
        policy=settings.policy,
        reward_model=settings.reward_model,
        reward_bias=0.0,
        reward_gain=1.0,
    )
    job = write_job(
        RunRewards(RunData(settings)),
        models,
        folder=tmp_path / "ppo",
        policy_dir=tmp_path / "trained",
    )
    # To save time and space on the disk; neither changes the memory of an update.
    fewer = {"watched_prompts": 0, "num_sample_generations": 0, "save_strategy": "no"}
    job.write_text(json.dumps(json.loads(job.read_text()) | fewer))
    limit = int(LIMITS[name] * GIB)
    ended = run_python("-m", "tests.helpers.jobs.peak_memory_job", job, limit, seconds=600)
    assert not ended.returncode, ended.stderr[-3000:]
    peaks = json.loads(ended.stdout.splitlines()[-1])
    size = ppo_size(
        settings,
        make_schedule(settings.ppo, num_prompts=rows, num_processes=1),
        longest_prompt=longest,
        processes=Processes(number=1, on_gpus=True),
    )
    assert size is not None
    computed = peak_memory(size).total
    assert len(read_metrics(job.parent / METRICS_FILE)) == UPDATES
    assert 0.85 * computed < peaks["allocated"] < 1.05 * computed


def _write_prompts(policy: str, number: int, longest: int, folder: Path) -> str:
    """Write prompts of `longest` tokens; the tokenizers have one token for each character."""
    tokenizer = load_tokenizer(policy)

    def tokens(text: str) -> int:
        rendered = text
        if tokenizer.chat_template:
            turns = [{"role": "user", "content": text}]
            rendered = tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=True
            )
        return len(tokenizer(rendered).input_ids)

    letters = [chr(ord("a") + one % 26) for one in range(number)]
    rows = [{"prompt": letter * (longest - tokens(""))} for letter in letters]
    assert tokens(rows[0]["prompt"]) == longest
    return write_rows(folder / "prompts.jsonl", rows)
