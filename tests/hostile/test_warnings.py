"""Wrong rewards, labels and numbers: said in words within three updates, or refused."""

import dataclasses
import random
import time
from collections import Counter

import pytest
import torch

from pipeline.reward_validation.accuracy import measure_accuracy
from pipeline.reward_validation.reward_gate import accuracy_too_low
from pipeline.settings.gate_configs import RewardGateConfig
from ppo_core.data.types import Rollout
from ppo_core.reporting.metrics import repetition_reward
from tests.helpers.runs.forked_python import run_python
from tests.ppo_core.training.test_trainer import CONFIG, make_trainer

THREE_UPDATES = dataclasses.replace(
    CONFIG,
    total_episodes=72,
    batch_size=24,
    num_ppo_epochs=1,
    response_length=12,
    stop_token_id=None,
    missing_eos_penalty=None,
    num_mini_batches=1,
)

# --- A reward that pays for repetition -----------------------------------------


def repeated_words(text: str) -> float:
    words = text.split()
    return len(words) - len(set(words))


def most_frequent(text: str) -> float:
    counts = Counter(text.split())
    return max(counts.values(), default=0)


def share_of_repeats(text: str) -> float:
    return repeated_words(text) / max(1, len(text.split()))


def few_words(text: str) -> float:
    return -len(set(text.split())) / max(1, len(text.split()))


def repeats_and_length(text: str) -> float:
    return repeated_words(text) + len(text) / 20


def repeats_with_noise(text: str) -> float:
    return repeated_words(text) + random.gauss(0, 0.3)


PAYS = [
    repeated_words,
    most_frequent,
    share_of_repeats,
    few_words,
    repeats_and_length,
    repeats_with_noise,
]


def length(text: str) -> float:
    return len(text) / 10


def brevity(text: str) -> float:
    return -len(text) / 10


def noise(text: str) -> float:
    return random.random()


def nothing(text: str) -> float:
    return 1.0


def variety(text: str) -> float:
    return -repeated_words(text)


def large_numbers(text: str) -> float:
    return sum(int(word[1:]) for word in text.split() if word[1:].isdigit()) / 100


HONEST = [length, brevity, noise, nothing, variety, large_numbers]


def warnings_of(function, caplog) -> list[str]:
    def reward(prompts: list[str], responses: list[str]) -> list[float]:
        return [function(response) for response in responses]

    make_trainer(THREE_UPDATES, reward_model=reward).train()
    live = (text for text in caplog.messages if text.startswith("Update "))
    return [text for text in live if "Reward for repetition" in text]


def test_a_reward_that_pays_for_repetition_is_said_within_three_updates(caplog):
    (message,) = warnings_of(repeated_words, caplog)
    assert message.startswith(("Update 2. ", "Update 3. "))
    assert "The reward pays for repetition" in message


def random_responses(rng: random.Random, count: int) -> list[list[int]]:
    """Responses as an untrained policy gives them, some of them short."""
    return [[rng.randrange(3, 40) for _ in range(rng.randrange(6, 20))] for _ in range(count)]


def measured(function, seed: int, count: int = 64) -> float:
    responses = random_responses(random.Random(seed), count)
    texts = [" ".join(f"w{token}" for token in response) for response in responses]
    scores = torch.tensor([float(function(text)) for text in texts])
    return repetition_reward(rollout_of(responses), scores)


@pytest.mark.parametrize("function", PAYS)
def test_whatever_pays_for_repetition_is_measured(function):
    random.seed(0)
    assert all(measured(function, seed) > 0.5 for seed in range(20))


@pytest.mark.parametrize("function", HONEST)
def test_nothing_else_is_measured_as_repetition(function):
    random.seed(0)
    assert all(measured(function, seed) < 0.5 for seed in range(50))


def rollout_of(responses: list[list[int]]) -> Rollout:
    longest = max(map(len, responses))
    ids = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in responses])
    lengths = torch.tensor(list(map(len, responses)))
    empty = torch.zeros(len(ids), longest)
    return Rollout(
        prompt_ids=ids,
        prompt_lengths=lengths,
        response_ids=ids,
        response_lengths=lengths,
        response_mask=torch.arange(longest) < lengths[:, None],
        has_stop=lengths > 0,
        logprobs=empty,
        behavior_logprobs=None,
        temperature=1.0,
    )


