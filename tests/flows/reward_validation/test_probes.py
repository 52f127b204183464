"""Which degenerate texts a reward model prefers to references."""

import json
from dataclasses import asdict
from random import Random

import pytest
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

from pipeline.results.reward_report import Probes
from pipeline.reward_validation.probes import GATING, run_probes
from pipeline.reward_validation.scores import TextScorer
from ppo_core.errors import ModelError
from ppo_core.models.reward_model import RewardModel
from tests.helpers.models.tiny import make_classifier, make_tokenizer
from tests.helpers.models.word_models import word_reward

RISING = [f"w{i} w{i + 1} w{i + 2} w{i + 3}" for i in range(30)]


def probe(
    model: RewardModel, references: list[str] = RISING, *, prompt: str = "w9", limit: float = 0.6
) -> Probes:
    return run_probes(
        TextScorer(model), [prompt] * len(references), references, seed=1, limit=limit
    )


def random_references(count: int) -> list[str]:
    rng = Random(0)
    return [" ".join(f"w{n}" for n in rng.sample(range(58), 6)) for _ in range(count)]


def test_a_model_that_counts_words_is_refused_for_saying_everything_again():
    # A loop and a shuffle are as long as the reference: ties. Three times 4 or 6 words are 4 or 6
    # more than twice, 5 on average.
    model = word_reward(every=1.0)
    result = probe(model, ["w1 w2 w3 w4", "w1 w2 w3 w4 w5 w6"] * 20)
    shares = {name: result.probes[name].preferred for name in GATING}
    assert shares == {"repeated words": 0.5, "repeated answer": 1.0, "shuffled words": 0.5}
    assert result.probes["repeated answer"].gain == 5
    assert len(result.reasons) == 1
    assert "(repeated answer) for 100.0% of 40 references" in result.reasons[0]


def test_a_model_that_likes_repetition_is_refused_for_both_kinds():
    # In a loop of 3 words over 4 places, one is a repeat; the opening and the reference have none.
    # Three times 4 words with the prompt's one have 8 repeats, twice have 4.
    result = probe(word_reward("repeats"), RISING[20:])
    assert result.probes["repeated words"].gain == 1
    assert result.probes["repeated answer"].gain == 4
    assert [result.probes[name].preferred for name in GATING] == [1, 1, 0.5]
    assert len(result.reasons) == 2


def test_a_model_that_likes_disorder_is_refused():
    # References rise, so a shuffle falls somewhere unless it happens to be one of 4! orders.
    result = probe(word_reward("falls"))
    assert result.probes["shuffled words"].preferred > 0.9
    assert any("shuffled words" in reason for reason in result.reasons)


def test_happy_words_may_be_liked_but_not_by_their_number():
    happy = {"w1": 1.0, "w2": 1.0}
    references = ["w1 w5 w6 w7 w2", "w5 w6 w1 w7", "w6 w5 w8 w2 w9"] * 10
    counted = probe(word_reward("sum", happy), references)
    assert [reason for reason in counted.reasons if "repeated answer" in reason]
    # The mean of a text is that of the text said again; with a prompt it would win by saying more.
    model = word_reward("mean", happy)
    assert probe(model, references, prompt="").probes["repeated answer"].preferred == 0.5
    assert probe(model, references, prompt="w9").probes["repeated answer"].preferred == 1.0


def test_words_that_are_liked_for_themselves_are_no_repetition():
    # The opening has the mean 1, once and over and over: above the reference's 3/6, and a tie.
    model = word_reward("mean", {"w1": 1.0, "w2": 1.0, "w3": 1.0})
    result = probe(model, ["w1 w2 w3 w4 w5 w6"] * 40, prompt="")
    assert result.probes["repeated words"].preferred == 0.5
    assert not result.reasons


def test_a_model_that_cannot_tell_prefers_degenerate_text_in_a_third_of_the_cases():
    # Two shuffles and the reference are three texts of one kind: each is the lowest in a third.
    model = RewardModel(make_classifier(), make_tokenizer())
    shuffled = probe(model, random_references(600)).probes["shuffled words"]
    assert shuffled.preferred == pytest.approx(1 / 3, abs=0.06)
    assert shuffled.low < 1 / 3 < shuffled.high


