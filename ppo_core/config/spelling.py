"""Find the setting that a misspelt, shortened or foreign name stands for."""

from collections.abc import Collection
from difflib import get_close_matches

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
    "center_rewards_coefficient": ("centre_rewards_coefficient",),
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
"""Name -> names of settings that it may stand for, the likeliest first. The names are short forms,
and names that other commands and libraries use."""


def same_setting(name: str, known: Collection[str]) -> str | None:
    """Return the name in `known` that another name of the same setting stands for; else None.

    Hyphens and underscores, and capital and small letters, count as equal.
    """
    plain = _plain(name)
    return next((meant for meant in (plain, *OTHER_NAMES.get(plain, ())) if meant in known), None)


def nearest_name(name: str, known: Collection[str]) -> str | None:
    """Return the name in `known` that a wrong name most likely stands for; None if none is near."""
    near = get_close_matches(_plain(name), known, n=1)
    return same_setting(name, known) or next(iter(near), None)


def _plain(name: str) -> str:
    return name.replace("-", "_").lower()
