"""Flags of `python -m ppo_core` for data, models and adapters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ppo_core.config.field_checks import changed, check_fields
from ppo_core.config.row_settings import (
    MAX_LEFT_OUT,
    Overlong,
    PromptFormat,
)
from ppo_core.errors import ConfigError
from ppo_core.io.validation import Count, Natural, ShareBelow1

ALL_LINEAR = "all-linear"
"""Value of `lora_target_modules`: adapters for every linear layer except the output head."""


def check_target_modules(setting: str, names: Sequence[str]) -> None:
    """Raise if the names of modules with adapters contain ALL_LINEAR beside other names.

    Raises:
        ConfigError: `setting` has ALL_LINEAR and another name.
    """
    if ALL_LINEAR in names and len(names) > 1:
        raise ConfigError(
            f"{setting}={names!r}: {ALL_LINEAR!r} must be the only entry; with others it would be "
            "read as a module name. Remove this entry or all others."
        )


@dataclass(frozen=True, kw_only=True)
class DatasetArguments:
    """Data sets of prompts."""

    dataset_name: str | None = None
    """Data set of prompts: a .jsonl, .json, .csv, .tsv or .parquet file (.gz and .pq too), a
    folder, or a hub id with an optional revision, as in `org/name@revision`; required."""

    dataset_config: str | None = None
    """Configuration name, if a hub data set or a folder's README.md has several configurations."""

    dataset_train_split: str = "train"
    """Split to train on."""

    dataset_test_split: str = "test"
    """Split to evaluate on; used only with eval_strategy=steps."""


@dataclass(frozen=True, kw_only=True)
class ScriptArguments(DatasetArguments):
    """Data sets, scaling of rewards, and the checkpoint to resume from."""

    allow_data_urls: bool = False
    """Allow dataset_name to be the address of a data file, such as https://..."""

    columns: list[str] | None = None
    """FIELD=COLUMN for columns with other names: `prompt=post` reads the prompt from the column
    `post`."""

    prompt_format: PromptFormat = "auto"
    """How the policy reads prompts: `chat` renders them with the tokenizer's chat template, `text`
    takes them as text, and `auto` is `chat` if the tokenizer has a template."""

    overlong: Overlong = "drop"
    """What happens to a prompt that leaves no room for a response: `error` stops, `drop` leaves the
    row out (see `max_left_out`), and `truncate` removes the start of the prompt."""

    max_left_out: ShareBelow1 = MAX_LEFT_OUT
    """Maximum fraction of the rows of a data set that may be left out, because they cannot be used
    or are too long. If more rows are left out, the command stops. 0 allows none."""

    watched_prompts: Natural = 0
    """Number of training prompts, equally spaced in the data set, whose greedy answers are saved in
    `output_dir/completions`: before the first update and num_sample_generations times after it. 0:
    save the answers to the evaluation prompts instead."""

    rewards: list[str] | None = None
    """Rewards whose sum, weighted by reward_weights, trains the policy: `reward-model` (the model
    of reward_model_path), `reward-model:PATH` or `python:FILE_OR_MODULE:FUNCTION`, each with or
    without `NAME=` before it. None: the reward model alone. Only the flow supports language models
    as rewards."""

    reward_bias: float = 0.0
    """Constant in score = (output - reward_bias) * reward_gain, where output is the output of the
    reward model. It may be the mean output for reference answers, for example."""

    reward_gain: float = 1.0
    """Factor in score = (output - reward_bias) * reward_gain."""

    reward_end_of_text: bool = True
    """End every scored text with the reward model's end-of-sequence token. Set False if the reward
    model was trained on texts without this token."""

    policy_dir: str | None = None
    """Folder for the final policy; None: `output_dir`, the only folder that push_to_hub uploads."""

    critic_path: str | None = None
    """Folder of the critic to start from, which an earlier training wrote into its `critic_dir`.
    None: the critic starts from the reward model, or from the policy."""

    critic_dir: str | None = None
    """Folder for the final critic; None: the critic is not saved."""

    resume_from_checkpoint: str | None = None
    """Folder of the checkpoint to resume from; `latest` takes the newest checkpoint in output_dir,
    or starts a new run if there is no checkpoint."""

    resume_anyway: bool = False
    """Only warn, instead of failing, if the checkpoint was written with different settings or
    models."""

    stop_after_updates: Count | None = None
    """Pause after this number of updates, counted from the start of the run: write a checkpoint and
    the policy, and end. The learning rate follows the full run. None: run all updates."""

    def __post_init__(self) -> None:
        """Check the values before anything is loaded."""
        check_fields(self)
        if self.reward_gain == 0:
            raise ConfigError(
                "reward_gain=0 makes every score 0, so only the KL term would train the policy. "
                "Give another number, or remove reward_gain."
            )


