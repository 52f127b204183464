"""Which backbones have the fast path; every other choice goes through the model's own forward."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.testing import assert_close
from transformers import (
    AttentionInterface,
    AutoModel,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention

from ppo_core.models.backbones import DecoderBackbone
from ppo_core.models.kernels.decoder_families import fast_path
from ppo_core.models.kernels.packed_linear import MIN_PASSES, packed
from tests.helpers.models.tiny import CONFIGS, VOCABULARY

_LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
IDS = torch.arange(3, 13).view(2, 5)
ROW, POSITION = torch.tensor([0, 1]), torch.tensor([4, 2])


def make_backbone(config: PreTrainedConfig = CONFIGS["llama"], **choices: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModel.from_config(type(config)(**config.to_dict()), **choices).eval()


def assert_own_forward(backbone: nn.Module) -> None:
    """The backbone has no fast path, and its own forward computes its states."""
    assert fast_path(backbone) is None
    calls = []

    class Counting(type(backbone)):  # type: ignore[misc]
        def forward(self, *args: Any, **inputs: Any) -> Any:
            calls.append(inputs)
            return super().forward(*args, **inputs)

    expected = backbone(IDS).last_hidden_state[ROW, POSITION]
    backbone.__class__ = Counting
    states = DecoderBackbone(backbone).states_at(IDS, ROW, POSITION)
    assert len(calls) == 1
    assert_close(states, expected, rtol=0, atol=0)


# --- Families ---


@pytest.mark.parametrize("family", CONFIGS)
def test_known_families_have_the_fast_path(family: str):
    assert fast_path(make_backbone(CONFIGS[family])) is not None


@pytest.mark.parametrize(
    "config",
    [
        MistralConfig(num_key_value_heads=2, **_LLAMA_LIKE),
        Qwen2Config(
            num_key_value_heads=2,
            use_sliding_window=True,
            sliding_window=4,
            max_window_layers=1,
            **_LLAMA_LIKE,
        ),
        GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, add_cross_attention=True),
    ],
    ids=lambda config: config.model_type,
)
def test_other_families_and_variants_use_their_own_forward(config: PreTrainedConfig):
    assert_own_forward(make_backbone(config))


def test_training_mode_uses_the_models_own_forward():
    assert_own_forward(make_backbone().train())  # Llama's dropout is 0


def test_half_precision_on_a_cpu_uses_the_models_own_forward():
    assert_own_forward(make_backbone().bfloat16())


def test_fewer_bits_on_a_cpu_use_the_models_own_forward():
    backbone = make_backbone()
    # As with frozen matrices that autocast reads.
    backbone.layers[1].mlp.bfloat16()
    assert fast_path(backbone) is not None
    quantized = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    backbone.layers[1].mlp.up_proj.weight = quantized
    assert fast_path(backbone) is None


def test_half_precision_on_a_gpu_has_the_fast_path_and_fewer_bits_do_not(monkeypatch):
    monkeypatch.setattr(nn.Parameter, "is_cuda", True, raising=False)
    backbone = make_backbone().bfloat16()
    assert fast_path(backbone) is not None
    # Embeddings in fp32, as in many quantized models, do not count for the rest.
    backbone.embed_tokens.float()
    assert fast_path(backbone) is not None
    quantised = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    backbone.layers[1].mlp.up_proj.weight = quantised
    assert fast_path(backbone) is None


# --- Attention ---


def test_an_explicit_default_keeps_the_fast_path():
    assert fast_path(make_backbone(attn_implementation="sdpa")) is not None


@pytest.mark.parametrize("family", CONFIGS)
def test_eager_attention_uses_the_models_own_forward(family: str):
    assert_own_forward(make_backbone(CONFIGS[family], attn_implementation="eager"))


def test_flash_attention_has_no_fast_path():
    backbone = make_backbone()
    backbone.config._attn_implementation = "flash_attention_2"  # from_config needs the library
    assert fast_path(backbone) is None


def test_an_attention_set_later_uses_the_models_own_forward():
    backbone = make_backbone()
    backbone.set_attn_implementation("eager")
    assert_own_forward(backbone)


@pytest.fixture
def calls() -> list[Tensor]:
    return []


@pytest.fixture
def own_attention(calls: list[Tensor]) -> Callable[..., Any]:
    """An attention function that records its queries."""

    def attend(module: Any, queries: Tensor, *args: Any, **settings: Any) -> Any:
        calls.append(queries)
        return sdpa_attention_forward(module, queries, *args, **settings)

    return attend


@pytest.fixture
def registries() -> Iterator[None]:
    """Restore the registered functions afterwards."""
    kinds = AttentionInterface, AttentionMaskInterface
    before = [dict(kind._global_mapping) for kind in kinds]
    yield
    for kind, mapping in zip(kinds, before, strict=True):
        kind._global_mapping.clear()
        kind._global_mapping.update(mapping)


@pytest.mark.usefixtures("registries")
def test_an_attention_registered_by_a_new_name_is_called(own_attention, calls):
    AttentionInterface.register("own", own_attention)
    assert_own_forward(make_backbone(attn_implementation="own"))
    assert calls


@pytest.mark.usefixtures("registries")
def test_an_attention_registered_in_the_place_of_the_default_is_called(own_attention, calls):
    backbone = make_backbone()
    AttentionInterface.register("sdpa", own_attention)
    assert_own_forward(backbone)
    assert calls


def test_an_attention_set_on_the_shared_instance_is_called(own_attention, calls):
    backbone = make_backbone()
    ALL_ATTENTION_FUNCTIONS["sdpa"] = own_attention
    try:
        assert_own_forward(backbone)
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert calls


@pytest.mark.usefixtures("registries")
def test_a_mask_registered_in_the_place_of_the_default_uses_the_models_own_forward():
    default = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    AttentionMaskInterface.register("sdpa", lambda *args, **settings: default(*args, **settings))
    assert_own_forward(make_backbone())


# --- Hooks ---

MODULES = [
    "",
    "embed_tokens",
    "norm",
    "rotary_emb",
    "layers.1",
    "layers.1.self_attn",
    "layers.1.self_attn.q_proj",
    "layers.1.mlp",
    "layers.1.mlp.act_fn",
    "layers.1.input_layernorm",
]
HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward pre-hook": lambda module: module.register_forward_pre_hook(lambda *_: None),
    "forward hook": lambda module: module.register_forward_hook(lambda *_: None),
    "backward pre-hook": lambda module: module.register_full_backward_pre_hook(lambda *_: None),
    "backward hook": lambda module: module.register_full_backward_hook(lambda *_: None),
    "state dict pre-hook": lambda module: module.register_state_dict_pre_hook(lambda *_: None),
    "state dict hook": lambda module: module.register_state_dict_post_hook(lambda *_: None),
}


@pytest.mark.parametrize("name", MODULES, ids=lambda name: name or "backbone")
@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_on_any_module_uses_the_models_own_forward(kind: str, name: str):
    backbone = make_backbone()
    handle = HOOKS[kind](backbone.get_submodule(name))
    assert_own_forward(backbone)
    handle.remove()
    assert fast_path(make_backbone()) is not None


@pytest.mark.parametrize("name", ["h.0.attn.resid_dropout", "h.0.attn.attn_dropout", "drop"])
def test_a_hook_on_a_dropout_uses_the_models_own_forward(name: str):
    backbone = make_backbone(CONFIGS["gpt2"])
    backbone.get_submodule(name).register_forward_hook(lambda *_: None)
    assert_own_forward(backbone)


GLOBAL_HOOKS: dict[str, Callable[[], Any]] = {
    "forward pre-hook": lambda: torch_modules.register_module_forward_pre_hook(lambda *_: None),
    "forward hook": lambda: torch_modules.register_module_forward_hook(lambda *_: None),
    "backward pre-hook": lambda: torch_modules.register_module_full_backward_pre_hook(
        lambda *_: None
    ),
    "backward hook": lambda: torch_modules.register_module_full_backward_hook(lambda *_: None),
}


@pytest.mark.parametrize("kind", GLOBAL_HOOKS)
def test_a_global_hook_uses_the_models_own_forward(kind: str):
    handle = GLOBAL_HOOKS[kind]()
    try:
        assert_own_forward(make_backbone())
    finally:
        handle.remove()


def test_a_hook_on_loading_keeps_the_fast_path():
    backbone = make_backbone()
    backbone.norm.register_load_state_dict_pre_hook(lambda *_: None)
    assert fast_path(backbone) is not None


# --- Replaced code ---


@pytest.mark.parametrize("name", MODULES[1:])
def test_a_forward_replaced_on_a_module_is_called(name: str):
    backbone = make_backbone()
    module: Any = backbone.get_submodule(name)
    calls, forward = [], module.forward

    def replaced(*args: Any, **inputs: Any) -> Any:
        calls.append(name)
        return forward(*args, **inputs)

    module.forward = replaced
    assert_own_forward(backbone)
    assert calls


def test_a_forward_replaced_on_a_class_is_called(monkeypatch: pytest.MonkeyPatch):
    backbone = make_backbone()
    calls, forward = [], LlamaAttention.forward

    def replaced(*args: Any, **inputs: Any) -> Any:
        calls.append(args)
        return forward(*args, **inputs)

    monkeypatch.setattr(LlamaAttention, "forward", replaced)
    assert_own_forward(backbone)
    assert calls


def test_a_subclass_of_a_layers_attention_is_called():
    class Attention(LlamaAttention):
        pass

    backbone = make_backbone()
    backbone.layers[0].self_attn.__class__ = Attention
    assert_own_forward(backbone)


def test_a_packed_copy_keeps_the_fast_path(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ppo_core.models.kernels.packed_linear.MIN_NUMEL", 0)
    backbone = make_backbone(LlamaConfig(**_LLAMA_LIKE))
    copied = packed(backbone, rows=2, passes=MIN_PASSES)
    assert copied is not backbone or not torch.backends.mkldnn.is_available()
    assert fast_path(copied) is not None
