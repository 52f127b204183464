"""Tokenizers with the chat templates of instruct models, and tiny models that read them."""

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, PreTrainedTokenizerFast, Qwen2Config

LLAMA_3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{{ message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

QWEN_2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

NO_SYSTEM = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) }}"
    "{{ '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

MARKED = CHATML.replace(
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}",
    "{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>' + '\n' }}{% endif %}",
)
"""ChatML with a generation mask."""

TEMPLATES: dict[str, tuple[str, list[str], str]] = {
    "llama-3": (
        LLAMA_3,
        ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "<|eot_id|>",
    ),
    "qwen-2": (QWEN_2, ["<|im_start|>", "<|im_end|>"], "<|im_end|>"),
    "chatml": (CHATML, ["<|im_start|>", "<|im_end|>"], "<|im_end|>"),
    "no-system": (NO_SYSTEM, ["<bos>", "<start_of_turn>", "<end_of_turn>"], "<end_of_turn>"),
    "marked": (MARKED, ["<|im_start|>", "<|im_end|>"], "<|im_end|>"),
}
"""Template, its special tokens, and the token that ends a turn, by family."""

END_OF_TEXT = "<|endoftext|>"
"""End-of-sequence token of the base model, which no template writes."""


def make_instruct_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer as those of Llama 3 and Qwen 2, with the template of a family."""
    template, special, _ = TEMPLATES[family]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [END_OF_TEXT, *special, *alphabet]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    starts = special[0] if special[0] in ("<|begin_of_text|>", "<bos>") else None
    if starts:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{starts} $A", special_tokens=[(starts, vocabulary[starts])]
        )
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=starts,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        additional_special_tokens=special,
    )
    made.chat_template = template
    return made


def make_instruct_config(family: str, tokenizer: PreTrainedTokenizerFast) -> Any:
    """The configuration of a tiny model of the family's architecture."""
    kind = Qwen2Config if family in ("qwen-2", "chatml", "marked") else LlamaConfig
    return make_tiny_config(kind, tokenizer, num_key_value_heads=2)


def make_tiny_config(kind: Any, tokenizer: PreTrainedTokenizerFast, **heads: int) -> Any:
    """A tiny configuration of any architecture with the common names of sizes."""
    return kind(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        **heads,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
