"""The gate before PPO: real reward models that are fit, and three that are not."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from pipeline.inputs.labeled_pairs import LabeledPair
from pipeline.results.reward_report import OnPolicy, RewardReport
from pipeline.reward_validation.samples import draw_samples
from pipeline.reward_validation.scores import TextScorer
from pipeline.reward_validation.validate import (
    Compare,
    Preferences,
    scored_samples,
    validate,
)
from pipeline.settings.gate_configs import RewardGateConfig
from ppo_core.data.rows.read_rows import read_rows
from ppo_core.errors import ModelError
from ppo_core.models.loading import load_reward_model
from ppo_core.models.reward_model import RewardModel
from ppo_core.supervised.supervised_config import SupervisedConfig
from ppo_core.supervised.training import train_reward_model
from ppo_core.training.answer_job import AnswerJob, run_answer_job
from tests.helpers.inputs.rows import rows_of
from tests.helpers.models.tiny import make_classifier, make_tokenizer
from tests.helpers.models.word_models import word_reward
from tests.helpers.paths import SHARED

DATA = SHARED
POLICY = str(DATA / "tinystories-656k")

stories = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not DATA.is_dir(), reason=f"{DATA} is missing"),
]


def train(folder: Path, rows: list[dict[str, str]]) -> RewardModel:
    """A reward model from the story model, as the preset of the stories trains it."""
    config = SupervisedConfig(seed=1, learning_rate=1e-3, batch_size=16, max_length=256)
    train_reward_model(POLICY, rows, config, folder)
    return load_reward_model(folder)


def texts(count: int) -> list[dict[str, str]]:
    rows = read_rows(str(DATA / "sentiment-pairs" / "train.jsonl"), "pairs")
    return list(rows.table.select(range(count)))


def turned(row: dict[str, str]) -> dict[str, str]:
    return {"chosen": row["rejected"], "rejected": row["chosen"]}


def report_on(
    model: RewardModel, training: dict[str, float] | None = None, **limits: Any
) -> RewardReport:
    """The report on the held-out pairs, the stories' prompts and the story model."""
    pairs = read_rows(str(DATA / "sentiment-pairs" / "test.jsonl"), "pairs")
    prompts = read_rows(str(DATA / "stories" / "prompts-train.jsonl"), "prompts")

    def draw(asked: list[str], *, samples_per_prompt: int, start: int) -> list[list[str]]:
        def answer(repeated: list[str]) -> list[str]:
            job = AnswerJob(
                policy=POLICY,
                tokenizer=POLICY,
                prompts=repeated,
                prompt_format="auto",
                response_length=32,
                temperature=1.0,
                seed=1 + start,
            )
            return run_answer_job(job).texts

        return draw_samples(answer, asked, samples_per_prompt=samples_per_prompt)

    return validate(
        TextScorer(model),
        Preferences(pairs),
        prompts,
        draw,
        RewardGateConfig(**limits),
        compare=None,
        training=training or {},
        seed=1,
    )


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> RewardModel:
    return train(tmp_path_factory.mktemp("good"), texts(4000))


@pytest.mark.slow
class TestStories:
    """Film reviews rated by people, and a real story model."""

    pytestmark = stories

    def test_a_model_of_film_reviews_is_fit_and_surer_pairs_are_easier(self, good: RewardModel):
        report = report_on(good)
        assert report.fit, report.reasons
        accuracy = report.accuracy
        by_margin = {name: rate.accuracy for name, rate in accuracy.by_margin.items()}
        assert accuracy.margin_of == "people"
        assert list(by_margin) == ["> 1", "> 2", "> 3", "> 4"]
        assert by_margin["> 4"] > by_margin["> 2"] > by_margin["> 1"]
        assert accuracy.longer.accuracy < accuracy.low

    @pytest.mark.slow
    def test_shuffled_labels_are_refused_for_their_accuracy(self, tmp_path: Path):
        rng = Random(0)
        rows = [row if rng.random() < 0.5 else turned(row) for row in texts(1500)]
        report = report_on(train(tmp_path, rows))
        assert not report.fit
        assert "the model does not predict people's preferences" in report.reasons[0]

    @pytest.mark.slow
    def test_a_model_that_counts_characters_is_refused_for_its_length(self, tmp_path: Path):
        rows = [
            row if len(row["chosen"]) > len(row["rejected"]) else turned(row) for row in texts(2500)
        ]
        report = report_on(train(tmp_path, rows))
        assert report.lengths.correlation > 0.9
        found = "\n".join(report.reasons)
        assert "Its score follows the length of a response (correlation +0.9" in found
        assert "prefers longer responses whatever their content" in found

    def test_a_rate_that_is_too_low_is_refused_with_a_next_step_that_works(self, tmp_path: Path):
        reports = {}
        for rate in (1e-6, "auto"):
            config = SupervisedConfig(learning_rate=rate, batch_size=16, max_length=256)
            metrics = train_reward_model(POLICY, texts(4000), config, tmp_path)
            reports[rate] = report_on(load_reward_model(tmp_path), metrics)
        assert not reports[1e-6].fit
        assert "did not learn its training pairs" in reports[1e-6].reasons[0]
        assert "learning_rate=auto, which tries" in reports[1e-6].reasons[0]
        assert reports["auto"].fit, reports["auto"].reasons

    def test_collapsed_scores_are_refused_for_that_alone(self, good: RewardModel):
        with torch.no_grad():
            good.model.score.weight.mul_(1e-4)
        try:
            (reason,) = report_on(good).reasons
        finally:
            with torch.no_grad():
                good.model.score.weight.mul_(1e4)
        assert "cannot tell one answer from another" in reason


