"""Flags of `flows/win_rate.py`, except the settings of the evaluation and of chat models."""

from dataclasses import dataclass

from ppo_core.config.field_checks import check_fields
from ppo_core.config.placement import Precision
from ppo_core.config.row_settings import MAX_LEFT_OUT, Overlong, PromptFormat
from ppo_core.io.validation import Count, ErrorRate, Seed, ShareBelow1


@dataclass(frozen=True, kw_only=True)
class WinRateArguments:
    """The model, the judge, the prompts, and the sampling of answers.

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

    against_itself: bool = False
    """Whether the model is compared with itself, sampled with another seed, to test the judge and
    the gate. References are then not needed."""

    columns: list[str] | None = None
    """Names of columns that differ from the standard, as in `prompt=post reference=summary`."""

    prompt_format: PromptFormat = "auto"
    """Format in which the model reads prompts: `chat` applies the tokenizer's chat template, `text`
    does not, and `auto` applies it if there is one."""

    overlong: Overlong = "drop"
    """What happens to a prompt that leaves no room for an answer: `error` stops, `drop` leaves the
    prompt out (see `max_left_out`), `truncate` removes the start of the prompt."""

    max_left_out: ShareBelow1 = MAX_LEFT_OUT
    """Maximum fraction of the rows of a data set that may be left out because they cannot be used
    or are too long; above it, the command stops. With 0, no row may be left out."""

    allow_data_urls: bool = False
    """Whether `eval_prompts` and `human_labels` may be addresses that begin with https:// or
    http://."""

    response_length: Count = 53
    """Maximum number of tokens of an answer."""

    stop_token_id: int | None = None
    """Id of the token that ends an answer; if None, the tokenizer's end-of-sequence token."""

    batch_size: Count = 64
    """Number of prompts in a generation batch; it is reduced if memory runs out."""

    precision: Precision = "auto"
    """Precision of the model, and of a chat model that judges: `fp32`, `bf16`, or `auto`, which is
    bf16 on a GPU that computes in bf16, else fp32."""

    seed: Seed = 1
    """Seed of the sampled answers and of the order in which pairs are judged."""

    alpha: ErrorRate = 0.001
    """The judge is asked until the pairs show that the model wins more than half of them, with at
    most this probability of error, or until all pairs are judged. With a smaller value, more pairs
    are judged, and the interval is narrower."""

    end_of_text: bool = True
    """Whether a reward model used as judge reads an end-of-sequence token after each answer."""

    output_dir: str = "outputs"
    """Folder for the judgements, and for a cache of the judge's replies. A cached reply is not paid
    for again."""

    summary_json: str = ""
    """JSON file for all results and settings; if empty, no file is written."""

    def __post_init__(self) -> None:
        """Raise if a value is out of range."""
        check_fields(self)
