"""Map a misspelled name, a short name or another library's name to the setting that it means."""

from collections.abc import Collection
from difflib import get_close_matches

OLD_NAMES = {"centre_rewards_coefficient": "center_rewards_coefficient"}
"""Name of a setting in version 0.1 -> its current name; the old name is still accepted."""

OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "lr": ("learning_rate",),
    "epochs": ("num_train_epochs", "num_epochs"),
    "num_epochs": ("num_train_epochs",),
    "num_train_epochs": ("num_epochs",),
    "episodes": ("total_episodes",),
    "steps": ("total_episodes",),
    "bs": ("batch_size",),
    "train_batch_size": ("per_device_train_batch_size", "batch_size"),
    "per_device_train_batch_size": ("batch_size",),
    "per_device_eval_batch_size": ("batch_size",),
    "grad_accum": ("gradient_accumulation_steps",),
    "accumulation_steps": ("gradient_accumulation_steps",),
    "max_seq_length": ("max_length",),
    "max_len": ("max_length",),
    "max_new_tokens": ("response_length",),
    "max_tokens": ("response_length",),
    "warmup": ("warmup_ratio",),
    "wd": ("weight_decay",),
    "assistant_only_loss": ("completion_only_loss",),
    "kl": ("kl_coef",),
    "beta": ("kl_coef",),
    "clip_range": ("cliprange",),
    "lambda": ("lam",),
    "lora_rank": ("lora_r", "r"),
    "lora_r": ("r",),
    "lora_alpha": ("alpha",),
    "lora_target_modules": ("target_modules",),
    "model": ("model_name_or_path", "policy"),
    "model_name": ("model_name_or_path", "policy"),
    "model_path": ("model_name_or_path", "policy"),
    "model_name_or_path": ("policy", "model"),
    "sft_model_path": ("policy",),
    "reward_model_path": ("reward_model",),
    "data": ("dataset_name", "prompts"),
    "dataset": ("dataset_name", "prompts"),
    "dataset_name": ("prompts", "eval_prompts"),
    "train_file": ("dataset_name", "prompts"),
    "split": ("dataset_train_split",),
    "output": ("output_dir",),
    "out": ("output_dir",),
    "nodes": ("num_nodes",),
    "num_processes": ("processes",),
    "nproc": ("processes",),
    "torch_dtype": ("dtype",),
}
"""Other name of a setting -> settings that the name may mean, the likeliest first. Other names are
short forms, and names in other commands and libraries."""


def same_setting(name: str, known: Collection[str]) -> str | None:
    """Return the setting in `known` that a name means, see `OTHER_NAMES`; None if there is none.

    If there are several, return the first. A hyphen counts as an underscore, and case is ignored.
    """
    plain = _plain(name)
    return next((meant for meant in (plain, *OTHER_NAMES.get(plain, ())) if meant in known), None)


def nearest_name(name: str, known: Collection[str]) -> str | None:
    """Return the setting in `known` that a wrong name most likely means; None if there is none."""
    near = get_close_matches(_plain(name), known, n=1)
    return same_setting(name, known) or next(iter(near), None)


def _plain(name: str) -> str:
    return name.replace("-", "_").lower()