WORDS = [{"prompt": f"w{i}", "reference": f"w{i + 9} w3 w5 w7"} for i in range(20)]


PAIRS = [{"prompt": "w9", "chosen": f"w{i} w1", "rejected": f"w{i + 1}"} for i in range(40)]


def report_on_words(
    prompts: list[dict[str, str]],
    *,
    model: RewardModel | None = None,
    pairs: list[dict[str, Any]] = PAIRS,
    num_prompts: int = 8,
    training: dict[str, float] | None = None,
    compare: Compare | None = None,
    votes: Sequence[LabeledPair] = (),
    **limits: Any,
) -> RewardReport:
    """The report on a reward model, a random one if none is given, and texts of few words."""

    def draw(asked, *, samples_per_prompt, start):
        return [[f"w{n} w2" for n in range(samples_per_prompt)] for _ in asked]

    return validate(
        TextScorer(model or RewardModel(make_classifier(), make_tokenizer())),
        Preferences(rows_of("pairs", pairs), votes),
        rows_of("prompts", prompts),
        draw,
        RewardGateConfig(num_prompts=num_prompts, **limits),
        compare=compare,
        training=training or {},
        seed=1,
    )


def test_each_block_of_prompts_is_sampled_with_random_numbers_of_its_own():
    starts = []

    def draw(asked, *, samples_per_prompt, start):
        starts.append(start)
        return [["w1"] * samples_per_prompt for _ in asked]

    scorer = TextScorer(RewardModel(make_classifier(), make_tokenizer()))
    limits = RewardGateConfig(num_prompts=8, max_prompts=20)
    blocks = list(scored_samples(scorer, rows_of("prompts", WORDS), draw, limits))
    assert starts == [0, 8, 16]
    assert [len(block.prompts) for block in blocks] == [8, 8, 4]


def test_with_its_bias_references_are_worth_nothing_and_with_its_gain_samples_vary_by_one():
    report = report_on_words(WORDS, unit_deviation=True, samples_per_prompt=6)
    model = RewardModel(make_classifier(), make_tokenizer(), bias=report.bias, gain=report.gain)
    prompts, references = zip(*(row.values() for row in WORDS), strict=True)
    assert model.score_texts(prompts, references).mean().item() == pytest.approx(0, abs=1e-6)
    asked = [prompt for prompt in prompts[:8] for _ in range(6)]
    samples = [f"w{n} w2" for _ in range(8) for n in range(6)]
    assert model.score_texts(asked, samples).std().item() == pytest.approx(1, abs=1e-5)


def test_the_gain_is_one_unless_it_is_asked_for():
    assert report_on_words(WORDS).gain == 1.0


@pytest.mark.parametrize("place", [0, 12])
def test_a_reference_that_is_too_long_for_the_model_is_left_out_of_the_bias(place: int, capsys):
    # The context has 64 tokens. The first 8 references are compared with samples.
    prompts = [*WORDS]
    prompts.insert(place, {"prompt": "w40", "reference": "w2 " * 64})
    report = report_on_words(prompts)
    assert report.bias == pytest.approx(report_on_words(WORDS).bias, abs=1e-6)
    assert (report.samples.references is None) == (place < 8)
    assert "the bias leaves out 1 of 21 references, which are too long" in capsys.readouterr().out
    assert report_on_words([prompts[place]]).bias == 0


