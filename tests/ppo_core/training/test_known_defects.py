"""Defects that other PPO implementations had, by the number of their row in our list of them.

Numbers after a row are issues or pull requests of TRL unless a project is named. Each test, or
the test named in `COVERED`, was seen to fail with the defect put back by hand.
"""

import ast
import copy
import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from pipeline.evaluation.compare_in_both_orders import compare
from pipeline.evaluation.evaluate_policies import evaluate_policies
from pipeline.judges.chat_judge import ChatJudge
from pipeline.judges.openai_model import OpenAIModel
from pipeline.judges.reply_cache import ReplyCache
from pipeline.settings.judge_config import JudgingConfig
from pipeline.settings.make_settings import make_settings
from ppo_core import PPOConfig, answer_prompts
from ppo_core.algorithm.reward_shaping import token_rewards
from ppo_core.algorithm.whitening import masked_whiten
from ppo_core.data.rows.encoding import encode_row
from ppo_core.data.types import Rollout, Scores
from ppo_core.errors import ConfigError, JudgeError, TrainingError
from ppo_core.models.critic import Critic
from ppo_core.models.policy import LanguageModel
from ppo_core.models.reward_model import RewardModel
from ppo_core.ppo.logprobs_and_values import critic_values
from ppo_core.ppo.schedule import make_schedule
from ppo_core.reporting.health import HealthMonitor
from ppo_core.reporting.metrics import objective_metrics, update_metrics
from ppo_core.supervised.examples.reward_pairs import pair_encoding
from ppo_core.supervised.supervised_config import SupervisedConfig
from tests.helpers.inputs.pipeline_inputs import tiny_table
from tests.helpers.models.rollouts import make_rollout, row_of
from tests.helpers.models.tiny import (
    EOS,
    make_classifier,
    make_policy,
    make_prompts,
    make_tokenizer,
)
from tests.helpers.paths import ROOT
from tests.helpers.servers.fault_server import fault_server, say
from tests.ppo_core.ppo.test_update import (
    make_config,
    make_experience,
    make_train_state,
    weights_after,
)
from tests.ppo_core.rollout.test_sample_responses import sample
from tests.ppo_core.training.test_trainer import CLOCKS, CONFIG, PROMPTS, LogRecorder, make_trainer

NAN = float("nan")

