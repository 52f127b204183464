"""A tiny random model of each family that is tested with a value head."""

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BloomConfig,
    CohereConfig,
    Gemma2Config,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    T5Config,
)

from tests.helpers.models.tiny import EOS, PAD, VOCABULARY

LAYERS = 3

_TOKENS = {
    "vocab_size": VOCABULARY,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
_LLAMA_LIKE = {
    **_TOKENS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_BART_LIKE = {
    **_TOKENS,
    "d_model": 32,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "decoder_start_token_id": EOS,
    "forced_eos_token_id": None,
}
_T5_LIKE = {
    **_TOKENS,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": LAYERS,
    "num_heads": 4,
    "decoder_start_token_id": PAD,
}

DECODERS: dict[str, PreTrainedConfig] = {
    "bloom": BloomConfig(hidden_size=32, n_layer=LAYERS, n_head=4, **_TOKENS),
    "cohere": CohereConfig(num_key_value_heads=2, **_LLAMA_LIKE),
    "gemma": GemmaConfig(num_key_value_heads=2, head_dim=8, **_LLAMA_LIKE),
    "gemma2": Gemma2Config(num_key_value_heads=2, head_dim=8, **_LLAMA_LIKE),
    "gpt2": GPT2Config(n_embd=32, n_layer=LAYERS, n_head=4, n_positions=64, **_TOKENS),
    "gpt_neox": GPTNeoXConfig(**_LLAMA_LIKE),
    "llama": LlamaConfig(num_key_value_heads=2, **_LLAMA_LIKE),
    "mistral": MistralConfig(num_key_value_heads=2, **_LLAMA_LIKE),
    "opt": OPTConfig(
        hidden_size=32,
        word_embed_proj_dim=16,
        ffn_dim=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=64,
        do_layer_norm_before=False,
        **_TOKENS,
    ),
    "phi3": Phi3Config(num_key_value_heads=2, **_LLAMA_LIKE),
    "qwen2": Qwen2Config(num_key_value_heads=2, **_LLAMA_LIKE),
}
ENCODER_DECODERS: dict[str, PreTrainedConfig] = {
    "t5": T5Config(**_T5_LIKE),
    "bart": BartConfig(**_BART_LIKE),
}
FAMILIES = {**DECODERS, **ENCODER_DECODERS}


def make_model(family: str, *, seed: int = 0) -> PreTrainedModel:
    """Return a random model in evaluation mode, with noise on all weights."""
    torch.manual_seed(seed)
    auto_class = AutoModelForSeq2SeqLM if family in ENCODER_DECODERS else AutoModelForCausalLM
    model = auto_class.from_config(type(FAMILIES[family])(**FAMILIES[family].to_dict()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def make_inputs(family: str) -> dict[str, torch.Tensor]:
    """Return two sequences of five tokens, one left-padded by one; four tokens for a decoder."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCABULARY, (2, 5), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if family in ENCODER_DECODERS:
        inputs["decoder_input_ids"] = torch.randint(3, VOCABULARY, (2, 4), generator=generator)
    return inputs