@pytest.mark.parametrize("missing", [None, "", " "])
@pytest.mark.parametrize("number", [1, 20])
def test_without_all_references_the_reward_stays_as_it_is(number: int, missing: str | None, capsys):
    blank = [row | {"reference": missing} for row in WORDS[:number]]
    report = report_on_words([*blank, *WORDS[number:]])
    assert report.bias == 0
    assert report.samples.references is None
    assert "not every row has a reference" in capsys.readouterr().out
    # Probes change the chosen responses instead; those of two words are too short.
    assert report.probes.left_out == 40


def test_rows_of_one_prompt_count_once_in_samples_bias_and_probes():
    asked = []

    def compare(blocks):
        asked.extend(prompt for block in blocks for prompt in block.prompts)

    # The second and third row of a prompt have other references.
    repeated = [
        row if number == 0 else row | {"reference": "w2 w4 w6 w8"}
        for row in WORDS
        for number in range(3)
    ]
    assert report_on_words(repeated, compare=compare) == report_on_words(WORDS)
    assert asked == [row["prompt"] for row in WORDS]


def test_bias_and_samples_may_be_of_more_prompts_than_a_thousand():
    prompts = [{"prompt": f"w{n // 58} w{n % 58}", "reference": f"w{n % 58}"} for n in range(1010)]
    report = report_on_words(prompts, num_prompts=1005, samples_per_prompt=5)
    assert report.samples.prompts == 1005
    scores = RewardModel(make_classifier(), make_tokenizer()).score_texts(
        [row["prompt"] for row in prompts[:1005]], [row["reference"] for row in prompts[:1005]]
    )
    assert report.bias == pytest.approx(scores.mean().item(), abs=1e-6)


def test_a_bias_is_never_taken_from_scores_that_are_not_finite():
    # Samples are drawn for 8 prompts; the broken reference is that of the last one.
    model = word_reward("sum", {"w50": float("nan"), "w1": 1.0})
    with pytest.raises(ModelError, match="1 of 20 references are not finite"):
        report_on_words([*WORDS[:19], {"prompt": "w19", "reference": "w50"}], model=model)


def test_ties_are_no_good_answers_to_make_worse():
    prompts = [{"prompt": row["prompt"]} for row in WORDS]
    pairs = [{"chosen": f"w{i} w1", "rejected": f"w{i + 1}", "tie": i < 30} for i in range(40)]
    assert report_on_words(prompts, pairs=pairs).probes.left_out == 10


def test_a_model_that_claims_less_than_it_knows_is_not_refused_for_that():
    # All margins are 0.01, so it is 50 % sure and right in all pairs: an error of one half.
    model = word_reward("last", {"w1": 0.01})
    pairs = [{"prompt": "w9", "chosen": f"w{i} w1", "rejected": f"w{i} w2"} for i in range(3, 43)]
    report = report_on_words(WORDS, model=model, pairs=pairs, min_sample_deviation=0.0)
    assert report.calibration.error == pytest.approx(0.5, abs=0.01)
    assert report.reasons == []


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        # The 95 % interval of 3 of 20 (Wilson) is below one half, and the one of 6 is not.
        (3, 17, "orders 15.0% of 20 pairs of answers as people do, 95 % interval 5.2% .. 36.0%"),
        (6, 14, ""),
        (17, 3, ""),
    ],
)
def test_votes_of_people_that_contradict_the_model_refuse_it(right: int, wrong: int, message: str):
    model = word_reward("last", {"w1": 1.0})
    good, bad = "w5 w1", "w5 w2"
    votes = [LabeledPair(prompt=f"w{n}", chosen=good, rejected=bad) for n in range(right)]
    votes += [LabeledPair(prompt=f"w{n}", chosen=bad, rejected=good) for n in range(wrong)]
    pairs = [{"prompt": "w9", "chosen": f"w{i} w1", "rejected": f"w{i} w2"} for i in range(3, 43)]
    report = report_on_words(WORDS, model=model, pairs=pairs, votes=votes, min_sample_deviation=0.0)
    assert report.people
    assert (report.people.accuracy, report.people.n) == (right / 20, 20)
    assert report.fit == (not message)
    assert all(message in reason for reason in report.reasons)
    undecided = report.people.low <= 0.5 <= report.people.high
    assert undecided == any(
        "includes 50 %, the rate of a random choice" in w for w in report.warnings
    )


