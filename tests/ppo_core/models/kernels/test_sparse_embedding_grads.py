"""Sparse embedding gradients against dense ones."""

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import GPT2Config, GPT2LMHeadModel

from ppo_core.models.adapters import add_adapter
from ppo_core.models.kernels.sparse_embedding_grads import sparse_embedding_grads
from tests.helpers.tiny import VOCABULARY, make_policy

TIED = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=2, n_positions=16)
ROWS = torch.tensor([[[3, 4, 4, 5]], [[9, 3, 2, 2]]])


def backward(policy: nn.Module) -> None:
    """Two microbatches."""
    policy.zero_grad()
    for ids in ROWS:
        policy(ids, labels=ids).loss.backward()


def gradients_of(policy: nn.Module) -> dict[str, Tensor]:
    named = policy.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def adapted(**settings: object) -> nn.Module:
    model = add_adapter(make_policy(), peft.LoraConfig(r=2, **settings))
    for name, parameter in model.named_parameters():
        if "lora" in name:
            nn.init.normal_(parameter)
    return model


MODELS = {
    "own head": make_policy,
    "tied": lambda: GPT2LMHeadModel(TIED).eval(),
    "adapter on it": lambda: adapted(target_modules=["q_proj", "embed_tokens"]),
    "some of its tokens": lambda: adapted(
        target_modules=["q_proj"], trainable_token_indices=[3, 4]
    ),
    "a copy of it": lambda: adapted(target_modules=["q_proj"], modules_to_save=["embed_tokens"]),
}


@pytest.mark.parametrize("model", MODELS)
def test_they_equal_dense_gradients(model):
    torch.manual_seed(0)
    policy = MODELS[model]()
    backward(policy)
    expected = gradients_of(policy)
    with sparse_embedding_grads(policy):
        backward(policy)
    assert_close(gradients_of(policy), expected, rtol=1e-5, atol=1e-7)
    assert not any(getattr(part, "sparse", False) for part in policy.modules())


def test_they_become_dense_when_they_have_more_rows_than_the_vocabulary():
    policy = make_policy()
    weight = policy.get_input_embeddings().weight
    with sparse_embedding_grads(policy):
        backward(policy)
        assert weight.grad._nnz() == ROWS.numel()
        policy(torch.arange(VOCABULARY)[None]).logits.sum().backward()
        assert not weight.grad.is_sparse
        more = policy(ROWS[0], labels=ROWS[0]).loss
        more.backward()
        assert not weight.grad.is_sparse


def test_an_embedding_with_scale_grad_by_freq_stays_dense():
    embedding = nn.Embedding(5, 2, scale_grad_by_freq=True)
    with sparse_embedding_grads(embedding):
        embedding(torch.tensor([1, 1, 2])).sum().backward()
        assert embedding.weight.grad.tolist() == [[0, 0], [1, 1], [1, 1], [0, 0], [0, 0]]
