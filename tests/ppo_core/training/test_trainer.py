"""The whole loop on tiny models: it learns, repeats itself to the bit, and says what is wrong."""

import dataclasses
import json
import traceback

import pytest
import torch
from torch.testing import assert_close
from transformers import TrainerCallback

from ppo_core import PPOConfig
from ppo_core.config.ppo_config import PPOConfig as PlainConfig
from ppo_core.data.prompt_set import make_run_prompts
from ppo_core.errors import ConfigError, DataError, ModelError, TrainingError
from ppo_core.models.loading import load_policy
from ppo_core.models.reward_model import RewardModel
from ppo_core.ppo import objective, update
from ppo_core.training.model_setup import join_processes, set_up_models
from ppo_core.training.trainer import Trainer
from ppo_core.trl.ppo_trainer import PPOTrainer
from tests.helpers.models.tiny import make_classifier, make_policy, make_tokenizer
from tests.helpers.runs.forked_python import run_python

PROMPTS = [f"w{i} w{(3 * i) % 50} w{(7 * i) % 50}"[: 3 + 3 * (i % 3)].strip() for i in range(40)]

CONFIG = PPOConfig(
    total_episodes=32,
    batch_size=16,
    num_ppo_epochs=2,
    num_mini_batches=2,
    per_device_train_batch_size=3,
    local_rollout_forward_batch_size=5,
    response_length=8,
    learning_rate=1e-3,
    temperature=1.0,
    missing_eos_penalty=1.0,
    stop_token_id=9,
    whiten_rewards=True,
    save_strategy="no",
    disable_tqdm=True,
)

METRICS = {
    "eps",
    "objective/kl",
    "objective/entropy",
    "objective/non_score_reward",
    "objective/rlhf_reward",
    "objective/scores",
    "policy/approxkl_avg",
    "policy/clipfrac_avg",
    "policy/entropy_avg",
    "loss/policy_avg",
    "loss/value_avg",
    "val/clipfrac_avg",
    "val/ratio",
    "val/ratio_var",
    "val/num_eos_tokens",
    "lr",
    "episode",
}
CLOCKS = {"eps", "time/sampling", "time/scoring", "time/updating"}


def make_trainer(config=CONFIG, *, prompts=PROMPTS, **changes) -> PPOTrainer:
    parts = {
        "processing_class": make_tokenizer(),
        "model": make_policy(),
        "ref_model": make_policy(),
        "reward_model": RewardModel(make_classifier(), make_tokenizer()),
        **changes,
    }
    return PPOTrainer(config, train_dataset=prompts, **parts)


def weights(trainer: PPOTrainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.policy.model.state_dict().items()}


class LogRecorder(TrainerCallback):
    """Keeps what is logged."""

    def __init__(self):
        self.logged = []

    def on_log(self, args, state, control, *, logs, **kwargs):
        self.logged.append(logs)


@pytest.mark.parametrize("shared_critic", [False, True])
def test_few_calls_lead_from_the_step_to_the_losses_which_are_computed_once(
    shared_critic: bool, monkeypatch
):
    calls = {"policy_loss": [], "value_loss": []}

    def noted(name: str):
        own = getattr(objective, name)

        def compute(*args, **settings):
            # Calls of our functions, without those of torch between them.
            frames = [frame for frame in traceback.extract_stack() if "/ppo_core/" in frame[0]]
            ours = [frame.name for frame in frames if "/tests/" not in frame.filename]
            calls[name].append(len(ours) - ours.index("step"))
            return own(*args, **settings)

        return compute

    for name in calls:
        monkeypatch.setattr(objective, name, noted(name))
    # The calls of a second thread do not begin with the step.
    monkeypatch.setattr(update, "may_run_both", lambda *args, **named: False)
    changes = {"per_device_train_batch_size": 8, "shared_critic": shared_critic}
    make_trainer(dataclasses.replace(CONFIG, **changes)).step()
    assert max(calls["policy_loss"]) <= 7
    # Two epochs of two minibatches, each of one microbatch.
    assert [len(depths) for depths in calls.values()] == [4, 4]


