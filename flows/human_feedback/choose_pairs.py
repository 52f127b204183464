"""Sample answers of policies, and choose the pairs that people should label."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from human_feedback.uncertain_pairs import Pair, random_pairs, uncertain_pairs
from pipeline.evaluation.rates import Array
from pipeline.inputs.json_lines import write_jsonl
from pipeline.launch.answers import answer, answer_processes
from pipeline.launch.stall_watch import STALL_MINUTES
from pipeline.promotion.fetch_champion import CHAMPIONS
from pipeline.registry.versions import find_policy
from pipeline.reward_validation.scores import TextScorer, require_finite
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.data.chat_template import Messages
from ppo_core.data.prompts import context_length
from ppo_core.data.rows.fitting import fit_prompts
from ppo_core.data.rows.reader import read_rows
from ppo_core.data.sources.json_rows import read_json_rows
from ppo_core.errors import ConfigError, DataError
from ppo_core.models.loading import load_config, load_reward_model, load_tokenizer
from ppo_core.training.answers import AnswerJob

CANDIDATES = 4
"""Number of prompts that are answered for each pair that a reward model chooses."""


@dataclass(frozen=True, kw_only=True)
class PairChoice:
    """What the pairs are chosen from.

    Raises:
        ConfigError: a value is out of range.
    """

    policies: Sequence[str]
    """Folders, hub ids, or models:/NAME@ALIAS. The first one's tokenizer measures the prompts."""

    prompts: str
    """Data set with `prompt`."""

    labels: int
    """Maximum number of pairs."""

    reward_model: str = ""
    """Folder of a reward model with several members; if empty, pairs are drawn at random."""

    samples: int = 4
    """Number of answers of each policy to a prompt."""

    response_length: int = PPOConfig.response_length
    temperature: float = PPOConfig.temperature
    seed: int = 1

    def __post_init__(self) -> None:
        """Raise if a number is too small."""
        least = {"labels": 1, "samples": 1, "response_length": 1}
        for name, bound in least.items():
            if (value := getattr(self, name)) < bound:
                raise ConfigError(f"{name}={value} must be at least {bound}.")
        if self.temperature <= 0:
            raise ConfigError(
                f"temperature={self.temperature:g} must be above 0: otherwise all answers of a "
                "policy to a prompt are equal."
            )
        if self.samples * len(self.policies) < 2:
            raise ConfigError("samples=1 of one policy is one answer, and a pair has two.")


def pairs_to_label(choice: PairChoice, cache: Path) -> list[Pair]:
    """Return the pairs that tell most about the preference of people; without a model, any pairs.

    `cache` is the folder of downloaded versions of registered models.

    Raises:
        ConfigError: the reward model has one member.
        DataError: the prompts cannot be used, or no prompt has two different answers.
        ModelError: a model cannot be loaded, or a score is not finite.
    """
    scorers = _scorers(choice.reward_model) if choice.reward_model else []
    policies = [find_policy(policy, cache / CHAMPIONS) for policy in choice.policies]
    prompts = _prompts(choice, policies[0])
    texts = [_answers(choice, policy, prompts) for policy in policies]
    answers = [[text for found in row for text in found] for row in zip(*texts, strict=True)]
    if scorers:
        scores = _scores(scorers, prompts, answers)
        pairs = uncertain_pairs(prompts, answers, scores, choice.labels)
    else:
        pairs = random_pairs(prompts, answers, choice.labels, choice.seed)
    if not pairs:
        raise DataError(
            f"No pair can be labeled: each of the {len(prompts)} prompts has equal answers only. "
            "Raise temperature, or name a second policy."
        )
    return pairs


def disputed_pairs(judgements: str, reward_model: str, labels: int) -> list[Pair]:
    """Return at most `labels` pairs whose better answer is another one for judge and reward model.

    The pairs of which the reward model is surest come first.

    Args:
        judgements: file `judgements.jsonl` of a run or of `win_rate.py`.
        reward_model: folder of a reward model.
        labels: maximum number of pairs.

    Raises:
        ConfigError: `labels` is below 1.
        DataError: the file cannot be read, is no such file, or has no such pair.
        ModelError: the model cannot be loaded, or a score is not finite.
    """
    if labels < 1:
        raise ConfigError(f"labels={labels} must be at least 1.")
    rows = [row for row in read_json_rows(Path(judgements)) if _is_decided(row, judgements)]
    prompts = [row["prompt"] for row in rows]
    answers = [[row["candidate"], row["opponent"]] for row in rows]
    scorer = TextScorer(load_reward_model(reward_model))
    scores = _scores([scorer], prompts, answers)[:, :, 0]
    margins = scores[:, 0] - scores[:, 1]
    disputed = [
        (abs(margin), Pair(row["prompt"], row["candidate"], row["opponent"], 0.0))
        for row, margin in zip(rows, margins, strict=True)
        if margin and (margin > 0) != (row["outcome"] == "first")
    ]
    if not disputed:
        raise DataError(
            f"{judgements}: judge and reward model agree on all {len(rows)} pairs that the judge "
            "decided. There is nothing to label."
        )
    disputed.sort(key=lambda one: -one[0])
    return [pair for _, pair in disputed[:labels]]


