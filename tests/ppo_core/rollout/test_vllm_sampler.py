"""A vLLM server samples with the policy's weights, and its rounding is seen and corrected."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import tensor
from torch.testing import assert_close

from ppo_core import PPOConfig
from ppo_core.algorithm.losses import importance_weights
from ppo_core.data.types import Rollout
from ppo_core.distributed.engine import Engine
from ppo_core.errors import ConfigError, ModelError, PPOError, TrainingError
from ppo_core.models.adapters import add_adapter, lora_config
from ppo_core.models.policy import LanguageModel
from ppo_core.ppo.logprobs_and_values import response_logprobs
from ppo_core.reporting.metrics import sampler_metrics
from ppo_core.rollout.sample_responses import sample_responses
from ppo_core.rollout.token_sampling import SamplingSettings, server_of
from ppo_core.rollout.vllm_client import VLLMServer
from ppo_core.rollout.vllm_sampler import VLLMSampler, request_seeds
from tests.helpers.models.tiny import make_policy, make_prompts
from tests.helpers.servers.full_disk import full_disk
from tests.helpers.servers.slow_servers import say_nothing, slow_server
from tests.helpers.servers.vllm_server import VLLMServerOfTests, vllm_server
from tests.ppo_core.distributed.test_choose_sharding import run_call
from tests.ppo_core.ppo.test_update import make_config, make_experience, weights_after
from tests.ppo_core.training.test_trainer import CONFIG, make_trainer, weights

MODULE = "tests.ppo_core.rollout.test_vllm_sampler"
STOP = 9
LENGTH = 8
PROMPTS = make_prompts([2, 5, 3, 7, 4, 4, 6, 2])
GREEDY = SamplingSettings(stop_token_id=STOP, temperature=0.0)
WARM = SamplingSettings(stop_token_id=STOP, temperature=0.7)


@pytest.fixture
def server() -> Iterator[VLLMServerOfTests]:
    """One that starts with other weights than the policy's."""
    with vllm_server(make_policy(seed=5)) as server:
        yield server


def settings(server: VLLMServerOfTests, folder: Path, **changes: Any) -> PPOConfig:
    return dataclasses.replace(
        CONFIG,
        use_vllm=True,
        vllm_server_base_url=server.url,
        vllm_weights_dir=str(folder / "weights"),
        vllm_server_timeout=2.0,
        response_length=LENGTH,
        **changes,
    )


def make_sampler(
    server: VLLMServerOfTests, folder: Path, policy: LanguageModel, adapted: Any = None
) -> VLLMSampler:
    described = server_of(settings(server, folder))
    assert described is not None
    return VLLMSampler(
        described, policy, adapted, Engine(use_cpu=True), PROMPTS, response_length=LENGTH
    )


def uniforms(seed: int = 0) -> torch.Tensor:
    return torch.rand(len(PROMPTS), LENGTH, generator=torch.Generator().manual_seed(seed))


def scored(policy: LanguageModel, rollout: Rollout) -> tuple[torch.Tensor, torch.Tensor]:
    """The policy's own log-probabilities of the counted tokens, and the server's."""
    mask = rollout.response_mask
    return response_logprobs(policy, rollout, 4)[mask], rollout.behavior_logprobs[mask]


# --- The server has the policy's weights -------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_after_synchronising_greedy_tokens_are_the_policys_and_before_they_are_not(
    family, tmp_path
):
    policy = LanguageModel(make_policy(family))
    own = sample_responses(policy, PROMPTS, uniforms(), GREEDY, batch_size=8)
    with vllm_server(make_policy(family, seed=5)) as server:
        sampler = make_sampler(server, tmp_path, policy)
        before = sampler.sample(PROMPTS, uniforms(), GREEDY, "weights-none")
        after = sampler.sample(PROMPTS, uniforms(), GREEDY, sampler.synchronize())
    for name in ("prompt_ids", "response_ids", "response_lengths", "response_mask", "has_stop"):
        assert torch.equal(getattr(after, name), getattr(own, name)), name
    assert not torch.equal(before.response_ids, own.response_ids)
    assert list((tmp_path / "weights").iterdir()) == []


