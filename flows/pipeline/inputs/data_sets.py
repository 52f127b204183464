"""The data sets of a run, as its steps read them."""

from pipeline.inputs.preference_pairs import LABELS, training_texts, without_pairs
from pipeline.inputs.rows import Row, Rows, held_out, read_rows
from pipeline.settings.evaluation_config import EvaluationConfig
from pipeline.settings.settings import Settings
from ppo_core.errors import DataError


def sft_rows(settings: Settings) -> Rows:
    """Rows of prompt and completion."""
    return read_rows(settings.sft_data, ["prompt", "completion"])


def training_pairs(settings: Settings) -> Rows:
    """Preferences to train the reward model on: texts alone, of pairs that are no ties.

    A pair that it is validated on is left out, whoever else voted on it.
    """
    rows = _read_pairs(settings.preferences)
    if not settings.preferences_test:
        rows = held_out(rows, settings.held_out_share)[0]
    return training_texts(without_pairs(rows, test_pairs(settings)))


def test_pairs(settings: Settings) -> Rows:
    """Preferences to validate the reward model on."""
    if settings.preferences_test:
        return _read_pairs(settings.preferences_test)
    return held_out(_read_pairs(settings.preferences), settings.held_out_share)[1]


def training_prompts(settings: Settings) -> Rows:
    """Prompts that PPO trains on, with references if there are any."""
    return read_rows(settings.prompts, ["prompt"], ["reference"])


def data_sets(settings: Settings) -> dict[str, Rows]:
    """Every data set that a run reads, by what it is used for."""
    return {
        **({"sft": sft_rows(settings)} if settings.sft_data else {}),
        **({} if settings.reward_model else {"preferences": training_pairs(settings)}),
        "preferences-test": test_pairs(settings),
        "prompts": training_prompts(settings),
        "eval-prompts": read_rows(settings.eval_prompts, ["prompt", "reference"]),
    }


def examples(source: str, config: EvaluationConfig) -> list[Row]:
    """Prompts and references that policies are judged on."""
    rows = read_rows(source, ["prompt", "reference"]).usable
    return [*rows[: config.num_examples]]


def human_labels(config: EvaluationConfig) -> list[Row]:
    """Pairs of answers that people compared; none where no file is named.

    Raises:
        DataError: the rows cannot be read, or a label is none of first, second and tie.
    """
    if not config.human_labels:
        return []
    rows = read_rows(config.human_labels, ["prompt", "first", "second", "label"])
    labels = {row["label"] for row in rows.usable}
    if unknown := sorted(labels - {"first", "second", "tie"}):
        raise DataError(
            f"human_labels={rows.source}: the label {unknown[0]!r} is none of first, second and "
            "tie. Mend the column."
        )
    return [*rows.usable]


def _read_pairs(source: str) -> Rows:
    return read_rows(source, ["chosen", "rejected"], ["prompt"], LABELS)
