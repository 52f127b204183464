"""Unusual texts: rare in training data, but a policy may write them."""

from itertools import cycle, islice

from ppo_core.data.chat_template import Messages
from ppo_core.data.prompts import context_length
from ppo_core.models.reward_model import RewardModel

LONGEST = 4096
"""Maximum number of tokens of an odd text, even if the model's context is longer or unlimited."""

RESPONSES = {
    "empty": "",
    "emoji": "🙂🙂 👩‍👩‍👧‍👦 🏳️‍🌈 fine",
    "Arabic": "كانت القصة جميلة جدا",
    "Chinese": "这个故事很好看。",
    "combining": "Z̷̢͇a̸͝l̴̕g̸o a\u0301e\u0301",
    "control": "a\x00b\x07c\x1b[31m\u202e\u200b\ufeff\r\n\t",
}
"""Short odd responses by name."""


def odd_rows(model: RewardModel, prompt: str | Messages, response: str) -> dict[str, list[int]]:
    """Return token rows of a prompt with odd responses, by name; empty rows are left out.

    A row of `RESPONSES` that is too long is cut at the beginning. Two more rows have the maximum
    length: `long` repeats `response`, and `one word` repeats the first word of `response`. These
    two rows end with the end-of-sequence token if the model reads one.
    """
    longest = longest_row(model)
    rows = {name: model.encode(prompt, text)[-longest:] for name, text in RESPONSES.items()}
    words = response.split()[:1]
    for name, text in {"long": response, "one word": " ".join(words)}.items():
        rows[name] = _filled(model, prompt, text)
    return {name: row for name, row in rows.items() if row}


def longest_row(model: RewardModel) -> int:
    """Return the maximum number of tokens of an odd text."""
    context = context_length(model.model.config) or LONGEST
    # Some encoders reserve two positions. Only the tokenizer's `model_max_length` excludes them.
    return min(context, model.tokenizer.model_max_length, LONGEST)


def _filled(model: RewardModel, prompt: str | Messages, text: str) -> list[int]:
    """Return a row of maximum length: prompt, repeated text, and any end-of-sequence token."""
    start = model.encode(prompt, text)[: longest_row(model)]
    body = model.tokenizer(text, add_special_tokens=False)["input_ids"]
    end = [model.tokenizer.eos_token_id] if model.end_of_text else []
    if not body:
        return start
    start = start[: len(start) - len(end)]
    return [*start, *islice(cycle(body), longest_row(model) - len(start) - len(end)), *end]
