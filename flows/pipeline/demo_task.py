"""The built-in task: TL;DR in miniature.

A seeded grammar writes forum posts, people of different care summarise them, and a
rule that knows the facts judges. Everything is made at run time, so the whole job
runs with no network: `build_demo_task` writes the files that the pipeline takes from
any user, and `judge` compares two answers.

    title : a strange week . sorry for the long post . my boss was there too . it
    happened in paris . it was not on friday . i only felt angry . tl;dr :
    -> my boss in paris felt angry

A post hides three to five facts among filler and near misses (`it was not on friday`).
A summary states each fact in two words: the slot's word, then the value. Writers
forget facts, mix them up and ramble, each at a known rate, so that a good policy can
beat the references and the preferences are as unreliable as people's.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

NUM_SFT_EXAMPLES = 10_000
NUM_TRAIN_PAIRS = 5_000
NUM_TEST_PAIRS = 1_000
NUM_TRAIN_PROMPTS = 8_000
NUM_EVAL_PROMPTS = 512

MAX_SUMMARY_WORDS = 23
"""Longest summary that a writer hands in, in words; one more token ends it."""


# --- The grammar -----------------------------------------------------------------


@dataclass(frozen=True)
class Slot:
    """One kind of fact: the word that announces it in a summary, values, and sentences."""

    word: str
    values: tuple[str, ...]
    stated: tuple[str, ...]
    """Sentences that make `{}` a fact of the post."""


SLOTS = (
    Slot(
        "my",
        tuple(
            "sister brother mother cousin uncle boss coworker neighbor roommate landlord "
            "teacher dentist".split()
        ),
        ("my {} was there too", "i had a fight with my {}", "this is about my {}"),
    ),
    Slot(
        "lost",
        tuple(
            "phone wallet laptop bike ring watch passport camera guitar jacket ticket tent".split()
        ),
        ("i lost the {}", "someone took the {}", "the {} is gone"),
    ),
    Slot(
        "in",
        tuple("paris london rome berlin oslo vienna boston chicago tokyo cairo delhi lima".split()),
        ("it happened in {}", "we were in {} then", "all of this was in {}"),
    ),
    Slot(
        "on",
        tuple(
            "monday tuesday wednesday thursday friday saturday sunday christmas easter "
            "halloween diwali eid".split()
        ),
        ("this was on {}", "it started on {}", "on {} it got worse"),
    ),
    Slot(
        "cost",
        tuple(
            "ten twelve fifteen twenty thirty forty fifty sixty seventy eighty ninety "
            "hundred".split()
        ),
        ("it cost {} dollars", "i paid {} dollars", "they want {} dollars from me"),
    ),
    Slot(
        "felt",
        tuple(
            "angry sad guilty jealous lonely tired scared ashamed proud confused relieved "
            "nervous".split()
        ),
        ("i felt {}", "it left me {}", "honestly i was {}"),
    ),
    Slot(
        "want",
        tuple(
            "advice help revenge money sleep silence respect closure peace space justice "
            "answers".split()
        ),
        ("all i want is {}", "i need {}", "please give me {}"),
    ),
)

TITLES = (
    "a strange week",
    "need to get this out",
    "am i the problem here",
    "long time reader",
    "what would you do",
    "not my best day",
    "first post here",
    "it finally happened",
)

FILLER = (
    "sorry for the long post",
    "i am on my phone",
    "english is not my language",
    "this is a throwaway account",
    "thanks for reading this",
    "i could not sleep at all",
    "some context first",
    "that is the whole story",
)

RAMBLES = (
    "anyway thanks for reading all this",
    "sorry for the long rant",
    "not sure what to do now",
    "it is a really long story",
    "any thoughts are welcome i guess",
)


@dataclass(frozen=True)
class Post:
    """A prompt, with what its writer meant: `facts` maps slot word to value."""

    prompt: str
    facts: Mapping[str, str]


def write_post(rng: Random) -> Post:
    """Three to five facts and two fillers, shuffled."""
    fact_slots = rng.sample(SLOTS, rng.randint(3, 5))
    facts = {slot.word: rng.choice(slot.values) for slot in fact_slots}
    sentences = rng.sample(FILLER, 2)
    sentences += [rng.choice(slot.stated).format(facts[slot.word]) for slot in fact_slots]
    rng.shuffle(sentences)
    text = " . ".join([f"title : {rng.choice(TITLES)}", *sentences])
    return Post(f"{text} . tl;dr :", facts)


# --- The writers of summaries ------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Writer:
    """How well somebody summarises; every field is a probability."""

    forgets: float = 0.0
    """Of leaving a fact out, each."""
    mistakes: float = 0.0
    """Of stating a wrong value for a fact, each."""
    invents: float = 0.0
    """Of stating a fact that the post does not have, for each slot without one."""
    repeats: float = 0.0
    """Of saying a fact twice, each."""
    rambles: float = 0.0
    """Of adding words that say nothing, at the end."""
    quotes: float = 0.0
    """Of copying a whole sentence of the post, at the end."""


CAREFUL = Writer(forgets=0.15, mistakes=0.02, rambles=0.35)
"""Who wrote the references: people, and not perfect ones."""

HURRIED = Writer(forgets=0.45, mistakes=0.04, rambles=0.65)
"""Who wrote the summaries for SFT: anybody on the forum."""

FORGETFUL = Writer(forgets=0.6)
MUDDLED = Writer(mistakes=0.5)
INVENTIVE = Writer(invents=0.5)
REPETITIVE = Writer(repeats=0.6)
QUOTING = Writer(quotes=1.0)
FAULTLESS = Writer()

CONTESTS = (
    (CAREFUL, HURRIED),
    (HURRIED, HURRIED),
    (HURRIED, FORGETFUL),
    (CAREFUL, FAULTLESS),
    (FAULTLESS, FORGETFUL),
    (CAREFUL, MUDDLED),
    (HURRIED, INVENTIVE),
    (FAULTLESS, INVENTIVE),
    (FAULTLESS, REPETITIVE),
    (FAULTLESS, QUOTING),
)
"""Whose summaries raters compared: together they do what a policy may try, and each failing
is seen to lose. A reward model of three layers still learns wrong values hardly at all."""


def write_summary(post: Post, writer: Writer, rng: Random) -> str:
    """One summary by `writer`, facts in the order of `SLOTS`, at most MAX_SUMMARY_WORDS words."""
    words: list[str] = []
    for slot in SLOTS:
        words += _statement(post, slot, writer, rng)
    if rng.random() < writer.rambles:
        words += rng.choice(RAMBLES).split()
    if rng.random() < writer.quotes:
        words += rng.choice(_sentences(post.prompt)).split()
    return " ".join(words[:MAX_SUMMARY_WORDS])


def _statement(post: Post, slot: Slot, writer: Writer, rng: Random) -> list[str]:
    if slot.word not in post.facts:
        invents = rng.random() < writer.invents
        return [slot.word, _wrong_value(post, slot, rng)] if invents else []
    if rng.random() < writer.forgets:
        return []
    value = post.facts[slot.word]
    if rng.random() < writer.mistakes:
        value = _wrong_value(post, slot, rng)
    return [slot.word, value] * (2 if rng.random() < writer.repeats else 1)


def _wrong_value(post: Post, slot: Slot, rng: Random) -> str:
    return rng.choice([value for value in slot.values if value != post.facts.get(slot.word)])


# --- The judge -------------------------------------------------------------------

FACT_OF_SENTENCE = {
    sentence.format(value): (slot.word, value)
    for slot in SLOTS
    for sentence in slot.stated
    for value in slot.values
}
VALUES_OF_WORD = {slot.word: frozenset(slot.values) for slot in SLOTS}

POINTS_PER_FACT = 5
POINTS_PER_INVENTION = -5
POINTS_PER_NEEDLESS_WORD = -1


def judge(prompts: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Say which summary of each pair is better: "first", "second" or "tie".

    The rule reads the facts from the prompt and gives points, see `grade`; it knows
    nothing of any model. "invalid" where the prompt is no post of this grammar.
    """
    verdicts = []
    for prompt, (first, second) in zip(prompts, pairs, strict=True):
        facts = read_facts(prompt)
        difference = grade(facts, first) - grade(facts, second)
        if not facts:
            verdicts.append("invalid")
        elif difference == 0:
            verdicts.append("tie")
        else:
            verdicts.append("first" if difference > 0 else "second")
    return verdicts