def write_pairs(pairs: Sequence[Pair], path: Path) -> None:
    """Write the pairs in the form that `feedback.py label` reads.

    Raises:
        TrainingError: the file cannot be written.
    """
    texts = ("prompt", "first", "second")
    write_jsonl(
        path, [{**{name: getattr(pair, name) for name in texts}, "label": ""} for pair in pairs]
    )


def _scorers(reward_model: str) -> list[TextScorer]:
    """Return a scorer for each member of a reward model.

    Raises:
        ConfigError: the model has one member.
    """
    scorers = TextScorer(load_reward_model(reward_model)).of_members()
    if len(scorers) == 1:
        raise ConfigError(
            f"--reward-model {reward_model} has one member, and the uncertainty is how far members "
            "differ. Train several with reward_model_training.members=3, or leave --reward-model "
            "out: then pairs are drawn at random."
        )
    return scorers


def _prompts(choice: PairChoice, policy: tuple[Path | str, Path | str]) -> list[str | Messages]:
    """Return the prompts to answer, drawn at random if there are more than needed."""
    model, tokenizer = policy[0], load_tokenizer(policy[1], "auto")
    rows = read_rows(choice.prompts, "prompts", is_chat=tokenizer.chat_template is not None)
    fitting = fit_prompts(
        rows,
        tokenizer,
        context=context_length(load_config(model)),
        response_length=choice.response_length,
        overlong="drop",
    )
    prompts = fitting.column("prompt")
    # Random pairs need more prompts than pairs, too: some have equal answers, or resemble others.
    wanted = CANDIDATES * choice.labels
    drawn = np.random.default_rng(choice.seed).permutation(len(prompts))[:wanted]
    return [prompts[place] for place in drawn]


def _answers(
    choice: PairChoice, policy: tuple[Path | str, Path | str], prompts: Sequence[str | Messages]
) -> list[list[str]]:
    """Return the answers of one policy to each prompt."""
    asked = [prompt for prompt in prompts for _ in range(choice.samples)]
    job = AnswerJob(
        policy=str(policy[0]),
        tokenizer=str(policy[1]),
        prompts=asked,
        prompt_format="auto",
        response_length=choice.response_length,
        temperature=choice.temperature,
        stop="own",
        seed=choice.seed,
    )
    with TemporaryDirectory() as folder:
        texts = answer(
            job,
            processes=answer_processes(0, len(asked)),
            folder=Path(folder) / "answers",
            stall_minutes=STALL_MINUTES,
        ).texts
    return [texts[at : at + choice.samples] for at in range(0, len(texts), choice.samples)]


def _scores(
    scorers: Sequence[TextScorer],
    prompts: Sequence[str | Messages],
    answers: Sequence[Sequence[str]],
) -> Array:
    """Return the scores (N, K, M) of K answers to each of N prompts by M models."""
    repeated = [prompt for prompt, texts in zip(prompts, answers, strict=True) for _ in texts]
    flat = [text for texts in answers for text in texts]
    scores = np.stack([scorer.score_texts(repeated, flat) for scorer in scorers], axis=-1)
    found = scores.reshape(len(prompts), -1, len(scorers))
    require_finite(found.mean(axis=-1), "answers")
    return found


def _is_decided(row: Mapping[str, Any], source: str) -> bool:
    """Return whether the judge decided a row of `judgements.jsonl`.

    Raises:
        DataError: the row is of another file.
    """
    if not {"prompt", "candidate", "opponent", "outcome"} <= row.keys():
        raise DataError(
            f"{source}: a row has the columns {', '.join(map(str, row))}, but judgements.jsonl has "
            "prompt, candidate, opponent and outcome. Name the file of a run."
        )
    return row["outcome"] in ("first", "second")
