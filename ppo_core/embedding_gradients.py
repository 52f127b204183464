"""Gradients of embeddings that hold the rows of the tokens alone that were read.

A microbatch reads a few hundred of the rows of an embedding, and PyTorch would give it a gradient
of all of them, mostly zeros, and add that to the one of the microbatch before: at 50,304 rows of
256 numbers 51 MiB each.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def gradients_of_read_rows(module: nn.Module) -> Iterator[None]:
    """Inside, backward passes give the embeddings of a module sparse gradients."""
    dense = [
        part for part in module.modules() if isinstance(part, nn.Embedding) and not part.sparse
    ]
    for embedding in dense:
        embedding.sparse = True
    try:
        yield
    finally:
        for embedding in dense:
            embedding.sparse = False


def make_dense(parameters: Iterable[nn.Parameter]) -> None:
    """Give parameters with a sparse gradient a dense one, as optimizers want it."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            # Added up first, by row: on a GPU the order of sums would differ from run to run.
            parameter.grad = parameter.grad.coalesce().to_dense()
