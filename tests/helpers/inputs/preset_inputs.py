"""Stand-ins for the models and data of the presets: tiny, random, and of the same kind.

A model has the architecture and the type of tokenizer of the one on the hub, and a row of data the
columns of the data set on the hub.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPTNeoXConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from pipeline.settings.make_settings import read_preset
from tests.helpers.inputs.pipeline_inputs import JUDGE, write_rows
from tests.helpers.models.chat_models import (
    make_instruct_config,
    make_instruct_tokenizer,
    make_tiny_config,
)

Row = dict[str, Any]


def write_tiny_model(hub_id: str, folder: Path) -> str:
    """Write a tiny model with random weights and the architecture of the one on the hub."""
    make_config, make_tokenizer, scores = MODELS[hub_id]
    tokenizer = make_tokenizer()
    config = make_config(tokenizer)
    torch.manual_seed(len(hub_id))
    kind: Any = AutoModelForCausalLM
    if scores:
        config.num_labels = 1
        kind = AutoModelForSequenceClassification
    path = folder / hub_id.rpartition("/")[2]
    kind.from_config(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def tiny_preset(
    name: str, folder: Path, write_model: Callable[[str, Path], str] = write_tiny_model
) -> dict[str, Any]:
    """The table of a preset with stand-ins for everything on the hub, and with small sizes.

    `write_model(hub_id, folder)` writes the stand-in of a model and returns its path.
    """
    table = read_preset(name)
    for setting in ("policy", "reward_model"):
        if hub_id := table.get(setting):
            table[setting] = write_model(hub_id.partition("@")[0], folder)
    for setting in ("preferences", "preferences_test", "prompts", "eval_prompts"):
        if hub_id := table.get(setting):
            make_row = ROWS[hub_id.partition(":")[0].partition("@")[0]]
            first = 100 * len(setting)  # other rows for each use
            rows = [make_row(number) for number in range(first, first + 16)]
            table[setting] = write_rows(folder / f"{setting}.jsonl", rows)
    (folder / "judge.py").write_text(JUDGE)
    return table | {
        "judge": f"python:{folder / 'judge.py'}:judge",
        "output_dir": str(folder / "outputs"),
        "processes": 1,
        "reward_model_training": table.get("reward_model_training", {})
        | {"batch_size": 4, "gradient_accumulation_steps": 1, "max_length": 256},
        "ppo": table["ppo"] | _SIZES | {"num_mini_batches": min(2, _minibatches(table))},
        "reward_gate": {"num_prompts": 4, "samples_per_prompt": 5},
        "evaluation": table["evaluation"] | {"num_examples": 8},
    }


_SIZES = {
    "total_episodes": 8,
    "batch_size": 4,
    "response_length": 8,
    "per_device_train_batch_size": 2,
    "local_rollout_forward_batch_size": 4,
}


def _minibatches(table: Mapping[str, Any]) -> int:
    return int(table["ppo"].get("num_mini_batches", 1))


# --- Models ------------------------------------------------------------------------


def _qwen_2() -> PreTrainedTokenizerFast:
    return make_instruct_tokenizer("qwen-2")


def _qwen_3() -> PreTrainedTokenizerFast:
    """Qwen 2's tokenizer with more special tokens, so that it has another vocabulary."""
    tokenizer = make_instruct_tokenizer("chatml")
    tokenizer.add_tokens(["<think>", "</think>"], special_tokens=True)
    return tokenizer


def _llama_3() -> PreTrainedTokenizerFast:
    return make_instruct_tokenizer("llama-3")


def _neox() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without a chat template, as Pythia's."""
    tokenizer = make_instruct_tokenizer("chatml")
    tokenizer.chat_template = None
    return tokenizer