def test_every_metric_is_logged_after_every_update():
    recorder = LogRecorder()
    history = make_trainer(callbacks=[recorder]).train()
    assert [{**logs, "epoch": None} for logs in recorder.logged] == [
        {**metrics, "epoch": None} for metrics in history
    ]
    assert len(history) == 2
    assert set(history[0]) >= METRICS
    assert [metrics["episode"] for metrics in history] == [16, 32]
    assert history[0]["lr"] == pytest.approx(1e-3)
    assert history[1]["lr"] == pytest.approx(0.5e-3)


def test_the_trainer_of_scripts_only_translates():
    def numbers(trainer: Trainer) -> list[dict[str, float]]:
        history = trainer.train()
        return [{k: v for k, v in each.items() if k not in CLOCKS} for each in history]

    tokenizer, policy = make_tokenizer(), make_policy()
    plain = PlainConfig(**dataclasses.asdict(CONFIG))
    config, engine = join_processes(plain, policy)
    reward = RewardModel(make_classifier(), tokenizer)
    models = set_up_models(
        config, tokenizer, engine, policy=policy, reference=make_policy(), reward=reward
    )
    prompts = make_run_prompts(PROMPTS, None, tokenizer, policy, config)
    trainer = Trainer(config, models, prompts, engine=engine)
    assert numbers(trainer) == numbers(make_trainer())
    with pytest.raises(dataclasses.FrozenInstanceError):
        trainer.config.kl_coef = 1.0


def test_the_first_update_starts_at_the_reference():
    first = make_trainer().train()[0]
    assert abs(first["objective/kl"]) < 1e-4
    assert first["val/first_ratio_error"] < 1e-5
    assert first["objective/rlhf_reward"] == pytest.approx(
        first["objective/non_score_reward"] + first["objective/scores"]
    )


def test_the_same_seed_gives_the_same_weights_to_the_bit_and_another_does_not():
    runs = []
    for seed in (1, 1, 2):
        trainer = make_trainer(dataclasses.replace(CONFIG, seed=seed))
        history = trainer.train()
        for metrics in history:
            for clock in CLOCKS:
                del metrics[clock]
        runs.append((weights(trainer), history))
    assert all(torch.equal(runs[0][0][name], runs[1][0][name]) for name in runs[0][0])
    assert runs[0][1] == runs[1][1]
    assert any(not torch.equal(runs[0][0][name], runs[2][0][name]) for name in runs[0][0])


def test_batch_splitting_changes_nothing_but_rounding():
    split = make_trainer()
    whole = make_trainer(
        dataclasses.replace(
            CONFIG, per_device_train_batch_size=16, local_rollout_forward_batch_size=16
        )
    )
    split.step(), whole.step()
    for name, weight in weights(whole).items():
        # Adam divides by the gradient's own size, so rounding in a tiny gradient shows.
        assert_close(weights(split)[name], weight, rtol=0, atol=2e-5, msg=name)


def test_the_policy_learns_what_the_reward_model_likes():
    config = dataclasses.replace(
        CONFIG,
        total_episodes=64 * 24,
        batch_size=64,
        per_device_train_batch_size=64,
        local_rollout_forward_batch_size=64,
        kl_coef=0.0,
        missing_eos_penalty=0.0,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
    )
    history = make_trainer(config).train()
    scores = [metrics["objective/scores"] for metrics in history]
    assert scores[-1] > scores[0] + 0.4
    assert history[-1]["objective/kl"] > 0.1


@pytest.mark.slow
def test_the_divergence_holds_the_policy_back():
    divergences = []
    for kl_coef in (0.0, 1.0):
        config = dataclasses.replace(
            CONFIG,
            total_episodes=64 * 16,
            batch_size=64,
            per_device_train_batch_size=64,
            local_rollout_forward_batch_size=64,
            kl_coef=kl_coef,
            learning_rate=3e-3,
        )
        divergences.append(make_trainer(config).train()[-1]["objective/kl"])
    assert divergences[1] < 0.5 * divergences[0]


def test_the_reference_and_the_reward_model_do_not_move():
    trainer = make_trainer()
    trainer.train()
    for frozen, fresh in (
        (trainer.reference.model, make_policy()),
        (trainer.rewards.models()[0].model, make_classifier()),
    ):
        for name, weight in fresh.state_dict().items():
            assert torch.equal(frozen.state_dict()[name], weight)


