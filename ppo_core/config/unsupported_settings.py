"""Settings of TRL and transformers that are not supported, and their replacements."""

import logging
from collections.abc import Collection, Mapping
from typing import Any

from ppo_core.config.spelling import nearest_name
from ppo_core.errors import ConfigError

logger = logging.getLogger(__name__)

Unsupported = Mapping[str, tuple[tuple[object, ...], str]]
"""Name of a setting -> (values that are accepted and ignored, advice for all other values)."""

_SIZES = (
    "it follows from batch_size, or per_device_train_batch_size x gradient_accumulation_steps x "
    "processes, and from num_mini_batches: set those"
)
_LAUNCHER = "the launcher sets it: accelerate launch --config_file FILE -m ppo_core, or torchrun"
_SHARDING = "set sharding='fsdp2' or 'zero3', or start with accelerate launch --config_file FILE"
_NO_LOADER = "prompts are token ids in memory, and there is no data loader: leave the setting out"
_NO_COMPILE = "models are not compiled: leave the setting out"
_NO_LOSS = "an evaluation answers prompts and scores them, it has no labels and no loss"
_NO_BEST = "compare the evaluations and load the checkpoint that you want"
_OPTIMIZER = "pass your own: PPOTrainer(..., optimizers=(optimizer, scheduler))"
_BFLOAT16 = "set bf16=True: fp16 would need loss scaling, which is not implemented"
_TRACKIO = "metrics are sent by the transformers integrations in report_to: leave the setting out"
_FREED = "memory is freed when a phase ends: leave the setting out"
_READ = "it is read from the model: leave the setting out"
_TRACKED = "it only labels the run: set run_name"
_VLLM = "set it with a flag of vllm serve, and set vllm_server_base_url"
_CHECKPOINTING = "set gradient_checkpointing=True, which is non-reentrant"

