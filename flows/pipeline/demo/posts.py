"""Grammar of the built-in task: forum posts, and summaries by writers with different error rates.

    title : a strange week . sorry for the long post . my boss was there too . it
    happened in paris . honestly i was angry . tl;dr :
    -> my boss in paris felt angry

A post has two to four facts and a filler sentence. A summary states each fact in two words: the
word of the slot (such as `in`) and the value (such as `paris`). With known probabilities, writers
omit facts, give facts wrong values, invent facts, and add needless words.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

MAX_SUMMARY_WORDS = 23
"""Maximum number of words of a summary; the end-of-sequence token is not counted."""


@dataclass(frozen=True)
class Slot:
    """A kind of fact: its word in summaries, its possible values, and its sentences in posts."""

    word: str
    values: tuple[str, ...]
    stated: tuple[str, ...]
    """Templates of the sentences that state a fact in a post; `{}` is the value."""


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
)

POST_TITLES = (
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
    """A prompt and its facts; `facts` maps the word of each used slot to the value."""

    prompt: str
    facts: Mapping[str, str]


def write_post(rng: Random) -> Post:
    """Write a post with two to four facts and a filler sentence, in random order."""
    fact_slots = rng.sample(SLOTS, rng.randint(2, 4))
    facts = {slot.word: rng.choice(slot.values) for slot in fact_slots}
    sentences = [rng.choice(FILLER)]
    sentences += [rng.choice(slot.stated).format(facts[slot.word]) for slot in fact_slots]
    rng.shuffle(sentences)
    text = " . ".join([f"title : {rng.choice(POST_TITLES)}", *sentences])
    return Post(f"{text} . tl;dr :", facts)


def sentences_of(prompt: str) -> list[str]:
    """Return the sentences of a post without the title and "tl;dr"."""
    return prompt.split(" . ")[1:-1]


@dataclass(frozen=True, kw_only=True)
class Writer:
    """Error probabilities of a writer."""

    forgets: float = 0.0
    """For each fact: probability that the summary omits it."""
    mistakes: float = 0.0
    """For each fact: probability that its value is wrong."""
    invents: float = 0.0
    """For each slot that the post does not use: probability of an invented fact."""
    repeats: float = 0.0
    """For each fact: probability that the summary states it twice."""
    rambles: float = 0.0
    """Probability that a phrase without facts follows the statements."""
    quotes: float = 0.0
    """Probability that the summary ends with a copied sentence of the post."""


CAREFUL = Writer(forgets=0.15, mistakes=0.02, rambles=0.35)
"""Writer of the references, which are imperfect, as if people had written them."""

HURRIED = Writer(forgets=0.4, mistakes=0.04, rambles=0.6)
"""Writer of the SFT completions."""

FORGETFUL = Writer(forgets=0.4)
MUDDLED = Writer(mistakes=0.4)
INVENTIVE = Writer(invents=0.4)
CONFUSED = Writer(forgets=0.3, invents=0.3)
REPETITIVE = Writer(repeats=0.6)
QUOTING = Writer(quotes=1.0)
FAULTLESS = Writer()

COMPARED_WRITERS = (
    (CAREFUL, HURRIED),
    (HURRIED, HURRIED),
    (CAREFUL, FORGETFUL),
    (FAULTLESS, FORGETFUL),
    (FAULTLESS, FORGETFUL),
    (CAREFUL, INVENTIVE),
    (FAULTLESS, INVENTIVE),
    (FAULTLESS, INVENTIVE),
    (CAREFUL, CONFUSED),
    (FAULTLESS, CONFUSED),
    (FAULTLESS, MUDDLED),
    (FAULTLESS, REPETITIVE),
    (FAULTLESS, QUOTING),
)
"""Pairs of writers whose summaries are compared; a repeated pair is compared twice as often. The
writers make every error that a policy may try, so for each error there are pairs in which the
summary with the error is rejected. Even so, a three-layer reward model hardly learns to recognize
wrong values."""


def write_summary(post: Post, writer: Writer, rng: Random) -> str:
    """Write a summary of at most MAX_SUMMARY_WORDS words, with facts in the order of `SLOTS`."""
    words: list[str] = []
    for slot in SLOTS:
        words += _statement(post, slot, writer, rng)
    if rng.random() < writer.rambles:
        words += rng.choice(RAMBLES).split()
    if rng.random() < writer.quotes:
        words += rng.choice(sentences_of(post.prompt)).split()
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
