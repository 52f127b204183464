"""Flags of TRL's scripts that this project accepts under TRL's names, or refuses with advice.

The names that PPO refuses are in `unsupported_settings`, because scripts may also pass them to the
Python class `PPOConfig`.
"""

from ppo_core.config.spelling import OLD_NAMES
from ppo_core.config.unsupported_settings import INSTEAD, Unsupported

PPO_ALIASES = {"torch_dtype": "dtype", "evaluation_strategy": "eval_strategy"}
"""Name in older versions of TRL and transformers -> flag of `python -m ppo_core`."""

SUPERVISED_ALIASES = {
    "num_train_epochs": "num_epochs",
    "per_device_train_batch_size": "batch_size",
    "max_seq_length": "max_length",
    "assistant_only_loss": "completion_only_loss",
    **OLD_NAMES,
}
"""Name in version 0.1, or in TRL's SFT and reward scripts -> flag of `ppo_core.supervised`."""

_SPLIT = "name the split in dataset_name, as in org/name:test"
_CONFIG = "name the configuration in dataset_name, as in org/name:config/train"
_ONE_DATA_SET = "write the rows into one file, and set dataset_name to the file"
_NO_EVALUATION = "nothing is evaluated during the training: evaluate the trained model"
_PROGRESS = "the loss is in metrics.jsonl in output_dir: leave the flag out"
_ONE_SAVE_SETTING = "set only save_steps, which writes checkpoints if it is above 0"
_UPLOAD = "upload the trained model: hf upload ORG/NAME OUTPUT_DIR"
_TOKENIZER = "it is read from the files of the tokenizer: set it there"
_ONE_ROW = "each row is a sequence of its own, and batches have rows of similar length"
_FP32 = "weights are trained in float32: set bf16 for bfloat16 autocast"
_OPTIMIZER = "AdamW has its usual settings here: leave the flag out"
_WARMUP = "set warmup_ratio, a fraction of the optimizer steps"
_NO_QUANTIZATION = "the base of adapters is loaded in full precision: leave the flag out"
_ADAPTERS = "adapters are plain LoRA here: leave the flag out"
_ATTENTION = "transformers chooses the attention of the model: leave the flag out"
_LOADER = "rows are mapped from disk, and batches are made in the main process: leave the flag out"
_NO_COMPILE = "models are not compiled: leave the flag out"
_TOKENIZED = "rows are tokenized in the main process: leave the flag out"
_ONE_LOSS = "SFT minimizes cross entropy, and a reward model the pairwise loss: leave the flag out"
_SHARDING = "set sharding to zero1, zero2, zero3 or fsdp2"

