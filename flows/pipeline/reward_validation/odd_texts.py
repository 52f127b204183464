"""Texts that nobody trained on, and a policy may write all the same."""

from itertools import cycle, islice

from ppo_core.data.prompts import context_length
from ppo_core.models.reward_model import RewardModel

LONGEST = 4096
"""Most tokens of an odd text, where the model's context is longer or has no bound."""

RESPONSES = {
    "empty": "",
    "emoji": "🙂🙂 👩‍👩‍👧‍👦 🏳️‍🌈 fine",
    "Arabic": "كانت القصة جميلة جدا",
    "Chinese": "这个故事很好看。",
    "combining": "Z̷̢͇a̸͝l̴̕g̸o a\u0301e\u0301",
    "control": "a\x00b\x07c\x1b[31m\u202e\u200b\ufeff\r\n\t",
}
"""Short odd responses by name."""


def odd_rows(model: RewardModel, prompt: str, response: str) -> dict[str, list[int]]:
    """Token rows of odd responses to a prompt, by name; those without any token are left out.

    Of a prompt that leaves them no room in the context only the end is there.

    Beside `RESPONSES` there are two that are as long as the context, or `LONGEST`: the given
    response over and over, `long`, and its first word, `one word`. Both end as the model's texts
    do.
    """
    longest = longest_row(model)
    rows = {name: model.encode(prompt, text)[-longest:] for name, text in RESPONSES.items()}
    words = response.split()[:1]
    for name, text in {"long": response, "one word": " ".join(words)}.items():
        rows[name] = _filled(model, prompt, text)
    return {name: row for name, row in rows.items() if row}


def longest_row(model: RewardModel) -> int:
    """Most tokens of an odd text."""
    context = context_length(model.model.config) or LONGEST
    # Some encoders keep two of their places for themselves; only the tokenizer knows.
    return min(context, model.tokenizer.model_max_length, LONGEST)


def _filled(model: RewardModel, prompt: str, text: str) -> list[int]:
    """A row as long as it may be: the prompt, the text over and over, and the end token."""
    start = model.encode(prompt, text)[: longest_row(model)]
    body = model.tokenizer(text, add_special_tokens=False)["input_ids"]
    end = [model.tokenizer.eos_token_id] if model.end_of_text else []
    if not body:
        return start
    start = start[: len(start) - len(end)]
    return [*start, *islice(cycle(body), longest_row(model) - len(start) - len(end)), *end]
