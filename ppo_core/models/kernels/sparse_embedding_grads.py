"""Sparse gradients of embeddings, with rows only for the tokens in a microbatch.

A dense gradient has a row for every token of the vocabulary, mostly zeros. Each microbatch would
add all these rows to the accumulated gradient.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def sparse_embedding_grads(module: nn.Module) -> Iterator[None]:
    """Give a module's embeddings sparse gradients in the backward passes in this context.

    On exit the gradients become dense, because optimizers need dense gradients. A gradient becomes
    dense earlier if it has more rows than the embedding.
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
    # An adapter on a frozen embedding reads `sparse`, and fails with sparse gradients.
    is_plain = not embedding.sparse and not embedding.scale_grad_by_freq
    return is_plain and embedding.weight.requires_grad


def _keep_small(weight: Tensor) -> None:
    # Adding a sparse gradient appends its rows, even for a token that has a row already.
    if weight.grad is not None and weight.grad.is_sparse and weight.grad._nnz() > len(weight):
        _make_dense(weight)


def _make_dense(weight: Tensor) -> None:
    if weight.grad is not None and weight.grad.is_sparse:
        weight.grad = weight.grad.to_dense()