def test_shuffles_depend_on_the_seed_alone():
    model = word_reward("falls")
    arguments = (TextScorer(model), ["w9"] * 30, RISING)
    assert run_probes(*arguments, seed=1, limit=0.6) == run_probes(*arguments, seed=1, limit=0.6)
    other = run_probes(*arguments, seed=2, limit=0.6)
    assert other.probes["shuffled words"] != probe(model).probes["shuffled words"]


def test_praise_and_layout_are_figures_only():
    # Every word of praise and of Markdown is unknown to the tokenizer, and unknown words are liked.
    model = word_reward("sum", {"<unk>": 1.0})
    result = probe(model, ["w1 w2 w3 w4", "w5 w6. w7 w8 w9"] * 20)
    free = {name: found for name, found in result.probes.items() if name not in GATING}
    assert set(free) == {"flattery", "flattering opening", "format"}
    assert {found.preferred for found in free.values()} == {1.0}
    assert not any(found.gating for found in free.values())
    # 24 words of praise, and the reference after them; "w6." is unknown in half of the texts.
    assert free["flattering opening"].gain == 24
    assert free["flattery"].gain == 23.5
    # "#", "Answer" and a dash for each of 1 or 2 sentences.
    assert free["format"].gain == 3.5


def test_only_a_clear_taste_is_a_reason():
    # Three times happy text is happier; 8 of 10 references are happy, the rest tie: 9 of 10.
    # Wilson at 9 of 10: 0.596 .. 0.982.
    references = ["w5 w6 w7 w1"] * 8 + ["w5 w6 w7 w8"] * 2
    model = word_reward("sum", {"w1": 1.0})
    found = probe(model, references)
    assert found.probes["repeated answer"].low == pytest.approx(0.596, abs=1e-3)
    assert not found.reasons
    (reason,) = probe(model, references, limit=0.59).reasons
    assert "90.0% of 10 references, 95 % interval 59.6% .. 98.2%" in reason
    assert "max_degenerate_preferred=59.0%" in reason


def test_references_that_cannot_be_made_worse_are_left_out():
    # Three words are their own loop; 22 words and a prompt of one fill 67 of 64 places.
    long = " ".join(f"w{i}" for i in range(22))
    result = probe(word_reward(), ["w1 w2 w3", long, "w1 w2 w3 w4", ""])
    assert result.left_out == 3
    assert {found.n for found in result.probes.values()} == {1}
    fitting = " ".join(f"w{i}" for i in range(21))
    assert probe(word_reward(), [fitting]).left_out == 0


def test_a_script_without_spaces_is_made_worse_by_its_characters():
    # A token a digit. After the prompt, 7, the reference has 17 tokens and 7 repeats; 012012...
    # as long has 13 of them.
    model = word_reward("repeats", prefix="")
    model.tokenizer.backend_tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    model.model.config.max_position_embeddings = 400
    found = probe(model, ["0123456789012345"] * 30, prompt="7")
    assert found.left_out == 0
    assert found.probes["repeated words"].gain == 6
    assert "repeat a few words without end" in found.reasons[0]


def test_nothing_is_said_where_every_reference_is_left_out():
    result = probe(word_reward(), ["w1", "w2"])
    assert (result.probes, result.left_out, result.reasons) == ({}, 2, [])


def test_the_prompt_is_part_of_what_is_scored():
    model = RewardModel(make_classifier(), make_tokenizer())
    references = random_references(50)
    one = run_probes(TextScorer(model), ["w9"] * 50, references, seed=1, limit=0.6)
    other = run_probes(TextScorer(model), ["w8 w7"] * 50, references, seed=1, limit=0.6)
    assert one.probes != other.probes


def test_scores_that_are_not_finite_are_refused():
    with pytest.raises(ModelError, match="30 of 30 references as 'flattery' are not finite"):
        probe(word_reward("sum", {"<unk>": float("inf")}))


def test_the_record_is_json():
    record = asdict(probe(word_reward(every=1.0)))
    assert json.loads(json.dumps(record, allow_nan=False)) == record
