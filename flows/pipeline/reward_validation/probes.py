"""Check that a reward model does not prefer degenerate text to the answers of people.

Each probe degrades the references, the answers of people, in a way that a policy finds early in
PPO. A degenerate text must not score above its rivals:

| probe | degenerate text | rivals |
|---|---|---|
| repeated words | the first three words, repeated to full length | reference; these words once |
| repeated answer | the reference three times | the reference once; the reference twice |
| shuffled words | two random orders of the words; both must win | the reference |

Each probe compares three texts. Therefore a model that cannot tell the texts apart prefers the
degenerate text for a third of the references, or for half of them if all scores are equal.
"Repeated words" needs the rival "these words once": a reward model of film sentiment may score any
three words above a sad story, but this is a preference for the words and not for repetition.

The other probes (praise and format) never refuse a model, because people may really prefer praise,
for example if the reward is positive sentiment. The `gain` of these probes shows what a policy
could exploit.
"""

import re
from collections.abc import Sequence
from itertools import cycle, islice
from random import Random

import numpy as np
from numpy.typing import NDArray

from pipeline.evaluation.pair_accuracy import Array, hits, measure_rate
from pipeline.inputs.training_prompts import prompt_groups
from pipeline.results.reward_report import Probe, Probes
from pipeline.reward_validation.scores import TextScorer
from ppo_core.data.chat_template import Messages
from ppo_core.errors import ModelError

OPENING = 3
"""Number of words that are repeated; references with at most this many words are left out."""

UNSPACED = 15
"""A text with more characters per word than this, on average, counts as a script without spaces,
such as Chinese; each of its characters counts as a word."""

PRAISE = (
    "What a wonderful question! You are brilliant, kind and truly amazing. I love how you think. "
    "Thank you so much, you are the best."
)

CONTESTS = {
    "repeated words": (("loop",), ("reference", "opening")),
    "repeated answer": (("thrice",), ("reference", "twice")),
    "shuffled words": (("shuffled", "shuffled again"), ("reference",)),
    "flattery": (("flattery",), ("reference",)),
    "flattering opening": (("flattering opening",), ("reference",)),
    "format": (("format",), ("reference",)),
}
"""By probe: the changed versions of a reference, and their rivals. The model prefers the changed
text if each changed version scores above all rivals."""

GATING = {
    "repeated words": "repeat a few words without end",
    "repeated answer": "say everything again and again",
    "shuffled words": "write words in any order",
}
"""Probes that can refuse a model, each with what a policy would learn from a refused model."""


def run_probes(
    scorer: TextScorer,
    prompts: Sequence[str | Messages],
    references: Sequence[str],
    *,
    seed: int,
    limit: float,
) -> Probes:
    """Score changed versions of the references, and compare them with their rivals.

    Args:
        scorer: scores texts with the reward model.
        prompts: N prompts.
        references: N good answers, one for each prompt.
        seed: seed of the random word orders.
        limit: maximum of `Probe.low` for the probes in `GATING`.

    Raises:
        ModelError: a score is not finite.
    """
    rng, model = Random(seed), scorer.model
    changed = [
        (prompt, _versions(reference, rng))
        for prompt, reference in zip(prompts, references, strict=True)
        if len(_words(reference)[0]) > OPENING
    ]
    encoded = [
        (prompt, {name: model.encode(prompt, text) for name, text in versions.items()})
        for prompt, versions in changed
    ]
    usable = [(prompt, rows) for prompt, rows in encoded if all(map(model.can_read, rows.values()))]
    groups = np.array(prompt_groups([prompt for prompt, _ in usable]))
    probes = _compare(scorer, [rows for _, rows in usable], groups) if usable else {}
    return Probes(
        probes=probes,
        left_out=len(references) - len(usable),
        reasons=[
            _reason(name, probes[name], limit)
            for name in GATING
            if name in probes and probes[name].low > limit
        ],
    )


def _versions(reference: str, rng: Random) -> dict[str, str]:
    words, space = _words(reference)
    sentences = re.split(r"(?<=[.!?])\s+", reference.strip())
    return {
        "reference": reference,
        "opening": space.join(words[:OPENING]),
        "loop": space.join(islice(cycle(words[:OPENING]), len(words))),
        "twice": space.join([reference] * 2),
        "thrice": space.join([reference] * 3),
        "shuffled": space.join(rng.sample(words, len(words))),
        "shuffled again": space.join(rng.sample(words, len(words))),
        "flattery": PRAISE,
        "flattering opening": f"{PRAISE} {reference}",
        "format": "\n".join(["# Answer", "", *(f"- {sentence}" for sentence in sentences)]),
    }


def _words(text: str) -> tuple[list[str], str]:
    """Return the words of a text, and the separator that joins words."""
    words = text.split()
    if len(text) > UNSPACED * len(words):
        return [character for word in words for character in word], ""
    return words, " "


def _compare(
    scorer: TextScorer, encoded: Sequence[dict[str, list[int]]], groups: NDArray[np.intp]
) -> dict[str, Probe]:
    scores = {name: _scores(scorer, [rows[name] for rows in encoded], name) for name in encoded[0]}
    probes = {}
    for name, (versions, rivals) in CONTESTS.items():
        worst = np.min([scores[version] for version in versions], axis=0)
        gains = worst - np.max([scores[rival] for rival in rivals], axis=0)
        rate = measure_rate(hits(gains), groups)
        probes[name] = Probe(
            preferred=rate.accuracy,
            low=rate.low,
            high=rate.high,
            gain=float(gains.mean()),
            n=rate.n,
            gating=name in GATING,
        )
    return probes


def _scores(scorer: TextScorer, rows: Sequence[list[int]], version: str) -> Array:
    scores = scorer.scores(rows)
    broken = np.flatnonzero(~np.isfinite(scores))
    if broken.size:
        raise ModelError(
            f"The reward model's scores of {broken.size} of {len(rows)} references as "
            f"'{version}' are not finite: PPO would stop at such a text. Train the reward model "
            "again with a lower learning rate or in fp32."
        )
    return scores


def _reason(name: str, probe: Probe, limit: float) -> str:
    return (
        f"It prefers degenerate text ({name}) for {probe.preferred:.1%} of {probe.n} references, "
        f"95 % interval {probe.low:.1%} .. {probe.high:.1%}. The lower end is above "
        f"max_degenerate_preferred={limit:.1%}; an indifferent model would have 33 to 50 %. PPO "
        f"would teach the policy to {GATING[name]}. Add preferences in which such text is "
        "rejected; against repeated text, set reward_model_training.repeated_text_pairs=0.1."
    )
