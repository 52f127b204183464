"""Tiny real models and a tokenizer for tests."""

from copy import deepcopy

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

VOCABULARY = 61
PAD, EOS, UNK = 0, 1, 2

_LLAMA_LIKE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(num_key_value_heads=2, **_LLAMA_LIKE),
    "gpt2": GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    ),
    "gpt_neox": GPTNeoXConfig(**_LLAMA_LIKE),
    "qwen2": Qwen2Config(num_key_value_heads=2, **_LLAMA_LIKE),
}


def make_tokenizer(*, words: int = VOCABULARY - 3, prefix: str = "w") -> PreTrainedTokenizerFast:
    """Return a word-level tokenizer in which `w0 w1 ...` are tokens 3, 4, ..."""
    vocabulary = {"<pad>": PAD, "<eos>": EOS, "<unk>": UNK}
    vocabulary |= {f"{prefix}{i}": i + 3 for i in range(words)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def make_policy(
    family: str = "llama", *, seed: int = 0, vocabulary: int = VOCABULARY
) -> PreTrainedModel:
    """Return a random causal model with noise on all weights, so that its logits differ."""
    torch.manual_seed(seed)
    # A copy, because a model keeps its configuration, and tests change it.
    config = deepcopy(CONFIGS[family])
    config.vocab_size = vocabulary
    return _spread(AutoModelForCausalLM.from_config(config))


def make_classifier(family: str = "llama", *, seed: int = 1, labels: int = 1) -> PreTrainedModel:
    """Return a random sequence classifier."""
    torch.manual_seed(seed)
    config = type(CONFIGS[family])(**{**CONFIGS[family].to_dict(), "num_labels": labels})
    return _spread(AutoModelForSequenceClassification.from_config(config))


def _spread(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def make_prompts(lengths: list[int], *, seed: int = 0) -> list[list[int]]:
    """Return random prompts of the given lengths, without the end-of-sequence token."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
