"""Our own forward pass against that of transformers."""

import itertools
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close
from transformers import (
    AutoModel,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from ppo_core.data.batching import pad_rows
from ppo_core.models.adapters import add_adapter
from ppo_core.models.backbones import DecoderBackbone
from ppo_core.models.kernels import attention, matmul_backend
from ppo_core.models.kernels.decoder_families import fast_path
from ppo_core.models.kernels.decoder_forward import BranchedPairs, states_at
from ppo_core.models.kernels.matmul_backend import uses_onednn
from ppo_core.rollout.captured_steps import FixedStep, _Graph, rounded
from ppo_core.rollout.decoder import Decoder
from ppo_core.rollout.fast_decoder import FastBackend
from ppo_core.rollout.kv_cache import KVCache
from tests.helpers.models.tiny import VOCABULARY, make_policy, make_prompts

_LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GPT2: dict[str, Any] = {"vocab_size": VOCABULARY, "n_embd": 48, "n_layer": 3, "n_head": 4}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}

PLAIN: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_LLAMA_LIKE),
    "llama with shared keys": LlamaConfig(num_key_value_heads=2, head_dim=16, **_LLAMA_LIKE),
    "llama with yarn": LlamaConfig(rope_parameters=_YARN, attention_bias=True, **_LLAMA_LIKE),
    "qwen2": Qwen2Config(num_key_value_heads=3, **_LLAMA_LIKE),
    "gpt_neox": GPTNeoXConfig(**_LLAMA_LIKE),
    "gpt_neox in sequence": GPTNeoXConfig(use_parallel_residual=False, **_LLAMA_LIKE),
    "gpt_neox all rotated": GPTNeoXConfig(
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        attention_bias=False,
        **_LLAMA_LIKE,
    ),
    "gpt2": GPT2Config(**_GPT2),
    "gpt2 scaled by layer": GPT2Config(scale_attn_by_inverse_layer_idx=True, **_GPT2),
}
LENGTHS = [9, 14, 3]
POSITIONS = {0: [4, 5, 6, 7], 1: [0, 2, 13], 2: [1]}
SEQUENCE = torch.tensor([sequence for sequence, chosen in POSITIONS.items() for _ in chosen])
POSITION = torch.tensor([position for chosen in POSITIONS.values() for position in chosen])


def make_backbone(config: PreTrainedConfig) -> PreTrainedModel:
    """Return a backbone in fp64 with noise on all weights."""
    torch.manual_seed(0)
    backbone = AutoModel.from_config(type(config)(**config.to_dict())).double().eval()
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return backbone