def test_every_limit_of_the_gate_can_refuse():
    open_gate = {
        "min_accuracy": 0.0,
        "max_calibration_error": 1.0,
        "max_length_correlation": 1.0,
        "min_shorter_accuracy": 0.0,
        "min_sample_deviation": 0.0,
        "max_degenerate_preferred": 1.0,
    }
    assert report_on_words(WORDS, **open_gate).fit
    closed = {
        "min_accuracy": (1.0, "does not predict people's preferences"),
        "max_calibration_error": (0.0, "expected calibration error"),
        "max_length_correlation": (0.0, "follows the length"),
        "min_sample_deviation": (100.0, "cannot tell one answer from another"),
        "tolerance": (1e-12, "tolerance=1e-12"),
    }
    for name, (limit, message) in closed.items():
        report = report_on_words(WORDS, **{**open_gate, name: limit})
        assert not report.fit
        assert any(message in reason for reason in report.reasons), name
        assert name == "tolerance" or len(report.reasons) == 1


@pytest.mark.parametrize(
    ("training", "cause"),
    [
        ({}, "does not predict people's preferences"),
        ({"loss": 0.5, "learning_rate": 1e-5}, "does not predict people's preferences"),
        (
            {"loss": 0.6921, "learning_rate": 1e-5},
            "loss was 0.692 at the end of the training, and a model that guesses has 0.693. The "
            "learning rate of 1.0e-05 does not suit this model. Run again with --set "
            "reward_model_training.learning_rate=auto, which",
        ),
        (
            {"loss": 3.1, "learning_rate": 1e-5, "loss_at_1.0e-05": 0.7, "loss_at_3.0e-05": 0.71},
            "Three learning rates were tried (loss on other pairs: 0.700 with 1.0e-05, 0.710 with "
            "3.0e-05), so the preferences are the likelier cause.",
        ),
    ],
)
def test_a_model_at_chance_is_refused_with_the_cause_that_its_training_shows(training, cause):
    rng = Random(0)
    pairs = [
        dict(zip(("chosen", "rejected"), rng.sample([f"w{i} w1", f"w{i} w2"], 2), strict=True))
        for i in range(3, 50)
    ]
    report = report_on_words(WORDS, pairs=pairs, training=training)
    (reason,) = [reason for reason in report.reasons if "accuracy on" in reason]
    assert cause in reason
    assert report.training == training


def on_policy(rate: float, low: float, high: float) -> OnPolicy:
    return OnPolicy(
        judge="rule",
        prompts=64,
        per_prompt=8,
        pairs=256,
        ties=0,
        invalid=0,
        accuracy=None,
        best_of={"2": rate, "4": rate},
        low=low,
        high=high,
        least=0.5,
        spent={},
    )


NOTHING_ELSE = {
    "max_calibration_error": 1.0,
    "max_length_correlation": 1.0,
    "min_shorter_accuracy": 0.0,
    "min_sample_deviation": 0.0,
    "max_degenerate_preferred": 1.0,
    "min_accuracy": 1.0,
}


def test_what_is_good_on_the_policys_samples_is_only_warned_of_for_its_given_pairs():
    found = on_policy(0.66, 0.57, 0.75)
    report = report_on_words(WORDS, compare=lambda blocks: found, **NOTHING_ELSE)
    assert report.fit
    assert found.usefulness == "good"
    (warning,) = report.warnings
    assert "min_accuracy=100.0%" in warning


@pytest.mark.parametrize(
    ("found", "cause"),
    [
        (
            on_policy(0.44, 0.41, 0.48),
            "the judge does not prefer the answers with the highest reward",
        ),
        (on_policy(0.52, 0.48, 0.56), "256 pairs of answers do not show"),
    ],
)
def test_what_is_useless_on_the_policys_samples_is_refused(found: OnPolicy, cause: str):
    limits = {**NOTHING_ELSE, "min_accuracy": 0.0}
    report = report_on_words(WORDS, compare=lambda blocks: found, **limits)
    (reason,) = report.reasons
    assert cause in reason
    assert f"wins {found.best_of['4']:.1%} against another answer" in reason
    assert not report.warnings


def test_a_good_model_is_only_warned_of_for_degenerate_text_that_it_likes():
    # Its score grows with every word, so it likes the answer that is repeated three times.
    wordy = word_reward("sum", every=1.0)
    limits = {**NOTHING_ELSE, "min_accuracy": 0.0, "max_degenerate_preferred": 0.6}
    for best, low, fit in ((0.66, 0.57, True), (0.58, 0.51, False)):
        found = on_policy(best, low, 0.75)
        report = report_on_words(WORDS, model=wordy, compare=lambda _, found=found: found, **limits)
        assert report.fit == fit
        said = report.warnings if fit else report.reasons
        assert any("It prefers degenerate text" in sentence for sentence in said)
