"""Options of the trainer, each in a whole run on tiny models."""

import dataclasses
import json

import pytest
import torch
from torch.testing import assert_close
from transformers import TrainerCallback

from ppo_core import PPOConfig
from ppo_core.errors import ConfigError, DataError, TrainingError
from ppo_core.models.kernels.decoder_families import fast_path
from ppo_core.models.loading import load_policy
from ppo_core.reporting.metrics_file import NEWEST_SAMPLES_FILE
from ppo_core.reporting.sample_table import NUM_NEWEST
from ppo_core.trl.ppo_trainer import PPOTrainer
from tests.helpers.models.tiny import make_classifier, make_policy, make_tokenizer
from tests.ppo_core.training.test_trainer import CONFIG as WHOLE_CONFIG
from tests.ppo_core.training.test_trainer import PROMPTS, weights
from tests.ppo_core.training.test_trainer import make_trainer as make_whole_trainer

CONFIG = dataclasses.replace(
    WHOLE_CONFIG,
    total_episodes=32,
    batch_size=8,
    per_device_train_batch_size=4,
    local_rollout_forward_batch_size=8,
    response_length=6,
)
"""Four updates of four optimizer steps."""

EVALUATION = ["w1 w2", "w3", "w4 w5 w6", "w7", "w8"]


def make_trainer(*, parts=None, **changes):
    return make_whole_trainer(dataclasses.replace(CONFIG, **changes), **(parts or {}))


def answer_lengths(prompts: list[str], responses: list[str]) -> list[float]:
    return [float(len(response.split())) for response in responses]


class Recorder(TrainerCallback):
    """Keeps the names of events in order, and the policy's weights after each update."""

    def __init__(self):
        self.events, self.weights, self.trainer = [], [], None

    def on_step_end(self, args, state, control, **kwargs):
        self.events.append("on_step_end")
        if self.trainer is not None:
            self.weights.append(weights(self.trainer))


def _record(event):
    def handler(self, args, state, control, **kwargs):
        self.events.append(event)

    return handler


EVENTS = "on_init_end on_train_begin on_step_begin on_log on_evaluate on_save on_train_end".split()
for _event in EVENTS:
    setattr(Recorder, _event, _record(_event))


# --- Precision and memory ---


def test_bf16_trains_in_bf16_and_keeps_the_weights_in_fp32():
    # Known defect, row 49: bf16=True was accepted and training ran in fp32.
    dtypes = {}
    for bf16 in (False, True):
        policy, seen = make_policy(), set()
        policy.model.layers[1].self_attn.q_proj.register_forward_hook(
            lambda _, __, output, seen=seen: seen.add((torch.is_grad_enabled(), output.dtype))
        )
        trainer = make_trainer(bf16=bf16, parts={"model": policy})
        before = weights(trainer)
        seen.clear()
        metrics = trainer.step()
        dtypes[bf16] = seen
        # Sampling and training round alike, up to the order of their sums.
        assert metrics["val/first_ratio_error"] < (0.05 if bf16 else 1e-5)
        assert {p.dtype for p in trainer._train_state.module.parameters()} == {torch.float32}
        assert any(not torch.equal(before[name], value) for name, value in weights(trainer).items())
    # The first is whether it was the update: sampling and training see the same policy.
    assert dtypes[True] == {(False, torch.bfloat16), (True, torch.bfloat16)}
    assert dtypes[False] == {(False, torch.float32), (True, torch.float32)}


def test_gradient_checkpointing_computes_twice_in_the_update_and_samples_with_a_cache():
    # Known defect, rows 37 and 49: it was "on", and never switched on.
    calls = {}
    for checkpointing in (False, True):
        policy, widths = make_policy(), {"sampling": [], "updating": []}
        trainer = make_trainer(gradient_checkpointing=checkpointing, parts={"model": policy})

        def count(_, inputs, widths=widths):
            phase = "updating" if torch.is_grad_enabled() else "sampling"
            widths[phase].append(inputs[0].shape[1])

        # Inside of the layer: its own hooks are not called again when it is computed again.
        policy.model.layers[0].mlp.register_forward_pre_hook(count)
        trainer.step()
        # In training mode the layers would drop the cache without a word.
        assert trainer.step()["val/first_ratio_error"] < 1e-5
        calls[checkpointing] = widths
    # Two updates of two passes of two minibatches, each forward and once more backward.
    assert len(calls[False]["updating"]) == 8
    assert len(calls[True]["updating"]) == 16
    # The second update samples as the first did: the prompts, and then token by token.
    assert calls[True]["sampling"] == calls[False]["sampling"]
    assert len(calls[True]["sampling"]) == 2 * CONFIG.response_length
    assert sum(width > 1 for width in calls[True]["sampling"]) == 2


