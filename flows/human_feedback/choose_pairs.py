"""Sample answers of policies, and choose the pairs that people should label."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from human_feedback.uncertain_pairs import Pair, first_unlike, random_pairs, uncertain_pairs
from pipeline.evaluation.pair_accuracy import Array
from pipeline.inputs.human_labels_to_pairs import unlabeled_rows
from pipeline.inputs.json_lines import read_jsonl, write_jsonl
from pipeline.inputs.run_data import RunData
from pipeline.inputs.training_prompts import prompt_key
from pipeline.launch.answers import answer_as_ppo
from pipeline.promotion.fetch_champion import CHAMPIONS
from pipeline.registry.fetch_policy import find_policy
from pipeline.reports.run_page.answer_sections import JudgedPair, read_evaluation_rows
from pipeline.results.step_records import JUDGEMENTS, SAMPLES
from pipeline.reward_validation.scores import require_finite
from pipeline.settings.settings import Settings
from pipeline.stages.validation import load_scorer
from ppo_core.config.field_checks import check_fields
from ppo_core.data.chat_template import Messages
from ppo_core.data.rows.dialogues import shown_prompt
from ppo_core.errors import ConfigError, DataError
from ppo_core.errors.out_of_memory import free_unused
from ppo_core.io.validation import Count, Seed
from ppo_core.models.loading import member_folders

CANDIDATES = 4
"""Number of prompts to answer first for each wanted pair, if a reward model chooses the pairs."""

SPARE = 1.25
"""Number of prompts to answer first for each random pair. It is above 1, because a prompt yields no
pair if its answers are equal or if the prompt resembles another prompt."""


@dataclass(frozen=True, kw_only=True)
class PairChoice:
    """Options for choosing pairs to label: policies, prompts, reward model and number of pairs.

    Raises:
        ConfigError: a value is out of range.
    """

    settings: Settings
    """Settings of a run. They determine how prompts are read, and how answers are sampled and
    scored."""

    policies: Sequence[str]
    """Folders, hub ids, or models:/NAME@ALIAS."""

    labels: Count
    """Maximum number of pairs."""

    reward_model: str = ""
    """Folder of a reward model with several members; if empty, pairs are drawn at random."""

    prompts: Sequence[str] = field(default_factory=list)
    """Data sets with prompts, all of which are used; if empty, the training prompts of the run."""

    samples: Count = 4
    """Number of answers of each policy to a prompt."""

    seed: Seed = 1

    def __post_init__(self) -> None:
        """Raise if a value is out of range."""
        check_fields(self)
        if self.samples * len(self.policies) < 2:
            raise ConfigError(
                "One policy with samples=1 gives one answer per prompt, but a pair needs two. "
                "Raise samples, or name a second policy."
            )
        if self.reward_model and len(self.members) < 2:
            has = "has only one member" if Path(self.reward_model).is_dir() else "is not a folder"
            raise ConfigError(
                f"reward_model='{self.reward_model}' {has}. Pairs are chosen by the disagreement "
                "between members, so train several (reward_model_training.members=3) and name the "
                "folder that contains member-1. To draw pairs at random, leave reward_model out."
            )

    @cached_property
    def members(self) -> list[Path]:
        """Folders of the members of the reward model."""
        return member_folders(self.reward_model)


def pairs_to_label(choice: PairChoice) -> list[Pair]:
    """Return the pairs on which the members of the reward model differ most.

    Without a reward model, return random pairs. Further prompts are answered until there are enough
    pairs, no prompts are left, or a round gives no further pair.

    Raises:
        DataError: the prompts cannot be used, or no prompt has two different answers.
        ModelError: a model cannot be loaded, or a score is not finite.
    """
    prompts = _prompts(choice)
    answers: list[list[str]] = []
    pairs: list[Pair] = []
    wanted = ceil((CANDIDATES if choice.reward_model else SPARE) * choice.labels)
    while len(pairs) < choice.labels and len(answers) < len(prompts):
        before = len(pairs)
        answers += _answers(choice, prompts[len(answers) : wanted], len(answers))
        pairs = _pairs(choice, prompts[: len(answers)], answers)
        if len(pairs) == before:
            break  # Further prompts would probably give no pair either.
        # Each round loads the models, so few large rounds are faster than many small ones.
        wanted *= 2
    if not pairs:
        raise DataError(
            f"No pair can be labeled: each of {len(answers)} prompts has equal answers only. "
            "Raise ppo.temperature in the settings, or name a second policy."
        )
    return pairs


def disputed_pairs(settings: Settings, folder: Path, reward_model: str, labels: int) -> list[Pair]:
    """Return pairs that judge and reward model order differently, PPO's answer first.

    The pairs are sorted by the difference between the reward model's scores, largest first. Each
    prompt has at most one pair.

    Args:
        settings: settings of the run.
        folder: folder of the run's evaluation.
        reward_model: folder of a reward model.
        labels: maximum number of pairs.

    Raises:
        DataError: a file of the evaluation is missing or damaged, or there is no such pair.
        ModelError: the model cannot be loaded, or a score is not finite.
    """
    rows = read_evaluation_rows(folder / JUDGEMENTS, JudgedPair)
    judged = [one for one in rows if _decides_about_ppo(one)]
    if not judged:
        raise DataError(
            f"'{folder}': the judge named no winner in the pairs with an answer of PPO."
        )
    # A verdict has the prompt as text, as the judge read it. The samples have the original prompt.
    asked = (row["prompt"] for row in read_jsonl(folder / SAMPLES) if "prompt" in row)
    as_asked = {shown_prompt(prompt): prompt for prompt in asked}
    if lacking := [one.prompt for one in judged if one.prompt not in as_asked]:
        raise DataError(
            f"'{folder / SAMPLES}' lacks a prompt of {JUDGEMENTS}, {lacking[0]!r:.80}, so the "
            "reward model cannot score its answers. Restore both files of the same evaluation."
        )
    prompts = [as_asked[one.prompt] for one in judged]
    answers = [[one.candidate, one.opponent] for one in judged]
    first, second = _scores(RunData(settings), [Path(reward_model)], prompts, answers)[:, :, 0].T
    margins = first - second
    preferred = np.array([1 if one.outcome == "first" else -1 for one in judged])
    order = sorted(np.flatnonzero(margins * preferred < 0), key=lambda row: -abs(margins[row]))
    found = [Pair(prompts[row], judged[row].candidate, judged[row].opponent) for row in order]
    pairs = first_unlike(found, labels)
    if not pairs:
        raise DataError(
            f"Judge and reward model order all {len(judged)} pairs in '{folder}' alike. There is "
            "nothing to label."
        )
    return pairs


def write_pairs(pairs: Sequence[Pair], path: Path) -> None:
    """Write the pairs in the format that `feedback.py label` reads.

    Raises:
        TrainingError: the file cannot be written.
    """
    write_jsonl(path, unlabeled_rows((pair.prompt, pair.first, pair.second) for pair in pairs))


def _decides_about_ppo(one: JudgedPair) -> bool:
    return one.contest.startswith("ppo_vs_") and one.outcome in ("first", "second")


def _prompts(choice: PairChoice) -> list[str | Messages]:
    """Return the distinct prompts in random order."""
    settings = choice.settings
    # Without eval_prompts, a part of the prompts would be held out for the evaluation.
    data = [replace(settings, prompts=name, eval_prompts=name) for name in choice.prompts]
    found = {
        prompt_key(prompt): prompt
        for each in data or [settings]
        for prompt in RunData(each).training_prompts().column("prompt")
    }
    prompts = list(found.values())
    order = np.random.default_rng(choice.seed).permutation(len(prompts))
    return [prompts[place] for place in order]


def _pairs(
    choice: PairChoice, prompts: Sequence[str | Messages], answers: Sequence[Sequence[str]]
) -> list[Pair]:
    """Choose pairs of the answers to these prompts."""
    if not choice.reward_model:
        return random_pairs(prompts, answers, choice.labels, choice.seed)
    scores = _scores(RunData(choice.settings), choice.members, prompts, answers)
    return uncertain_pairs(prompts, answers, scores, choice.labels)


def _answers(choice: PairChoice, prompts: Sequence[str | Messages], start: int) -> list[list[str]]:
    """Return the sampled answers of all policies to each prompt.

    `start` is the number of prompts that are already answered.
    """
    answers: list[list[str]] = [[] for _ in prompts]
    for number, policy in enumerate(choice.policies):
        # Each policy of each round has its own number.
        sampled = _sample_answers(choice, policy, start * len(choice.policies) + number, prompts)
        for row, texts in zip(answers, sampled, strict=True):
            row += texts
        free_unused()
    return answers


def _sample_answers(
    choice: PairChoice, policy: str, number: int, prompts: Sequence[str | Messages]
) -> list[list[str]]:
    """Sample answers of a policy with PPO's settings; `number` selects the random numbers."""
    model, tokenizer = find_policy(policy, Path(choice.settings.output_dir) / "cache" / CHAMPIONS)
    # With equal seeds, similar policies would give similar answers to similar prompts.
    settings = replace(choice.settings, seed=(choice.seed + number) % 2**32)
    asked = [prompt for prompt in prompts for _ in range(choice.samples)]
    with TemporaryDirectory() as folder:
        texts = answer_as_ppo(settings, str(model), Path(folder), asked, tokenizer=str(tokenizer))
    return [texts[at : at + choice.samples] for at in range(0, len(texts), choice.samples)]


def _scores(
    data: RunData,
    reward_models: Sequence[Path],
    prompts: Sequence[str | Messages],
    answers: Sequence[Sequence[str]],
) -> Array:
    """Return scores (N, K, M) of K answers to each of N prompts by M models.

    One model is loaded at a time.
    """
    repeated = [prompt for prompt, texts in zip(prompts, answers, strict=True) for _ in texts]
    flat = [text for texts in answers for text in texts]
    found = []
    for folder in reward_models:
        found.append(load_scorer(data, str(folder)).score_texts(repeated, flat))
        free_unused()
    scores = np.stack(found, axis=-1).reshape(len(prompts), -1, len(reward_models))
    require_finite(scores.mean(axis=-1), "answers")
    return scores
