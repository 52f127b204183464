"""Tokenizers that multiply texts, take exponential time, or panic."""

import base64
import json
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

from ppo_core.data.encode_prompts import encode_prompt, prompt_text
from ppo_core.errors import DataError, ModelError
from ppo_core.models.files import tokenizer_checks
from ppo_core.models.loading import load_tokenizer
from tests.helpers.models.tiny import make_tokenizer

PLAIN: dict[str, Any] = json.loads(make_tokenizer().backend_tokenizer.to_str())


def changed(**parts: Any) -> str:
    return json.dumps({**PLAIN, **parts})


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def several(rules: list[Any], key: str) -> dict[str, Any]:
    return {"type": "Sequence", key: rules}


def split(pattern: str) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


def template(pieces: int, ids: int) -> dict[str, Any]:
    token = {"id": "x", "ids": [3] * ids, "tokens": ["w0"] * ids}
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "x", "type_id": 0}}] * pieces
        + [{"Sequence": {"id": "A", "type_id": 0}}],
        "pair": PLAIN["post_processor"]["pair"],
        "special_tokens": {"x": token},
    }


CHARSMAP = base64.b64encode((4).to_bytes(4, "little") + b"\0" * 4 + b"x" * 5000 + b"\0").decode()

GROWING = {
    "a normalizer that multiplies": changed(normalizer=replace("w", "w" * 10_000)),
    "a normalizer of a pattern": changed(normalizer=replace(".", "w" * 10_000, "Regex")),
    "normalizers in a row": changed(
        normalizer=several([replace("w", "w" * 10)] * 12, "normalizers")
    ),
    "normalizers in one another": changed(
        normalizer=several([several([replace("w", "w" * 100)] * 2, "normalizers")], "normalizers")
        | {"normalizers": [several([replace("w", "w" * 100)] * 2, "normalizers")]}
    ),
    "a normalizer between characters": changed(
        normalizer=several([replace("x*", "x", "Regex")] * 30, "normalizers")
    ),
    "a normalizer that adds": changed(normalizer={"type": "Prepend", "prepend": "w" * 100_000}),
    "a table of replacements": changed(
        normalizer={"type": "Precompiled", "precompiled_charsmap": CHARSMAP}
    ),
    "a decoder that multiplies": changed(decoder=replace("w", "w" * 1_000_000)),
    "a decoder of a pattern": changed(decoder=replace(".", "w" * 10_000, "Regex")),
    "decoders in a row": changed(decoder=several([replace("w", "w" * 20)] * 5, "decoders")),
    "a decoder and a normalizer": changed(
        normalizer=replace("w", "w" * 100), decoder=replace("w", "w" * 100)
    ),
    "a decoder that adds": changed(decoder={"type": "BPEDecoder", "suffix": "w" * 100_000}),
    "a frame of many tokens": changed(post_processor=template(2000, 1)),
    "a token of many tokens": changed(post_processor=template(1, 100_000)),
    "a frame of tokens of tokens": changed(post_processor=template(200, 200)),
    "a huge token": changed(
        model={**PLAIN["model"], "vocab": {**PLAIN["model"]["vocab"], "w0" * 100_000: 61}}
    ),
    "a huge added token": changed(
        added_tokens=[
            *PLAIN["added_tokens"],
            {**PLAIN["added_tokens"][0], "id": 61, "content": "x" * 100_000},
        ]
    ),
}

SLOW = {
    "a pattern of exponential time": changed(pre_tokenizer=split("(a+)+$")),
    "two ways to match": changed(pre_tokenizer=split("(a|aa)+$")),
    "two ways to match a digit": changed(pre_tokenizer=split(r"(\d|\d\d)+$")),
    "spaces of spaces": changed(pre_tokenizer=split(r"(\s+)+$")),
    "words of words": changed(pre_tokenizer=split(r"(\w+\w*)+$")),
    "a normalizer of exponential time": changed(normalizer=replace("(b+)+$", "x", "Regex")),
    "any character but one": changed(normalizer=replace("([^-]+)+$", "x", "Regex")),
    "punctuation": changed(pre_tokenizer=split(r"([!-/]+)+$")),
}

TOKENIZERS = GROWING | SLOW


def folder_of(content: str, tmp_path: Path) -> Path:
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    return tmp_path


@pytest.mark.parametrize("case", TOKENIZERS)
def test_a_tokenizer_is_refused_by_name(case: str, tmp_path: Path):
    folder = folder_of(TOKENIZERS[case], tmp_path)
    begin = time.monotonic()
    with pytest.raises(ModelError) as refused:
        load_tokenizer(folder)
    assert str(folder) in str(refused.value)
    assert time.monotonic() - begin < 2 * tokenizer_checks.TRIAL_SECONDS


def test_a_pattern_that_is_slow_and_does_not_fail_is_cut_off(tmp_path: Path, monkeypatch):
    folder = folder_of(changed(pre_tokenizer=split("(a+)+\0")), tmp_path)
    monkeypatch.setattr(tokenizer_checks, "TRIAL_SECONDS", 0.1)
    with pytest.raises(ModelError, match=r"exponential time|retry-limit-in-match"):
        load_tokenizer(folder)


def test_a_panic_over_a_text_is_an_error_of_the_data():
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(
        Regex("(ab|abab)+$"), "removed"
    )
    with pytest.raises(DataError, match="cannot encode a text"):
        encode_prompt(tokenizer, "ab" * 60 + "c")


def test_a_panic_over_tokens_is_an_error_of_the_data():
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(
        [decoders.Fuse(), decoders.Replace(Regex("(w0|w0w0)+$"), "x")]
    )
    with pytest.raises(DataError, match="cannot decode"):
        prompt_text(tokenizer, [3] * 60 + [4])


def test_rules_of_published_tokenizers_are_accepted(tmp_path: Path):
    backend = Tokenizer.from_str(json.dumps(PLAIN))
    # Of Llama 2, T5, BERT, XLM-R (NFKC) and ALBERT.
    backend.normalizer = normalizers.Sequence(
        [
            normalizers.Prepend("▁"),
            normalizers.Replace(" ", "▁"),
            normalizers.Replace(Regex(" {2,}"), "▁"),
            normalizers.Replace("``", '"'),
            normalizers.BertNormalizer(),
            normalizers.NFKC(),
        ]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    load_tokenizer(folder_of(backend.to_str(), tmp_path))
