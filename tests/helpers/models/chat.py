"""A tokenizer with a chat template, and a chat model with a fixed response."""

from itertools import pairwise
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from tests.helpers.models.tiny import EOS, make_tokenizer

SYSTEM, USER, ASSISTANT = 53, 54, 55

WORD, LETTER_A, LETTER_B = 56, 57, 58
"""Token ids of `VERDICT:`, `A` and `B` in the tokenizer of `write_parrot`."""

_TURNS = "{% for m in messages %}{{ '<' + m.role + '> ' + m.content + END }}{% endfor %}"
_ANSWER = "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"

ENDED = _TURNS.replace("END", "(' <eos> ' if m.role == 'assistant' else ' ')") + _ANSWER
"""Template that ends each assistant turn with the end-of-sequence token and a space."""

OPEN = _TURNS.replace("END", "' '") + _ANSWER
"""Template without end-of-sequence tokens."""

FORGETFUL = ENDED.replace("m.content", "(m.content if loop.last else 'w9')")
"""Template that renders a turn differently if another turn follows."""

STRICT = "{{ raise_exception('roles must alternate') }}"
"""Template that raises for all messages."""


def make_chat_tokenizer(template: str | None = ENDED) -> PreTrainedTokenizerFast:
    """Return a tokenizer with tokens 3 ... 52 for `w0 ... w49`, and a token for each role."""
    tokenizer = make_tokenizer(words=50)
    tokenizer.add_tokens(["<system>", "<user>", "<assistant>"])
    tokenizer.chat_template = template
    return tokenizer


def say(*turns: str) -> list[dict[str, str]]:
    """Return messages of user and assistant in alternation, the user first."""
    roles = ["user", "assistant"] * len(turns)
    return [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]


def write_parrot(folder: Path, says: list[int], *, template: str = ENDED, eos_token_id=EOS) -> str:
    """Save a chat model that answers any prompt with the tokens of `says` after the first.

    Its layers add nothing to the residual stream, so it is a bigram model: the current token alone
    determines the next. Returns the folder.
    """
    tokenizer = make_chat_tokenizer(template)
    tokenizer.add_tokens(["VERDICT:", "A", "B"])
    size = len(tokenizer)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=size,
            hidden_size=60,
            intermediate_size=4,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=512,
            eos_token_id=EOS,
        )
    )
    layer = model.model.layers[0]
    with torch.no_grad():
        for matrix in (layer.self_attn.o_proj, layer.mlp.down_proj, model.lm_head):
            matrix.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size, 60))
        for token, following in pairwise(says):
            model.lm_head.weight[following, token] = 1
    model.generation_config.eos_token_id = eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
