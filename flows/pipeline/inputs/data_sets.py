"""Read the data sets of a run."""

from pipeline.inputs.preference_pairs import LABELS, training_texts, without_pairs
from pipeline.inputs.rows import Row, Rows, held_out, read_rows
from pipeline.settings.evaluation_config import EvaluationConfig
from pipeline.settings.settings import Settings
from ppo_core.errors import DataError


def sft_rows(settings: Settings) -> Rows:
    """Read the rows of prompt and completion for SFT."""
    return read_rows(
        settings.sft_data, ["prompt", "completion"], allow_urls=settings.allow_data_urls
    )


def training_pairs(settings: Settings) -> Rows:
    """Read the preferences for training the reward model, without labels and without ties.

    Pairs that are also in the validation set are left out, even if other people labelled them.
    """
    rows = _read_pairs(settings.preferences, settings)
    if not settings.preferences_test:
        rows = held_out(rows, settings.held_out_share)[0]
    return training_texts(without_pairs(rows, test_pairs(settings)))


def test_pairs(settings: Settings) -> Rows:
    """Read the preferences for validating the reward model."""
    if settings.preferences_test:
        return _read_pairs(settings.preferences_test, settings)
    return held_out(_read_pairs(settings.preferences, settings), settings.held_out_share)[1]


def training_prompts(settings: Settings) -> Rows:
    """Read the prompts that PPO trains on, with the column `reference` if it exists."""
    return read_rows(
        settings.prompts, ["prompt"], ["reference"], allow_urls=settings.allow_data_urls
    )


def evaluation_rows(settings: Settings) -> Rows:
    """Read all rows of prompt and reference that the policies can be judged on."""
    return read_rows(
        settings.eval_prompts, ["prompt", "reference"], allow_urls=settings.allow_data_urls
    )


def data_sets(settings: Settings) -> dict[str, Rows]:
    """Read every data set of a run; the keys are the uses of the data sets."""
    return {
        **({"sft": sft_rows(settings)} if settings.sft_data else {}),
        **({} if settings.reward_model else {"preferences": training_pairs(settings)}),
        "preferences-test": test_pairs(settings),
        "prompts": training_prompts(settings),
        "eval-prompts": evaluation_rows(settings),
    }


def examples(source: str, config: EvaluationConfig, *, allow_urls: bool) -> list[Row]:
    """Read the first `num_examples` prompts and references for the evaluation."""
    rows = read_rows(source, ["prompt", "reference"], allow_urls=allow_urls).usable
    return [*rows[: config.num_examples]]


def human_labels(config: EvaluationConfig, *, allow_urls: bool) -> list[Row]:
    """Read the pairs of answers that people labelled; empty if no file is set.

    Raises:
        DataError: the rows cannot be read, or a label is not first, second or tie.
    """
    if not config.human_labels:
        return []
    columns = ["prompt", "first", "second", "label"]
    rows = read_rows(config.human_labels, columns, allow_urls=allow_urls)
    labels = {row["label"] for row in rows.usable}
    if unknown := sorted(labels - {"first", "second", "tie"}):
        raise DataError(
            f"human_labels={rows.source}: the label {unknown[0]!r} is none of first, second and "
            "tie. Correct the column label."
        )
    return [*rows.usable]


def _read_pairs(source: str, settings: Settings) -> Rows:
    sides = ["chosen", "rejected"]
    return read_rows(source, sides, ["prompt"], LABELS, allow_urls=settings.allow_data_urls)