INSTEAD: Unsupported = {
    # transformers.TrainingArguments: length, optimizer, precision
    "lr_scheduler_kwargs": ((None, {}), _OPTIMIZER),
    "optim": (("adamw_torch", "adamw_torch_fused"), _OPTIMIZER),
    "optim_args": ((None,), _OPTIMIZER),
    "optim_target_modules": ((None,), _OPTIMIZER),
    "average_tokens_across_devices": ((True,), "means are always over the tokens of all processes"),
    "label_smoothing_factor": ((0.0,), "PPO has no labels to smooth"),
    "fp16": ((False,), _BFLOAT16),
    "bf16_full_eval": ((False,), "set bf16=True, for training and evaluation alike"),
    "fp16_full_eval": ((False,), _BFLOAT16),
    "tf32": ((None,), "call torch.set_float32_matmul_precision('high') before training"),
    # memory and speed
    "activation_checkpointing": ((None, False), _CHECKPOINTING),
    "activation_checkpointing_kwargs": ((None, {"use_reentrant": False}), _CHECKPOINTING),
    "gradient_checkpointing_kwargs": ((None, {"use_reentrant": False}), _CHECKPOINTING),
    "torch_compile": ((False,), _NO_COMPILE),
    "torch_compile_backend": ((None,), _NO_COMPILE),
    "torch_compile_mode": ((None,), _NO_COMPILE),
    "use_liger_kernel": ((False,), "log-probabilities are computed in chunks already"),
    "liger_kernel_config": ((None,), "log-probabilities are computed in chunks already"),
    "use_cache": ((False,), "sampling always uses a cache, training never does"),
    "neftune_noise_alpha": (
        (None,),
        "with noise, the trained policy would differ from the policy that sampled",
    ),
    "torch_empty_cache_steps": (
        (None,),
        "lower per_device_train_batch_size or local_rollout_forward_batch_size",
    ),
    "auto_find_batch_size": (
        (False,),
        "set batch_size, and lower per_device_train_batch_size until the memory suffices: this "
        "changes no result",
    ),
    # logs
    "logging_strategy": (("steps",), "set logging_steps, in updates"),
    "logging_first_step": ((False,), "set logging_steps=1"),
    "log_on_each_node": ((False,), "the main process alone logs"),
    "logging_nan_inf_filter": ((False,), "metrics are logged as they are"),
    "include_num_input_tokens_seen": (("no", False), "the metrics count episodes"),
    "log_level": (("passive",), "call transformers.logging.set_verbosity"),
    "log_level_replica": (("warning",), "call transformers.logging.set_verbosity"),
    "project": (("huggingface",), _TRACKIO),
    "trackio_space_id": ((None,), _TRACKIO),
    "trackio_bucket_id": ((None,), _TRACKIO),
    "trackio_static_space_id": ((None,), _TRACKIO),
    "debug": (("", []), "optimizer steps with a non-finite loss or gradient are always skipped"),
    "skip_memory_metrics": ((True,), "profile with torch.profiler"),
    # evaluation
    "eval_delay": ((0,), "set eval_steps"),
    "eval_on_start": ((False,), "call trainer.generate_completions() before trainer.train()"),
    "prediction_loss_only": ((False,), _NO_LOSS),
    "eval_do_concat_batches": ((True,), _NO_LOSS),
    "eval_use_gather_object": ((False,), _NO_LOSS),
    "eval_accumulation_steps": ((None,), _NO_LOSS),
    "include_for_metrics": (([],), _NO_LOSS),
    "batch_eval_metrics": ((False,), _NO_LOSS),
    "label_names": ((None,), _NO_LOSS),
    "load_best_model_at_end": ((False,), _NO_BEST),
    "metric_for_best_model": ((None,), _NO_BEST),
    "greater_is_better": ((None,), _NO_BEST),
    # files and the hub
    "save_only_model": (
        (False,),
        "a checkpoint holds all that resuming needs; trainer.save_model() writes the policy alone",
    ),
    "save_on_each_node": ((False,), "put output_dir on storage that all nodes share"),
    "enable_jit_checkpoint": ((False,), "set save_steps, and resume from the last checkpoint"),
    "hub_strategy": (("end",), "call trainer.push_to_hub() when you want an upload"),
    "hub_always_push": ((False,), "call trainer.push_to_hub() when you want an upload"),
    "hub_revision": ((None,), "call trainer.push_to_hub(), which uploads to the main branch"),
    "resume_from_checkpoint": ((None,), "call trainer.train(resume_from_checkpoint=...)"),
    "ignore_data_skip": ((False,), "a resumed run always continues with the next prompts"),
    "restore_callback_states_from_checkpoint": ((True,), "a resumed run always restores them"),
    # data
    "remove_unused_columns": ((True, False), "only the prompt is read"),
    "train_sampling_strategy": (("random",), "every pass over the prompts has a new seeded order"),
    "length_column_name": (("length",), "batches are sorted by length where that saves time"),
    "dataloader_drop_last": ((False,), "no prompt is dropped: a batch may span two passes"),
    "dataloader_num_workers": ((0,), "set dataset_num_proc: " + _NO_LOADER),
    "dataloader_pin_memory": ((False,), _NO_LOADER),
    "dataloader_persistent_workers": ((False,), _NO_LOADER),
    "dataloader_prefetch_factor": ((None,), _NO_LOADER),
    "dataloader_multiprocessing_context": ((None,), _NO_LOADER),
    "dataloader_in_order": ((True,), _NO_LOADER),
    "data_seed": ((None,), "set seed, which seeds the order of the prompts as well"),
    "full_determinism": ((False,), "call transformers.enable_full_determinism(seed) yourself"),
    # processes
    "accelerator_config": ((None,), _LAUNCHER),
    "parallelism_config": ((None,), _LAUNCHER),
    "ddp_find_unused_parameters": ((None,), _LAUNCHER),
    "ddp_bucket_cap_mb": ((None,), _LAUNCHER),
    "ddp_broadcast_buffers": ((None,), _LAUNCHER),
    "ddp_static_graph": ((None,), _LAUNCHER),
    "ddp_backend": ((None,), _LAUNCHER),
    "fsdp": ((None, "", False), _SHARDING),
    "fsdp_config": ((None,), _SHARDING),
    "local_rank": ((-1,), _LAUNCHER),
    "do_train": ((True,), "trainer.train() trains"),
    "do_eval": ((False,), "set eval_strategy='steps' and eval_steps"),
    "do_predict": ((False,), "call trainer.generate_completions()"),
    # fields that TRL's PPOConfig computes
    "world_size": ((None,), _LAUNCHER),
    "num_total_batches": ((None,), "set total_episodes; updates are total_episodes / batch_size"),
    "micro_batch_size": ((None,), _SIZES),
    "local_batch_size": ((None,), _SIZES),
    "local_mini_batch_size": ((None,), _SIZES),
    # settings of TRL's classic PPOConfig (see ppo_core.classic)
    "backward_batch_size": ((None,), _SIZES),
    "global_backward_batch_size": ((None,), _SIZES),
    "global_batch_size": ((None,), _SIZES),
    "forward_batch_size": ((None,), "set per_device_train_batch_size"),
    "steps": ((), "set total_episodes: both count responses"),
    "ppo_epochs": ((), "set num_ppo_epochs"),
    "init_kl_coef": ((), "set kl_coef"),
    "adap_kl_ctrl": ((False,), "set kl_target and kl_horizon, and kl_coef adapts"),
    "target": ((), "set kl_target"),
    "horizon": ((), "set kl_horizon"),
    "kl_penalty": ((), "set kl_estimator: kl is k1, abs is abs, mse is k2, full is full"),
    "early_stopping": ((False,), "set target_kl"),
    "log_with": ((None,), "set report_to"),
    "tracker_project_name": ((), "set the integration's own variable, such as WANDB_PROJECT"),
    "tracker_kwargs": (({},), "set the integration's own environment variables"),
    "project_kwargs": (({},), "set output_dir"),
    "accelerator_kwargs": (({},), _LAUNCHER),
    "push_to_hub_if_best_kwargs": (({},), _NO_BEST),
    "compare_steps": ((1,), _NO_BEST),
    "task_name": ((None,), _TRACKED),
    "query_dataset": ((), _TRACKED),
    "model_name": ((), _TRACKED),
    "reward_model": ((), "pass it: PPOTrainer(..., reward_model=...)"),
    "is_encoder_decoder": ((None,), _READ),
    "is_peft_model": ((None,), _READ),
    "optimize_cuda_cache": ((None, False), _FREED),
    "optimize_device_cache": ((False,), _FREED),
    # arguments of TRL's scripts
    "trust_remote_code": (
        (False,),
        "code from a model's repository is never run; use a model that is part of transformers",
    ),
    "lora_dropout": (
        (0.0,),
        "dropout is off in PPO, because the trained policy must equal the policy that sampled",
    ),
    "lora_task_type": (("CAUSAL_LM",), "the adapters are part of a causal language model"),
    "bnb_4bit_quant_storage": ((None,), "4-bit weights are stored in bytes, bitsandbytes' default"),
    "dataset_streaming": ((False,), "the prompts are read into memory"),
    "gradient_checkpointing_use_reentrant": ((None, False), _CHECKPOINTING),
    "sanity_check": ((False,), "set total_episodes to a small number"),
    "non_eos_penalty": ((), "set missing_eos_penalty, which is subtracted from the score"),
    "penalty_reward_value": ((), "set missing_eos_penalty, which is subtracted from the score"),
    "truncate_token": ((), "set stop_token"),
    "truncate_token_id": ((), "set stop_token_id"),
    "no_cuda": ((False,), "set use_cpu"),
    "ignore_bias_buffers": ((False,), "buffers are not communicated: leave the setting out"),
    # TRL's settings of a vLLM server
    "vllm_mode": (("server",), _VLLM),
    "vllm_server_host": ((), "set vllm_server_base_url"),
    "vllm_server_port": ((), "set vllm_server_base_url"),
    "vllm_group_port": ((), "weights go through the folder vllm_weights_dir"),
    "vllm_gpu_memory_utilization": ((), _VLLM),
    "vllm_tensor_parallel_size": ((), _VLLM),
    "vllm_max_model_length": ((None,), _VLLM),
    "vllm_enable_sleep_mode": ((False,), _VLLM),
    "vllm_importance_sampling_correction": (
        (True,),
        "differences caused by the server's rounding are always corrected; "
        "vllm_importance_sampling_cap bounds the correction",
    ),
    "vllm_importance_sampling_mode": (("token_truncate",), "weights are per token and truncated"),
    # names of older transformers
    "overwrite_output_dir": ((False,), "choose another output_dir, or remove the old checkpoints"),
    "logging_dir": ((None,), "set the environment variable TENSORBOARD_LOGGING_DIR"),
    "save_safetensors": ((True,), "weights are always written as safetensors"),
    "group_by_length": (
        (False,),
        "microbatches are sorted by length already, and batches stay random",
    ),
    "evaluation_strategy": (("no",), "set eval_strategy"),
    "config": ((), "write the settings into a TOML file: python -m ppo_core settings.toml"),
}
"""Name -> (values that match the fixed behavior of this trainer, advice for other values)."""

