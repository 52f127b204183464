"""A digest of the settings of a tokenizer that change its token ids."""

import hashlib
import json

from transformers import PreTrainedTokenizerBase


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a short digest of a tokenizer and its chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = tokenizer.get_vocab() if backend is None else backend.to_str()
    parts = [
        type(tokenizer).__name__,
        rules,
        tokenizer.chat_template,
        {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