def test_gradient_checkpointing_gives_the_same_gradients():
    after = []
    for checkpointing in (False, True):
        policy, critic = make_policy(), make_classifier(seed=4)
        optimizer = torch.optim.SGD([*policy.parameters(), *critic.parameters()], lr=0.1)
        trainer = make_trainer(
            gradient_checkpointing=checkpointing,
            num_ppo_epochs=1,
            num_mini_batches=1,
            parts={"model": policy, "value_model": critic, "optimizers": (optimizer, None)},
        )
        trainer.step()
        after.append({**policy.state_dict(), **critic.state_dict(prefix="critic.")})
    for name, value in after[0].items():
        assert_close(after[1][name], value, rtol=0, atol=1e-6, msg=name)
    start = make_policy().state_dict()
    assert any((after[0][name] - value).abs().max() > 1e-4 for name, value in start.items())


def test_the_name_of_the_run_and_the_published_learning_rate_arrive():
    # Known defect, row 37: run_name was ignored, and the default learning rate was another's.
    assert make_trainer(run_name="mine")._reporter.args.run_name == "mine"
    assert make_trainer(exp_name="theirs")._reporter.args.run_name == "theirs"
    assert PPOConfig().learning_rate == 3e-6
    assert make_trainer(learning_rate=3e-6).step()["lr"] == pytest.approx(3e-6)


# --- What follows the policy ---


def test_what_is_saved_is_the_running_mean_of_the_policy(tmp_path):
    recorder = Recorder()
    trainer = make_trainer(ema_decay=0.6, parts={"callbacks": [recorder]})
    recorder.trainer, mean = trainer, weights(trainer)
    trainer.train()
    assert len(recorder.weights) == 4
    for after_update in recorder.weights:
        mean = {name: 0.6 * mean[name] + 0.4 * after_update[name] for name in mean}
    trainer.save_model(tmp_path)
    saved, last = load_policy(tmp_path).state_dict(), weights(trainer)
    for name, value in mean.items():
        assert_close(saved[name], value, rtol=0, atol=1e-6, msg=name)
        assert torch.equal(last[name], recorder.weights[-1][name])
    assert any((saved[name] - last[name]).abs().max() > 1e-4 for name in last)


def test_the_reference_becomes_the_policy_every_so_many_updates():
    history = make_trainer(reference_refresh_updates=2).train()
    near = [abs(metrics["objective/kl"]) < 1e-4 for metrics in history]
    assert near == [True, False, True, False]
    assert all(torch.isfinite(torch.tensor(metrics["objective/kl"])) for metrics in history)


def test_the_coefficient_follows_the_divergence_and_is_logged():
    trainer = make_trainer(kl_target=6.0, kl_horizon=100, kl_coef=0.1)
    history = trainer.train()
    expected = 0.1
    for metrics in history:
        assert metrics["objective/kl_coef"] == pytest.approx(expected)
        error = min(max(metrics["objective/kl"] / 6.0 - 1, -0.2), 0.2)
        expected *= 1 + error * 8 / 100
    # The first divergence is 0, a fifth too low and more.
    assert history[1]["objective/kl_coef"] == pytest.approx(0.1 * (1 - 0.2 * 8 / 100))


def test_the_kl_coefficient_waits_while_only_the_critic_is_trained():
    options = {"kl_target": 6.0, "kl_horizon": 100, "kl_coef": 0.1}
    trainer = make_trainer(critic_warmup_updates=2, critic_learning_rate=1e-3, **options)
    used = [entry["objective/kl_coef"] for entry in trainer.train()]
    # The third update is the first that trains the policy. Its responses are those of the start.
    assert used == pytest.approx([0.1, 0.1, 0.1, 0.1 * (1 - 0.2 * 8 / 100)])


@pytest.mark.parametrize("shared", [False, True])
def test_a_run_resumes_from_a_checkpoint_of_the_critics_warmup(tmp_path, shared: bool):
    options = {"critic_warmup_updates": 2, "shared_critic": shared, "save_strategy": "steps"}

    def trainer(name: str) -> PPOTrainer:
        return make_trainer(**options, output_dir=str(tmp_path / name))

    whole, first, second = trainer("whole"), trainer("parts"), trainer("parts")
    whole.train()
    first.train(stop_after_updates=1)
    start = make_policy().state_dict()
    assert_close(weights(first), start, rtol=0, atol=0)
    second.train(resume_from_checkpoint=True)
    assert_close(weights(second), weights(whole), rtol=0, atol=0)
    assert any(not torch.equal(value, start[name]) for name, value in weights(second).items())


