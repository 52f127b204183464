"""Judge of the built-in task, a rule that compares summaries with the facts of a post."""

from collections.abc import Sequence

from pipeline.demo.posts import SLOTS, sentences_of

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
    """Return a verdict for each pair of summaries: "first", "second", "tie" or "invalid".

    `grade` scores both summaries against the facts in the prompt. The verdict is "invalid" if the
    prompt states no facts in the grammar of `posts`.
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
    """Return the (slot word, value) pairs that the post states."""
    sentences = sentences_of(prompt)
    return frozenset(FACT_OF_SENTENCE[s] for s in sentences if s in FACT_OF_SENTENCE)


def grade(facts: frozenset[tuple[str, str]], summary: str) -> int:
    """Return the points of a summary: 5 per correct fact, -5 per wrong fact, -1 per needless word.

    A statement is the word of a slot followed by a value of the slot. Words of a repeated
    statement and words outside of statements are needless.
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