COVERED = {
    3: ("tests/ppo_core/algorithm/test_arithmetic.py", "test_rewards_by_hand"),
    7: (
        "tests/ppo_core/algorithm/test_arithmetic.py",
        "test_a_missing_stop_costs_the_penalty_and_a_present_one_nothing",
    ),
    12: (
        "tests/ppo_core/rollout/test_sample_responses.py",
        "test_recorded_log_probabilities_are_those_of_a_training_pass",
    ),
    14: (
        "tests/ppo_core/ppo/test_update.py",
        "test_every_pass_steps_once_a_minibatch_and_sees_every_response_once",
    ),
    15: (
        "tests/ppo_core/ppo/test_update.py",
        "test_every_pass_steps_once_a_minibatch_and_sees_every_response_once",
    ),
    18: ("tests/ppo_core/ppo/test_update.py", "test_the_microbatch_size_changes_nothing"),
    19: (
        "tests/ppo_core/ppo/test_update.py",
        "test_one_step_is_plain_autograd_on_the_mean_over_all_counted_tokens",
    ),
    20: ("tests/ppo_core/training/test_trainer.py", "test_two_processes_are_one"),
    22: (
        "tests/ppo_core/ppo/test_update.py",
        "test_gradients_are_scaled_down_to_the_norm_that_is_set",
    ),
    24: (
        "tests/ppo_core/algorithm/test_arithmetic.py",
        "test_the_same_value_everywhere_standardises_to_zero_and_not_to_nan",
    ),
    26: (
        "tests/ppo_core/trl/classic/test_classic_trainer.py",
        "test_processes_of_which_one_is_far_and_one_is_near_stop_early_together",
    ),
    27: ("tests/ppo_core/training/test_trainer.py", "test_two_processes_are_one"),
    29: (
        "tests/ppo_core/training/test_trainer.py",
        "test_the_same_object_as_policy_and_reference_is_refused",
    ),
    31: (
        "tests/ppo_core/models/test_adapters.py",
        "test_a_second_adapter_on_top_of_one_is_refused",
    ),
    32: ("tests/ppo_core/training/test_trainer.py", "test_a_policy_that_cannot_learn_is_refused"),
    33: (
        "tests/ppo_core/models/test_adapters.py",
        "test_a_reward_adapter_on_the_causal_base_scores_like_the_classifier_it_was",
    ),
    37: (
        "tests/ppo_core/training/test_trainer_options.py",
        "test_gradient_checkpointing_computes_twice_in_the_update_and_samples_with_a_cache",
    ),
    38: (
        "tests/ppo_core/distributed/test_choose_sharding.py",
        "test_two_processes_get_the_results_of_one",
    ),
    39: ("tests/ppo_core/training/test_trainer.py", "test_saving_writes_what_transformers_loads"),
    40: (
        "tests/ppo_core/training/test_export.py",
        "test_a_run_that_was_interrupted_goes_on_to_the_bit",
    ),
    41: ("tests/ppo_core/checkpointing/test_recovery.py", "test_each_saved_state_is_needed"),
    42: (
        "tests/ppo_core/training/test_answer_prompts.py",
        "test_the_same_seed_gives_the_same_texts_in_batches_of_any_size",
    ),
    43: ("tests/docs/test_docs.py", "test_the_published_python_examples_run"),
    44: ("tests/flows/evaluation/test_win_rate.py", "test_a_failed_verdict_counts_for_nobody"),
    45: ("tests/flows/evaluation/test_win_rate.py", "test_a_failed_verdict_counts_for_nobody"),
    46: (
        "tests/flows/evaluation/test_win_rate.py",
        "test_a_judge_that_prefers_a_position_gives_ties_only",
    ),
    48: (
        "tests/flows/judges/test_judge_prompt.py",
        "test_hostile_texts_come_through_as_they_are_in_every_place",
    ),
    49: (
        "tests/ppo_core/training/test_trainer_options.py",
        "test_bf16_trains_in_bf16_and_keeps_the_weights_in_fp32",
    ),
    51: (
        "tests/ppo_core/rollout/test_sample_responses.py",
        "test_a_sampled_pad_token_counts_like_any_other",
    ),
}


