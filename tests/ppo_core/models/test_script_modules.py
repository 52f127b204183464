"""Rewards and value models that are a script's own modules, in whole updates and alone."""

from dataclasses import replace
from types import SimpleNamespace

import peft
import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedModel

from ppo_core.errors import ModelError
from ppo_core.models.model_with_value_head import AutoModelForCausalLMWithValueHead
from ppo_core.models.reward_model import RewardModel
from tests.helpers.models.tiny import make_classifier, make_policy, make_tokenizer
from tests.ppo_core.training.test_trainer import CONFIG, make_trainer

ONE_UPDATE = replace(
    CONFIG,
    total_episodes=8,
    batch_size=8,
    num_ppo_epochs=1,
    response_length=4,
    missing_eos_penalty=None,
    num_sample_generations=0,
)


class WithBackbone(nn.Module):
    """A backbone of transformers and a score of two layers, as TRL reads them."""

    base_model_prefix = "body"

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.body = make_policy(seed=5).model
        self.score = nn.Sequential(nn.Linear(32, 4), nn.Linear(4, 1))

    def token_scores(self, ids):
        return self.score(self.body(ids).last_hidden_state)[..., 0]


class Words(nn.Module):
    """A backbone without transformers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.words = nn.Embedding(61, 8)

    def forward(self, input_ids, attention_mask):
        states = (self.words(input_ids) * attention_mask[..., None]).cumsum(1)
        return SimpleNamespace(last_hidden_state=states, hidden_states=None)


class WithWords(WithBackbone):
    def __init__(self):
        nn.Module.__init__(self)
        self.body, self.score = Words(), nn.Linear(8, 1, bias=False)

    def token_scores(self, ids):
        return self.score(self.body(ids, torch.ones_like(ids)).last_hidden_state)[..., 0]


class ScoresRows(nn.Module):
    """Ids and mask in, (B,) or (B, 1) out."""

    def __init__(self, *, width: int | None = None):
        super().__init__()
        torch.manual_seed(7)
        self.words, self.width = nn.Embedding(61, 1), width

    def forward(self, ids, mask):
        scores = (self.words(ids)[..., 0] * mask).sum(1)
        return scores if self.width is None else scores[:, None].expand(-1, self.width)

    def token_scores(self, ids):
        return self.words(ids)[..., 0].cumsum(1)


class ScoresTokens(nn.Module):
    """One value for each token, (B, S) or (B, S, 1)."""

    def __init__(self, *, flat: bool = True):
        super().__init__()
        torch.manual_seed(8)
        self.words, self.flat = nn.Embedding(61, 1), flat

    def forward(self, input_ids):
        values = self.words(input_ids).cumsum(1)
        return SimpleNamespace(logits=values[..., 0] if self.flat else values)

    def token_scores(self, ids):
        return self.words(ids)[..., 0].cumsum(1)


class ScoresStates(WithBackbone):
    """A score of all states at once, which depends on earlier tokens: a method, or a layer."""

    def __init__(self):
        nn.Module.__init__(self)
        torch.manual_seed(9)
        self.body, self.head = make_policy(seed=5).model, nn.Linear(32, 1)

    def score(self, states):
        batch, tokens, _ = states.shape
        assert tokens > 1
        return self.head(states.cumsum(1)).reshape(batch, tokens, 1)

    def token_scores(self, ids):
        return self.head(self.body(ids).last_hidden_state.cumsum(1))[..., 0]


class Summed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(9)
        self.head = nn.Linear(32, 1)

    def forward(self, states):
        return self.head(states.cumsum(1))[:, :, 0]


class WithScoreModule(WithBackbone):
    """The score is a module of the script that needs all states."""

    def __init__(self):
        nn.Module.__init__(self)
        self.body, self.score = make_policy(seed=5).model, Summed()

    def token_scores(self, ids):
        return self.score(self.body(ids).last_hidden_state)


class Transformed(PreTrainedModel):
    """A script's own class of transformers, whose `score` is a method; it has no `forward`."""

    config_class = LlamaConfig
    _supports_sdpa = True
    base_model_prefix = "body"

    def __init__(self):
        source = make_policy(seed=5)
        super().__init__(source.config)
        torch.manual_seed(9)
        self.body, self.head = source.model, nn.Linear(32, 1)

    score, token_scores = ScoresStates.score, ScoresStates.token_scores


