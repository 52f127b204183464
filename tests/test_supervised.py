"""SFT and reward-model training: what counts in the losses, what is refused, and determinism."""

import math
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
)

from pipeline.demo_task import write_base_model
from ppo_core.config import SupervisedConfig
from ppo_core.errors import ConfigError, DataError, ModelError, TrainingError
from ppo_core.supervised import (
    IGNORED_LABEL,
    PairRanker,
    collate_examples,
    collate_pairs,
    encode_example,
    encode_pair,
    preference_loss,
    train_reward_model,
    train_sft,
)

EXAMPLES = [
    {"prompt": "i lost the ring . tl;dr :", "completion": "lost ring"},
    {"prompt": "it cost ten dollars . i felt sad . tl;dr :", "completion": "cost ten felt sad"},
]
PAIRS = [
    {"prompt": "i lost the ring . tl;dr :", "chosen": "lost ring", "rejected": "lost tent"},
    {"prompt": "i felt sad . tl;dr :", "chosen": "felt sad", "rejected": ""},
]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    write_base_model(folder, seed=1)
    return folder


def settings(**changes) -> SupervisedConfig:
    return SupervisedConfig(**{"learning_rate": 1e-3, "batch_size": 2, "max_length": 64, **changes})


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


# --- What counts -----------------------------------------------------------------


def test_only_the_completion_and_its_end_are_learned(base):
    tokenizer = AutoTokenizer.from_pretrained(base)
    row = encode_example(tokenizer, EXAMPLES[0], 0, settings())
    # <bos> i lost the ring . tl;dr : | lost ring <eos>
    assert tokenizer.decode(row["input_ids"]) == "<bos> i lost the ring . tl;dr : lost ring <eos>"
    assert row["labels"] == [IGNORED_LABEL] * 8 + row["input_ids"][8:]
    assert len(row["labels"]) == 11


def test_end_of_text_false_appends_nothing(base):
    tokenizer = AutoTokenizer.from_pretrained(base)
    row = encode_example(tokenizer, EXAMPLES[0], 0, settings(end_of_text=False))
    assert tokenizer.decode(row["input_ids"][8:]) == "lost ring"


def test_examples_are_padded_on_the_right_and_padding_does_not_count():
    rows = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8], "labels": [8]}]
    batch = collate_examples(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 6, 7], [8, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


def test_pairs_keep_the_chosen_response_first(base):
    tokenizer = AutoTokenizer.from_pretrained(base)
    pair = encode_pair(tokenizer, PAIRS[1], 0, settings())
    assert tokenizer.decode(pair["chosen"]) == "<bos> i felt sad . tl;dr : felt sad <eos>"
    assert tokenizer.decode(pair["rejected"]) == "<bos> i felt sad . tl;dr : <eos>"
    batch = collate_pairs([pair])
    assert batch["lengths"].tolist() == [[10, 8]]
    assert batch["input_ids"].shape == (1, 2, 10)
    assert batch["input_ids"][0, 0].tolist() == pair["chosen"]


def test_a_pair_needs_no_prompt(base):
    tokenizer = AutoTokenizer.from_pretrained(base)
    pair = encode_pair(tokenizer, {"chosen": "sad", "rejected": "proud"}, 0, settings())
    assert tokenizer.decode(pair["chosen"]) == "<bos> sad <eos>"


def test_preference_loss_matches_the_numbers_done_by_hand():
    # differences 0 and ln 3: -log(1/2) = ln 2, -log(3/4) = ln(4/3); their mean is ln(8/3) / 2
    loss = preference_loss(torch.tensor([1.0, 2.0 + math.log(3)]), torch.tensor([1.0, 2.0]))
    assert_close(loss, torch.tensor(math.log(8 / 3) / 2))


def test_scores_do_not_depend_on_padding_neighbours_or_pad_tokens_in_the_text(base):
    classifier = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    ranker = PairRanker(classifier).eval().double()
    # The first row ends with the token that also fills up the second.
    ids = torch.tensor([[4, 9, 0, 0], [7, 8, 0, 0]])
    both = ranker.score(ids, torch.tensor([4, 2]))
    first = ranker.score(ids[:1], torch.tensor([4]))
    second = ranker.score(ids[1:, :2], torch.tensor([2]))
    assert_close(both, torch.cat([first, second]), rtol=0, atol=1e-6)


def test_the_head_starts_at_the_published_scale(base):
    torch.manual_seed(0)
    classifier = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    head = PairRanker(classifier).head.weight
    # 128 draws of standard deviation 1/sqrt(129) = 0.0880; four standard errors are 0.022.
    assert head.std().item() == pytest.approx(0.088, abs=0.022)


# --- The trainings ---------------------------------------------------------------


def test_sft_learns_its_examples(base, tmp_path):
    metrics = train_sft(base, EXAMPLES, settings(num_epochs=30), tmp_path / "sft")
    assert metrics["steps"] == 30
    assert metrics["rows"] == 2
    assert metrics["loss"] < 0.1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "sft")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "sft")
    prompt = tokenizer(EXAMPLES[0]["prompt"], return_tensors="pt")["input_ids"]
    answer = model.generate(prompt, max_new_tokens=5, do_sample=False)[0, prompt.shape[1] :]
    assert tokenizer.decode(answer) == "lost ring <eos>"


