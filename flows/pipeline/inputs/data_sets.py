"""Read the data sets of a run, and leave out or shorten rows that the models cannot read."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain

from transformers import PreTrainedTokenizerBase

from pipeline.inputs.preference_pairs import split_off_judge_pairs, training_pairs_of
from pipeline.inputs.training_prompts import prompts_without
from pipeline.settings.evaluation_config import EvaluationConfig
from pipeline.settings.settings import Settings
from ppo_core.config.row_settings import PromptFormat
from ppo_core.data.prompts import context_length
from ppo_core.data.rows.fitting import fit_pairs, fit_prompts
from ppo_core.data.rows.forms import Kind, Row
from ppo_core.data.rows.reader import ROW, Rows, read_rows
from ppo_core.errors import DataError
from ppo_core.models.loading import load_config, load_tokenizer
from ppo_core.supervised.examples.encoded_rows import TrainingKind, encode_rows, max_tokens
from ppo_core.supervised.supervised_config import SupervisedConfig


@cache
def cached_tokenizer(path: str, prompt_format: PromptFormat) -> PreTrainedTokenizerBase:
    """Return a tokenizer, which a step needs for each data set but reads once."""
    return load_tokenizer(path, prompt_format)


def policy_tokenizer(settings: Settings) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the policy, in the prompt format of the run."""
    return cached_tokenizer(settings.policy, settings.prompt_format)


def is_chat(settings: Settings) -> bool:
    """Return whether the policy reads prompts as a chat."""
    return policy_tokenizer(settings).chat_template is not None


def reward_format(settings: Settings) -> PromptFormat:
    """Return the prompt format of the reward model: its own chat template, or the policy's text."""
    return "auto" if is_chat(settings) else "text"


