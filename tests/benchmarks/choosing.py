"""Pairs on which reward models differ most, against random pairs, on the stories.

    PYTHONPATH=.:flows python -m tests.benchmarks.choosing --seeds 1 2 3

Simulated people label pairs of the policy's own samples in four rounds; one label in ten is wrong.
After each round three reward models learn from all labels so far, and choose the next pairs. What
they have learned is measured on samples for other prompts, by labels without mistakes.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from human_feedback.uncertain_pairs import Pair, random_pairs, uncertain_pairs
from pipeline.evaluation.pair_accuracy import Array
from pipeline.reward_validation.scores import TextScorer
from pipeline.settings.make_settings import read_preset
from ppo_core.models.loading import load_reward_model
from ppo_core.supervised.supervised_config import SupervisedConfig
from ppo_core.supervised.training import train_reward_model
from ppo_core.training.answer_job import AnswerJob, run_answer_job
from tests.helpers.vader_judge import judge, people

SIZES = (250, 500, 1_000, 2_000)
"""Labels at the end of each round."""

AT_ONCE = 200
"""Labels taken from one sampling of all 800 prompts."""

SAMPLES, MEMBERS, TESTED = 4, 3, 8
"""Answers to a prompt, reward models, and answers to a prompt of the measurement."""


def main() -> None:
    """Print the figures of both ways of choosing, for each seed and number of labels."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    for seed in parser.parse_args().seeds:
        for way in ("random", "chosen"):
            for labels, (best, accuracy) in zip(SIZES, _run(way, seed), strict=True):
                print(f"{way} seed {seed} labels {labels}: {best:.3f} {accuracy:.3f}", flush=True)


def _run(way: str, seed: int) -> list[tuple[float, float]]:
    """Return best-of-four and accuracy after each round."""
    preset = read_preset("stories")
    policy = str(preset["policy"])
    prompts, tested = (_prompts(str(preset[name])) for name in ("prompts", "eval_prompts"))
    samples = _sample(policy, tested, TESTED, seed=1_000 + seed)
    found, rows, scorers = [], [], list[TextScorer]()
    with TemporaryDirectory() as folder:
        for number, labels in enumerate(SIZES):
            while len(rows) < labels:
                drawn = 100_000 * seed + len(rows)
                answers = _sample(policy, prompts, SAMPLES, seed=drawn)
                count = min(AT_ONCE, labels - len(rows))
                # Some pairs are ties.
                if way == "random" or not scorers:
                    pairs = random_pairs(prompts, answers, 2 * count, drawn)
                else:
                    scores = _scores(scorers, prompts, answers)
                    pairs = uncertain_pairs(prompts, answers, scores, 2 * count)
                rows += _labeled(pairs)[:count]
            scorers = _train(policy, rows, Path(folder) / str(number), seed, preset)
            found.append(_measure(scorers, tested, samples))
            print(f"# {way} {seed}: {len(rows)} labels", flush=True)
    return found


def _prompts(source: str) -> list[str]:
    return [json.loads(line)["prompt"] for line in Path(source).read_text().splitlines()]


def _sample(policy: str, prompts: Sequence[str], count: int, *, seed: int) -> list[list[str]]:
    job = AnswerJob(
        policy=policy,
        tokenizer=policy,
        prompts=[prompt for prompt in prompts for _ in range(count)],
        prompt_format="auto",
        response_length=32,
        temperature=1.0,
        seed=seed,
        batch_size=256,
    )
    texts = run_answer_job(job).texts
    return [texts[at : at + count] for at in range(0, len(texts), count)]


def _labeled(pairs: Sequence[Pair]) -> list[dict[str, str]]:
    labels = people([], [(pair.first, pair.second) for pair in pairs])
    return [
        {
            "prompt": str(pair.prompt),
            "chosen": pair.first if label == "first" else pair.second,
            "rejected": pair.second if label == "first" else pair.first,
        }
        for pair, label in zip(pairs, labels, strict=True)
        if label != "tie"
    ]


def _train(
    policy: str, rows: Sequence[dict[str, str]], folder: Path, seed: int, preset: dict
) -> list[TextScorer]:
    scorers = []
    for member in range(1, MEMBERS + 1):
        config = SupervisedConfig(
            **preset["reward_model_training"] | {"seed": 100 * seed + member, "save_steps": 0}
        )
        place = folder / f"member-{member}"
        train_reward_model(policy, rows, config, place)
        scorers.append(TextScorer(load_reward_model(place)))
    return scorers


def _scores(
    scorers: Sequence[TextScorer], prompts: Sequence[str], answers: Sequence[Sequence[str]]
) -> Array:
    repeated = [prompt for prompt, texts in zip(prompts, answers, strict=True) for _ in texts]
    flat = [text for texts in answers for text in texts]
    scores = np.stack([scorer.score_texts(repeated, flat) for scorer in scorers], axis=-1)
    return scores.reshape(len(prompts), -1, len(scorers))


def _measure(
    scorers: Sequence[TextScorer], prompts: Sequence[str], samples: Sequence[Sequence[str]]
) -> tuple[float, float]:
    """Return how often the best of four beats a further sample, and the accuracy on all pairs."""
    scores = _scores(scorers, prompts, samples).mean(axis=-1)
    best = scores[:, :4].argmax(axis=1)
    points = {"first": 1.0, "tie": 0.5, "second": 0.0}
    contests = [(row[place], row[4]) for row, place in zip(samples, best, strict=True)]
    won = np.mean([points[outcome] for outcome in judge([], contests)])
    places = [(i, j) for i in range(TESTED) for j in range(i)]
    outcomes = judge([], [(row[i], row[j]) for row in samples for i, j in places])
    order = np.array([row[i] > row[j] for row in scores for i, j in places])
    decided = np.array([outcome != "tie" for outcome in outcomes])
    right = order == np.array([outcome == "first" for outcome in outcomes])
    return float(won), float(right[decided].mean())


if __name__ == "__main__":
    main()
