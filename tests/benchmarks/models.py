"""Random models and prompts, saved once and loaded by both sides."""

import json
import math
from pathlib import Path

import torch
from scipy.optimize import brentq
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from tests.benchmarks.cases import Shape, Workload

PAD, EOS, UNKNOWN = 0, 1, 2
FIRST_WORD = 3
SEED = 1
TEMPERATURE = 0.7
CONSTANT = 0.5
"""First component of every hidden state before the last norm."""

NEVER = -30.0
"""Logit of a token that must not be drawn, where other logits are about 0."""


def save_models(workload: Workload, folder: Path) -> None:
    """Save policy, critic, reward model, tokenizer and prompts; the reference is the policy."""
    torch.manual_seed(SEED)
    logging.disable_progress_bar()
    config = model_config(workload.shape)
    policy = AutoModelForCausalLM.from_config(config)
    rows = random_rows(workload.shape, 16)
    stops = workload.mean_length is not None
    stop = stop_probability(workload.mean_length, workload.response_length) if stops else None
    set_stop_probability(policy, rows, stop)
    policy.save_pretrained(folder / "policy")
    for part in ("critic", "reward"):
        AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / part)
    make_tokenizer(workload.shape.vocabulary).save_pretrained(folder / "tokenizer")
    (folder / "prompts.json").write_text(json.dumps(make_prompts(workload)))


def model_config(shape: Shape) -> PreTrainedConfig:
    """Return transformers' config of a model; a classifier has one label."""
    common = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "num_labels": 1,
    }
    return LlamaConfig(**common) if shape.family == "llama" else GPTNeoXConfig(**common)


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of words `w3 w4 ...` that pads on the left, as TRL needs for prompts."""
    words = {"<pad>": PAD, "<eos>": EOS, "<unk>": UNKNOWN}
    words |= {f"w{number}": number for number in range(FIRST_WORD, vocabulary)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    )


def make_prompts(workload: Workload) -> list[list[int]]:
    """Return the prompts of an update; every update has these prompts."""
    generator = torch.Generator().manual_seed(SEED)
    lengths = workload.prompt_lengths
    if lengths is None:
        lengths = torch.randint(32, 97, (workload.batch,), generator=generator).tolist()
    size = (FIRST_WORD, workload.shape.vocabulary)
    return [torch.randint(*size, (length,), generator=generator).tolist() for length in lengths]


def random_rows(shape: Shape, count: int) -> Tensor:
    """Return random token ids (count, 64)."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(FIRST_WORD, shape.vocabulary, (count, 64), generator=generator)


def stop_probability(mean_length: float, most: int) -> float:
    """Return the probability q of stopping at each token for a mean response length.

    The length is min(geometric(q), most), whose mean is (1 - (1 - q)^most) / q.
    """

    def excess(stop: float) -> float:
        return (1 - (1 - stop) ** most) / stop - mean_length

    return float(brentq(excess, 1e-6, 1 - 1e-6))


@torch.no_grad()
def set_stop_probability(policy: PreTrainedModel, rows: Tensor, stop: float | None) -> None:
    """Give the stop token about the probability `stop` at every position; None: never drawn.

    The first component of every hidden state becomes a constant that no layer writes to, so the
    head's weight there is a bias for each token. That holds with tied embeddings too, because
    neither the stop nor the pad token is read. The pad token is never drawn: TRL ends a response
    at it.
    """
    embeddings = policy.get_input_embeddings().weight
    head = policy.get_output_embeddings().weight
    head[:, 0] = 0
    embeddings[:, 0] = CONSTANT
    for name, layer in policy.named_modules():
        if name.endswith(("attention.dense", "dense_4h_to_h", "o_proj", "down_proj")):
            layer.weight[0] = 0
            if layer.bias is not None:
                layer.bias[0] = 0
    states = policy.base_model(rows).last_hidden_state.flatten(0, 1)
    first = states[:, 0].mean()
    others = head[FIRST_WORD:]
    normaliser = (states @ others.T / TEMPERATURE).logsumexp(dim=1).mean()
    wanted = torch.full((2,), NEVER)
    if stop is not None:
        wanted[1] = TEMPERATURE * (math.log(stop / (1 - stop)) + normaliser)
    head[[PAD, EOS]] = 0
    head[[PAD, EOS], 0] = wanted / first


def linear_parameters(shape: Shape) -> tuple[int, int]:
    """Return numbers of weights in the backbone's linear layers and in the head."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(shape))
    backbone = sum(
        layer.weight.numel() for layer in model.base_model.modules() if isinstance(layer, nn.Linear)
    )
    return backbone, model.get_output_embeddings().weight.numel()


def all_parameters(shape: Shape) -> tuple[int, int]:
    """Return the numbers of weights of the policy, and of a classifier."""
    with torch.device("meta"):
        config = model_config(shape)
        policy = AutoModelForCausalLM.from_config(config)
        critic = AutoModelForSequenceClassification.from_config(config)
    return policy.num_parameters(), critic.num_parameters()