def test_weights_that_a_killed_run_left_are_removed_by_the_next_run_with_the_server(
    server, tmp_path
):
    policy, folder = LanguageModel(make_policy()), tmp_path / "weights"
    left = folder / make_sampler(server, tmp_path, policy).synchronize()
    left.mkdir()
    with vllm_server(make_policy()) as another:
        other = folder / make_sampler(another, tmp_path, policy).synchronize()
    other.mkdir()
    assert {*folder.iterdir()} == {left, other}
    make_sampler(server, tmp_path, policy).synchronize()
    assert {*folder.iterdir()} == {other}


def test_a_prompt_that_is_asked_again_is_not_answered_from_what_old_weights_left(server, tmp_path):
    policy = LanguageModel(make_policy())
    sampler = make_sampler(server, tmp_path, policy)
    first = sampler.sample(PROMPTS, uniforms(), GREEDY, sampler.synchronize())
    with torch.no_grad():
        policy.model.get_output_embeddings().weight.copy_(
            make_policy(seed=3).get_output_embeddings().weight
        )
    second = sampler.sample(PROMPTS, uniforms(), GREEDY, sampler.synchronize())
    own = sample_responses(policy, PROMPTS, uniforms(), GREEDY, batch_size=8)
    assert torch.equal(second.response_ids, own.response_ids)
    assert not torch.equal(first.response_ids[:, 0], own.response_ids[:, 0])


class EngineOnMeta(Engine):
    device = torch.device("meta")


def test_a_rollout_is_on_the_device_of_the_run_even_if_the_weights_are_offloaded(server, tmp_path):
    sampler = make_sampler(server, tmp_path, LanguageModel(make_policy()))
    sampler._engine = EngineOnMeta(use_cpu=True)
    rollout = sampler.sample(PROMPTS, uniforms(), GREEDY, "weights-none")
    assert rollout.response_ids.device.type == rollout.logprobs.device.type == "meta"


