"""A tokenizer with a chat template, made in memory."""

from tiny import make_tokenizer
from transformers import PreTrainedTokenizerFast

SYSTEM, USER, ASSISTANT = 53, 54, 55

_TURNS = "{% for m in messages %}{{ '<' + m.role + '> ' + m.content + END }}{% endfor %}"
_ANSWER = "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"

ENDED = _TURNS.replace("END", "(' <eos> ' if m.role == 'assistant' else ' ')") + _ANSWER
"""Ends every turn of the assistant with the end-of-sequence token and a space."""

OPEN = _TURNS.replace("END", "' '") + _ANSWER
"""Ends no turn."""

FORGETFUL = ENDED.replace("m.content", "(m.content if loop.last else 'w9')")
"""Renders a turn otherwise once another follows."""

STRICT = "{{ raise_exception('roles must alternate') }}"
"""Refuses everything."""


def make_chat_tokenizer(template: str | None = ENDED) -> PreTrainedTokenizerFast:
    """`w0 w1 ... w49` are tokens 3, 4, ... 52; the roles have a token each."""
    tokenizer = make_tokenizer(words=50)
    tokenizer.add_tokens(["<system>", "<user>", "<assistant>"])
    tokenizer.chat_template = template
    return tokenizer


def say(*turns: str) -> list[dict[str, str]]:
    """Messages by user and assistant in turn, the user first."""
    roles = ["user", "assistant"] * len(turns)
    return [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
