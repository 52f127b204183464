"""Print the figures of several runs and their means: `make tldr` and others call it."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FIGURES: dict[str, Callable[[dict[str, Any]], float]] = {
    "SFT against the references": lambda run: run["win_rate"]["sft_vs_reference"]["rate"],
    "  upper end of its interval": lambda run: run["win_rate"]["sft_vs_reference"]["high"],
    "PPO against the references": lambda run: run["win_rate"]["ppo_vs_reference"]["rate"],
    "  lower end of its interval": lambda run: run["win_rate"]["ppo_vs_reference"]["low"],
    "PPO against SFT": lambda run: run["win_rate"]["ppo_vs_sft"]["rate"],
    "KL of an answer, nats": lambda run: run["kl"]["ppo"],
    "distinct answers": lambda run: run["distinct"]["ppo"],
    "best of four by it, judged": lambda run: run["reward_model"]["on_policy"]["best_of"]["4"],
    "accuracy of the reward model": lambda run: run["reward_model"]["accuracy"]["accuracy"],
    "seconds of PPO": lambda run: run["timings"]["seconds"]["train_policy"],
    "seconds of all steps": lambda run: sum(run["timings"]["seconds"].values()),
    "peak memory of PPO, GiB": lambda run: run["timings"]["peak_rss_bytes"] / 2**30,
}


def print_figures(paths: Sequence[str]) -> None:
    """One line a figure: its value in each run, and the mean."""
    runs = [json.loads(Path(path).read_text()) for path in paths]
    for name, read in FIGURES.items():
        values = [read(run) for run in runs]
        shown = "  ".join(f"{value:8.3f}" for value in values)
        print(f"{name:32}  {shown}  mean {sum(values) / len(values):8.3f}")


if __name__ == "__main__":
    print_figures(sys.argv[1:])
