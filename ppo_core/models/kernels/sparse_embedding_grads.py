"""Gradients of embeddings that hold the rows of the tokens alone that were read.

A microbatch reads a few hundred of the rows of an embedding, and PyTorch would give it a gradient
of all of them, mostly zeros, and add that to the one of the microbatch before: at 50,304 rows of
256 numbers 51 MiB each.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def gradients_of_read_rows(module: nn.Module) -> Iterator[None]:
    """Inside, backward passes give the embeddings of a module sparse gradients.

    At the end they are dense, as optimizers want them; before, where they have more rows than that.
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
    # Adapters read the flag of the frozen embedding that they are on, and cannot do with it.
    is_plain = not embedding.sparse and not embedding.scale_grad_by_freq
    return is_plain and embedding.weight.requires_grad


def _keep_small(weight: Tensor) -> None:
    """A sum of sparse gradients has the rows of all of them."""
    if weight.grad is not None and weight.grad.is_sparse and weight.grad._nnz() > len(weight):
        _make_dense(weight)


def _make_dense(weight: Tensor) -> None:
    if weight.grad is not None and weight.grad.is_sparse:
        weight.grad = weight.grad.to_dense()