@pytest.mark.parametrize("cut", [{"top_k": 5}, {"top_p": 0.5}])
def test_restricted_sampling_records_the_behavior_and_starts_at_ratio_one(cut):
    trainer = make_trainer(kl_estimator="full", **cut)
    rollout = trainer._sample(trainer._draw_prompts())
    # What is left out gives its probability to what stays.
    gained = (rollout.behavior_logprobs - rollout.logprobs)[rollout.response_mask]
    assert (gained > 0.1).all()
    metrics = trainer.step()
    assert metrics["val/first_ratio_error"] < 1e-5
    assert metrics["objective/kl"] >= 0
    whole = make_trainer()
    assert whole._sample(whole._draw_prompts()).behavior_logprobs is None


def test_pretraining_texts_become_likelier():
    texts = [f"w{i} w{i + 1} w{i + 2} w{i + 3}" for i in range(0, 40, 4)]
    tokenizer, likelihoods = make_tokenizer(), []
    for changes, parts in (({}, {}), ({"ptx_coef": 2.0}, {"pretrain_dataset": texts})):
        trainer = make_trainer(parts=parts, **changes)
        trainer.train()
        ids = tokenizer(texts, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            likelihoods.append(-trainer.policy.model(ids, labels=ids).loss.item())
    assert likelihoods[1] > likelihoods[0] + 0.05


# --- Steps that are not taken ---


def test_three_steps_in_a_row_that_are_not_finite_end_the_run_with_the_weights_intact():
    # The squared error of such a return is infinite in fp32.
    trainer = make_trainer(parts={"reward_model": lambda prompts, responses: [1e30] * 8})
    before = weights(trainer)
    with pytest.raises(TrainingError, match=r"^3 steps in a row.*weights are unchanged"):
        trainer.train()
    assert trainer._train_state.skipped_steps == 3
    assert all(torch.equal(before[name], value) for name, value in weights(trainer).items())


def test_good_steps_between_them_let_the_run_go_on():
    scores = iter([1e30, 1.0, 1e30, 1.0])

    def reward(prompts, responses):
        return [next(scores)] * len(responses)

    trainer = make_trainer(num_ppo_epochs=1, parts={"reward_model": reward})
    before = weights(trainer)
    history = trainer.train()
    assert [metrics["val/skipped_steps"] for metrics in history] == [2, 2, 4, 4]
    assert any(not torch.equal(before[name], value) for name, value in weights(trainer).items())


# --- Callbacks ---


def test_callbacks_see_all_events_in_order(tmp_path):
    recorder = Recorder()
    make_trainer(
        total_episodes=16,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        num_sample_generations=0,
        output_dir=str(tmp_path),
        parts={"callbacks": [recorder], "eval_dataset": EVALUATION},
    ).train()
    update = ["on_step_begin", "on_step_end", "on_log"]
    assert recorder.events == [
        "on_init_end",
        "on_train_begin",
        *update,
        *update,
        "on_log",  # the evaluation's
        "on_evaluate",
        "on_save",
        "on_train_end",
    ]


def test_a_callback_may_end_the_run():
    class Stopper(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 2

    recorder = Recorder()
    trainer = make_trainer(parts={"callbacks": [recorder]})
    trainer.add_callback(Stopper())
    assert len(trainer.train()) == 2
    assert recorder.events[-1] == "on_train_end"
    assert trainer.state.global_step == 2


# --- Evaluation and samples ---


def test_an_evaluation_is_logged_every_so_many_updates(tmp_path):
    trainer = make_trainer(
        eval_strategy="steps",
        eval_steps=2,
        num_sample_generations=0,
        output_dir=str(tmp_path),
        parts={"eval_dataset": EVALUATION, "reward_model": answer_lengths},
    )
    trainer.train()
    logged = {
        entry["step"]: entry["eval/scores"]
        for entry in trainer.state.log_history
        if "eval/scores" in entry
    }
    assert logged.keys() == {2, 4}
    scores = trainer.generate_completions().scores
    assert logged[4] == pytest.approx(sum(scores) / len(EVALUATION))


def test_an_evaluation_without_prompts_is_refused_before_training():
    with pytest.raises(ConfigError, match="needs an eval_dataset"):
        make_trainer(eval_strategy="steps")


def test_completions_answer_all_evaluation_prompts_greedily_and_show_a_table(tmp_path, capsys):
    parts = {"eval_dataset": EVALUATION, "reward_model": answer_lengths}
    trainer = make_trainer(output_dir=str(tmp_path), per_device_eval_batch_size=2, parts=parts)
    completions = trainer.generate_completions()
    assert completions.queries == EVALUATION
    assert completions.scores == answer_lengths(completions.queries, completions.responses)
    for query, response in zip(EVALUATION, completions.responses, strict=True):
        ids = make_tokenizer()(query, return_tensors="pt")["input_ids"]
        greedy = make_policy().generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=9)
        new = greedy[0, ids.shape[1] :].tolist()
        new = new[: new.index(9)] if 9 in new else new
        assert response.split() == make_tokenizer().decode(new, skip_special_tokens=True).split()
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("query", "response", "score", *EVALUATION))
    written = (tmp_path / "completions" / "step-000000.jsonl").read_text().splitlines()
    assert [json.loads(line)["query"] for line in written] == EVALUATION
    assert trainer.generate_completions(sampling=True).queries == EVALUATION[:2]


