"""Small random models of every model type of transformers that writes text."""

from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.helpers.models.tiny import EOS, PAD, VOCABULARY

CAUSAL = dict(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
MULTIMODAL = {
    name: model
    for name, model in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items()
    if name not in CAUSAL
}


def _sizes(names: str, size: int) -> dict[str, int]:
    return dict.fromkeys(names.split(), size)


SIZES: dict[str, Any] = {
    **_sizes(
        "vocab_size decoder_vocab_size unpadded_vocab_size text_vocab_size "
        "vocab_size_per_layer_input encoder_hash_byte_group_vocab",
        VOCABULARY,
    ),
    **_sizes(
        "hidden_size d_model n_embd embedding_size word_embed_proj_dim emb_dim embedding_dim "
        "attention_hidden_size lru_width input_embedding_size output_embedding_size "
        "backbone_hidden_size embed_dim projection_dim out_hidden_size hidden_size_global "
        "adapter_in_dim adapter_out_dim adapter_input_size adapter_output_size",
        32,
    ),
    **_sizes(
        "intermediate_size ffn_dim n_inner d_ff ffn_hidden_size decoder_ffn_dim encoder_ffn_dim "
        "dim_ff dff d_inner feed_forward_size intermediate_size_mlp dense_intermediate_size",
        64,
    ),
    **_sizes(
        "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
        "expert_ffn_hidden_size shared_experts_intermediate_size "
        "moe_shared_expert_intermediate_size",
        16,
    ),
    **_sizes(
        "num_hidden_layers n_layer n_layers decoder_layers encoder_layers num_layers num_blocks "
        "num_decoder_layers num_encoder_layers depth",
        2,
    ),
    **_sizes(
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads "
        "encoder_attention_heads attention_heads num_encoder_attention_heads "
        "num_decoder_attention_heads swa_num_attention_heads linear_num_heads",
        4,
    ),
    **_sizes("num_key_value_heads num_kv_heads swa_num_key_value_heads num_query_groups", 2),
    **_sizes("head_dim swa_head_dim kv_channels dim_head d_head attention_head_size", 8),
    **_sizes(
        "qk_rope_head_dim qk_nope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim "
        "linear_head_dim index_head_dim hidden_size_per_layer_input laurel_rank rotary_dim "
        "mamba_d_state state_size ssm_state_size d_rel gated_norm_rank adapter_rank "
        "router_hidden_size query_pre_attn_scalar mamba_headdim mamba_dt_rank",
        8,
    ),
    **_sizes("kv_lora_rank q_lora_rank qk_head_dim o_lora_rank dim_model_base", 16),
    **_sizes(
        "num_experts n_routed_experts num_local_experts moe_num_experts index_n_heads "
        "linear_num_value_heads mamba_num_heads n_mamba_heads zero_expert_num",
        4,
    ),
    **_sizes(
        "num_experts_per_tok num_experts_per_token moe_topk moe_k n_groups o_groups "
        "linear_num_key_heads moe_top_k",
        2,
    ),
    **_sizes("n_group num_expert_group topk_group mamba_n_groups n_shared_experts", 1),
    **_sizes(
        "sliding_window attention_chunk_size sliding_window_size local_attention window_size "
        "attention_window_size mamba_chunk_size chunk_size",
        8,
    ),
    **_sizes("max_position_embeddings n_positions max_target_positions max_seq_len n_ctx", 128),
    **_sizes("mamba_n_heads num_mem_blocks", 8),
    "mamba_d_head": 8,
    "mamba_head_dim": 16,
    "image_size": 28,
    "patch_size": 14,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": 2,
}
"""Size of each field, where the type has the field."""

_LOCAL = ["sliding_attention", "full_attention"] * 2
_HYBRID = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
_FOUR_LAYERS = {"num_hidden_layers": 4}
_HEAD = {"head_dim": 8}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_HALF_MROPE = {**MROPE, "mrope_section": [1, 1, 0]}
_MROPE_TEXTS = "qwen2_vl_text qwen2_5_vl_text qwen2_5_omni_text glm4v_text paddleocr_vl_text"
"""Types whose positions have three parts, though their default configuration does not say so."""

SPECIAL: dict[str, dict[str, Any]] = {
    # Two types whose own forward pass and cache see different tokens behind a small window.
    "moshi": {"sliding_window": 64},
    "dots3_note_vision_encoder": {
        "per_layer_config": {},
        "adapter_in_dim": 32,
        "adapter_out_dim": 32,
    },
    "gemma4_assistant": {
        "text_config": {
            "num_hidden_layers": 2,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        }
    },
    "glm5_next_text": {"qk_rope_head_dim": 0},
    "gemma4_text": {**_FOUR_LAYERS, "num_kv_shared_layers": 2, "layer_types": _LOCAL},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "bailing_hybrid": {**_FOUR_LAYERS, "layer_group_size": 2},
    "bamba": {**_FOUR_LAYERS, "attn_layer_indices": [1, 3]},
    "chameleon": {"vocabulary_map": {"<image>": 4, "IMGIMGBA": 5}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": MROPE}},
    "deepseek_ocr2_text": {
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {"num_key_value_heads": 4},
    "ernie4_5_vl_moe_text": {
        "rope_parameters": {**MROPE, "mrope_section": [1, 1, 2]},
        "moe_intermediate_size": [16, 16],
    },
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {**_FOUR_LAYERS, "num_kv_shared_layers": 2, "layer_types": _LOCAL},
    "gemma4_unified_text": {**_FOUR_LAYERS, "num_kv_shared_layers": 2, "layer_types": _LOCAL},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite4_vision": {
        "deepstack_layer_map": [[0, 0]],
        "downsample_rate": "1/2",
        "spatial_target_layers": [1],
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 64,
            "num_attention_heads": 4,
            "image_size": 28,
            "patch_size": 14,
        },
    },
    "granitemoehybrid": {**_FOUR_LAYERS, "layer_types": _HYBRID},
    "hunyuan_v1_dense": _HEAD,
    "hunyuan_v1_moe": _HEAD,
    "hunyuan_vl_text": {**_HEAD, "rope_parameters": MROPE},
    "inkling2_vision": {"text_hidden_size": 32},
    "jamba": {**_FOUR_LAYERS, "attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {**_FOUR_LAYERS, "layer_types": _HYBRID},
    "lfm2": {**_FOUR_LAYERS, "layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {**_FOUR_LAYERS, "layer_types": ["conv", "full_attention"] * 2},
    "lfm3": _FOUR_LAYERS,
    "mamba2": {"num_heads": 8},
    "mistral4": {"head_dim": 16},
    "ministral": _HEAD,
    "molmo2_adapter": {"vision_feature_layer": [1, 0], "text_hidden_size": 32},
    "muse_spark_audio": {"num_hidden_layers": 4, "out_hidden_size": 32},
    "nemotron": {**_HEAD, "num_key_value_heads": 2},
    **{name: {"rope_parameters": _HALF_MROPE} for name in ("glm4v_moe_text", "glm_ocr_text")},
    "radio": {"video_temporal_patch_size": 2},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 151652},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 151652},
    "qwen3_5_moe_text": _FOUR_LAYERS,
    "qwen3_5_text": _FOUR_LAYERS,
    "qwen3_next": _FOUR_LAYERS,
    "qwen4_exp_text": {
        **_FOUR_LAYERS,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 32,
        "indexer_compress_ratio": 4,
    },
    "step3p5": {"sliding_window": 8},
    **{name: {"rope_parameters": MROPE} for name in _MROPE_TEXTS.split()},
    "recurrent_gemma": {"num_hidden_layers": 3, "attention_window_size": 64},
    "reformer": {
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [8, 16],
        "axial_pos_embds_dim": [16, 16],
    },
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        **_FOUR_LAYERS,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "zamba2": {
        "num_hidden_layers": 2,
        "layers_block_type": ["linear_attention", "hybrid"],
        "attention_head_dim": 16,
        "mamba_headdim": 16,
        "attention_hidden_size": 64,
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""Further fields of some types."""


INVALID_DEFAULTS = {"gemma4_assistant"}
"""Types whose configuration cannot be made without further fields."""


def small_config(name: str) -> PreTrainedConfig:
    """Return the configuration of a model type, made small."""
    config_class = CONFIG_MAPPING[name]
    return config_class(**_small_fields(config_class))


def _small_fields(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    special = SPECIAL.get(config_class.model_type, {})
    default = config_class(**(special if config_class.model_type in INVALID_DEFAULTS else {}))
    fields = default.to_dict()
    sizes = {
        name: size
        for name, size in SIZES.items()
        if isinstance(fields.get(name), int) and not isinstance(fields[name], bool)
    }
    if "kv_lora_rank" in sizes:
        sizes["num_key_value_heads"] = 4
    if "is_decoder" in fields and not default.is_encoder_decoder:
        sizes["is_decoder"] = True
    if "mrope_section" in str(fields.get("rope_parameters")):
        sizes["rope_parameters"] = MROPE
    parts = {}
    for part in default.sub_configs:
        own = getattr(default, part, None)
        if isinstance(own, PreTrainedConfig):
            parts[part] = {**_small_fields(type(own)), "model_type": own.model_type}
    return {**sizes, **parts, **special}


def small_model(name: str, *, seed: int = 0) -> PreTrainedModel:
    """Return a random model of a type, in evaluation mode, with noise on all weights."""
    classes = CAUSAL | MULTIMODAL
    model_class = getattr(transformers, classes[name])
    config = small_config(name)
    text = config.get_text_config(decoder=True)
    if not isinstance(config, model_class.config_class) and isinstance(
        text, model_class.config_class
    ):
        config = text
    torch.manual_seed(seed)
    model = model_class._from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()
