"""Flags of `python -m ppo_core` beside PPOConfig: data, models, adapters."""

from dataclasses import dataclass, fields
from typing import Literal

from ppo_core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ScriptArguments:
    """Data sets, how rewards are scaled, and which checkpoint to resume."""

    dataset_name: str | None = None
    """Prompts: a .jsonl, .json or .parquet file, a folder, or a hub id; required."""

    dataset_config: str | None = None
    """Configuration name of a hub data set that has several."""

    dataset_train_split: str = "train"
    """Split to train on."""

    dataset_test_split: str = "test"
    """Split to evaluate on; read only with eval_strategy=steps."""

    reward_bias: float = 0.0
    """Subtracted from the reward model's output, for example its mean over reference answers."""

    reward_gain: float = 1.0
    """Factor applied after `reward_bias`: score = (output - reward_bias) * reward_gain."""

    reward_end_of_text: bool = True
    """Whether the reward model was trained on texts that end in its end-of-sequence token; if
    so, every scored text gets one."""

    policy_dir: str | None = None
    """Folder for the final policy; None: `output_dir`."""

    resume_from_checkpoint: str | None = None
    """Folder of the checkpoint to resume, or `latest` for the newest in output_dir, if any."""

    resume_anyway: bool = False
    """Resume even if the checkpoint was written with other settings or models; differences are
    only warned about."""


@dataclass(frozen=True, kw_only=True)
class LoraArguments:
    """LoRA settings that PPO and supervised training share.

    Raises:
        ConfigError: a LoRA setting is given without `use_peft`.
    """

    use_peft: bool = False
    """Train LoRA adapters (arXiv:2106.09685) on a frozen model. In PPO the frozen model is the
    reference; after supervised training the adapters are merged into the saved model."""

    lora_r: int = 16
    """Rank of the adapters."""

    lora_alpha: int = 32
    """Adapters are scaled by lora_alpha / lora_r."""

    lora_target_modules: list[str] | None = None
    """Modules that get adapters, or `all-linear`; None takes PEFT's default for the model."""

    def __post_init__(self) -> None:
        """Check the values before anything is loaded."""
        lora = [
            name for name in self.changed() if name.startswith(("lora_", "use_rslora", "use_dora"))
        ]
        if lora and not self.use_peft:
            raise ConfigError(f"{lora[0]} takes effect only with --use_peft. Give both.")

    def changed(self) -> list[str]:
        """Return the names of the settings that differ from their defaults."""
        return [one.name for one in fields(self) if getattr(self, one.name) != one.default]


@dataclass(frozen=True, kw_only=True)
class ModelArguments(LoraArguments):
    """The policy, its precision and its adapters.

    Raises:
        ConfigError: a setting would have no effect, or the trained weights would be in half
            precision.
    """

    model_name_or_path: str | None = None
    """Folder or hub id of the tokenizer, and of the policy if sft_model_path is not given."""

    model_revision: str = "main"
    """Branch, tag or commit of the policy on the hub."""

    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    """Precision of the policy's weights; other than float32 only with use_peft, where the base is
    frozen."""

    attn_implementation: str | None = None
    """Attention implementation of the policy, such as sdpa, eager or flash_attention_2; None:
    transformers' default for the model."""

    lora_target_parameters: list[str] | None = None
    """Parameters that get adapters but are not the weight of a module, such as MoE experts."""

    lora_modules_to_save: list[str] | None = None
    """Modules that are trained in full and saved with the adapters."""

    use_rslora: bool = False
    """Scale adapters by lora_alpha / sqrt(lora_r) (arXiv:2312.03732)."""

    use_dora: bool = False
    """Adapt magnitude and direction of the weights separately (arXiv:2402.09353)."""

    load_in_8bit: bool = False
    """Load the frozen base in 8 bits; requires bitsandbytes and a GPU."""

    load_in_4bit: bool = False
    """Load the frozen base in 4 bits; requires bitsandbytes and a GPU."""

    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "nf4"
    """Number format of 4-bit weights (nf4: arXiv:2305.14314)."""

    use_bnb_nested_quant: bool = False
    """Quantize the quantization constants of 4-bit weights as well (arXiv:2305.14314)."""

    def __post_init__(self) -> None:
        """Check the values before anything is loaded."""
        super().__post_init__()
        changed = self.changed()
        four_bit = [name for name in changed if "bnb" in name]
        if four_bit and not self.load_in_4bit:
            raise ConfigError(f"{four_bit[0]} takes effect only with --load_in_4bit. Give both.")
        frozen = [name for name in changed if name in ("dtype", "load_in_8bit", "load_in_4bit")]
        if frozen and not self.use_peft:
            raise ConfigError(
                f"{frozen[0]}={getattr(self, frozen[0])!r} would be the precision of the trained "
                "weights, which would round small updates away. Add --use_peft, which trains "
                "adapters on a frozen base, or train under autocast with --bf16."
            )
