"""Print the figures of runs on real stories, and their means: `make stories` calls it."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FIGURES: dict[str, Callable[[dict[str, Any]], float]] = {
    "win rate of PPO over the start": lambda run: run["win_rate"]["ppo_vs_sft"]["rate"],
    "KL of a response, nats": lambda run: run["objective"]["objective/kl"]["last"],
    "distinct responses": lambda run: run["distinct"]["ppo"],
    "accuracy of the reward model": lambda run: run["reward_model"]["accuracy"],
    "episodes per second": lambda run: run["timings"]["episodes_per_second"],
    "seconds of all phases": lambda run: sum(run["timings"]["seconds"].values()),
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