@pytest.mark.parametrize("row", COVERED)
def test_the_test_that_is_named_exists(row):
    path, name = COVERED[row]
    tree = ast.parse((ROOT / path).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_no_row_is_forgotten():
    here = {int(row) for row in re.findall(r"^# row (\d+)", Path(__file__).read_text(), re.M)}
    assert here | COVERED.keys() == set(range(1, 53))


def step(prompts=PROMPTS, *, parts=None, **changes) -> dict[str, float]:
    """The metrics of one update."""
    config = dataclasses.replace(CONFIG, **changes)
    return make_trainer(config, prompts=prompts, **(parts or {})).step()


def plain_logits(rollout: Rollout, b: int) -> torch.Tensor:
    """Tempered logits before each response token, by the plain forward pass on one row."""
    start = int(rollout.prompt_lengths[b])
    with torch.no_grad():
        logits = make_policy()(tensor([row_of(rollout, b)])).logits[0, start - 1 : -1]
    return logits / rollout.temperature


def plain_logprobs(rollout: Rollout, b: int) -> torch.Tensor:
    chosen = rollout.response_ids[b, : rollout.response_lengths[b], None]
    return plain_logits(rollout, b).log_softmax(-1).gather(1, chosen)[:, 0]


def first_greedy_token(*prompt: int) -> int:
    with torch.no_grad():
        return int(make_policy()(tensor([prompt])).logits[0, -1].argmax())


# --- Masks, tokens, ends -----------------------------------------------------------


# row 1 (#6121, #2022, #2496)
def test_padding_adds_nothing_to_the_entropies():
    experience = make_experience()
    config = make_config(per_device_train_batch_size=3, num_mini_batches=2)
    _, sums = weights_after(config, experience, make_train_state(0.0))
    entropies = [
        torch.distributions.Categorical(logits=plain_logits(experience.rollout, b)).entropy()
        for b in range(8)
    ]
    expected = torch.cat(entropies).mean().item()
    assert update_metrics(sums)["policy/entropy_avg"] == pytest.approx(expected, abs=1e-5)

    rollout = sample(LanguageModel(make_policy()), make_prompts([4, 2, 6] * 4), stop=9, length=30)
    assert not rollout.response_mask.all()
    scores = Scores(
        ref_logprobs=rollout.logprobs, values=rollout.logprobs, scores=torch.zeros(len(rollout))
    )
    metrics = objective_metrics(rollout, scores, torch.zeros(12, 30), kl_coef=0.1)
    surprise = [-plain_logprobs(rollout, b).sum() for b in range(12)]
    expected = torch.stack(surprise).mean().item()
    assert metrics["objective/entropy"] == pytest.approx(expected, rel=1e-5)


# row 2 (#6809, #6861)
def test_ratio_and_divergence_are_means_over_counted_tokens():
    experience = make_experience()
    rollout = experience.rollout
    config = make_config(per_device_train_batch_size=3, num_mini_batches=2)
    _, sums = weights_after(config, experience, make_train_state(0.0))
    new = torch.cat([plain_logprobs(rollout, b) for b in range(8)])
    ratio = torch.exp(new - rollout.logprobs[rollout.response_mask])
    metrics = update_metrics(sums)
    assert metrics["policy/approxkl_avg"] == pytest.approx(
        (ratio.log() ** 2).mean().item() / 2, abs=1e-5
    )
    assert metrics["val/ratio"] == pytest.approx(ratio.mean().item(), abs=1e-5)
    assert metrics["val/ratio_var"] == pytest.approx(ratio.var(correction=0).item(), abs=1e-5)


# row 4 (#5338)
def test_the_penalty_looks_for_the_stop_token_that_is_set():
    # Nearly greedy, so that each response begins with a token that is known beforehand.
    first = first_greedy_token(4, 5)
    assert first not in (EOS, 9)
    stopped = {"temperature": 0.01, "stop_token_id": first}
    free, fined = (step(["w1 w2"], missing_eos_penalty=p, **stopped) for p in (0.0, 100.0))
    assert fined["objective/scores"] == free["objective/scores"]

    tokenizer = make_tokenizer()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(first)
    going_on = {"temperature": 0.01, "parts": {"processing_class": tokenizer}}
    free, fined = (step(["w1 w2"], missing_eos_penalty=p, **going_on) for p in (0.0, 100.0))
    assert fined["val/num_eos_tokens"] == 0
    assert fined["objective/scores"] == pytest.approx(free["objective/scores"] - 100, abs=1e-3)


# row 5 (#6802, #6805)
def test_a_stop_token_in_the_prompt_neither_ends_nor_excuses_a_response():
    prompts = ["w6 w1", "w2 w6 w6"]  # w6 is token 9, the stop token
    free, fined = (step(prompts, missing_eos_penalty=p) for p in (0.0, 100.0))
    unstopped = CONFIG.batch_size - fined["val/num_eos_tokens"]
    assert unstopped > 0
    assert fined["val/response_length"] > 1
    fine = 100 * unstopped / CONFIG.batch_size
    assert fined["objective/scores"] == pytest.approx(free["objective/scores"] - fine, abs=1e-3)


# row 6 (#5303)
def test_a_pad_token_that_is_the_end_of_sequence_token_changes_nothing():
    updates = []
    for pad in ("<pad>", "<eos>"):
        tokenizer, policy, classifier = make_tokenizer(), make_policy(), make_classifier()
        tokenizer.pad_token = pad
        policy.config = copy.deepcopy(
            policy.config
        )  # tests.helpers.models.tiny shares it between policies
        policy.config.pad_token_id = classifier.config.pad_token_id = tokenizer.pad_token_id
        parts = {
            "processing_class": tokenizer,
            "model": policy,
            "reward_model": RewardModel(classifier, tokenizer),
        }
        metrics = step(parts=parts, stop_token_id=None, response_length=24)
        updates.append({name: metrics[name] for name in metrics.keys() - CLOCKS})
    assert updates[0]["val/num_eos_tokens"] > 0
    assert updates[0] == updates[1]


# row 7 (#2012, #2033)
def test_a_negative_penalty_is_refused():
    with pytest.raises(ConfigError, match=r"missing_eos_penalty=-1\.0 must be at least 0"):
        PPOConfig(missing_eos_penalty=-1.0)


# row 8 (#2528)
def test_sampling_is_told_the_stop_token():
    first = first_greedy_token(4, 5)
    metrics = step(["w1 w2"], temperature=0.01, stop_token_id=first)
    assert metrics["val/response_length"] == 1
    assert metrics["val/num_eos_tokens"] == CONFIG.batch_size

    settings = {"response_length": 9, "temperature": 0.0, "seed": 1}
    model, tokenizer = make_policy(), make_tokenizer()
    going_on = answer_prompts(model, tokenizer, ["w1 w2"], **settings)
    stopped = answer_prompts(model, tokenizer, ["w1 w2"], **settings, stop_token_id=first)
    assert going_on.texts != [""]
    assert stopped.texts == [""]


# row 9 (verl #1850, #50, #1758)
def test_a_value_belongs_to_the_state_before_its_token_and_is_zero_after_the_end():
    reward_model = RewardModel(make_classifier(), make_tokenizer(), bias=0.3)
    rollout = make_rollout()
    values = critic_values(Critic.from_reward_model(reward_model), rollout, 2)
    for b, (start, length) in enumerate(zip((3, 7, 1), (5, 2, 4), strict=True)):
        row = row_of(rollout, b)
        states = [row[: start + t] for t in range(length)]
        assert_close(values[b, :length], reward_model.score_encoded(states, 8))
        assert (values[b, length:] == 0).all()


# row 10 (verl #6361)
def test_what_the_mask_hides_may_be_nan():
    mask = tensor([[True, True, False], [True, False, False]])
    hidden = tensor([[1.0, 2.0, NAN], [6.0, NAN, NAN]])
    rewards = token_rewards(tensor([5.0, 7.0]), hidden, mask, kl_coef=0.1)
    assert_close(rewards, tensor([[-0.1, 4.8, 0.0], [6.4, 0.0, 0.0]]))
    for keep_mean in (True, False):
        out = masked_whiten(hidden, mask, keep_mean=keep_mean)
        assert out.isfinite().all()
        assert (out[~mask] == 0).all()


# row 11 (#1718)
def test_the_mask_has_the_shape_of_the_responses_however_short_they_are():
    first = first_greedy_token(4, 5)
    prompts = [[4, 5], [7, 8, 9, 4, 5]]
    rollout = sample(LanguageModel(make_policy()), prompts[:1], temperature=0, stop=first)
    assert rollout.response_lengths.tolist() == [1]
    for one in (rollout, sample(LanguageModel(make_policy()), prompts, stop=first)):
        assert one.response_mask.shape == one.response_ids.shape == one.logprobs.shape
        assert one.response_mask.sum(1).tolist() == one.response_lengths.tolist()


# row 12 (#235, #256, #262, #487, #1003)
def test_restrictions_in_the_models_generation_config_are_not_sampled_with():
    plain, restricted, prompts = make_policy(), make_policy(), make_prompts([3, 9, 5])
    restricted.generation_config.update(
        do_sample=True, top_k=1, top_p=0.1, min_new_tokens=15, repetition_penalty=5.0
    )
    one, other = (sample(LanguageModel(model), prompts, stop=9) for model in (plain, restricted))
    assert torch.equal(one.response_ids, other.response_ids)
    assert torch.equal(one.logprobs, other.logprobs)
    for b in range(3):
        length = one.response_lengths[b]
        assert_close(one.logprobs[b, :length], plain_logprobs(one, b), rtol=0, atol=1e-5)


# row 13 (#2358, #2110)
def test_the_ratio_before_the_first_step_is_one_and_is_logged():
    metrics = step(temperature=0.7)
    assert metrics["val/first_ratio_error"] < 1e-5
    assert metrics["val/ratio_var"] > 1e-8


# --- Arithmetic of steps and batches -----------------------------------------------


# row 16 (#1740, #1743)
def test_a_started_batch_of_episodes_is_finished_and_part_of_an_epoch_is_refused():
    history = make_trainer(dataclasses.replace(CONFIG, total_episodes=20)).train()
    assert [metrics["episode"] for metrics in history] == [16, 32]
    assert [metrics["lr"] for metrics in history] == pytest.approx([1e-3, 0.5e-3])
    assert (
        make_schedule(
            PPOConfig(num_train_epochs=1.5, batch_size=16), num_prompts=40, num_processes=1
        ).total_episodes
        == 64
    )
    with pytest.raises(ConfigError, match="num_ppo_epochs"):
        make_settings({"ppo": {"num_ppo_epochs": 1.5}}, {})


# row 17 (#2463)
def test_the_trainers_optimizer_moves_the_whole_critic():
    trainer = make_trainer()
    before = {name: p.detach().clone() for name, p in trainer.critic.named_parameters()}
    trainer.step()
    after = dict(trainer.critic.named_parameters())
    assert [name for name in before if torch.equal(before[name], after[name])] == []


# row 21 (#1918)
def test_the_first_step_is_taken_at_the_first_learning_rate():
    train_state = make_train_state()
    only_the_first = torch.optim.lr_scheduler.LambdaLR(
        train_state.optimizer, lambda done: float(done == 0)
    )
    train_state = dataclasses.replace(train_state, scheduler=only_the_first)
    before = {name: p.detach().clone() for name, p in train_state.module.named_parameters()}
    after, _ = weights_after(make_config(), make_experience(), train_state)
    assert any(not torch.equal(before[name], after[name]) for name in before)


# row 23 (#1180)
def test_the_divergence_that_is_reported_is_the_estimate_that_is_set():
    k1, k3 = (
        step(parts={"ref_model": make_policy(seed=4)}, kl_estimator=estimator, kl_coef=0.5)
        for estimator in ("k1", "k3")
    )
    assert k1["objective/entropy"] == k3["objective/entropy"]  # the same responses
    assert abs(k1["objective/kl"] - k3["objective/kl"]) > 0.1
    for metrics in (k1, k3):
        assert metrics["objective/non_score_reward"] == pytest.approx(
            -0.5 * metrics["objective/kl"]
        )


# row 24 (#727)
def test_one_token_in_the_whole_batch_is_whitened_without_nan():
    metrics = step(
        batch_size=1, num_mini_batches=1, response_length=1, whiten_rewards=True, total_episodes=1
    )
    assert all(torch.tensor(value).isfinite() for value in metrics.values())


# row 25 (#224)
def test_statistics_are_numbers_and_hold_no_graph():
    _, sums = weights_after(make_config(per_device_train_batch_size=3), make_experience())
    assert {type(value) for value in vars(sums).values()} == {float}
    assert {type(value) for value in step().values()} == {float}


# row 28 (#488, #454, #1347)
def test_a_ratio_that_explodes_is_held_by_the_clipping_or_stops_with_the_next_move():
    spike = make_experience()
    spike.advantages[0, 0] = -1.0
    spike.rollout.logprobs[0, 0] = -25.0
    train_state = make_train_state(1.0)
    before = {name: p.detach().clone() for name, p in train_state.module.named_parameters()}
    after, sums = weights_after(make_config(max_grad_norm=0.01), spike, train_state)
    assert sums.ratio_error > 1e4
    distance = sum(((after[name] - before[name]) ** 2).sum() for name in before).sqrt()
    assert distance.item() == pytest.approx(0.01, rel=1e-2)

    spike.rollout.logprobs[0, 0] = -1e4
    weights_after(make_config(max_grad_norm=0.01), spike, train_state)
    assert train_state.skipped_in_a_row == 1
    with pytest.raises(
        TrainingError, match=r"The weights are unchanged since the last good step\."
    ):
        HealthMonitor(make_config(max_skipped_steps=1)).check_skipped(1)
    assert all(torch.equal(p, after[name]) for name, p in train_state.module.named_parameters())


# --- Models ------------------------------------------------------------------------


# row 30 (#1534)
def test_answers_shown_as_the_sft_policys_are_not_the_trained_policys(tmp_path):
    settings = make_settings(tiny_table(tmp_path), {})
    folder = tmp_path / "trained"
    make_policy(seed=7).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    result = evaluate_policies(settings, settings.policy, str(folder), None, tmp_path)
    samples = [json.loads(line) for line in Path(result.samples).read_text().splitlines()]
    for who, model in (("sft", make_policy()), ("ppo", make_policy(seed=7))):
        expected = answer_prompts(
            model,
            make_tokenizer(),
            [row["prompt"] for row in samples],
            response_length=settings.ppo.response_length,
            temperature=settings.evaluation.temperature,
            seed=settings.seed,
        )
        assert [row[who] for row in samples] == expected.texts
    assert [row["sft"] for row in samples] != [row["ppo"] for row in samples]


# row 30 (#1534)
def test_the_divergence_is_from_the_reference_and_not_from_the_policy():
    assert abs(step(parts={"ref_model": make_policy(seed=4)})["objective/kl"]) > 0.1


# row 34 (#2273, #3292); of functions as rewards, tests/ppo_core/ppo/test_rewards.py
def test_without_a_critic_it_starts_from_the_reward_model():
    reward_model = RewardModel(make_classifier(), make_tokenizer(), bias=0.3)
    rollout = make_rollout()
    critic = make_trainer(reward_model=reward_model, value_model=None).critic
    assert_close(
        critic_values(critic, rollout, 3),
        critic_values(Critic.from_reward_model(reward_model), rollout, 3),
    )
    own = Critic.from_policy(make_policy(seed=5))
    assert make_trainer(reward_model=reward_model, value_model=own).critic is own


class ListeningRewardModel(RewardModel):
    """Remembers which texts it was asked about, and what it said."""

    def score_texts(self, prompts, responses, batch_size=64):
        scores = super().score_texts(prompts, responses, batch_size)
        self.heard = prompts, responses, scores
        return scores


# row 35 (#1674, #1979, #3595, #2523)
def test_a_reward_model_with_another_tokenizer_is_handed_the_policys_texts():
    tokenizer = make_tokenizer(prefix="v")
    tokenizer.add_tokens([f"w{i}" for i in range(58)])
    model = make_classifier()
    model.resize_token_embeddings(len(tokenizer))
    reward_model = ListeningRewardModel(model, tokenizer)
    metrics = step(parts={"reward_model": reward_model}, missing_eos_penalty=0.0)
    prompts, responses, scores = reward_model.heard
    assert set(prompts) <= set(PROMPTS)
    words = " ".join(responses).split()
    assert words
    assert all(word.startswith(("w", "<unk>")) for word in words)
    assert metrics["objective/scores"] == pytest.approx(scores.mean().item(), abs=1e-6)


# row 36 (#1702)
def test_a_reward_model_is_trained_on_the_tokens_that_it_is_scored_on():
    # Together the two texts are one unknown word, apart they are two known ones.
    tokenizer = make_tokenizer()
    pair = {"prompt": "w1", "chosen": "w2", "rejected": "w3"}
    trained_on = encode_row(tokenizer, pair_encoding(tokenizer, SupervisedConfig()), pair)
    reward_model = RewardModel(make_classifier(), tokenizer)
    assert trained_on["chosen"] == reward_model.encode("w1", "w2") == [4, 5, EOS]
    assert trained_on["rejected"] == reward_model.encode("w1", "w3") == [4, 6, EOS]


# --- Judges ------------------------------------------------------------------------


# row 47
def test_a_spent_budget_ends_the_evaluation_with_an_error(tmp_path):
    with fault_server([say("VERDICT: A")]) as server:
        config = JudgingConfig(base_url=server.url, max_calls=12)
        judge = ChatJudge(OpenAIModel("model", config), config, ReplyCache(tmp_path))
        with pytest.raises(JudgeError, match=r"(?s)12.*max_calls"):
            compare(judge, list("abcdefghij"), ["x"] * 10, ["y"] * 10)
    assert len(server.requests) <= 12


# --- Seen when another implementation was run --------------------------------------


# row 50
def test_the_rate_of_episodes_is_no_whole_number_and_every_update_is_logged():
    recorder = LogRecorder()
    history = make_trainer(callbacks=[recorder]).train()
    assert len(recorder.logged) == len(history) == 2
    assert not any(metrics["eps"].is_integer() for metrics in recorder.logged)


# row 52
def test_the_place_of_a_score_does_not_depend_on_the_longest_response():
    scores, kl = tensor([5.0, 7.0]), tensor([[1.0, 2.0, 0.0], [3.0, 0.0, 0.0]])
    mask = tensor([[True, True, False], [True, False, False]])
    together = token_rewards(scores, kl, mask, kl_coef=0.1)
    for b, length in ((0, 2), (1, 1)):
        by_itself = token_rewards(
            scores[b : b + 1], kl[b : b + 1, :length], mask[b : b + 1, :length], kl_coef=0.1
        )
        assert_close(together[b, :length], by_itself[0])
        assert (together[b, length:] == 0).all()
