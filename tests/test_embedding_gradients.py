"""Gradients of embeddings that hold the rows that were read."""

import pytest
import torch
from torch.testing import assert_close
from transformers import GPT2Config, GPT2LMHeadModel

from ppo_core.embedding_gradients import gradients_of_read_rows, make_dense
from tests.tiny import VOCABULARY, make_policy

TIED = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=2, n_positions=16)
ROWS = torch.tensor([[[3, 4, 4, 5]], [[9, 3, 2, 2]]])


def gradients(policy: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Of two microbatches."""
    policy.zero_grad()
    for ids in ROWS:
        policy(ids, labels=ids).loss.backward()
    return {name: p.grad.clone() for name, p in policy.named_parameters()}


@pytest.mark.parametrize("is_tied", [False, True])
def test_they_are_those_of_all_rows(is_tied):
    policy = GPT2LMHeadModel(TIED).eval() if is_tied else make_policy()
    expected = gradients(policy)
    embedding = policy.get_input_embeddings()
    with gradients_of_read_rows(policy):
        gradients(policy)
        assert embedding.weight.grad.is_sparse != is_tied
    assert not embedding.sparse
    make_dense(policy.parameters())
    found = {name: p.grad for name, p in policy.named_parameters()}
    assert_close(found, expected, rtol=1e-5, atol=1e-7)