def _qwen_2_config(tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    return make_instruct_config("qwen-2", tokenizer)


def _llama_3_config(tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    return make_instruct_config("llama-3", tokenizer)


_QWEN_3 = partial(make_tiny_config, Qwen3Config, num_key_value_heads=2, head_dim=8)

MODELS: dict[str, tuple[Callable[..., Any], Callable[[], PreTrainedTokenizerFast], bool]] = {
    "Qwen/Qwen2.5-0.5B-Instruct": (_qwen_2_config, _qwen_2, False),
    "Qwen/Qwen2.5-7B-Instruct": (_qwen_2_config, _qwen_2, False),
    "meta-llama/Llama-3.1-8B-Instruct": (_llama_3_config, _llama_3, False),
    "Skywork/Skywork-Reward-V2-Qwen3-0.6B": (_QWEN_3, _qwen_3, True),
    "Skywork/Skywork-Reward-V2-Llama-3.1-8B": (_llama_3_config, _llama_3, True),
    "trl-lib/pythia-1b-deduped-tldr-sft": (partial(make_tiny_config, GPTNeoXConfig), _neox, False),
    "trl-lib/pythia-1b-deduped-tldr-rm": (partial(make_tiny_config, GPTNeoXConfig), _neox, True),
}
"""Configuration, tokenizer, and whether the model scores, by hub id."""


LLAMA_LIKE = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")

PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-0.5B-Instruct": {
        **dict(zip(LLAMA_LIKE, (151_936, 896, 4_864, 24), strict=True)),
        **{"num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True},
    },
    "Qwen/Qwen2.5-7B-Instruct": {
        **dict(zip(LLAMA_LIKE, (152_064, 3_584, 18_944, 28), strict=True)),
        **{"num_attention_heads": 28, "num_key_value_heads": 4},
    },
    "meta-llama/Llama-3.1-8B-Instruct": {
        **dict(zip(LLAMA_LIKE, (128_256, 4_096, 14_336, 32), strict=True)),
        **{"num_attention_heads": 32, "num_key_value_heads": 8},
    },
    "Skywork/Skywork-Reward-V2-Qwen3-0.6B": {
        **dict(zip(LLAMA_LIKE, (151_936, 1_024, 3_072, 28), strict=True)),
        **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
        "tie_word_embeddings": True,
    },
    "trl-lib/pythia-1b-deduped-tldr-sft": {
        **dict(zip(LLAMA_LIKE, (50_304, 2_048, 8_192, 16), strict=True)),
        "num_attention_heads": 8,
    },
}
"""Sizes in the config.json of the hub."""

PUBLISHED["Skywork/Skywork-Reward-V2-Llama-3.1-8B"] = PUBLISHED["meta-llama/Llama-3.1-8B-Instruct"]
PUBLISHED["trl-lib/pythia-1b-deduped-tldr-rm"] = PUBLISHED["trl-lib/pythia-1b-deduped-tldr-sft"]


def write_published_config(hub_id: str, folder: Path) -> str:
    """A folder with the configuration of a model on the hub, a small tokenizer, and no weights."""
    make_config, make_tokenizer, _ = MODELS[hub_id]
    tokenizer = make_tokenizer()
    path = folder / hub_id.rpartition("/")[2]
    kind = type(make_config(tokenizer))
    kind(**PUBLISHED[hub_id]).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def write_published_model(hub_id: str, folder: Path) -> str:
    """Write random weights of the published size in bfloat16, made on the GPU."""
    path = write_published_config(hub_id, folder)
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    scores = MODELS[hub_id][2]
    kind: Any = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    config.num_labels = 1 if scores else 2
    with torch.device("cuda"):
        model = kind.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path)
    del model
    torch.cuda.empty_cache()
    return path


# --- Data --------------------------------------------------------------------------


def _ultrafeedback(number: int) -> Row:
    asked = {"role": "user", "content": f"What is {number} + 1?"}
    right = {"role": "assistant", "content": f"It is {number + 1}."}
    wrong = {"role": "assistant", "content": f"I do not know, maybe {number}."}
    return {
        "prompt": asked["content"],
        "prompt_id": f"{number:064x}",
        "chosen": [asked, right],
        "rejected": [asked, wrong],
        "messages": [asked, right],
        "score_chosen": 8.0,
        "score_rejected": 3.5,
    }


def _hh(number: int) -> Row:
    dialogue = f"\n\nHuman: Hi!\n\nAssistant: Hello.\n\nHuman: What is {number} + 1?\n\nAssistant:"
    return {"chosen": f"{dialogue} {number + 1}.", "rejected": f"{dialogue} No idea."}


def _post(number: int) -> str:
    return f"SUBREDDIT: r/pets\n\nTITLE: Cat {number}\n\nPOST: My cat ran away.\n\nTL;DR:"


def _tldr(number: int) -> Row:
    return {"prompt": _post(number), "completion": f" Cat {number} ran away."}


def _tldr_preference(number: int) -> Row:
    return {"prompt": _post(number), "chosen": f" Cat {number} left.", "rejected": " A cat."}


ROWS: dict[str, Callable[[int], Row]] = {
    "HuggingFaceH4/ultrafeedback_binarized": _ultrafeedback,
    "Anthropic/hh-rlhf": _hh,
    "trl-lib/tldr": _tldr,
    "trl-lib/tldr-preference": _tldr_preference,
}
"""Function that makes a row by its number, by hub id."""