NO_EFFECT = frozenset(
    "average_tokens_across_devices dataloader_drop_last dataloader_in_order "
    "dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers "
    "dataloader_pin_memory dataloader_prefetch_factor ddp_bucket_cap_mb "
    "ddp_find_unused_parameters eval_accumulation_steps eval_do_concat_batches "
    "gradient_checkpointing_kwargs group_by_length include_num_input_tokens_seen "
    "length_column_name log_level log_level_replica log_on_each_node logging_first_step "
    "logging_nan_inf_filter save_only_model save_safetensors skip_memory_metrics torch_compile "
    "torch_compile_backend torch_compile_mode torch_empty_cache_steps train_sampling_strategy "
    "trackio_bucket_id trackio_space_id trackio_static_space_id project use_cache use_liger_kernel "
    "liger_kernel_config".split()
)
"""Names in `INSTEAD` whose values never change a result. For these names, a value that is not
accepted causes only a log line."""


def refuse_unsupported(
    given: Mapping[str, Any],
    supported: Collection[str],
    instead: Unsupported = INSTEAD,
    *,
    no_effect: Collection[str] = (),
    prefix: str = "",
) -> dict[str, Any]:
    """Return the settings of `given` whose names are in `supported`.

    A setting in `instead` is dropped if its value is accepted. A setting that is also in
    `no_effect` is dropped with any value, and a value that is not accepted is logged. `prefix`
    precedes the names in messages; it is `--` for flags.

    Raises:
        ConfigError: a setting is neither supported nor dropped.
    """
    for name, value in given.items():
        if name not in supported:
            _check_unsupported(name, value, supported, instead, no_effect, prefix)
    return {name: value for name, value in given.items() if name in supported}


def _check_unsupported(
    name: str,
    value: object,
    supported: Collection[str],
    unsupported: Unsupported,
    no_effect: Collection[str],
    prefix: str,
) -> None:
    if name not in unsupported:
        similar = nearest_name(name, supported)
        hint = f"Did you mean {prefix}{similar}?" if similar else "Remove it."
        raise ConfigError(
            f"There is no setting {prefix}{name}, so {value!r:.80} would change nothing. {hint}"
        )
    accepted, instead = unsupported[name]
    if value in accepted:
        return
    if name not in no_effect:
        raise ConfigError(f"{prefix}{name}={value!r:.80} is not supported: {instead}.")
    logger.warning("%s%s=%.80r has no effect here: %s.", prefix, name, value, instead)
