"""Flags of `flows/win_rate.py` apart from the settings of the evaluation and of chat models."""

from dataclasses import dataclass

from ppo_core.config.checks import check_fields
from ppo_core.config.placement import Precision
from ppo_core.config.row_settings import (
    MAX_LEFT_OUT,
    Overlong,
    PromptFormat,
)
from ppo_core.io.validation import Count, Seed, ShareAbove0, ShareBelow1


@dataclass(frozen=True, kw_only=True)
class WinRateArguments:
    """The model, the judge, the prompts, and how answers are sampled.

    Raises:
        ConfigError: a value is out of range.
    """

    model: str
    """Folder or hub id of a decoder-only model, or an MLflow URI: models:/NAME/VERSION or
    models:/NAME@ALIAS."""

    judge: str
    """openai:MODEL, transformers:PATH, reward-model:PATH, python:FILE_OR_MODULE:FUNCTION or rule
    (the built-in task's judge). Several judges, joined by commas, vote."""

    eval_prompts: str = ""
    """File or hub data set with prompt and reference; empty uses the built-in task's prompts."""

    columns: list[str] | None = None
    """Columns with other names, as in `prompt=post reference=summary`."""

    prompt_format: PromptFormat = "auto"
    """How the model reads prompts: `chat`, by its tokenizer's chat template; `text`; or `auto`,
    chat if there is a template."""

    overlong: Overlong = "drop"
    """What happens to a prompt that leaves no room for an answer: `error`, `drop` (see
    `max_left_out`), or `truncate`, which removes its start."""

    max_left_out: ShareBelow1 = MAX_LEFT_OUT
    """Maximum fraction of the rows of a data set that may be left out, because they cannot be used
    or are too long; above it, the command stops. 0 allows none."""

    allow_data_urls: bool = False
    """Whether `eval_prompts` and `human_labels` may be addresses such as https:// or s3://."""

    response_length: Count = 53
    """Maximum number of tokens of an answer."""

    stop_token_id: int | None = None
    """Id of the token that ends an answer; None for the tokenizer's end-of-sequence token."""

    batch_size: Count = 64
    """Number of prompts in a generation batch; fewer if memory is full."""

    precision: Precision = "auto"
    """Precision of the model, and of a chat model that judges: `fp32`, `bf16`, or `auto`, bf16 on
    a GPU that computes in it."""

    seed: Seed = 1
    """Seed of the sampled answers and of the order in which pairs are judged."""

    alpha: ShareAbove0 = 0.001
    """The judge is asked until it is shown that the model wins more than half of the pairs, with
    this probability of error; until a rate of 55 % is implausible; or for all pairs. A smaller
    value judges more pairs, and makes the interval narrower."""

    end_of_text: bool = True
    """Whether a reward model used as judge reads an end-of-sequence token after each answer."""

    output_dir: str = "outputs"
    """Folder for the judgements and for a cache of judge replies, which avoids paying twice."""

    summary_json: str = ""
    """JSON file for all results and settings; empty writes no file."""

    def __post_init__(self) -> None:
        """Raise if a value is out of range."""
        check_fields(self)
