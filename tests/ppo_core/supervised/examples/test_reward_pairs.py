"""Pairs of a reward model: their token ids, margins and batches."""

import pytest

from ppo_core.data.encode_prompts import encode_dialogue
from ppo_core.data.rows.encoding import encode_row
from ppo_core.data.rows.row_error import RowError
from ppo_core.supervised.examples.reward_pairs import collate_pairs, pair_encoding
from ppo_core.supervised.supervised_config import SupervisedConfig
from tests.helpers.inputs.rows import read_row
from tests.helpers.models.chat import ASSISTANT, ENDED, make_chat_tokenizer, say
from tests.helpers.models.tiny import EOS


def pair(row, template=None, **changes):
    tokenizer = make_chat_tokenizer(template)
    read = read_row("pairs", row, is_chat=template is not None)
    return encode_row(tokenizer, pair_encoding(tokenizer, SupervisedConfig(**changes)), read)


def test_a_pair_of_texts_has_its_prompt_in_front_or_none():
    texts = {"chosen": "w1", "rejected": ""}
    assert pair({"prompt": "w0", **texts}) == {
        "chosen": [3, 4, EOS],
        "rejected": [3, EOS],
        "margin": 0.0,
    }
    assert pair(texts)["chosen"] == [4, EOS]
    assert pair({**texts, "rejected": "w2"}, end_of_text=False)["rejected"] == [5]


PROMPT = say("w0", "w1", "w2")
CHOSEN, REJECTED = ({"role": "assistant", "content": text} for text in ("w3", "w4"))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": PROMPT, "chosen": [CHOSEN], "rejected": [REJECTED]},
        {"prompt": PROMPT, "chosen": "w3", "rejected": "w4"},
        {"chosen": [*PROMPT, CHOSEN], "rejected": [*PROMPT, REJECTED]},
    ],
)
def test_pairs_of_messages_are_what_the_reward_model_reads_when_it_scores(row):
    encoded = pair(row, ENDED)
    tokenizer = make_chat_tokenizer(ENDED)
    assert encoded["chosen"] == encode_dialogue(tokenizer, PROMPT, "w3", end=True)
    assert encoded["rejected"] == encode_dialogue(tokenizer, PROMPT, "w4", end=True)
    assert encoded["rejected"][-3:] == [ASSISTANT, 7, EOS]


def test_a_pair_keeps_its_margin():
    assert pair({"chosen": "w0", "rejected": "w1", "margin": 2})["margin"] == 2.0


def test_a_pair_with_a_text_of_no_token_is_refused():
    with pytest.raises(RowError, match="without tokens"):
        pair({"chosen": "w0", "rejected": ""}, end_of_text=False)


def test_pairs_keep_the_chosen_response_first():
    rows = [
        {"chosen": [3, 4, 1], "rejected": [3, 1], "margin": 0.5},
        {"chosen": [5], "rejected": [6], "margin": 0.0},
    ]
    batch = collate_pairs(rows)
    assert batch["input_ids"].tolist() == [[[3, 4, 1], [3, 1, 0]], [[5, 0, 0], [6, 0, 0]]]
    assert batch["lengths"].tolist() == [[3, 2], [1, 1]]
    assert batch["margins"].tolist() == [0.5, 0.0]


def test_a_batch_has_weights_only_if_its_pairs_have_them():
    rows = [{"chosen": [3], "rejected": [4], "margin": 0.0, "weight": each} for each in (1.0, 0.25)]
    assert collate_pairs(rows)["weights"].tolist() == [1.0, 0.25]
    plain = [{name: value for name, value in row.items() if name != "weight"} for row in rows]
    assert "weights" not in collate_pairs(plain)
