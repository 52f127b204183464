"""The data sets of a run; rows that the models cannot read are left out or shortened."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from pipeline.inputs.contamination import find_copies, text_of, without_copies
from pipeline.inputs.human_labels_to_pairs import pairs_of_votes
from pipeline.inputs.labeled_pairs import LabeledPair, decided_pairs
from pipeline.inputs.row_digests import read_digests, without_erased
from pipeline.inputs.training_pairs import (
    held_out_pairs,
    join_by_weight,
    split_off_judge_pairs,
    training_pairs_of,
)
from pipeline.inputs.training_prompts import one_row_per_prompt, prompt_key, prompts_without
from pipeline.inputs.user_feedback_to_pairs import pairs_of_feedback
from pipeline.settings.evaluation_config import EvaluationConfig
from pipeline.settings.settings import Settings
from ppo_core.config.row_settings import PromptFormat, ReadOptions
from ppo_core.data.chat_template import Messages
from ppo_core.data.prompts import context_length
from ppo_core.data.rows.overlong import fit_pairs, fit_prompts
from ppo_core.data.rows.read_rows import Rows, read_rows
from ppo_core.data.rows.row_columns import Row
from ppo_core.data.rows.row_formats import Kind
from ppo_core.data.rows.split_rows import held_out, reports_left_out
from ppo_core.data.sources.source import named_data
from ppo_core.errors import DataError
from ppo_core.io.folder_cache import digest_of
from ppo_core.models.loading import load_config, load_tokenizer
from ppo_core.supervised.examples.encoded_rows import TrainingKind, encode_rows, max_tokens
from ppo_core.supervised.supervised_config import SupervisedConfig

PAIRS_FILE = "pairs.jsonl"
"""File in a folder of pairs of the policy's samples; its columns: prompt, chosen, rejected."""

MOST_PAIRS_PER_PROMPT = 16
"""Maximum number of pairs of the policy's samples for one prompt."""

LEAST_TO_CHOOSE = 16
"""Minimum number of prompts on which the judge chooses a policy."""


