"""Sparse gradients of embeddings: only the rows of the tokens in a microbatch.

A dense gradient has a row for every token of the vocabulary, mostly zeros, and each microbatch
would add all of them to the sum so far.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def sparse_embedding_grads(module: nn.Module) -> Iterator[None]:
    """Give the embeddings of a module sparse gradients in backward passes inside.

    On exit the gradients are dense, as optimizers need them. Inside, a gradient becomes dense once
    it has more rows than the embedding.
    """
    embeddings = [part for part in module.modules() if isinstance(part, nn.Embedding)]
    embeddings = [embedding for embedding in embeddings if _can_be_sparse(embedding)]
    handles = []
    for embedding in embeddings:
        embedding.sparse = True
        handles.append(embedding.weight.register_post_accumulate_grad_hook(_keep_small))
    try:
        yield
    finally:
        for embedding, handle in zip(embeddings, handles, strict=True):
            embedding.sparse = False
            handle.remove()
            _make_dense(embedding.weight)


def _can_be_sparse(embedding: nn.Embedding) -> bool:
    # A frozen embedding may carry an adapter, which reads the flag and fails with sparse gradients.
    is_plain = not embedding.sparse and not embedding.scale_grad_by_freq
    return is_plain and embedding.weight.requires_grad


def _keep_small(weight: Tensor) -> None:
    # Adding sparse gradients appends their rows.
    if weight.grad is not None and weight.grad.is_sparse and weight.grad._nnz() > len(weight):
        _make_dense(weight)


def _make_dense(weight: Tensor) -> None:
    if weight.grad is not None and weight.grad.is_sparse:
        weight.grad = weight.grad.to_dense()
