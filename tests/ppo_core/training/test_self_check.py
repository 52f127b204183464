"""The check before the first rollout finds every planted fault, and names the model."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ppo_core.errors import ModelError
from ppo_core.models.backbones import Decoding
from ppo_core.models.critic import Critic
from ppo_core.models.policy import LanguageModel
from ppo_core.models.reward_model import RewardModel
from ppo_core.ppo.model_bundle import ModelBundle
from ppo_core.ppo.rewards import make_rewards
from ppo_core.rollout.kv_cache import KVCache
from ppo_core.training.model_setup import join_processes
from ppo_core.training.self_check import SelfCheck, check_numbers
from tests.helpers.models.tiny import make_classifier, make_policy, make_prompts, make_tokenizer
from tests.ppo_core.training.test_trainer import CONFIG


def make_bundle() -> ModelBundle:
    """Return models of one family, whose policy has a hook, so that transformers computes it."""
    tokenizer = make_tokenizer()
    policy = make_policy()
    policy.base_model.register_forward_pre_hook(lambda *_: None)
    return ModelBundle(
        policy=LanguageModel(policy),
        adapted=None,
        reference=LanguageModel(make_policy(seed=3)),
        saved_dtype=torch.float32,
        critic=Critic.from_classifier(make_classifier(seed=4)),
        rewards=make_rewards(RewardModel(make_classifier(), tokenizer), tokenizer, batch_size=4),
    )


def check(models: ModelBundle) -> SelfCheck:
    _, engine = join_processes(CONFIG, models.policy.model)
    return check_numbers(models, make_prompts([5, 9, 3, 12]), engine, samples_here=True)


def change_inputs(module: nn.Module, change: Callable[[dict], None]) -> None:
    """Call a module with changed keyword arguments."""
    own = module.forward

    def forward(**inputs: object) -> object:
        change(inputs)
        return own(**inputs)

    module.forward = forward


def is_decoding(inputs: dict) -> bool:
    cache = inputs.get("past_key_values")
    return cache is not None and cache.get_seq_length() > 0


def late_position(inputs: dict) -> None:
    if is_decoding(inputs):
        inputs["position_ids"] = inputs["position_ids"] + 1


def no_mask(inputs: dict) -> None:
    inputs.pop("attention_mask", None)


def all_visible(inputs: dict) -> None:
    """Let each token of a prompt see all of them."""
    if not is_decoding(inputs):
        size = inputs["input_ids"].shape[1]
        mask = torch.ones(len(inputs["input_ids"]), 1, size, size, dtype=torch.bool)
        inputs["attention_mask"] = mask


def off_by_one_positions(models: ModelBundle) -> None:
    change_inputs(models.policy.model.base_model, late_position)


def bidirectional_prefix(models: ModelBundle) -> None:
    change_inputs(models.policy.model.base_model, all_visible)


def dropout_left_on(models: ModelBundle) -> None:
    for layer in models.policy.model.base_model.layers:
        layer.register_forward_hook(lambda _, inputs, out: nn.functional.dropout(out, 0.1))


def batch_dependent_states(models: ModelBundle) -> None:
    """Let each state depend on the other sequences, as batch normalization in training mode."""
    layer = models.policy.model.base_model.layers[0]
    layer.register_forward_hook(lambda _, inputs, out: out - out.mean(dim=0, keepdim=True))


def scaled_logits(models: ModelBundle) -> None:
    models.policy._rule = ScaledRule()


class ScaledRule:
    """A rule of the LM head that the model does not have."""

    is_identity = False

    def apply(self, product: Tensor) -> Tensor:
        return product * 1.1


def reference_sees_padding(models: ModelBundle) -> None:
    layer = models.reference.model.base_model.layers[0]
    layer.register_forward_hook(lambda _, inputs, out: out + out.mean(dim=1, keepdim=True))


def shifted_values(models: ModelBundle) -> None:
    own = models.critic.backbone.states
    models.critic.backbone.states = lambda rows: own(rows).roll(1, dims=0)


def shifted_scores(models: ModelBundle) -> None:
    (scorer,) = models.rewards.models()
    own = scorer.score_rows
    scorer.score_rows = lambda ids, lengths: own(ids, lengths - 1)


REFUSED = {
    off_by_one_positions: "LlamaForCausalLM",
    bidirectional_prefix: "LlamaForCausalLM",
    dropout_left_on: "LlamaForCausalLM",
    batch_dependent_states: "LlamaForCausalLM",
    scaled_logits: "LlamaForCausalLM",
    reference_sees_padding: "reference's log-probabilities",
    shifted_values: "critic's values",
    shifted_scores: "reward model's scores",
}


@pytest.mark.parametrize("plant", REFUSED, ids=lambda plant: plant.__name__)
def test_a_fault_that_no_backend_avoids_is_refused(plant):
    models = make_bundle()
    plant(models)
    with pytest.raises(ModelError, match=r"\(model type llama\)") as refused:
        check(models)
    assert REFUSED[plant] in str(refused.value)


def ignored_mask(monkeypatch: pytest.MonkeyPatch, models: ModelBundle) -> None:
    change_inputs(models.policy.model.base_model, no_mask)


def positions_by_cache_length(monkeypatch: pytest.MonkeyPatch, models: ModelBundle) -> None:
    """Count positions from the longest sequence, which is wrong for a prompt that is added."""
    change_inputs(models.policy.model.base_model, lambda inputs: inputs.pop("position_ids", None))


def forgetting_cache(monkeypatch: pytest.MonkeyPatch, models: ModelBundle) -> None:
    own = KVCache.advance

    def advance(self: KVCache) -> None:
        own(self)
        for keys, values in self._layers:
            keys[..., self.end - 3, :], values[..., self.end - 3, :] = 0, 0

    monkeypatch.setattr(KVCache, "advance", advance)


def mixed_up_sequences(monkeypatch: pytest.MonkeyPatch, models: ModelBundle) -> None:
    own = KVCache.keep
    monkeypatch.setattr(KVCache, "keep", lambda self, kept: own(self, kept.flip(0)))


@pytest.mark.parametrize(
    "plant",
    [ignored_mask, positions_by_cache_length, forgetting_cache, mixed_up_sequences],
    ids=lambda plant: plant.__name__,
)
def test_a_fault_of_padded_decoding_leads_to_decoding_by_length(plant, monkeypatch):
    models = make_bundle()
    plant(monkeypatch, models)
    decoding = check(models).decoding
    assert decoding.kind is Decoding.BY_LENGTH
    assert "transformers' cache with padding (difference" in str(decoding)


def test_models_without_a_fault_pass_and_the_result_is_recorded():
    record = check(make_bundle()).as_record()
    assert record.pop("backend") == "transformers' cache with padding"
    assert set(record) == {
        "decoded",
        "policy_padded",
        "reference_padded",
        "critic_padded",
        "reward_model_1_padded",
    }
    assert max(record.values()) < 1e-5


def test_a_critic_that_sees_padding_gets_a_mask():
    models = make_bundle()

    def count(_, args: tuple, inputs: dict, output: object) -> None:
        ids = inputs["input_ids"]
        mask = inputs.get("attention_mask", torch.ones_like(ids))
        output.last_hidden_state *= mask.sum(dim=1)[:, None, None]

    models.critic.model.register_forward_hook(count, with_kwargs=True)
    check(models)
    assert models.critic.backbone.passes_mask