def test_reward_model_learns_its_pairs_and_loads_as_a_classifier_with_one_label(base, tmp_path):
    metrics = train_reward_model(base, PAIRS, settings(num_epochs=30), tmp_path / "rm")
    assert metrics["loss"] < 0.1
    assert (tmp_path / "rm" / "model.safetensors").exists()
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm")
    assert saved.config.num_labels == 1
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "rm")
    ids = [encode_pair(tokenizer, pair, 0, settings()) for pair in PAIRS]
    chosen, rejected = (
        [saved(torch.tensor([pair[name]])).logits.item() for pair in ids]
        for name in ("chosen", "rejected")
    )
    assert chosen[0] > rejected[0]
    assert chosen[1] > rejected[1]


def test_the_same_seed_gives_the_same_weights_bit_for_bit_and_another_does_not(base, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        config = settings(batch_size=1, seed=seed)
        # More than 50 batches: fewer are all sorted by length, whatever the seed.
        train_sft(base, EXAMPLES * 30, config, tmp_path / name)
        train_reward_model(tmp_path / name, PAIRS * 30, config, tmp_path / f"rm-{name}")
    for kind in ("", "rm-"):
        a, b, c = (
            (tmp_path / f"{kind}{name}" / "model.safetensors").read_bytes() for name in "abc"
        )
        assert a == b
        assert a != c


def test_the_model_that_training_starts_from_is_left_as_it_was(base, tmp_path):
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    train_sft(base, EXAMPLES, settings(), tmp_path / "sft")
    assert {path.name: path.read_bytes() for path in base.iterdir()} == before


# --- What is refused -------------------------------------------------------------


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([], "no rows"),
        ([{"prompt": "sad", "text": "sad"}], "no column 'completion'; it has: prompt, text"),
        ([{"prompt": None, "completion": "sad"}], "Row 0: 'prompt' is NoneType, not text"),
        (
            [EXAMPLES[0], {"prompt": "sad " * 62, "completion": "sad"}],
            "1 of 2 rows .* row 1 with 65",
        ),
    ],
)
def test_unusable_examples_are_refused_before_training(base, tmp_path, examples, message):
    with pytest.raises(DataError, match=message):
        train_sft(base, examples, settings(), tmp_path / "sft")
    assert not (tmp_path / "sft").exists()


def test_an_empty_completion_without_an_end_is_refused(base, tmp_path):
    rows = [{"prompt": "sad", "completion": ""}]
    with pytest.raises(DataError, match="Row 0 has an empty completion"):
        train_sft(base, rows, settings(end_of_text=False), tmp_path / "sft")


def test_rows_beyond_the_models_context_are_refused_whatever_the_settings_say(base, tmp_path):
    rows = [{"chosen": "sad " * 200, "rejected": "sad"}]
    with pytest.raises(DataError, match="longer than 128 tokens"):
        train_reward_model(base, rows, settings(max_length=1000), tmp_path / "rm")


def test_a_loss_that_is_not_finite_stops_the_run_and_saves_nothing(base, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(base)
    model.model.norm.weight.data.fill_(math.nan)
    model.save_pretrained(tmp_path / "broken")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "broken")
    with pytest.raises(TrainingError, match="loss is nan at step 1"):
        train_sft(tmp_path / "broken", EXAMPLES, settings(), tmp_path / "sft")
    assert not (tmp_path / "sft" / "model.safetensors").exists()


def test_a_classifier_that_does_not_read_the_last_token_is_refused():
    tiny = BertConfig(
        vocab_size=8,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        num_labels=1,
    )
    with pytest.raises(ModelError, match="no last-token classifier"):
        PairRanker(BertForSequenceClassification(tiny))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", 0.0),
        ("num_epochs", 0),
        ("batch_size", 0),
        ("max_length", 0),
        ("warmup_ratio", 1.0),
        ("weight_decay", -0.1),
    ],
)
def test_settings_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=f"{name}={value}"):
        SupervisedConfig(**{name: value})