class Decoded(nn.Module):
    """The backbone keeps the tokens, and the score is computed from them: a function as a model."""

    base_model_prefix = "body"

    class Body(nn.Module):
        def forward(self, input_ids, attention_mask, position_ids, use_cache, **options):
            assert not use_cache
            self.ids, self.lengths = input_ids, attention_mask.sum(1)
            assert position_ids.equal(torch.arange(input_ids.shape[1]).expand_as(input_ids))
            states = torch.zeros(*input_ids.shape, 1)
            return SimpleNamespace(hidden_states=(states,))

    def __init__(self):
        super().__init__()
        self.body = self.Body()

    def score(self, states):
        return self.body.ids.cumsum(1).float()[..., None] + states

    def token_scores(self, ids):
        return ids.cumsum(1).float()


REWARDS = {
    "score as a method": ScoresStates,
    "score as a module of the script": WithScoreModule,
    "class of transformers": Transformed,
    "function as a model": Decoded,
    "backbone": WithBackbone,
    "own backbone": WithWords,
    "(B,)": ScoresRows,
    "(B, 1)": lambda: ScoresRows(width=1),
}


class WithHead(AutoModelForCausalLMWithValueHead):
    """A model with a value head as value model; its LM head is not used."""

    def __init__(self):
        torch.manual_seed(9)
        super().__init__(make_policy(seed=5), summary_dropout_prob=0.0)
        self.pretrained_model.lm_head.requires_grad_(False)

    def token_scores(self, ids):
        return self(ids)[2]

    def named_parameters(self, *names, **options):
        named = super().named_parameters(*names, **options)
        return ((name, value) for name, value in named if "lm_head" not in name)


class WithLMHead(WithBackbone):
    """The backbone of the value model is a policy; its LM head is not used."""

    def __init__(self):
        super().__init__()
        self.body = make_policy(seed=5)

    def token_scores(self, ids):
        return self.score(self.body.model(ids).last_hidden_state)[..., 0]

    def named_parameters(self, *names, **options):
        named = super().named_parameters(*names, **options)
        return ((name, value) for name, value in named if "lm_head" not in name)


CRITICS = {
    "backbone with an LM head": WithLMHead,
    "value head": WithHead,
    "score as a method": ScoresStates,
    "score as a module of the script": WithScoreModule,
    "class of transformers": Transformed,
    "backbone": WithBackbone,
    "own backbone": WithWords,
    "(B, S)": ScoresTokens,
    "(B, S, 1)": lambda: ScoresTokens(flat=False),
}


def rows_of(rollout):
    """Token ids of each prompt with its response, and the number of tokens of the prompt."""
    for row in range(len(rollout)):
        prompt = rollout.prompt_ids[row, : rollout.prompt_lengths[row]]
        yield (
            torch.cat([prompt, rollout.response_ids[row, : rollout.response_lengths[row]]]),
            len(prompt),
        )


def scored(trainer):
    """Sample and score one batch; return rollout and scores."""
    prompts = trainer._draw_prompts()
    rollout = trainer._sample(prompts)
    return rollout, trainer._score(rollout, prompts)


@pytest.mark.parametrize("form", REWARDS)
def test_a_module_scores_the_tokens_of_each_response(form: str):
    reward = REWARDS[form]()
    trainer = make_trainer(ONE_UPDATE, reward_model=reward)
    rollout, scores = scored(trainer)
    expected = [reward.token_scores(ids[None])[0, -1] for ids, _ in rows_of(rollout)]
    assert_close(scores.scores, torch.stack(expected).detach(), rtol=0, atol=1e-5)
    before = {name: value.clone() for name, value in reward.state_dict().items()}
    trainer.train()
    assert all(value.equal(before[name]) for name, value in reward.state_dict().items())
    assert not any(parameter.requires_grad for parameter in reward.parameters())


@pytest.mark.parametrize("form", CRITICS)
def test_a_module_values_each_token_and_is_trained(form: str):
    critic = CRITICS[form]()
    trainer = make_trainer(ONE_UPDATE, value_model=critic)
    rollout, scores = scored(trainer)
    for row, (ids, start) in enumerate(rows_of(rollout)):
        expected = critic.token_scores(ids[None])[0, start - 1 : -1].detach()
        assert_close(scores.values[row, : len(expected)], expected, rtol=0, atol=1e-5)
    before = {name: value.clone() for name, value in critic.named_parameters()}
    assert trainer.train()[0]["loss/value_avg"] > 0
    unmoved = [name for name, value in critic.named_parameters() if value.equal(before[name])]
    # The last norm of the backbone and so on all move; a shift of all words' scores may be 0.
    assert unmoved == []
    assert trainer.value_model is critic


def adapted_classifier(family: str, **settings):
    """A classifier with an adapter, as scripts make value and reward models."""
    classifier = make_classifier(family)
    torch.manual_seed(4)
    # PEFT's default for a B of zeros would hide an adapter that is not used.
    config = peft.LoraConfig(r=2, task_type="SEQ_CLS", init_lora_weights=False, **settings)
    return peft.get_peft_model(classifier, config)


