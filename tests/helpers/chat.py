"""A tokenizer with a chat template, made in memory, and a chat model with one thing to say."""

from itertools import pairwise
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from tests.helpers.tiny import EOS, make_tokenizer

SYSTEM, USER, ASSISTANT = 53, 54, 55

WORD, LETTER_A, LETTER_B = 56, 57, 58
"""`VERDICT:`, `A` and `B` of a parrot's tokenizer."""

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


def write_parrot(folder: Path, says: list[int], *, template: str = ENDED, eos_token_id=EOS) -> str:
    """A chat model that says the tokens behind the first one of `says`, whatever it is asked.

    Its layers add nothing, so the token at hand alone decides on the next: a bigram model.
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
