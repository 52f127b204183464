"""The built-in task, a miniature of TL;DR summarization.

A seeded grammar generates all data at run time, so the flow runs without a network.
`build_demo_task` writes the same files that a user would provide. References and demonstrations
are imperfect and preferences are noisy, as if people had written them. If they were perfect, no
policy could beat the references, and the reward model would be perfect.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from pipeline.demo import judge, posts
from pipeline.demo.judge import grade
from pipeline.demo.posts import (
    CAREFUL,
    COMPARED_WRITERS,
    FAULTLESS,
    FILLER,
    HURRIED,
    POST_TITLES,
    RAMBLES,
    SLOTS,
    Post,
    write_post,
    write_summary,
)
from ppo_core.io import folder_cache

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

NUM_SFT_EXAMPLES = 10_000
NUM_TRAIN_PAIRS = 12_000
NUM_TEST_PAIRS = 1_000
NUM_TRAIN_PROMPTS = 8_000
NUM_EVAL_PROMPTS = 512


def find_demo_task(cache_folder: Path, seed: int) -> Path:
    """Return the folder of the task for a seed; build the task if it is not in the cache."""
    code = folder_cache.digest_of_code(posts.__name__, judge.__name__, __name__)
    return folder_cache.make_once(
        cache_folder,
        "tldr",
        {"seed": seed, "code": code},
        lambda folder: build_demo_task(folder, seed),
    ).path


def build_demo_task(folder: Path, seed: int) -> None:
    """Write the files of the task for a seed: base model, SFT examples, preferences and prompts.

    No post occurs twice in the files, so no evaluation uses training data. Equal seeds give equal
    bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = Random(seed)
    posts = _unique_posts(rng)
    _write_rows(folder / "prompts-eval.jsonl", _prompt_rows(posts, NUM_EVAL_PROMPTS, rng))
    _write_rows(folder / "preferences-test.jsonl", _pair_rows(posts, NUM_TEST_PAIRS, rng))
    _write_rows(folder / "sft.jsonl", _sft_rows(posts, NUM_SFT_EXAMPLES, rng))
    _write_rows(folder / "preferences-train.jsonl", _pair_rows(posts, NUM_TRAIN_PAIRS, rng))
    _write_rows(folder / "prompts-train.jsonl", _prompt_rows(posts, NUM_TRAIN_PROMPTS, rng))
    write_base_model(folder / "base", seed)


def _unique_posts(rng: Random) -> Iterator[Post]:
    seen = set()
    while True:
        post = write_post(rng)
        if post.prompt not in seen:
            seen.add(post.prompt)
            yield post


def _prompt_rows(posts: Iterator[Post], count: int, rng: Random) -> Iterator[dict[str, str]]:
    for _ in range(count):
        post = next(posts)
        # A blank reference would count as missing. A faultless writer does not depend on chance,
        # so with a generator of its own, the other rows stay the same.
        written = write_summary(post, CAREFUL, rng) or write_summary(post, FAULTLESS, Random(0))
        yield {"prompt": post.prompt, "reference": written}


def _sft_rows(posts: Iterator[Post], count: int, rng: Random) -> Iterator[dict[str, str]]:
    for _ in range(count):
        post = next(posts)
        yield {"prompt": post.prompt, "completion": write_summary(post, HURRIED, rng)}


def _pair_rows(posts: Iterator[Post], count: int, rng: Random) -> Iterator[dict[str, str]]:
    for _ in range(count):
        post = next(posts)
        first, second = _two_summaries(post, rng)
        if not _rater_prefers_first(post, first, second, rng):
            first, second = second, first
        yield {"prompt": post.prompt, "chosen": first, "rejected": second}


def _two_summaries(post: Post, rng: Random) -> tuple[str, str]:
    """Write two different summaries, in random order."""
    while True:
        first, second = (
            write_summary(post, writer, rng) for writer in rng.choice(COMPARED_WRITERS)
        )
        if first != second:
            return (first, second) if rng.random() < 0.5 else (second, first)


def _rater_prefers_first(post: Post, first: str, second: str, rng: Random) -> bool:
    """Draw the choice of a rater from the Bradley-Terry model."""
    facts = frozenset(post.facts.items())
    difference = grade(facts, first) - grade(facts, second)
    return rng.random() < 1 / (1 + math.exp(-RATER_CARE * difference))


RATER_CARE = 0.6
"""Log-odds per point. If two summaries differ by one fact (five points), a rater prefers the better
one with probability 0.95."""


def _write_rows(path: Path, rows: Iterable[Mapping[str, str]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")


def vocabulary() -> list[str]:
    """Return the four special tokens and every word of the grammar, in a fixed order."""
    sentences = [f"title : {title}" for title in POST_TITLES] + [". tl;dr :", *FILLER, *RAMBLES]
    for slot in SLOTS:
        sentences += [slot.word, *slot.values, *slot.stated]
    words = dict.fromkeys(word for sentence in sentences for word in sentence.split())
    del words["{}"]
    return [*SPECIAL_TOKENS.values(), *words]


SPECIAL_TOKENS = {
    "pad_token": "<pad>",
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "unk_token": "<unk>",
}


def write_base_model(folder: Path, seed: int) -> None:
    """Write a word-level tokenizer and a three-layer Llama with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=8,
        max_position_embeddings=128,
        initializer_range=0.08,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer() -> "PreTrainedTokenizerFast":
    """Return a tokenizer with one token per word, which decodes to words joined by spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ids = {word: number for number, word in enumerate(vocabulary())}
    bos, unk = SPECIAL_TOKENS["bos_token"], SPECIAL_TOKENS["unk_token"]
    words = Tokenizer(models.WordLevel(ids, unk_token=unk))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, ids[bos])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=words, clean_up_tokenization_spaces=False, **SPECIAL_TOKENS
    )
