"""Rows encoded in a batch are exactly the rows encoded alone."""

import random

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from ppo_core.data.encode_prompts import encode_prompt, encode_prompts, response_segments
from ppo_core.data.rows import read_rows as reader
from ppo_core.data.rows.describe import describe_reading
from ppo_core.data.rows.encoding import encode_batch, encode_row
from ppo_core.data.rows.overlong import fit_prompts
from ppo_core.data.rows.row_error import RowError, attempt
from ppo_core.data.segments import encode_sequence
from ppo_core.errors import ConfigError, DataError
from ppo_core.supervised.examples.encoded_rows import encode_rows
from ppo_core.supervised.examples.reward_pairs import pair_encoding
from ppo_core.supervised.examples.sft_examples import example_encoding
from ppo_core.supervised.supervised_config import SupervisedConfig
from tests.helpers.inputs.rows import rows_of
from tests.helpers.models.chat import say
from tests.helpers.models.chat_models import TEMPLATES, make_instruct_tokenizer
from tests.helpers.slow_cases import slow

FAMILIES = [*TEMPLATES, "text"]


def make_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of the family; that of "text" adds both a start and an end token."""
    if family != "text":
        return make_instruct_tokenizer(family)
    tokenizer = make_instruct_tokenizer("chatml")
    tokenizer.chat_template = None
    end = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{end} $A {end}", special_tokens=[(end, tokenizer.eos_token_id)]
    )
    return tokenizer


def random_rows(family: str, count: int) -> list[dict]:
    """Return rows of prompt, chosen, rejected and completion, with special tokens and no texts."""
    rng, tokenizer = random.Random(family), make_tokenizer(family)
    words = ["a", "be", "é", " ", "\n", tokenizer.eos_token, *tokenizer.all_special_tokens]

    def text() -> str:
        return " ".join(rng.choices(words, k=rng.randrange(6)))

    def prompt():
        if family == "text":
            return "p" + text()
        turns = say(*(text() for _ in range(rng.choice([1, 1, 3]))))
        return [{"role": "system", "content": "s"}, *turns] if rng.random() < 0.3 else turns

    return [
        {"prompt": prompt(), **{name: text() for name in ("chosen", "rejected", "completion")}}
        for _ in range(count)
    ]


def shown(outcome):
    """Return an encoded row, or the text of the error, which can be compared."""
    return str(outcome) if isinstance(outcome, RowError) else outcome


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("encoding_of", [pair_encoding, example_encoding])
@pytest.mark.parametrize("end", [True, False])
def test_a_row_does_not_depend_on_the_rows_that_are_encoded_with_it(family, encoding_of, end):
    tokenizer, rows = make_tokenizer(family), random_rows(family, 80)
    encoding = encoding_of(tokenizer, SupervisedConfig(end_of_text=end))
    alone = [attempt(encode_row, tokenizer, encoding, row) for row in rows]
    together = encode_batch(tokenizer, encoding, rows)
    assert list(map(shown, together)) == list(map(shown, alone))
    if family == "no-system":
        assert 0 < sum(isinstance(row, RowError) for row in together) < len(rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_many_prompts_have_the_tokens_of_each(family, monkeypatch):
    monkeypatch.setattr("ppo_core.data.encode_prompts.ROWS_AT_ONCE", 7)
    tokenizer = make_tokenizer(family)
    prompts = [row["prompt"] for row in random_rows(family, 30)]
    prompts = [prompt for prompt in prompts if family != "no-system" or len(prompt) % 2]
    mixed = [*prompts, [5, 6], "", "a text", "a text"]
    assert encode_prompts(tokenizer, mixed) == [encode_prompt(tokenizer, one) for one in mixed]


def test_text_that_ends_by_itself_keeps_its_end_and_an_added_end_is_removed():
    tokenizer = make_tokenizer("text")
    end = tokenizer.eos_token
    assert encode_prompts(tokenizer, ["a", f"a{end}", ""]) == [
        [0, *tokenizer("a", add_special_tokens=False)["input_ids"]],
        [0, *tokenizer("a", add_special_tokens=False)["input_ids"], 0, 0],
        [0],
    ]


@pytest.mark.parametrize("overlong", ["truncate", *slow("drop", "error")])
@pytest.mark.parametrize("family", ["llama-3", "text"])
def test_the_size_of_a_batch_changes_no_row_and_no_digest(family, overlong, monkeypatch, tmp_path):
    tokenizer, found = make_tokenizer(family), []
    good = random_rows(family, 20)
    rows = rows_of("pairs", good * 30, is_chat=family != "text")
    lengths = sorted(len(pair["chosen"]) for pair in encoded(rows, tokenizer, 4000, "drop"))
    for size in (1, 7, 1000):
        monkeypatch.setattr(reader, "ROWS_AT_ONCE", size)
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / str(size))
        found.append(outcome_of(rows, tokenizer, lengths[-1], overlong))
    assert found[0] == found[1] == found[2]


def outcome_of(rows, tokenizer, limit, overlong):
    """Return all that encoding gives: rows, digest and counts, or the text of the error."""
    try:
        kept = encoded(rows, tokenizer, limit, overlong)
    except DataError as error:
        return str(error)
    return list(kept), kept.digest, kept.left_out


def encoded(rows, tokenizer, limit, overlong):
    config = SupervisedConfig(max_length=limit)
    return encode_rows("pairs", rows, tokenizer, config, limit=limit, overlong=overlong)


def test_ties_are_skipped_and_counted():
    row = {"prompt": "q", "responses": ["a", "b", "c"], "scores": [2, 2, 1]}
    found = encoded(rows_of("pairs", [row] * 2), make_tokenizer("text"), 100, "error")
    assert len(found) == 4
    assert describe_reading(found).startswith("the rows, less 2 ties: 4 rows, reading prompt, ")


def test_the_first_row_that_is_too_long_is_named():
    prompts = [{"prompt": "a"}] * 3 + [{"prompt": "a" * 9}] * 2
    tokenizer = make_tokenizer("text")
    with pytest.raises(DataError, match="Row 3 has 10 tokens, and at most 8 fit"):
        fit_prompts(
            rows_of("prompts", prompts), tokenizer, context=9, response_length=1, overlong="error"
        )
    # A context without room for any prompt is an error of the setting, not of a row.
    with pytest.raises(ConfigError, match=r"context of 9 tokens has no room .* response_length=9"):
        fit_prompts(
            rows_of("prompts", prompts), tokenizer, context=9, response_length=9, overlong="drop"
        )


def test_the_first_prompt_that_cannot_be_encoded_is_named():
    prompts = ["a"] * 1200 + [[10**9], [10**8]]
    with pytest.raises(DataError, match="Row 1200: A prompt has the token id 1000000000"):
        encode_prompts(make_tokenizer("text"), prompts)


def test_start_and_end_tokens_that_a_text_already_has_are_not_added_again():
    tokenizer = make_tokenizer("text")
    start = end = tokenizer.bos_token = tokenizer.eos_token
    assert encode_prompt(tokenizer, f"{start}p") == encode_prompt(tokenizer, "p")
    given, added = (
        encode_sequence(tokenizer, response_segments(tokenizer, text, end=True))
        for text in (f"a{end}", "a")
    )
    assert given == added and added[-1] == tokenizer.eos_token_id
    config = SupervisedConfig()
    texts = [{"text": f"{start}p{end}"}, {"text": "p"}]
    encoding = example_encoding(tokenizer, config)
    rendered, plain = (encode_row(tokenizer, encoding, row) for row in texts)
    assert rendered == plain