@pytest.fixture
def fast_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse what no fast kernel of a GPU computes: a mask with fewer key heads than query heads.

    PyTorch would store all scores, and a copy of the keys in fp32.
    """
    attend = functional.scaled_dot_product_attention

    def checked(
        queries: Tensor, keys: Tensor, values: Tensor, attn_mask: Tensor | None, **options: Any
    ) -> Tensor:
        assert attn_mask is None or queries.shape[1] == keys.shape[1]
        return attend(queries, keys, values, attn_mask=attn_mask, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", checked)


def with_gradients(model: nn.Module, states: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    weights = torch.arange(states.numel(), dtype=states.dtype).view_as(states)
    (states * weights.cos()).sum().backward()
    return states.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same_states_and_gradients(model: PreTrainedModel, backbone: nn.Module) -> None:
    ids, _ = pad_rows(make_prompts(LENGTHS))
    parts = fast_path(backbone)
    assert parts is not None
    actual, gradients = with_gradients(model, states_at(parts, ids, SEQUENCE, POSITION))
    plain = [
        backbone(row[None, :n]).last_hidden_state[0] for row, n in zip(ids, LENGTHS, strict=True)
    ]
    states = torch.stack([plain[b][t] for b, t in zip(SEQUENCE, POSITION, strict=True)])
    expected, expected_gradients = with_gradients(model, states)
    # transformers computes the angles in fp32.
    assert_close(actual, expected, rtol=0, atol=1e-9)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        assert_close(gradients[name], gradient, rtol=1e-9, atol=1e-8, msg=name)


@pytest.mark.parametrize("family", PLAIN)
@pytest.mark.parametrize(
    ("max_scores", "block"),
    [(attention.MAX_SCORES, 64), (attention.MAX_SCORES, 5), (0, 64)],
    ids=["own", "in blocks", "of PyTorch"],
)
def test_states_and_gradients_are_those_of_transformers(family, max_scores, block, monkeypatch):
    monkeypatch.setattr(attention, "MAX_SCORES", max_scores)
    monkeypatch.setattr(attention, "BLOCK", block)
    backbone = make_backbone(PLAIN[family])
    assert_same_states_and_gradients(backbone, backbone)


@pytest.mark.parametrize("family", PLAIN)
def test_last_states_by_the_attention_of_pytorch_are_those_of_transformers(
    family, fast_attention, monkeypatch
):
    monkeypatch.setattr(attention, "MAX_SCORES", 0)
    backbone = make_backbone(PLAIN[family])
    ids, lengths = pad_rows(make_prompts(LENGTHS))
    actual = states_at(fast_path(backbone), ids, torch.arange(3), lengths - 1)
    rows = zip(ids, LENGTHS, strict=True)
    expected = [backbone(row[None, :n]).last_hidden_state[0, -1] for row, n in rows]
    assert_close(actual, torch.stack(expected), rtol=0, atol=1e-9)


def test_states_and_gradients_with_an_adapter_are_those_of_transformers():
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"])
    model = add_adapter(make_policy(), settings).double()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    assert_same_states_and_gradients(model, model.base_model.model.model)


class FixedBackend(FastBackend):
    """Decodes as a GPU does, by steps of rounded shapes, without capturing them."""

    def decode(self, tokens: Tensor) -> Tensor:
        rows = rounded(len(tokens), self.cache.max_sequences)
        step = FixedStep(self._layers, self.cache, rows, self.cache.width)
        step.take(tokens)
        return step.compute()[: len(tokens)]


BACKENDS = pytest.mark.parametrize("make_backend", [FastBackend, FixedBackend])


@pytest.mark.parametrize("family", PLAIN)
@pytest.mark.parametrize("max_scores", [attention.MAX_SCORES, 0], ids=["own", "of PyTorch"])
@BACKENDS
def test_decoding_makes_the_states_of_the_full_sequences(
    family, make_backend, max_scores, fast_attention, monkeypatch
):
    monkeypatch.setattr(attention, "MAX_SCORES", max_scores)
    backbone = make_backbone(PLAIN[family])
    prompts, answers = make_prompts(LENGTHS), make_prompts([4, 4, 4], seed=1)
    parts = fast_path(backbone)
    assert parts is not None
    kept = torch.tensor([2, 0])
    with torch.no_grad():
        cache = KVCache(3, max(LENGTHS), 4, SEQUENCE.device)
        decoder = Decoder(make_backend(parts, cache, nullcontext), prompts)
        for t in range(5):
            rows = range(3) if t < 3 else kept.tolist()
            whole = [torch.tensor([prompts[n] + answers[n][:t]]) for n in rows]
            expected = [backbone(row).last_hidden_state[0, -1] for row in whole]
            assert_close(decoder.states, torch.stack(expected), rtol=0, atol=1e-9)
            if t == 2:
                decoder.keep(kept)
                rows = kept.tolist()
            if t < 4:
                decoder.step(torch.tensor([answers[n][t] for n in rows]))


@BACKENDS
def test_decoding_in_half_precision_rounds_as_much_as_transformers(make_backend, monkeypatch):
    """As on a GPU with adapters on a base in bfloat16, whose passes run under autocast."""
    monkeypatch.setattr(nn.Parameter, "is_cuda", True, raising=False)
    monkeypatch.setattr(attention, "MAX_SCORES", 0)
    policy = make_policy("qwen2")
    adapted = add_adapter(policy, peft.LoraConfig(r=2, target_modules="all-linear"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    exact = deepcopy(policy.model).double()
    for name, parameter in policy.model.named_parameters():
        if "lora" not in name:
            parameter.data = parameter.data.bfloat16()
    parts = fast_path(policy.model)
    assert parts is not None
    prompts, answers = make_prompts(LENGTHS), make_prompts([4, 4, 4], seed=1)
    errors = {"ours": [], "transformers'": []}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        cache = KVCache(3, max(LENGTHS), 4, SEQUENCE.device)
        decoder = Decoder(make_backend(parts, cache, nullcontext), prompts)
        for t in range(4):
            decoder.step(torch.tensor([answers[n][t] for n in range(3)]))
            for n in range(3):
                ids = torch.tensor([prompts[n] + answers[n][: t + 1]])
                with torch.autocast("cpu", enabled=False):
                    expected = exact(ids).last_hidden_state[0, -1]
                theirs = policy.model(ids).last_hidden_state[0, -1]
                errors["ours"].append((decoder.states[n] - expected).norm())
                errors["transformers'"].append((theirs - expected).norm())
    assert cache.block(0, 3, 1)[0].dtype == torch.bfloat16
    ours, theirs = (torch.stack(each).mean() for each in errors.values())
    assert 0 < ours < 1.5 * theirs


@BACKENDS
@pytest.mark.parametrize("family", PLAIN)
def test_added_prompts_see_nothing_of_the_dropped_sequences(family, make_backend):
    backbone = make_backbone(PLAIN[family])
    first, later = make_prompts([3, 9]), make_prompts([2, 7], seed=2)
    answers = make_prompts([6] * 3, seed=1)
    parts = fast_path(backbone)
    assert parts is not None
    with torch.no_grad():
        cache = KVCache(2, 9, 6, SEQUENCE.device)
        decoder = Decoder(make_backend(parts, cache, nullcontext), first)
        for t in range(2):
            decoder.step(torch.tensor([answers[0][t], answers[1][t]]))
        for part in itertools.chain(*cache._layers):
            part[1] = torch.nan
        # The longest is left out, so what the other has moves.
        decoder.keep(torch.tensor([0]))
        decoder.step(torch.tensor([answers[0][2]]))
        decoder.add(later[:1])
        rows = [first[0] + answers[0][:3], later[0]]
        for t in range(2):
            expected = [backbone(torch.tensor([row])).last_hidden_state[0, -1] for row in rows]
            assert_close(decoder.states, torch.stack(expected), rtol=0, atol=1e-9)
            tokens = [answers[0][3 + t], answers[1][t]]
            decoder.step(torch.tensor(tokens))
            rows = [[*row, token] for row, token in zip(rows, tokens, strict=True)]
        decoder.keep(torch.tensor([], dtype=torch.long))
        decoder.add(later[1:])
        expected = [backbone(torch.tensor([later[1]])).last_hidden_state[0, -1]]
        assert_close(decoder.states, torch.stack(expected), rtol=0, atol=1e-9)


def train(backbone: Any) -> None:
    backbone.train()


def test_half_precision_differs_by_its_rounding_alone():
    backbone = make_backbone(PLAIN["gpt_neox"]).float()
    wrapped = DecoderBackbone(backbone)
    ids, _ = pad_rows(make_prompts(LENGTHS))
    exact = wrapped.states_at(ids, SEQUENCE, POSITION)
    with torch.autocast("cpu", torch.bfloat16):
        rounded, gradients = with_gradients(backbone, wrapped.states_at(ids, SEQUENCE, POSITION))
        other = backbone(ids).last_hidden_state[SEQUENCE, POSITION]
    assert_close(rounded.float(), exact, rtol=0, atol=0.1)
    assert (rounded - exact).norm() < 1.2 * (other - exact).norm()
    assert all(gradient.isfinite().all() for gradient in gradients.values())


def change_nothing(backbone: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("max_scores", "change", "by_onednn"),
    [(20 * 20, change_nothing, True), (19 * 19, change_nothing, False), (20 * 20, train, False)],
    ids=["own attention", "long rows", "as a whole"],
)
@pytest.mark.usefixtures("onednn_tried_anew")
def test_large_layers_are_multiplied_by_onednn_where_attention_is_not(
    max_scores, change, by_onednn, monkeypatch
):
    monkeypatch.setattr(attention, "MAX_SCORES", max_scores)
    monkeypatch.setattr(matmul_backend, "MIN_NUMEL", 48 * 64)
    monkeypatch.setattr(matmul_backend, "MAX_ERROR", 1.0)  # also on a processor that rounds
    backbone = make_backbone(PLAIN["llama"])
    change(backbone)
    with DecoderBackbone(backbone).products(torch.zeros(2, 20)):
        assert uses_onednn() == by_onednn
    assert not uses_onednn()


@pytest.mark.parametrize(
    ("sequences", "most", "expected"),
    [(64, 64, 64), (33, 64, 64), (32, 64, 32), (1, 12, 1), (4, 7, 4)],
)
def test_captured_rows_are_the_batch_or_a_half_of_it_again_and_again(sequences, most, expected):
    assert rounded(sequences, most) == expected


class FullGraph(_Graph):
    """A step whose capture finds the memory of the GPU full."""

    tries = 0

    def _captured(self) -> torch.cuda.CUDAGraph:
        self.tries += 1
        if self.tries == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        raise RuntimeError("CUDA error: out of memory")  # an allocation outside of PyTorch


def test_a_step_that_cannot_be_captured_is_computed(caplog):
    parts, cache = fast_path(make_policy().model), KVCache(2, 9, 4, SEQUENCE.device)
    assert parts is not None
    with torch.no_grad():
        decoder = Decoder(FastBackend(parts, cache, nullcontext), make_prompts([3, 9]))
        step = FixedStep(parts, cache, 2, cache.width)
        graph = FullGraph(step, nullcontext, SEQUENCE.device, (0, 0))
        states = [graph.run(torch.tensor([5, 6])).clone() for _ in range(4)]
        decoder.step(torch.tensor([5, 6]))
    for found in states:
        assert_close(found, decoder.states)
    assert graph.tries == 2
    assert [record.message.partition(",")[0] for record in caplog.records] == [
        "The memory of the GPU is too full to capture decoding steps of 2 sequences"
    ]


# --- Pairs with a common start, computed once ---

OF_PAIRS = torch.tensor([[9, 20], [33, 33], [1, 5], [30, 2], [33, 33]])


def make_pairs() -> torch.Tensor:
    """Return pairs (5, 2, 33) that begin alike, differ from the start, or are wholly alike."""
    pairs = torch.randint(1, 20, (5, 2, 33), generator=torch.Generator().manual_seed(1))
    pairs[:2, 1, :8] = pairs[:2, 0, :8]
    pairs[3:, 1] = pairs[3:, 0]
    return pairs


@pytest.mark.parametrize("name", PLAIN)
def test_states_and_gradients_of_pairs_equal_those_of_each_sequence_alone(name):
    torch.manual_seed(0)
    model, pairs = AutoModel.from_config(PLAIN[name]).eval().double(), make_pairs()
    backbone = DecoderBackbone(model)
    assert backbone.fast_layers() is not None
    together = backbone.last_states(pairs, OF_PAIRS)
    together.square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    alone = torch.stack(
        [
            model(input_ids=ids[None, :length]).last_hidden_state[0, -1]
            for ids, length in zip(pairs.flatten(0, 1), OF_PAIRS.flatten().tolist(), strict=True)
        ]
    )
    alone.square().sum().backward()
    # transformers computes rotary angles in fp32.
    assert_close(together, alone, rtol=0, atol=1e-5)
    for ours, parameter in zip(gradients, model.parameters(), strict=True):
        assert_close(ours, parameter.grad, rtol=1e-4, atol=1e-4)


def test_a_row_has_the_common_start_once():
    # The common start is 5 6; the rests are 7 and 8 9.
    context = BranchedPairs(torch.tensor([[[5, 6, 7, 0], [5, 6, 8, 9]]]), torch.tensor([[3, 4]]))
    assert context.ids.tolist() == [[5, 6, 7, 8, 9]]
    assert context.positions.tolist() == [[0, 1, 2, 2, 3]]
    visible = (context.mask[0] == 0).int().tolist()
    assert visible[2:] == [[1, 1, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 1, 1]]