def reward_tokenizer(settings: Settings) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the reward model; a given one uses its own chat template."""
    if settings.reward_model:
        return cached_tokenizer(settings.reward_model, reward_format(settings))
    return policy_tokenizer(settings)


def sft_rows(settings: Settings) -> Rows:
    """Read the demonstrations for SFT."""
    return _read(settings.sft_data, "demonstrations", settings)


def training_pairs(settings: Settings) -> Rows:
    """Read the preferences for training the reward model, without labels and without ties.

    Pairs that are also in the validation set are left out, even if other people labelled them, and
    so are the pairs of a judge that the run trains.
    """
    rows = _training_pairs_of_both(settings)
    return rows if settings.judge else split_off_judge_pairs(rows)[0]


def judge_pairs(settings: Settings) -> Rows:
    """Read the preferences for training the judge: a third, or all if a reward model is given."""
    rows = _training_pairs_of_both(settings)
    return rows if settings.reward_model else split_off_judge_pairs(rows)[1]


def _training_pairs_of_both(settings: Settings) -> Rows:
    """Read the preferences that are not for validation, without labels and without ties."""
    rows = _read(settings.preferences, "pairs", settings)
    if not settings.preferences_test:
        rows = held_out(rows, settings.held_out_share)[0]
    # Before any is shortened: the keys of long pairs must agree.
    return training_pairs_of(rows, _validation_pairs(settings))


def encoded_demonstrations(settings: Settings) -> Rows:
    """Return the demonstrations as SFT reads them: token ids, with the digest of the rows."""
    return _encoded("demonstrations", sft_rows(settings), settings.sft, settings)


def encoded_pairs(settings: Settings) -> Rows:
    """Return the preferences as the training reads them: token ids, with the digest of the rows."""
    return _encoded("pairs", training_pairs(settings), settings.reward_model_training, settings)


def encoded_judge_pairs(settings: Settings) -> Rows:
    """Return the preferences for the judge as the training reads them, like `encoded_pairs`."""
    return _encoded("pairs", judge_pairs(settings), settings.reward_model_training, settings)


def _encoded(kind: TrainingKind, rows: Rows, config: SupervisedConfig, settings: Settings) -> Rows:
    encoded = encode_rows(
        kind,
        rows,
        policy_tokenizer(settings),
        config,
        limit=max_tokens(settings.policy, config),
        overlong=settings.overlong,
    )
    # The digest of token ids would change with the tokenizer, although the data are the same.
    return replace(encoded, digest=rows.digest)


def test_pairs(settings: Settings) -> Rows:
    """Read the preferences for validating the reward model, those that it can read."""
    model = settings.reward_model or settings.policy
    return _fitting_pairs(settings, model, reward_tokenizer(settings))


def judge_test_pairs(settings: Settings) -> Rows:
    """Read the preferences for validating a judge that the run trains, those that it can read."""
    return _fitting_pairs(settings, settings.policy, policy_tokenizer(settings))


def _fitting_pairs(settings: Settings, model: str, tokenizer: PreTrainedTokenizerBase) -> Rows:
    return fit_pairs(
        _validation_pairs(settings),
        tokenizer,
        context_length(load_config(model)),
        settings.overlong,
        end_of_text=settings.reward_model_training.end_of_text,
    )


def _validation_pairs(settings: Settings) -> Rows:
    if settings.preferences_test:
        return _read(settings.preferences_test, "pairs", settings)
    return held_out(_read(settings.preferences, "pairs", settings), settings.held_out_share)[1]


def held_out(rows: Rows, share: float, most: int | None = None) -> tuple[Rows, Rows]:
    """Split off the last fraction `share` of the rows; both results have at least one row.

    At most `most` rows are split off, if it is given.

    Pairs of one ranked list, or of judgements of one prompt, stay together.

    Raises:
        DataError: there are fewer than two rows, or all are pairs of one prompt.
    """
    if len(rows) < 2:
        raise DataError(f"{rows.source} has one row, so none can be held out. Add rows.")
    cut = min(max(round(len(rows) * (1 - share)), 1), len(rows) - 1)
    if most is not None:
        cut = max(cut, len(rows) - most)
    cut = _between_prompts(rows, cut)
    first = rows.part(0, cut, f"first {cut}")
    last = rows.part(cut, len(rows), f"last {len(rows) - cut}")
    # Rows that were left out belong to the larger part.
    return replace(first, left_out=rows.left_out, left_out_files=rows.left_out_files), last


def _between_prompts(rows: Rows, cut: int) -> int:
    """Return the next place to cut that separates no pairs of one ranked list or judged prompt.

    Raises:
        DataError: all rows are pairs of one.
    """
    numbers = rows.table.with_format("arrow")[ROW]
    places = chain(range(cut, len(rows)), range(cut - 1, 0, -1))
    for place in places:
        if numbers[place] != numbers[place - 1]:
            return place
    raise DataError(
        f"{rows.source} has the pairs of one prompt, so none can be held out. Add prompts."
    )


def training_prompts(settings: Settings) -> Rows:
    """Read the prompts that PPO trains on, with the column `reference`.

    Without `eval_prompts`, the prompts split off for the evaluation are left out.
    """
    if settings.eval_prompts:
        return _fitting(settings, _read(settings.prompts, "prompts", settings))
    return prompts_without(*_split_prompts(settings))


def evaluation_rows(settings: Settings) -> Rows:
    """Read the prompts that the policies can be judged on; all rows have a reference, or none has.

    Raises:
        DataError: some rows have no reference.
    """
    if settings.eval_prompts:
        rows = _fitting(settings, _read(settings.eval_prompts, "prompts", settings))
    else:
        rows = _split_prompts(settings)[1]
    return rows if _missing_references(rows) == len(rows) else require_reference(rows)


def _split_prompts(settings: Settings) -> tuple[Rows, Rows]:
    """Split the rows of `prompts`: first the rows to train on, then the rows of the evaluation."""
    # After long prompts are shortened: the policy must be judged on none that it was trained on.
    rows = _fitting(settings, _read(settings.prompts, "prompts", settings))
    return held_out(rows, settings.held_out_share, settings.evaluation.num_examples)


def data_sets(settings: Settings) -> dict[str, Rows]:
    """Read every data set of a run; the keys are the uses of the data sets."""
    return {
        **({"sft": encoded_demonstrations(settings)} if settings.sft_data else {}),
        **({} if settings.reward_model else {"preferences": encoded_pairs(settings)}),
        **({} if settings.judge else {"judge-preferences": encoded_judge_pairs(settings)}),
        "preferences-test": test_pairs(settings),
        "prompts": training_prompts(settings),
        "eval-prompts": evaluation_rows(settings),
    }


def examples(settings: Settings) -> list[Row]:
    """Read the first `num_examples` rows for the evaluation."""
    return first_rows(evaluation_rows(settings), settings.evaluation)


def references_of(rows: Sequence[Row]) -> list[str] | None:
    """Return the references of the rows of an evaluation; None if no row has any text as one."""
    references = [row["reference"] or "" for row in rows]
    return references if any(text.strip() for text in references) else None


def first_rows(rows: Rows, config: EvaluationConfig) -> list[Row]:
    """Return the rows that an evaluation judges."""
    return list(rows.table.select(range(min(config.num_examples, len(rows)))))


def require_reference(rows: Rows) -> Rows:
    """Raise if a row has no reference to compare an answer with; return the rows.

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


def human_labels(
    config: EvaluationConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    renamed: Mapping[str, str],
    allow_urls: bool,
    max_left_out: float,
) -> Rows | None:
    """Read the pairs of answers that people labelled; None if no file is set.

    Raises:
        DataError: the rows cannot be read, or a label is not first, second or tie.
    """
    if not config.human_labels:
        return None
    rows = read_rows(
        config.human_labels,
        "votes",
        is_chat=tokenizer.chat_template is not None,
        renamed=renamed,
        allow_urls=allow_urls,
        max_left_out=max_left_out,
    )
    if unknown := sorted(set(rows.column("label")) - {"first", "second", "tie"}):
        raise DataError(
            f"human_labels={rows.source}: the label {unknown[0]!r} is none of first, second and "
            "tie. Correct the column label."
        )
    return rows


def labels_of_run(settings: Settings) -> Rows | None:
    """Read the labelled pairs of a run, see `human_labels`."""
    return human_labels(
        settings.evaluation,
        policy_tokenizer(settings),
        renamed=settings.columns,
        allow_urls=settings.allow_data_urls,
        max_left_out=settings.max_left_out,
    )


def _read(source: str, kind: Kind, settings: Settings) -> Rows:
    return read_rows(
        source,
        kind,
        is_chat=is_chat(settings),
        renamed=settings.columns,
        allow_urls=settings.allow_data_urls,
        max_left_out=settings.max_left_out,
    )


def _fitting(settings: Settings, rows: Rows) -> Rows:
    return fit_prompts(
        rows,
        policy_tokenizer(settings),
        context=context_length(load_config(settings.policy)),
        response_length=settings.ppo.response_length,
        overlong=settings.overlong,
    )