@dataclass(frozen=True, kw_only=True)
class LoraArguments:
    """LoRA settings of both PPO and supervised training.

    Raises:
        ConfigError: a LoRA setting is given without `use_peft`.
    """

    use_peft: bool = False
    """Train LoRA adapters (arXiv:2106.09685) on a frozen model. In PPO the frozen model is the
    reference; after supervised training the adapters are merged into the saved model."""

    lora_r: int = 16
    """Rank of the adapters."""

    lora_alpha: int = 32
    """Numerator of the scale of the adapters, lora_alpha / lora_r."""

    lora_target_modules: list[str] | None = None
    """Names of the modules with adapters, or `all-linear`; None: PEFT's default for the model."""

    def __post_init__(self) -> None:
        """Check the values before anything is loaded."""
        names = ("lora_", "use_rslora", "use_dora")
        lora = [name for name in changed(self) if name.startswith(names)]
        if lora and not self.use_peft:
            raise ConfigError(
                f"{lora[0]} takes effect only with --use_peft. Add --use_peft, or remove "
                f"--{lora[0]}."
            )
        check_target_modules("lora_target_modules", self.lora_target_modules or ())


@dataclass(frozen=True, kw_only=True)
class ModelArguments(LoraArguments):
    """The policy, its precision and its adapters.

    Raises:
        ConfigError: a setting would have no effect, or the trained weights would not be in
            float32.
    """

    model_name_or_path: str | None = None
    """Folder or hub id of the tokenizer, and also of the policy if sft_model_path is not given; a
    hub id may name a revision, as in `org/name@revision`."""

    model_revision: str | None = None
    """Branch, tag or commit of the policy's hub repository; None: the revision at the end of the
    policy's name, as in `org/name@revision`, or else main."""

    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    """Precision of the policy's weights. Values other than float32 need use_peft, which freezes
    the base model. float16 would need loss scaling, which is not implemented."""

    attn_implementation: str | None = None
    """Attention implementation of the policy, such as sdpa, eager or flash_attention_2; None:
    transformers' default for the model."""

    lora_target_parameters: list[str] | None = None
    """Names of further parameters to adapt that are not the weight of a module, such as the weights
    of MoE experts."""

    lora_modules_to_save: list[str] | None = None
    """Modules that are trained in full and saved with the adapters."""

    use_rslora: bool = False
    """Scale adapters by lora_alpha / sqrt(lora_r) (arXiv:2312.03732)."""

    use_dora: bool = False
    """Adapt magnitude and direction of the weights separately (DoRA, arXiv:2402.09353)."""

    load_in_8bit: bool = False
    """Load the frozen base model in 8 bits; requires bitsandbytes."""

    load_in_4bit: bool = False
    """Load the frozen base model in 4 bits; requires bitsandbytes."""

    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "nf4"
    """Number format of 4-bit weights (nf4: arXiv:2305.14314)."""

    use_bnb_nested_quant: bool = False
    """Quantize the quantization constants of 4-bit weights as well (arXiv:2305.14314)."""

    def __post_init__(self) -> None:
        """Check the values before anything is loaded."""
        super().__post_init__()
        given = changed(self)
        four_bit = [name for name in given if "bnb" in name]
        if four_bit and not self.load_in_4bit:
            raise ConfigError(
                f"{four_bit[0]} takes effect only with --load_in_4bit. Add --load_in_4bit, or "
                f"remove --{four_bit[0]}."
            )
        frozen = [name for name in given if name in ("dtype", "load_in_8bit", "load_in_4bit")]
        if frozen and not self.use_peft:
            raise ConfigError(
                f"{frozen[0]}={getattr(self, frozen[0])!r} would reduce the precision of the "
                "trained weights, and small updates would be lost by rounding. Add --use_peft to "
                f"train adapters on a frozen base model, or replace --{frozen[0]} by --bf16."
            )