def test_a_reward_model_with_other_tokens_reads_texts():
    tokenizer = make_tokenizer(words=100)
    model = make_classifier()
    model.resize_token_embeddings(len(tokenizer))
    reward_model, seen = RewardModel(model, tokenizer), []
    plain = reward_model.encode
    reward_model.encode = lambda prompt, response: seen.append(prompt) or plain(prompt, response)
    trainer = make_trainer(reward_model=reward_model)
    seen.clear()  # prompts are tried before the training
    trainer.step()
    assert len(seen) == CONFIG.batch_size
    assert set(seen) <= set(PROMPTS)


def test_a_critic_of_other_tokens_is_never_copied():
    reward_model = RewardModel(make_classifier("gpt2"), make_tokenizer(prefix="v"))
    trainer = make_trainer(reward_model=reward_model)
    assert type(trainer.critic.model) is type(trainer.policy.model.base_model)
    assert (trainer.critic.head.weight == 0).all()


def test_saving_writes_what_transformers_loads(tmp_path):
    trainer = make_trainer()
    trainer.train()
    trainer.save_model(tmp_path)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        assert torch.equal(load_policy(tmp_path)(ids).logits, trainer.policy.model(ids).logits)
    assert (tmp_path / "model.safetensors").exists()
    assert (tmp_path / "tokenizer.json").exists()


def test_nothing_is_learned_from_a_batch_with_a_score_that_is_not_finite(caplog):
    calls = []

    def reward(prompts, responses):
        calls.append(prompts)
        return [float("nan") if len(calls) == 1 and b == 3 else 0.5 * b for b in range(16)]

    config = dataclasses.replace(CONFIG, missing_eos_penalty=None)
    trainer = make_trainer(config, reward_model=reward)
    before = weights(trainer)
    first = trainer.step()
    assert all(torch.equal(before[name], weight) for name, weight in weights(trainer).items())
    assert f"The first of them is nan, for the prompt {calls[0][3]!r}" in caplog.text
    assert first["val/skipped_steps"] == 4
    second = trainer.step()
    assert second["val/skipped_steps"] == 4
    assert second["objective/scores"] == 3.75
    assert any(not torch.equal(before[name], weight) for name, weight in weights(trainer).items())
    # The schedule ends with the run all the same.
    assert trainer._train_state.scheduler.last_epoch == 8


def test_too_many_batches_in_a_row_with_scores_that_are_not_finite_end_the_run():
    trainer = make_trainer(
        dataclasses.replace(CONFIG, total_episodes=80),
        reward_model=lambda prompts, responses: [float("inf")] * len(responses),
    )
    with pytest.raises(TrainingError, match="3 steps in a row had a score, a loss or a gradient"):
        trainer.train()


def test_a_full_memory_ends_the_run_with_the_settings_to_change():
    trainer = make_trainer()

    def is_full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    trainer.policy.model.model.layers[0].register_forward_hook(is_full)
    expected = r"out of memory \(peak [\d.]+ GiB .*\): CUDA .* per_device_train_batch_size.* zero3"
    with pytest.raises(TrainingError, match=expected):
        trainer.train()


def test_the_same_object_as_policy_and_reference_is_refused():
    policy = make_policy()
    with pytest.raises(ModelError, match="the same object"):
        make_trainer(model=policy, ref_model=policy)


@pytest.mark.parametrize(
    ("name", "given", "kind"),
    [
        ("model", "gpt2", "CausalLM"),
        ("model", None, "CausalLM"),
        ("ref_model", "gpt2", "CausalLM"),
        ("value_model", "gpt2", "SequenceClassification"),
    ],
)
def test_a_name_in_the_place_of_a_model_is_refused_with_the_way_to_load_one(name, given, kind):
    words = rf"{name}={given!r} is not a loaded model.*AutoModelFor{kind}\.from_pretrained"
    with pytest.raises(ModelError, match=words):
        make_trainer(**{name: given})