def test_an_adapter_is_sent_merged(server, tmp_path):
    adapted = add_adapter(make_policy(), lora_config(r=4, target_modules=["q_proj", "up_proj"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    trainer = make_trainer(settings(server, tmp_path), model=adapted, ref_model=None)
    sampler = make_sampler(server, tmp_path, trainer.policy, trainer.policy_model)
    rollout = sampler.sample(PROMPTS, uniforms(), WARM, sampler.synchronize())
    own, theirs = scored(trainer.policy, rollout)
    assert_close(theirs, own, rtol=0, atol=1e-5)
    base, _ = scored(trainer.reference, rollout)
    assert (base - own).abs().mean() > 0.01


def test_weights_that_do_not_fit_on_the_disk_are_an_error_that_says_so(server, tmp_path):
    sampler = make_sampler(server, tmp_path, LanguageModel(make_policy()))
    with full_disk(20_000), pytest.raises(TrainingError, match=r"weights cannot be .* Free disk"):
        sampler.synchronize()
    assert list((tmp_path / "weights").iterdir()) == []


# --- What comes back ---------------------------------------------------------------


@pytest.mark.parametrize("cut", [{}, {"top_k": 3}, {"top_p": 0.6}], ids=str)
def test_the_servers_logprobs_are_those_of_what_it_drew_from(cut, server, tmp_path):
    policy = LanguageModel(make_policy())
    sampler = make_sampler(server, tmp_path, policy)
    sampling = dataclasses.replace(WARM, **cut)
    rollout = sampler.sample(PROMPTS, uniforms(), sampling, sampler.synchronize())
    own, theirs = scored(policy, rollout)
    if not cut:
        assert_close(theirs, own, rtol=0, atol=1e-5)
    else:
        # Of a part of the policy, where each token is likelier than in the whole.
        assert (theirs > own).all()
        assert (importance_weights(own, theirs, cap=2.0) < 1).all()


def test_a_response_follows_from_its_own_row_of_randomness_alone(server, tmp_path):
    sampler = make_sampler(server, tmp_path, LanguageModel(make_policy()))
    version = sampler.synchronize()
    rows = [5, 2, 2]
    whole = sampler.sample(PROMPTS, uniforms(), WARM, version)
    some = sampler.sample([PROMPTS[row] for row in rows], uniforms()[rows], WARM, version)
    other = sampler.sample(PROMPTS, uniforms(seed=1), WARM, version)
    assert torch.equal(some.response_ids, whole.response_ids[rows])
    assert not torch.equal(other.response_ids, whole.response_ids)
    assert len(set(request_seeds(uniforms()))) == len(PROMPTS)


def test_the_weights_of_tokens_are_the_ratios_up_to_the_cap():
    policy, server = tensor([0.5, 0.5, 0.1]).log(), tensor([0.25, 0.1, 0.2]).log()
    # .5/.25 = 2   .5/.1 = 5, capped to 3   .1/.2 = .5
    assert_close(importance_weights(policy, server, cap=3.0), tensor([2.0, 3.0, 0.5]))
    metrics = sampler_metrics(policy, server, cap=3.0)
    assert metrics["vllm/weight_mean"] == pytest.approx((2 + 3 + 0.5) / 3)
    assert metrics["vllm/weight_max"] == pytest.approx(5)
    assert metrics["vllm/capped"] == pytest.approx(1 / 3)


def test_the_loss_weighs_a_token_by_the_cap_at_most():
    experience = make_experience()

    def weights_of(ratio: float, cap: float) -> dict[str, torch.Tensor]:
        """The weights after a step from tokens, each `ratio` times likelier than as drawn."""
        rollout = experience.rollout
        drawn = dataclasses.replace(
            rollout, behavior_logprobs=rollout.logprobs - torch.tensor(ratio).log()
        )
        config = make_config(vllm_weights_dir="w", use_vllm=True, vllm_importance_sampling_cap=cap)
        return weights_after(config, dataclasses.replace(experience, rollout=drawn))[0]

    capped, of_two, of_five = weights_of(5.0, 2.0), weights_of(2.0, 2.0), weights_of(5.0, 5.0)
    for name, weight in of_two.items():
        assert_close(capped[name], weight, rtol=0, atol=1e-6, msg=name)
    assert not all(torch.equal(of_five[name], capped[name]) for name in capped)


def test_a_server_with_old_weights_shows_in_the_metrics(server, tmp_path):
    policy = LanguageModel(make_policy())
    sampler = make_sampler(server, tmp_path, policy)
    version = sampler.synchronize()
    fresh = sampler.sample(PROMPTS, uniforms(), WARM, version)
    assert sampler_metrics(*scored(policy, fresh), cap=2.0)["vllm/kl"] < 1e-8
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    stale = sampler_metrics(
        *scored(policy, sampler.sample(PROMPTS, uniforms(), WARM, version)), cap=2.0
    )
    assert stale["vllm/kl"] > 0.01
    assert stale["vllm/weight_max"] > 1.2


def test_a_server_that_does_not_use_all_weights_is_warned_of(server, tmp_path, caplog):
    trainer = make_trainer(settings(server, tmp_path))
    assert trainer.step()["vllm/kl"] < 1e-8
    assert "nats per token" not in caplog.text
    server.keeps_its_head = True
    with torch.no_grad():
        trainer.policy.model.lm_head.weight.normal_()
    assert trainer.step()["vllm/kl"] > 0.1
    assert "nats per token" in caplog.text


# --- The whole training ------------------------------------------------------------


@pytest.mark.slow
def test_a_training_resumes_where_its_server_was_lost_and_ends_as_one_that_kept_it(
    server, tmp_path
):
    config = settings(server, tmp_path, save_strategy="steps", save_steps=1)
    whole = make_trainer(dataclasses.replace(config, output_dir=str(tmp_path / "whole")))
    history = whole.train()
    assert len(history) == 2
    for metrics in history:
        assert metrics["vllm/kl"] < 1e-8
        assert metrics["vllm/weight_mean"] == pytest.approx(1, abs=1e-4)
        assert metrics["val/first_ratio_error"] < 1e-5
        assert metrics["time/synchronising"] < metrics["time/sampling"]

    lost = make_trainer(
        dataclasses.replace(config, output_dir=str(tmp_path / "lost"), vllm_server_timeout=1.5)
    )
    after_one = lost._after_update

    def stop_the_server(*given):
        after_one(*given)
        server.stop()

    lost._after_update = stop_the_server
    with pytest.raises(TrainingError, match="cannot be reached to load the policy's weights"):
        lost.train()

    with vllm_server(make_policy(seed=7)) as another:
        moved = settings(another, tmp_path, save_strategy="steps", save_steps=1)
        resumed = make_trainer(dataclasses.replace(moved, output_dir=str(tmp_path / "lost")))
        rest = resumed.train(resume_from_checkpoint=True)
    assert len(rest) == 1
    assert all(torch.equal(weights(resumed)[name], weights(whole)[name]) for name in weights(whole))


def train_in_a_process(folder: str, url: str, changes: dict[str, Any]) -> None:
    """Two updates of a run that one or several processes make."""
    torch.set_num_threads(1)
    config = dataclasses.replace(
        CONFIG,
        total_episodes=30,
        batch_size=15,  # which does not divide by two
        num_mini_batches=3,
        num_sample_generations=0,
        use_vllm=True,
        vllm_server_base_url=url,
        vllm_weights_dir=f"{folder}/weights",
        **changes,
    )
    model = make_policy()
    adapter = lora_config(r=4, target_modules=["q_proj"]) if "adapter" in folder else None
    trainer = make_trainer(config, model=model, ref_model=None, peft_config=adapter)
    history = trainer.train()
    trainer.save_model(f"{folder}/policy")
    if trainer.is_world_process_zero():
        assert max(metrics["vllm/kl"] for metrics in history) < 1e-8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ddp", {}),
        ("zero3", {"sharding": "zero3", "ds3_gather_for_generation": False}),
        ("fsdp2", {"sharding": "fsdp2"}),
        ("adapter", {"sharding": "fsdp2"}),
    ],
)
def test_two_processes_end_as_one_with_weights_in_shards_or_not(name, changes, server, tmp_path):
    policies = []
    for processes, settings in ((2, changes), (1, {})):
        folder = tmp_path / f"{name}-{processes}"
        folder.mkdir()
        call = f"{MODULE}.train_in_a_process{(str(folder), server.url, settings)}"
        run_call(folder, call, processes)
        policies.append(load_file(folder / "policy" / "model.safetensors"))
    shared, alone = policies
    assert shared.keys() == alone.keys()
    for key, weight in alone.items():
        assert_close(shared[key], weight, rtol=0, atol=1e-5, msg=key)
    # Each response once for each of two updates, in one process; in two the last row of an odd
    # batch is a second one's filler. And a check by each process.
    assert len(server.completions) == (2 * 16 + 2) + (2 * 15 + 1)
    assert len(server.loaded) == 2 + 2


@pytest.mark.slow
def test_what_one_process_misses_ends_both(tmp_path, server):
    server.dev_mode = False
    call = f"{MODULE}.train_in_a_process{(str(tmp_path), server.url, {})}"
    with pytest.raises(AssertionError, match="Process 0 failed: The vLLM server at") as caught:
        run_call(tmp_path, call)
    assert "VLLM_SERVER_DEV_MODE=1" in str(caught.value)


# --- What cannot work --------------------------------------------------------------


def refusal(server: VLLMServerOfTests, folder: Path, kind: type[PPOError], **changes: Any) -> str:
    """The message of the first update of a run that is refused."""
    with pytest.raises(kind) as caught:
        make_trainer(settings(server, folder, **changes)).step()
    return str(caught.value)


def test_a_server_that_is_still_starting_is_waited_for(server, tmp_path):
    server.busy_answers = 2
    make_sampler(server, tmp_path, LanguageModel(make_policy())).synchronize()
    assert len(server.loaded) == 1


def test_a_server_that_is_reached_and_answers_too_late_is_no_server_to_start():
    with (
        slow_server(say_nothing) as url,
        pytest.raises(TrainingError, match=r"did not list .* within .* Raise vllm_server_timeout"),
    ):
        VLLMServer(url, timeout=0.3, at_once=1).check([1], 5)


def test_a_key_that_was_read_with_its_line_break_is_sent_without(server, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "canary-0123456789\n")
    make_sampler(server, tmp_path, LanguageModel(make_policy()))


@pytest.mark.parametrize("key", ["sk-schlüssel", "one\ntwo"])
def test_a_key_that_no_header_can_carry_is_refused_with_the_settings(key, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", key)
    with pytest.raises(ConfigError, match="VLLM_API_KEY holds characters") as error:
        PPOConfig(use_vllm=True, vllm_weights_dir="weights")
    assert key not in str(error.value)


def test_a_server_that_cannot_do_it_is_refused_by_what_it_must_be_started_with(server, tmp_path):
    server.processed_logprobs = False
    assert "--logprobs-mode processed_logprobs" in refusal(server, tmp_path, ConfigError)
    server.processed_logprobs, server.max_model_len = True, 9
    assert "--max-model-len" in refusal(server, tmp_path, ModelError)
    server.max_model_len, server.dev_mode = 64, False
    assert "VLLM_SERVER_DEV_MODE=1" in refusal(server, tmp_path, TrainingError)


def test_a_server_of_another_model_does_not_load_the_weights(tmp_path):
    with vllm_server(make_policy("gpt_neox")) as server:
        words = refusal(server, tmp_path, TrainingError)
    assert "did not load the policy's weights: status 500" in words
    assert "restart the server with the policy's model" in words


def test_a_response_of_more_tokens_than_asked_is_not_learned_from(server, tmp_path):
    server.tokens_too_many = 1
    config = {"stop_token": None, "stop_token_id": None, "missing_eos_penalty": None}
    words = refusal(server, tmp_path, TrainingError, **config)
    assert f"{LENGTH + 1} tokens where at most {LENGTH} were requested" in words


def test_weights_that_cannot_be_written_are_a_clear_error(server, tmp_path):
    (tmp_path / "weights").write_text("a file in the folder's place")
    assert "vllm_weights_dir=" in refusal(server, tmp_path, TrainingError)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_vllm": True}, "needs vllm_weights_dir"),
        ({"vllm_weights_dir": "w"}, "takes effect only with use_vllm=True"),
        ({"vllm_importance_sampling_cap": 0.5}, "at least 1"),
        ({"vllm_server_base_url": "http://host:8000/v1"}, "without /v1"),
        ({"vllm_server_base_url": "http://host:80000"}, "must be http://HOST:PORT"),
        ({"vllm_server_base_url": "http://host:port"}, "must be http://HOST:PORT"),
        ({"vllm_server_base_url": "http://"}, "must be http://HOST:PORT"),
        ({"vllm_server_base_url": None}, "must be http://HOST:PORT"),
        ({"vllm_server_base_url": "http://host:8000\n"}, "must be http://HOST:PORT"),
        ({"vllm_server_timeout": 0.0}, "above 0"),
        ({"vllm_mode": "colocate"}, "vllm serve"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_settings_that_contradict_each_other_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        PPOConfig(**changes)