SUPERVISED_INSTEAD: Unsupported = {
    # data
    "dataset_train_split": (("train",), _SPLIT),
    "dataset_test_split": (("test",), _NO_EVALUATION),
    "dataset_config": ((None,), _CONFIG),
    "dataset_streaming": ((False,), "the rows are read once and kept on disk: leave the flag out"),
    "dataset_text_field": (("text",), "rename the column to text"),
    "dataset_num_proc": ((None, 1), _TOKENIZED),
    "dataset_batch_size": ((None,), _TOKENIZED),
    "dataset_kwargs": ((None,), _TOKENIZED),
    "datasets": ((), _ONE_DATA_SET),
    "remove_unused_columns": ((True, False), "only the columns that are needed are read"),
    "packing": ((False,), _ONE_ROW),
    "eval_packing": ((None, False), _NO_EVALUATION),
    "packing_strategy": ((), _ONE_ROW),
    "padding_free": ((False,), _ONE_ROW),
    "pad_to_multiple_of": ((None,), _ONE_ROW),
    "group_by_length": ((True,), "batches always have rows of similar length"),
    "chat_template_path": ((None,), _TOKENIZER),
    "eos_token": ((None,), _TOKENIZER),
    "pad_token": ((None,), _TOKENIZER),
    "dataloader_num_workers": ((0,), _LOADER),
    "dataloader_pin_memory": ((False,), _LOADER),
    "dataloader_drop_last": ((False,), "no row is dropped"),
    # models
    "model_revision": (
        ("main",),
        "write the revision as model_name_or_path=org/name@revision",
    ),
    "trust_remote_code": INSTEAD["trust_remote_code"],
    "dtype": (("float32",), _FP32),
    "torch_dtype": (("float32",), _FP32),
    "attn_implementation": ((None,), _ATTENTION),
    "model_init_kwargs": ((None,), "the model is loaded as it was saved: leave the flag out"),
    "load_in_4bit": ((False,), _NO_QUANTIZATION),
    "load_in_8bit": ((False,), _NO_QUANTIZATION),
    "bnb_4bit_quant_type": (("nf4",), _NO_QUANTIZATION),
    "use_bnb_nested_quant": ((False,), _NO_QUANTIZATION),
    "lora_modules_to_save": ((None,), "the score head is always trained: leave the flag out"),
    "lora_target_parameters": ((None,), _ADAPTERS),
    "use_rslora": ((False,), _ADAPTERS),
    "use_dora": ((False,), _ADAPTERS),
    # optimizer and precision
    "max_steps": ((-1,), "set num_epochs"),
    "warmup_steps": ((), _WARMUP),
    "lr_scheduler_type": (("linear",), "the rate falls linearly to 0 after the warmup"),
    "optim": (("adamw_torch", "adamw_torch_fused"), _OPTIMIZER),
    "adam_beta1": ((0.9,), _OPTIMIZER),
    "adam_beta2": ((0.999,), _OPTIMIZER),
    "adam_epsilon": ((1e-8,), _OPTIMIZER),
    "max_grad_norm": ((1, 1.0), "gradients are always clipped to norm 1"),
    "fp16": ((False,), "set bf16: fp16 would need loss scaling, which is not implemented"),
    "tf32": ((None,), "matmuls have the precision that torch is set to: leave the flag out"),
    "gradient_checkpointing_kwargs": (
        (None, {"use_reentrant": False}),
        "set gradient_checkpointing",
    ),
    "activation_offloading": ((False,), "set gradient_checkpointing"),
    "torch_compile": ((False,), _NO_COMPILE),
    "use_liger_kernel": ((False,), "the model's own layers are used: leave the flag out"),
    "neftune_noise_alpha": ((None,), "no noise is added: leave the flag out"),
    "loss_type": (("nll",), _ONE_LOSS),
    "label_smoothing_factor": ((0, 0.0), _ONE_LOSS),
    # logs, evaluation and files
    "logging_steps": ((), _PROGRESS),
    "logging_strategy": ((), _PROGRESS),
    "logging_first_step": ((False,), _PROGRESS),
    "logging_dir": ((None,), _PROGRESS),
    "report_to": (("none",), _PROGRESS),
    "run_name": ((None,), _PROGRESS),
    "disable_tqdm": ((False,), _PROGRESS),
    "eval_strategy": (("no",), _NO_EVALUATION),
    "evaluation_strategy": (("no",), _NO_EVALUATION),
    "eval_steps": ((None,), _NO_EVALUATION),
    "per_device_eval_batch_size": ((), _NO_EVALUATION),
    "do_eval": ((False,), _NO_EVALUATION),
    "do_train": ((True,), "the command trains"),
    "load_best_model_at_end": ((False,), _NO_EVALUATION),
    "save_strategy": (("no",), _ONE_SAVE_SETTING),
    "save_safetensors": ((True,), "weights are always written as safetensors"),
    "overwrite_output_dir": ((True,), "a model in output_dir is replaced by the trained model"),
    "push_to_hub": ((False,), _UPLOAD),
    "hub_model_id": ((None,), _UPLOAD),
    "config": ((), "write the settings as flags"),
    # processes
    "deepspeed": ((None,), _SHARDING),
    "fsdp": ((None, ""), _SHARDING),
    "use_cpu": ((False,), "hide the GPU: set the environment variable CUDA_VISIBLE_DEVICES to ''"),
}
"""Flag of TRL's SFT and reward scripts -> (values that match the fixed behavior of
`python -m ppo_core.supervised`, advice for other values)."""

LORA_TASKS = {"sft": "CAUSAL_LM", "reward": "SEQ_CLS"}
"""Kind of training -> the only value of TRL's flag `lora_task_type` that is accepted."""


def supervised_instead(kind: str, *, saves: bool) -> Unsupported:
    """Return `SUPERVISED_INSTEAD`, plus the flags whose accepted value depends on the arguments.

    `kind` is the kind of training, and `saves` is whether the flag save_steps is given.
    """
    task = LORA_TASKS.get(kind)
    return {
        **SUPERVISED_INSTEAD,
        "lora_task_type": ((task,), f"the adapters of this training are always {task}"),
        "save_strategy": (("steps" if saves else "no",), _ONE_SAVE_SETTING),
        "disable_dropout": ((False,), "the dropout of the model's configuration is used"),
    }
