"""Columns, masks and memory of sequences that end in the same column."""

import torch

from ppo_core.rollout.kv_cache import KVCache, TransformersView

INF = torch.inf


def new_cache() -> KVCache:
    """Return a cache of 2 sequences, 3 prompt tokens and 2 new ones; one layer of one head."""
    return KVCache(2, 3, 2, torch.device("cpu"))


def write_prompt(cache: KVCache, sequence: int, tokens: list[float]) -> None:
    """Store a prompt whose keys are its tokens and whose values are their negatives."""
    keys = torch.tensor(tokens, dtype=torch.float32).view(1, 1, -1, 1)
    columns = slice(cache.end - len(tokens), cache.end)
    cache.write(0, (torch.tensor([sequence]), slice(None), columns), keys, -keys)


def append(cache: KVCache, tokens: list[float]) -> tuple[list[list[float]], list[list[float]]]:
    """Store the next token of each sequence as transformers does; returns keys and values."""
    keys = torch.tensor(tokens, dtype=torch.float32).view(-1, 1, 1, 1)
    seen = TransformersView(cache, 1).update(keys, -keys, 0)
    cache.advance()
    return seen[0][:, 0, :, 0].tolist(), seen[1][:, 0, :, 0].tolist()


def test_sequences_end_in_the_same_column_and_see_nothing_before_their_first_token():
    cache = new_cache()
    cache.add(torch.tensor([3, 1]))
    write_prompt(cache, 0, [1, 2, 3])
    write_prompt(cache, 1, [4])
    assert (cache.first, cache.end) == (0, 3)
    assert cache.mask[:, 0].tolist() == [[0, 0, 0, 0, 0], [-INF, -INF, 0, 0, 0]]
    keys, values = append(cache, [5, 6])
    assert keys == [[1, 2, 3, 5], [0, 0, 4, 6]]
    assert values == [[-1, -2, -3, -5], [0, 0, -4, -6]]
    assert cache.lengths.tolist() == [4, 2]
    assert (cache.first, cache.end) == (0, 4)


def test_kept_sequences_move_to_the_columns_of_the_longest_prompt():
    cache = new_cache()
    cache.add(torch.tensor([3, 1]))
    write_prompt(cache, 0, [1, 2, 3])
    write_prompt(cache, 1, [4])
    append(cache, [5, 6])
    cache.keep(torch.tensor([1]))
    # Two tokens, which end at the 3 columns of a prompt that may be added.
    assert cache.lengths.tolist() == [2]
    assert (cache.first, cache.end) == (1, 3)
    assert cache.mask[:, 0].tolist() == [[-INF, 0, 0, 0, 0]]
    assert append(cache, [7])[0][0][1:] == [4, 6, 7]


def test_a_prompt_that_is_added_finds_nothing_of_the_sequence_before():
    cache = new_cache()
    cache.add(torch.tensor([3, 3]))
    write_prompt(cache, 0, [1, 2, 3])
    write_prompt(cache, 1, [torch.nan] * 3)
    cache.keep(torch.tensor([0]))
    append(cache, [4])
    cache.add(torch.tensor([2]))
    write_prompt(cache, 1, [5, 6])
    assert cache.lengths.tolist() == [4, 2]
    assert cache.mask[:, 0].tolist() == [[0, 0, 0, 0, 0], [-INF, -INF, 0, 0, 0]]
    assert append(cache, [7, 8])[0] == [[1, 2, 3, 4, 7], [0, 0, 5, 6, 8]]


def test_all_sequences_may_be_dropped():
    cache = new_cache()
    cache.add(torch.tensor([2]))
    write_prompt(cache, 0, [1, 2])
    append(cache, [3])
    cache.keep(torch.tensor([], dtype=torch.long))
    assert (cache.first, cache.end) == (3, 3)
    cache.add(torch.tensor([1]))
    write_prompt(cache, 0, [4])
    assert append(cache, [5])[0][0][2:] == [4, 5]
