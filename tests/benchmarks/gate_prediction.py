"""Does the gate's figure predict what PPO reaches? Rank correlations over runs of the stories.

    PYTHONPATH=.:flows python -m tests.benchmarks.gate_prediction SUMMARY.json ...

Each summary is of a run of `make fresh-stories` in this folder, with another reward model in each
run (see SEEDS and LABELS there). The judge of an evaluation stops as soon as the result is decided,
so a win rate of a summary comes from few pairs. Here each policy answers every evaluation prompt
four times, and the judge of the stories compares these answers with four answers of SFT.
"""

import json
import sys
from pathlib import Path

from scipy.stats import spearmanr

from pipeline.registry.fetch_policy import find_policy
from ppo_core.models.loading import load_policy, load_tokenizer
from ppo_core.training.answer_prompts import answer_prompts
from tests.helpers.paths import SHARED
from tests.helpers.vader_judge import judge

REPEATS = 4
SFT = SHARED / "tinystories-656k"
POINTS = {"first": 1.0, "tie": 0.5, "second": 0.0}


def answers(policy: str, prompts: list[str], *, seed: int) -> list[str]:
    """REPEATS answers to each prompt, with the decoding of the preset."""
    model, tokenizer = load_policy(policy), load_tokenizer(str(SFT))
    texts = []
    for repeat in range(REPEATS):
        options = {"response_length": 32, "temperature": 1.0, "seed": seed + repeat}
        texts += answer_prompts(model, tokenizer, prompts, **options).texts
    return texts


def main(paths: list[str]) -> None:
    lines = (SHARED / "stories" / "prompts-eval.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    rivals = answers(str(SFT), prompts, seed=1000)
    rates: dict[str, list[float]] = {"best of four": [], "pairs of samples": [], "given pairs": []}
    wins = []
    for path in paths:
        run = json.loads(Path(path).read_text())
        policy, _ = find_policy(run["model"]["uri"], Path("outputs/cache/policies"))
        texts = answers(str(policy), prompts, seed=2000)
        verdicts = judge(prompts * REPEATS, list(zip(texts, rivals, strict=True)))
        wins.append(sum(POINTS[verdict] for verdict in verdicts) / len(verdicts))
        found = run["reward_model"]
        rates["best of four"].append(found["on_policy"]["best_of"]["4"])
        rates["pairs of samples"].append(found["on_policy"]["accuracy"]["accuracy"])
        rates["given pairs"].append(found["accuracy"]["accuracy"])
        shown = "  ".join(f"{name} {values[-1]:.3f}" for name, values in rates.items())
        print(f"{path}: wins {wins[-1]:.3f}, KL {run['kl']['ppo']:.2f}; {shown}", flush=True)
    for name, values in rates.items():
        print(f"rank correlation of wins with {name}: {spearmanr(values, wins).statistic:.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
