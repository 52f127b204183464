"""`python -m tests.benchmarks.measure_sampling TOKENS ROUNDS MODELS...`: ours against `generate`.

Both draw TOKENS tokens for each prompt, in alternation. Prints the seconds of each round as JSON,
by the name of the models' folder.
"""

import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from ppo_core.data.batching import pad_rows
from ppo_core.models.policy import LanguageModel
from ppo_core.rollout.sample_responses import sample_responses
from ppo_core.rollout.token_sampling import NO_STOP_TOKEN, SamplingSettings
from tests.benchmarks.models import PAD, TEMPERATURE


def ours(policy: LanguageModel, prompts: list[list[int]], tokens: int) -> None:
    """Sample responses with our loop."""
    settings = SamplingSettings(stop_token_id=NO_STOP_TOKEN, temperature=TEMPERATURE)
    uniforms = torch.rand(len(prompts), tokens)
    sample_responses(policy, prompts, uniforms, settings, batch_size=len(prompts))


def generate(policy: LanguageModel, prompts: list[list[int]], tokens: int) -> None:
    """Sample responses with `generate` of transformers."""
    ids, lengths = pad_rows(prompts, side="left")
    visible = torch.arange(ids.shape[1]) >= (ids.shape[1] - lengths)[:, None]
    answers = policy.model.generate(
        ids,
        attention_mask=visible.long(),
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=0,
        max_new_tokens=tokens,
        eos_token_id=None,
        pad_token_id=PAD,
    )
    assert answers.shape[1] == ids.shape[1] + tokens


@torch.no_grad()
def measure(folder: Path, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Return seconds of each round, by sampler, after a warmup round."""
    model = AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    policy = LanguageModel(model)
    prompts = json.loads((folder / "prompts.json").read_text())
    seconds: dict[str, list[float]] = {}
    for _ in range(rounds + 1):
        for way in (ours, generate):
            started = time.perf_counter()
            way(policy, prompts, tokens)
            seconds.setdefault(way.__name__, []).append(time.perf_counter() - started)
    return {way: each[1:] for way, each in seconds.items()}


if __name__ == "__main__":
    folders = map(Path, sys.argv[3:])
    print(json.dumps({each.name: measure(each, *map(int, sys.argv[1:3])) for each in folders}))