@pytest.mark.parametrize(
    ("family", "settings"),
    [("llama", {}), ("gpt_neox", {}), ("llama", {"target_modules": "all-linear"})],
)
def test_a_value_model_may_have_an_adapter(family: str, settings, tmp_path):
    critic = adapted_classifier(family, **settings)
    saving = {"output_dir": str(tmp_path), "save_strategy": "steps"}
    config = replace(ONE_UPDATE, gradient_checkpointing=True, **saving)
    trainer = make_trainer(config, value_model=critic)
    rollout, scores = scored(trainer)
    for row, (ids, start) in enumerate(rows_of(rollout)):
        states = critic.get_base_model().base_model(ids[None]).last_hidden_state
        expected = critic.get_base_model().score(states)[0, start - 1 : -1, 0].detach()
        assert_close(scores.values[row, : len(expected)], expected, rtol=0, atol=1e-5)
    before = {name: value.clone() for name, value in critic.named_parameters()}
    assert trainer.train()[0]["loss/value_avg"] > 0
    moved = {name for name, value in critic.named_parameters() if not value.equal(before[name])}
    assert moved == {name for name, value in critic.named_parameters() if value.requires_grad}
    assert moved and all("lora_" in name or "score" in name for name in moved)
    again = adapted_classifier(family, **settings)
    assert make_trainer(config, value_model=again).train(resume_from_checkpoint=True) == []
    for name, value in again.named_parameters():
        assert value.equal(dict(critic.named_parameters())[name])


def test_a_reward_model_with_an_adapter_scores_as_its_merged_copy():
    adapted = adapted_classifier("llama")
    merged = adapted_classifier("llama").merge_and_unload()
    trainers = [make_trainer(ONE_UPDATE, reward_model=one) for one in (adapted, merged)]
    found, expected = [scored(trainer)[1].scores for trainer in trainers]
    assert_close(found, expected, rtol=0, atol=1e-5)
    assert trainers[0].reward_model is adapted


def test_a_value_model_with_an_adapter_and_no_score_for_each_token_is_refused():
    adapted = peft.get_peft_model(make_policy(), peft.LoraConfig(r=2, task_type="CAUSAL_LM"))
    with pytest.raises(ModelError, match="has no `score` for each token"):
        make_trainer(ONE_UPDATE, value_model=adapted)


@pytest.mark.parametrize("settings", [None, {}, {"target_modules": "all-linear"}])
def test_a_value_model_with_several_values_at_each_token_is_refused(settings):
    critic: nn.Module = WithBackbone()
    if settings is None:
        critic.score = nn.Linear(32, 2)
    else:
        config = LlamaConfig(**make_policy().config.to_dict() | {"num_labels": 2})
        lora = peft.LoraConfig(r=2, task_type="SEQ_CLS", **settings)
        critic = peft.get_peft_model(LlamaForSequenceClassification(config), lora)
    with pytest.raises(ModelError, match=r"gives 2 values for each token.*num_labels=1"):
        make_trainer(ONE_UPDATE, value_model=critic)


def test_a_run_with_modules_resumes(tmp_path):
    config = replace(ONE_UPDATE, output_dir=str(tmp_path), save_strategy="steps")
    given = {"reward_model": WithBackbone(), "value_model": ScoresTokens()}
    make_trainer(config, **given).train()
    again = {"reward_model": WithBackbone(), "value_model": ScoresTokens()}
    resumed = make_trainer(config, **again)
    assert resumed.train(resume_from_checkpoint=True) == []
    for name, value in again["value_model"].named_parameters():
        assert value.equal(dict(given["value_model"].named_parameters())[name])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"reward_model": ScoresRows(width=2)}, r"ScoresRows returned scores of shape \(\d+, 2\)"),
        ({"reward_model": nn.Linear(2, 1)}, "The reward model Linear raised"),
        ({"value_model": ScoresRows()}, r"ScoresRows returned values of shape \(\d+,\)"),
    ],
)
def test_other_shapes_are_refused(given, words: str):
    trainer = make_trainer(ONE_UPDATE, **given)
    with pytest.raises(ModelError, match=words):
        trainer.train()


def test_a_module_that_is_trained_is_no_reward():
    module = WithBackbone()
    with pytest.raises(ModelError, match="reward model is the same object as a model that is"):
        make_trainer(ONE_UPDATE, reward_model=module, value_model=module)


def test_models_of_transformers_are_read_as_before():
    classifier = make_classifier()
    trainer = make_trainer(ONE_UPDATE, reward_model=classifier)
    (scorer,) = trainer.rewards.models()
    assert isinstance(scorer, RewardModel) and scorer.model is classifier
    assert trainer.rewards.modules() == []
    assert make_tokenizer().eos_token_id is not None