def test_a_language_model_as_reward_is_refused_with_the_way_to_load_one():
    with pytest.raises(ModelError, match="load_reward_model"):
        make_trainer(reward_model=make_policy())


def test_a_policy_that_cannot_learn_is_refused():
    with pytest.raises(ModelError, match="requires a gradient"):
        make_trainer(model=make_policy().requires_grad_(False))


def test_a_prompt_that_leaves_no_room_is_refused_before_training():
    with pytest.raises(DataError, match="longer than 56 tokens"):
        make_trainer(prompts=["w1", "w1 " * 57])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_mini_batches": 3}, "does not divide"),
        ({"batch_size": 0}, "batch_size=0 must be a whole number, at least 1"),
        ({"num_ppo_epochs": 1.5}, "num_ppo_epochs=1.5 must be a whole number"),
        ({"temperature": 0.0}, "temperature=0.0 must be above 0"),
        ({"missing_eos_penalty": -1.0}, "missing_eos_penalty=-1.0 must be at least 0"),
        ({"lam": 1.5}, "lam=1.5 must be between 0 and 1"),
        ({"kl_estimator": "k9"}, "kl_estimator='k9' must be one of k1, k2, k3, abs, full"),
        ({"adam_beta2": 1.0}, "adam_beta2=1.0"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(CONFIG, **changes)


def test_the_published_defaults():
    config = PPOConfig()
    assert (config.kl_coef, config.cliprange, config.cliprange_value) == (0.05, 0.2, 0.2)
    assert (config.vf_coef, config.gamma, config.lam) == (0.1, 1.0, 0.95)
    assert (config.num_ppo_epochs, config.num_mini_batches) == (4, 1)
    assert (config.temperature, config.response_length) == (0.7, 53)
    assert (config.learning_rate, config.adam_epsilon) == (3e-6, 1e-5)


TWO_PROCESSES = """
import dataclasses, json, sys
import torch
torch.set_num_threads(1)
from tests.ppo_core.training.test_trainer import UNEVEN, make_trainer
trainer = make_trainer(dataclasses.replace(UNEVEN, **json.loads(sys.argv[2])))
metrics = trainer.train()[-1]
trainer.save_model(sys.argv[1])
if trainer.engine.is_main:
    with open(sys.argv[1] + "/metrics.json", "w") as file:
        json.dump(metrics, file)
"""

# 15 responses are 8 and 7, a minibatch of 5 is 3 and 2, its last microbatch one row for two. With
# a large epsilon Adam does not blow up the rounding of gradients that are nearly 0.
UNEVEN = dataclasses.replace(
    CONFIG,
    batch_size=15,
    num_mini_batches=3,
    per_device_train_batch_size=2,
    total_episodes=30,
    adam_epsilon=1e-2,
    use_score_scaling=True,
)


RLOO = {"advantage_estimator": "rloo", "samples_per_prompt": 3, "whiten_rewards": False}
"""With UNEVEN, groups of responses lie in several processes and minibatches."""


@pytest.mark.parametrize(
    ("changes", "of_two"),
    [
        ({}, {}),
        pytest.param(RLOO, {}, marks=pytest.mark.slow),
        pytest.param(RLOO, {"sharding": "fsdp2"}, marks=pytest.mark.slow),
        pytest.param(RLOO, {"sharding": "zero3"}, marks=pytest.mark.slow),
    ],
)
def test_two_processes_are_one(changes: dict, of_two: dict, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TWO_PROCESSES)
    results = []
    for processes, settings in ((1, changes), (2, changes | of_two)):
        folder = tmp_path / str(processes)
        folder.mkdir()
        ran = run_python(script, folder, json.dumps(settings), processes=processes)
        assert ran.returncode == 0, ran.stderr
        results.append((load_policy(folder), json.loads((folder / "metrics.json").read_text())))
    (one, one_metrics), (two, two_metrics) = results
    for name in (METRICS - CLOCKS) & one_metrics.keys():
        assert two_metrics[name] == pytest.approx(one_metrics[name], abs=1e-5), name
    for name, weight in one.state_dict().items():
        assert_close(two.state_dict()[name], weight, rtol=0, atol=1e-6, msg=name)