@dataclass(frozen=True)
class RunData:
    """The data sets of a run, prepared for its models; each tokenizer is loaded once."""

    settings: Settings
    """Settings of the run, with paths on this machine."""

    @cached_property
    def policy_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the policy, in the prompt format of the run."""
        return load_tokenizer(self.settings.policy, self.settings.prompt_format)

    @property
    def is_chat(self) -> bool:
        """Whether the policy reads prompts as a chat."""
        return self.policy_tokenizer.chat_template is not None

    @property
    def reward_format(self) -> PromptFormat:
        """Prompt format of the reward model.

        If the policy reads prompts as a chat, `auto`: the reward model's own chat template.
        Otherwise `text`.
        """
        return "auto" if self.is_chat else "text"

    @cached_property
    def reward_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the given reward model, or of the policy if the run trains the model."""
        if self.settings.reward_model:
            return load_tokenizer(self.settings.reward_model, self.reward_format)
        return self.policy_tokenizer

    def sft_rows(self) -> Rows:
        """Read the demonstrations for SFT."""
        return self._read(self.settings.sft_data, "demonstrations")

    def training_pairs(self) -> Rows:
        """Read prompt, chosen and rejected of the preferences that train the reward model.

        Ties are left out. Pairs that are also in the validation set are left out, even if their
        labels differ there. If the run trains a judge, the pairs of the judge are left out too.
        """
        rows = self._training_pairs_of_both()
        return rows if self.settings.judge else split_off_judge_pairs(rows)[0]

    def reward_training_pairs(self) -> Rows:
        """Return the rows that train the reward model: the given pairs, and `feedback`."""
        return join_by_weight([(self.training_pairs(), 1.0), *self._weighted_feedback()])

    def feedback(self, held_out_pairs: Sequence[Rows] = ()) -> Rows | None:
        """Read the feedback of users as training pairs, see `pairs_of_feedback`.

        Pairs that are also in the validation set or in `held_out_pairs` are left out.
        """
        if not self.settings.feedback:
            return None
        rows = self._read(self.settings.feedback, "feedback")
        return pairs_of_feedback(rows, [self._validation_pairs(), *held_out_pairs])

    def _weighted_feedback(self, held_out_pairs: Sequence[Rows] = ()) -> list[tuple[Rows, float]]:
        rows = self.feedback(held_out_pairs)
        return [] if rows is None else [(rows, self.settings.feedback_weight)]

    def judge_pairs(self) -> Rows:
        """Read the preferences for training the judge.

        These are a third of the pairs if the run also trains the reward model, otherwise all pairs.
        """
        rows = self._training_pairs_of_both()
        return rows if self.settings.reward_model else split_off_judge_pairs(rows)[1]

    def _training_pairs_of_both(self) -> Rows:
        """Read prompt, chosen and rejected of all preferences except validation pairs and ties."""
        rows = self._read(self.settings.preferences, "pairs")
        if not self.settings.preferences_test:
            rows = held_out_pairs(rows, self.settings.held_out_share)[0]
        # Compare pairs before long texts are shortened: shortened texts have other keys.
        return training_pairs_of(rows, self._validation_pairs())

    def encoded_demonstrations(self) -> Rows:
        """Return the demonstrations as token ids for SFT, with the digest of the original rows."""
        return self.encoded("demonstrations", self.sft_rows(), self.settings.sft)

    def encoded_pairs(self) -> Rows:
        """Return the preferences as token ids for the training of the reward model."""
        return self.encoded("pairs", self.training_pairs(), self.settings.reward_model_training)

    def encoded_feedback(self) -> Rows | None:
        """Return the feedback as token ids; None if there is none."""
        rows = self.feedback()
        return rows and self.encoded("pairs", rows, self.settings.reward_model_training)

    def encoded_judge_pairs(self) -> Rows:
        """Return the preferences as token ids for the training of the judge."""
        return self.encoded("pairs", self.judge_pairs(), self.settings.reward_model_training)

    def encoded(self, kind: TrainingKind, rows: Rows, config: SupervisedConfig) -> Rows:
        """Return rows as token ids for a training, with the digest of the original rows."""
        encoded = encode_rows(
            kind,
            rows,
            self.policy_tokenizer,
            config,
            limit=max_tokens(self.settings.policy, config),
            overlong=self.settings.overlong,
        )
        # The digest of token ids would change with the tokenizer, although the data are the same.
        return replace(encoded, digest=rows.digest)

    def test_pairs(self) -> Rows:
        """Read the validation preferences that fit into the context of the reward model."""
        model = self.settings.reward_model or self.settings.policy
        return self._fitting_pairs(model, self.reward_tokenizer, self._validation_pairs())

    def judge_test_pairs(self) -> Rows:
        """Read the validation preferences that fit into the context of a trained judge."""
        return self._fitting_pairs(
            self.settings.policy, self.policy_tokenizer, self._validation_pairs()
        )

    def _fitting_pairs(self, model: str, tokenizer: PreTrainedTokenizerBase, rows: Rows) -> Rows:
        return fit_pairs(
            rows,
            tokenizer,
            context_length(load_config(model)),
            self.settings.overlong,
            end_of_text=self.settings.reward_model_training.end_of_text,
        )

    def _validation_pairs(self) -> Rows:
        if self.settings.preferences_test:
            return self._read(self.settings.preferences_test, "pairs")
        rows = self._read(self.settings.preferences, "pairs")
        return held_out_pairs(rows, self.settings.held_out_share)[1]

    def training_prompts(self) -> Rows:
        """Read the prompts that PPO trains on, with the column `reference`.

        Without `eval_prompts`, leave out the prompts that are split off for the evaluation.
        """
        if self.settings.eval_prompts:
            return self._fitting(self._read(self.settings.prompts, "prompts"))
        return prompts_without(*self._split_prompts())

    def evaluation_rows(self) -> Rows:
        """Read the prompts of the evaluation; either all rows have a reference, or none has one.

        Prompts on which the judge chooses the policy are left out, and so are copies of training
        texts.

        Raises:
            DataError: some rows have no reference, or all prompts are copies of training texts.
        """
        rows = self._evaluation_rows
        return require_all_or_no_references(rows)

    @cached_property
    def _evaluation_rows(self) -> Rows:
        rows = self._unseen_prompts()[1]
        return without_copies(rows, self._training_rows(), self.settings.max_overlap)

    def digest_of_evaluation(self) -> str:
        """Return the digest of the evaluation's rows before copies of training texts are left out.

        Prompts on which the judge chooses the policy are not among these rows.
        """
        rows = self._unseen_prompts()[1]
        return digest_of([[row["prompt"], row["reference"]] for row in rows])

    def _training_rows(self) -> list[Rows]:
        """Read the texts of the data sets that train a model of the run."""
        settings = self.settings
        return [
            self.training_prompts(),
            *([self.sft_rows()] if settings.sft_data else []),
            *(rows for rows in (self.fresh_labels(), self.feedback()) if rows),
            # With a given reward model and a named judge, the preferences train nothing.
            *([] if settings.reward_model and settings.judge else [self._training_pairs_of_both()]),
        ]

    def selection_prompts(self) -> list[str | Messages]:
        """Return random prompts on which the policy is chosen, see `SelectionConfig`.

        With the method `kl`, these are training prompts of PPO. With the method `judge`, these are
        prompts that neither PPO nor the evaluation uses, and no copies of the evaluation's prompts.

        Raises:
            DataError: there are too few prompts for the judge.
        """
        rows, judged_on = self._unseen_prompts()
        by_judge = rows is not None
        rows = self.training_prompts() if rows is None else rows
        prompts = one_row_per_prompt(rows).column("prompt")
        if by_judge:
            prompts = self._without_judged(prompts, judged_on.column("prompt"))
            if len(prompts) < LEAST_TO_CHOOSE:
                raise DataError(
                    f"{rows.source} has only {len(prompts)} different prompts that the evaluation "
                    f"does not use; selection.method='judge' needs {LEAST_TO_CHOOSE}. Add prompts, "
                    "or set selection.method='kl'."
                )
        lots = np.random.default_rng(self.settings.seed).permutation(len(prompts))
        return [prompts[number] for number in lots[: self.settings.selection.num_prompts]]

    def _without_judged(
        self, prompts: list[str | Messages], judged_on: list[str | Messages]
    ) -> list[str | Messages]:
        """Return the prompts that are neither equal to nor copies of prompts of the evaluation.

        Copies are removed from the selection, because the evaluation needs more prompts.
        """
        left_out = {prompt_key(prompt) for prompt in judged_on}
        if self.settings.max_overlap < 1:
            texts = [[text_of(prompt) for prompt in judged_on]]
            copies = find_copies(prompts, texts, self.settings.max_overlap)
            left_out |= {prompt_key(prompts[place]) for place in copies}
        return [prompt for prompt in prompts if prompt_key(prompt) not in left_out]

    def _unseen_prompts(self) -> tuple[Rows | None, Rows]:
        """Read the prompts that PPO does not train on.

        Return the prompts on which the judge chooses the policy, and the prompts of the evaluation.
        The first value is None if the judge does not choose.

        Raises:
            DataError: there is only one prompt for the judge and the evaluation.
        """
        if self.settings.eval_prompts:
            rows = self._fitting(self._read(self.settings.eval_prompts, "prompts"))
        else:
            rows = self._split_prompts()[1]
        if self.settings.selection.method != "judge":
            return None, rows
        number = min(len(rows) // 2, self.settings.selection.num_prompts)
        first, last = held_out(rows, 1 - number / len(rows))
        # The rows that were left out are reported with the rows of the evaluation.
        return first, reports_left_out(last, rows)

    def _split_prompts(self) -> tuple[Rows, Rows]:
        """Split the rows of `prompts` into rows for training and rows for the evaluation.

        If the judge chooses the policy, the second part also has the prompts for this choice.
        """
        # Shorten long prompts first, so that `prompts_without` finds prompts that become equal.
        rows = self._fitting(self._read(self.settings.prompts, "prompts"))
        settings = self.settings
        most = settings.evaluation.num_examples
        if settings.selection.method == "judge":
            most += settings.selection.num_prompts
        return held_out(rows, settings.held_out_share, most)

    def by_use(self) -> dict[str, Rows]:
        """Read every data set of the run; each key is the use of a data set."""
        return {
            **({"sft": self.encoded_demonstrations()} if self.settings.sft_data else {}),
            **({} if self.settings.reward_model else {"preferences": self.encoded_pairs()}),
            **({"feedback": feedback} if (feedback := self.encoded_feedback()) else {}),
            **({} if self.settings.judge else {"judge-preferences": self.encoded_judge_pairs()}),
            "preferences-test": self.test_pairs(),
            "prompts": self.training_prompts(),
            "eval-prompts": self.evaluation_rows(),
            **({"human-labels": labels} if (labels := self.labels()) else {}),
            **({"fresh-pairs-labels": labels} if (labels := self.fresh_labels()) else {}),
        }

    def digested(self) -> dict[str, tuple[Rows, Rows]]:
        """Return the given rows of each data set of `by_use`, and the rows that the run uses."""
        settings = self.settings
        test = settings.preferences_test or settings.preferences
        given: dict[str, tuple[str, Kind]] = {
            "sft": (settings.sft_data, "demonstrations"),
            "preferences": (settings.preferences, "pairs"),
            "judge-preferences": (settings.preferences, "pairs"),
            "preferences-test": (test, "pairs"),
            "feedback": (settings.feedback, "feedback"),
            "prompts": (settings.prompts, "prompts"),
            "eval-prompts": (settings.eval_prompts or settings.prompts, "prompts"),
        }
        return {
            name: (self._read(*given[name]) if name in given else rows, rows)
            for name, rows in self.by_use().items()
        }

    @cached_property
    def erased(self) -> list[set[bytes]]:
        """The digests of each row that is removed from all data sets, see `Settings.erase`."""
        settings = self.settings
        if not settings.erase:
            return []
        with named_data("erase"):
            return read_digests(
                settings.erase, settings.columns, allow_urls=settings.allow_data_urls
            )

    def examples(self, champion: int | None = None) -> list[Row]:
        """Read the rows for an evaluation against a champion version; see `judged_rows`."""
        return judged_rows(self.evaluation_rows(), self.settings.evaluation, champion)

    def labels(self) -> Rows | None:
        """Read the labeled pairs, see `human_labels`."""
        return self._labels("human_labels", self.settings.evaluation.human_labels)

    def fresh_prompts(self, number: int = 1) -> list[str | Messages]:
        """Return the prompt of each pair of the policy's samples in the round `number`.

        The first round has the number 1. The rounds share `fresh_pairs.count` pairs. The prompts
        are drawn at random from the prompts of PPO. If there are fewer prompts than pairs, several
        consecutive pairs have the same prompt.

        Raises:
            DataError: there would be more than MOST_PAIRS_PER_PROMPT pairs of one prompt.
        """
        count, rounds = self.settings.fresh_pairs.count, self.settings.fresh_pairs.rounds
        rows = self.training_prompts()
        prompts = one_row_per_prompt(rows).column("prompt")
        each, more = divmod(count, len(prompts))
        if count > MOST_PAIRS_PER_PROMPT * len(prompts):
            raise DataError(
                f"fresh_pairs.count={count} needs {count / len(prompts):.1f} pairs for each of the "
                f"{len(prompts)} different prompts of {rows.source}. The maximum is "
                f"{MOST_PAIRS_PER_PROMPT}. Lower the count, or add prompts."
            )
        pairs = np.full(len(prompts), each) + (np.arange(len(prompts)) < more)
        lots = np.random.default_rng(self.settings.seed).permutation(len(prompts))
        first, last = (count * end // rounds for end in (number - 1, number))
        return [prompts[lot] for lot in np.repeat(lots, pairs)[first:last]]

    def fresh_labels(self) -> Rows | None:
        """Read the labeled pairs of the policy's samples, see `fresh_pairs.labels`."""
        return self._labels("fresh_pairs.labels", self.settings.fresh_pairs.labels)

    def fresh_pairs(self, folder: str) -> tuple[Rows, Rows]:
        """Read pairs of the policy's samples; return the training pairs and the held-out pairs."""
        return held_out_pairs(self.all_fresh_pairs(folder), self.settings.held_out_share)

    def fitting_held_out_pairs(self, folder: str) -> Rows:
        """Read the held-out pairs of the policy's samples that fit into every reward model."""
        rows = self.fresh_pairs(folder)[1]
        if given := self.settings.reward_model:
            rows = self._fitting_pairs(given, self.reward_tokenizer, rows)
        return self._fitting_pairs(self.settings.policy, self.policy_tokenizer, rows)

    def all_fresh_pairs(self, folder: str) -> Rows:
        """Read the labeled pairs of the policy's samples in a folder."""
        return self._read(str(Path(folder) / PAIRS_FILE), "pairs")

    def fresh_training_pairs(self, folders: Sequence[str]) -> Rows:
        """Return the training pairs of several rounds, the feedback, and the given pairs.

        The given pairs have the weight `given_weight`; with 0, they are left out.
        """
        parts = [(self.fresh_pairs(folder)[0], 1.0) for folder in folders]
        if weight := self.settings.fresh_pairs.given_weight:
            parts.append((self.training_pairs(), weight))
        tested = [self.fresh_pairs(folder)[1] for folder in folders]
        return join_by_weight([*parts, *self._weighted_feedback(tested)])

    def voted_pairs(self, fresh: str | None = None) -> list[LabeledPair]:
        """Return pairs of answers that people labeled, and that trained no reward model of the run.

        These are the pairs of `human_labels`, and the held-out pairs of `fresh_pairs.labels`, which
        are in the folder `fresh`. Ties are left out.
        """
        votes, trained, found = self.labels(), [], {}
        if votes is not None and len(votes):
            found["human_labels"] = pairs_of_votes(votes)
        if fresh is not None:
            training, rest = self.fresh_pairs(fresh)
            trained.append(training)
            found |= {"fresh_pairs.labels": rest} if self.settings.fresh_pairs.labels else {}
        if found and not self.settings.reward_model:
            trained += [self.training_pairs(), *(rows for rows, _ in self._weighted_feedback())]
        model = self.settings.reward_model or self.settings.policy
        fitting = []
        for name, rows in found.items():
            with named_data(name):
                fitting.append(self._fitting_pairs(model, self.reward_tokenizer, rows))
        return decided_pairs(chain.from_iterable(fitting), trained)

    def _labels(self, name: str, source: str) -> Rows | None:
        rows = read_labels(name, source, self.policy_tokenizer, self._options())
        return None if rows is None else self._without_erased(rows)

    def _read(self, source: str, kind: Kind) -> Rows:
        rows = read_rows(source, kind, is_chat=self.is_chat, options=self._options())
        return self._without_erased(rows)

    def _options(self) -> ReadOptions:
        settings = self.settings
        return ReadOptions(settings.columns, settings.allow_data_urls, settings.max_left_out)

    def _without_erased(self, rows: Rows) -> Rows:
        return without_erased(rows, frozenset().union(*self.erased))

    def _fitting(self, rows: Rows) -> Rows:
        return fit_prompts(
            rows,
            self.policy_tokenizer,
            context=context_length(load_config(self.settings.policy)),
            response_length=self.settings.ppo.response_length,
            overlong=self.settings.overlong,
        )


def references_of(rows: Sequence[Row]) -> list[str] | None:
    """Return the references of the rows of an evaluation; None if no row has a reference."""
    references = [row["reference"] or "" for row in rows]
    return references if any(references) else None


def judged_rows(rows: Rows, config: EvaluationConfig, champion: int | None = None) -> list[Row]:
    """Return the rows that an evaluation against a champion version judges.

    A fraction `rotate` of the judged rows is drawn at random for each champion version. The other
    judged rows are the first rows of `rows`, and are always the same.

    Raises:
        DataError: there are too few rows to draw from.
    """
    judged = min(config.num_examples, len(rows))
    rotated = round(config.rotate * judged)
    fixed = judged - rotated
    others = np.arange(fixed, len(rows))
    if len(others) < 2 * rotated:
        needed = config.num_examples + round(config.rotate * config.num_examples)
        raise DataError(
            f"evaluation.rotate={config.rotate:g} draws {rotated} of {judged} judged rows anew for "
            f"each champion. Only {len(others)} rows of {rows.source} are left besides the {fixed} "
            f"fixed rows, so most drawn rows would repeat. Add at least {needed - len(rows)} rows "
            f"to eval_prompts, lower num_examples to {int(len(rows) / (1 + config.rotate))}, or "
            "remove rotate."
        )
    drawn = np.random.default_rng(champion or 0).permutation(others)[:rotated]
    return list(rows.table.select([*range(fixed), *sorted(drawn.tolist())]))


def require_all_or_no_references(rows: Rows) -> Rows:
    """Return the rows; raise if only some of the rows have a reference.

    Raises:
        DataError: a reference is missing.
    """
    return rows if _missing_references(rows) == len(rows) else require_reference(rows)


def require_reference(rows: Rows) -> Rows:
    """Return the rows; raise if a row has no reference.

    Raises:
        DataError: a reference is missing.
    """
    if missing := _missing_references(rows):
        raise DataError(
            f"{missing} of the {len(rows)} rows of {rows.source} have no reference. Add the "
            "references that answers are compared with, or name their column in [columns]."
        )
    return rows


def _missing_references(rows: Rows) -> int:
    return int(rows.table.with_format("arrow")["reference"].null_count)


def read_labels(
    name: str, source: str, tokenizer: PreTrainedTokenizerBase, options: ReadOptions
) -> Rows | None:
    """Read the pairs of answers that people labeled; None if `source` is empty.

    Rows without a label are left out.

    Raises:
        DataError: the rows cannot be read, or a label is not first, second or tie.
    """
    if not source:
        return None
    is_chat = tokenizer.chat_template is not None
    with named_data(name):
        rows = read_rows(source, "votes", is_chat=is_chat, options=options)
    labels = rows.column("label")
    if unknown := sorted(set(labels) - {"first", "second", "tie", ""}):
        raise DataError(
            f"{name}={rows.source}: the label {unknown[0]!r} is none of first, second and "
            "tie. Correct the column label."
        )
    given = [number for number, label in enumerate(labels) if label]
    return replace(rows, table=rows.table.select(given))