def test_some_responses_of_the_last_update_lie_beside_the_metrics(tmp_path):
    asked = []

    def reward(prompts: list[str], responses: list[str]) -> list[float]:
        asked.append((prompts, responses))
        return answer_lengths(prompts, responses)

    changes = {"save_strategy": "steps", "missing_eos_penalty": None}
    trainer = make_trainer(output_dir=str(tmp_path), parts={"reward_model": reward}, **changes)
    trainer.train()
    rows = [json.loads(line) for line in (tmp_path / NEWEST_SAMPLES_FILE).read_text().splitlines()]
    last = zip(*asked[-1], answer_lengths(*asked[-1]), strict=True)
    assert [tuple(row.values()) for row in rows] == list(last)[:NUM_NEWEST]
    assert len(asked) > 1


def test_without_evaluation_prompts_there_are_no_completions():
    assert make_trainer().generate_completions() is None


@pytest.mark.parametrize(
    ("times", "updates"), [(0, []), (1, [0, 4]), (3, [0, 2, 3, 4]), (9, [0, 1, 2, 3, 4])]
)
def test_samples_are_shown_so_many_times_in_a_run(times, updates, tmp_path):
    make_trainer(
        num_ppo_epochs=1,
        num_mini_batches=1,
        num_sample_generations=times,
        output_dir=str(tmp_path),
        parts={"eval_dataset": EVALUATION[:1], "reward_model": answer_lengths},
    ).train()
    shown = sorted(path.stem for path in tmp_path.glob("completions/*.jsonl"))
    assert shown == [f"step-{update:06d}" for update in updates]


# --- What is handed over ---


def test_an_optimizer_and_a_schedule_of_ones_own_are_used():
    policy, critic = make_policy(), make_classifier(seed=4)
    optimizer = torch.optim.SGD([*policy.parameters(), *critic.parameters()], lr=0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    parts = {"model": policy, "value_model": critic, "optimizers": (optimizer, schedule)}
    history = make_trainer(total_episodes=16, parts=parts).train()
    # Four optimizer steps an update.
    assert [metrics["lr"] for metrics in history] == pytest.approx([0.5, 0.5 * 0.5**4])
    parts = {"model": policy, "value_model": critic, "optimizers": (optimizer, schedule)}
    with pytest.raises(
        ConfigError,
        match=r"critic_warmup_updates=1 .* Remove critic_warmup_updates or the scheduler",
    ):
        make_trainer(critic_warmup_updates=1, parts=parts)


def test_pretraining_texts_and_their_weight_go_together():
    for changes, parts in (({"ptx_coef": 1.0}, {}), ({}, {"pretrain_dataset": PROMPTS})):
        with pytest.raises(ConfigError, match="weight of the texts"):
            make_trainer(parts=parts, **changes)
    with pytest.raises(DataError, match="text 0 has 65 tokens"):
        make_trainer(parts={"pretrain_dataset": ["w1 " * 65]}, ptx_coef=1.0)
    # The names of splits, and the characters of a text, are no texts.
    for dataset in ({"w1 w2": ["w1 w2"]}, "w1 w2"):
        with pytest.raises(DataError, match=r"is not a data set\..*choose a split"):
            make_trainer(parts={"pretrain_dataset": dataset}, ptx_coef=1.0)


def test_prompts_padded_on_the_left_train_like_those_without_padding():
    rows = make_tokenizer()(PROMPTS)["input_ids"]
    tokenizer = make_tokenizer()
    tokenizer.padding_side = "left"
    padded = tokenizer(PROMPTS, padding=True)
    dataset = [
        {"input_ids": ids, "attention_mask": mask}
        for ids, mask in zip(padded["input_ids"], padded["attention_mask"], strict=True)
    ]
    assert any(len(ids) > len(row) for ids, row in zip(padded["input_ids"], rows, strict=True))
    histories = []
    for prompts in (rows, dataset):
        metrics = make_trainer(parts={"prompts": prompts}).step()
        histories.append({k: v for k, v in metrics.items() if not k.startswith("time/")})
    assert histories[0] == histories[1]


def test_gradient_checkpointing_leaves_the_fast_path_to_sampling_and_scoring():
    trainer = make_trainer(gradient_checkpointing=True)
    for model in (trainer.policy, trainer.critic):
        assert fast_path(model.backbone.module) is not None