def test_the_metric_is_high_only_for_repetition_at_equal_length():
    rng = random.Random(0)
    lengths = [rng.randrange(4, 30) for _ in range(64)]
    responses = [[rng.randrange(3, 12) for _ in range(n)] for n in lengths]
    rollout = rollout_of(responses)
    repeats = torch.tensor([1 - len(set(ids)) / len(ids) for ids in responses])
    assert repetition_reward(rollout, repeats) > 0.99
    assert repetition_reward(rollout, -repeats) == 0
    # Longer texts repeat more words. A reward for length is not a reward for repetition.
    assert torch.corrcoef(torch.stack([repeats, torch.tensor(lengths)]))[0, 1] > 0.8
    assert repetition_reward(rollout, torch.tensor(lengths, dtype=torch.float32)) < 0.2
    assert repetition_reward(rollout, torch.ones(64)) == 0
    assert repetition_reward(rollout_of(responses[:7]), repeats[:7]) == 0
    noise = [
        repetition_reward(rollout_of(responses[:8]), torch.rand(8, generator=generator))
        for generator in (torch.Generator().manual_seed(n) for n in range(500))
    ]
    assert sum(value > 0.5 for value in noise) <= 3


def test_equal_responses_count_once():
    rng = random.Random(0)
    few = [[rng.randrange(3, 12) for _ in range(12)] for _ in range(9)]
    repeats = torch.tensor([1 - len(set(ids)) / len(ids) for ids in few])
    noisy = repeats + torch.tensor([rng.gauss(0, 0.15) for _ in few])
    once = repetition_reward(rollout_of(few), noisy)
    assert repetition_reward(rollout_of(few * 20), noisy.repeat(20)) == pytest.approx(once)
    # The scores of equal responses, which differ with the prompt, are averaged.
    apart = torch.cat([noisy + 0.5, noisy - 0.5])
    assert repetition_reward(rollout_of(few * 2), apart) == pytest.approx(once, abs=1e-5)
    assert repetition_reward(rollout_of(few[:7] * 20), repeats[:7].repeat(20)) == 0


# --- Reversed preferences ------------------------------------------------------


def pairs(count: int):
    from pipeline.inputs.labeled_pairs import LabeledPair, label_pairs

    rows = [{"prompt": "w1", "chosen": f"w2 w{n}", "rejected": "w3"} for n in range(count)]
    found: list[LabeledPair] = label_pairs(rows)
    return found


@pytest.mark.parametrize(
    ("right", "words"),
    [
        (0, "chosen and rejected are swapped"),
        (10, "chosen and rejected are swapped"),
        (50, "does not predict people's preferences"),
        (100, ""),
    ],
)
def test_the_gate_names_swapped_labels(right, words):
    chosen = [1.0] * right + [-1.0] * (100 - right)
    accuracy = measure_accuracy(chosen, [0.0] * 100, pairs(100))
    reason = accuracy_too_low(accuracy, RewardGateConfig(), {})
    assert words in reason and bool(reason) == bool(words)


# --- NaN in one of two processes -----------------------------------------------

NOT_FINITE = {
    "score": "1 of 16 scores are not finite",
    "everywhere": "16 of 16 scores are not finite",
    "critic": "steps in a row had a score, a loss or a gradient that is not finite",
    "policy": "8 of 8 sampled responses have a log-probability that is not finite",
    "reference": "steps in a row had a score, a loss or a gradient that is not finite",
    "error": "ZeroDivisionError",
    "shape": "Return one float for each response",
}


@pytest.mark.slow
@pytest.mark.parametrize("where", NOT_FINITE)
def test_numbers_that_are_not_finite_in_one_process_are_said_by_both(where):
    started = time.monotonic()
    ran = run_python(
        "-m",
        "tests.helpers.jobs.nan_job",
        where,
        variables={"CUDA_VISIBLE_DEVICES": ""},
        processes=2,
    )
    assert time.monotonic() - started < 60
    assert ran.returncode != 0, ran.stderr[-3000:]
    assert NOT_FINITE[where] in ran.stderr, ran.stderr[-3000:]


def test_skipped_steps_are_said_in_the_first_update(caplog):
    config = dataclasses.replace(THREE_UPDATES, max_skipped_steps=100)
    trainer = make_trainer(config, reward_model=lambda prompts, texts: [1.0] * len(texts))
    with torch.no_grad():
        next(trainer.critic.parameters()).fill_(float("nan"))
    trainer.train()
    message, end = [text for text in caplog.messages if "Skipped steps" in text]
    assert end.startswith("What was wrong in this training: Update 1.")
    assert message.startswith("Update 1. Skipped steps: rise of val/skipped_steps is ")
    assert "not finite" in message and "max_skipped_steps" in message