def read_facts(prompt: str) -> frozenset[tuple[str, str]]:
    """The (slot word, value) that the post states."""
    sentences = _sentences(prompt)
    return frozenset(FACT_OF_SENTENCE[s] for s in sentences if s in FACT_OF_SENTENCE)


def grade(facts: frozenset[tuple[str, str]], summary: str) -> int:
    """Points: 5 for a fact covered, -5 for one invented, -1 for every needless word.

    A statement is a slot's word and then one of its values. What is said twice, and
    what is no statement, is needless.
    """
    words = summary.split()
    stated: set[tuple[str, str]] = set()
    needless = 0
    while words:
        statement = (words[0], words[1]) if len(words) > 1 else (words[0], "")
        if statement[1] not in VALUES_OF_WORD.get(statement[0], ()):
            needless += 1
            words = words[1:]
            continue
        needless += 2 * (statement in stated)
        stated.add(statement)
        words = words[2:]
    return (
        POINTS_PER_FACT * len(stated & facts)
        + POINTS_PER_INVENTION * len(stated - facts)
        + POINTS_PER_NEEDLESS_WORD * needless
    )


def _sentences(prompt: str) -> list[str]:
    """The sentences of a post, without its title and the call for a summary."""
    return prompt.split(" . ")[1:-1]


# --- The files -------------------------------------------------------------------


def build_demo_task(folder: Path, seed: int) -> None:
    """Write the task of this seed: base model, SFT examples, preferences, prompts.

    No post occurs twice in all the files, so nothing that is evaluated was trained on.
    The same seed gives the same bytes.
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
        yield {"prompt": post.prompt, "reference": write_summary(post, CAREFUL, rng)}


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
    """Two different summaries, in random order."""
    while True:
        first, second = (write_summary(post, writer, rng) for writer in rng.choice(CONTESTS))
        if first != second:
            return (first, second) if rng.random() < 0.5 else (second, first)


def _rater_prefers_first(post: Post, first: str, second: str, rng: Random) -> bool:
    """A rater's choice by the Bradley-Terry model: sure of large differences only."""
    facts = frozenset(post.facts.items())
    difference = grade(facts, first) - grade(facts, second)
    return rng.random() < 1 / (1 + math.exp(-RATER_CARE * difference))


RATER_CARE = 0.6
"""Log-odds per point: a rater sees one missing fact of five points with probability 0.95."""


def _write_rows(path: Path, rows: Iterable[Mapping[str, str]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")


# --- The base model --------------------------------------------------------------


def vocabulary() -> list[str]:
    """Every word of the grammar, in a fixed order, after the four special tokens."""
    sentences = [f"title : {title}" for title in TITLES] + [". tl;dr :", *FILLER, *RAMBLES]
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


def _tokenizer():
    """One token a word; a text comes back from its tokens exactly, words joined by spaces."""
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
