"""Log-probabilities, scores and values against the plain transformers forward."""

import peft
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Gemma2Config,
    Gemma2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from ppo_core.algorithm.masking import length_mask
from ppo_core.data.types import Rollout
from ppo_core.errors import DataError, ModelError
from ppo_core.models import lm_head
from ppo_core.models.actor_critic import ActorCritic, Critic
from ppo_core.models.adapters import add_adapter, plain_model
from ppo_core.models.loading import (
    check_reward_config,
    load_policy,
    load_reward_model,
    load_tokenizer,
)
from ppo_core.models.policy import LanguageModel
from ppo_core.models.reward_model import RewardModel
from tests.helpers.tiny import (
    CONFIGS,
    EOS,
    VOCABULARY,
    make_classifier,
    make_policy,
    make_prompts,
    make_tokenizer,
)

TEMPERATURE = 0.7


def make_rollout(prompt_lengths=(3, 7, 1), response_lengths=(5, 2, 4), *, seed=0) -> Rollout:
    """Return random prompts and responses of these lengths, with nonzero padding."""
    torch.manual_seed(seed)
    prompts = torch.randint(2, VOCABULARY, (len(prompt_lengths), max(prompt_lengths)))
    responses = torch.randint(2, VOCABULARY, (len(response_lengths), max(response_lengths)))
    return Rollout(
        prompt_ids=prompts,
        prompt_lengths=torch.tensor(prompt_lengths),
        response_ids=responses,
        response_lengths=torch.tensor(response_lengths),
        has_stop=torch.zeros(len(prompt_lengths), dtype=torch.bool),
        logprobs=torch.zeros(responses.shape),
        temperature=TEMPERATURE,
        response_mask=length_mask(torch.tensor(response_lengths), responses.shape[1]),
    )


def row_of(rollout: Rollout, b: int) -> list[int]:
    prompt = rollout.prompt_ids[b, : rollout.prompt_lengths[b]]
    return torch.cat([prompt, rollout.response_ids[b, : rollout.response_lengths[b]]]).tolist()


def test_rows_join_prompt_and_response_without_a_gap():
    rollout = make_rollout()
    joined = rollout.token_rows(torch.tensor([2, 0]))
    assert joined.ids[0, :5].tolist() == row_of(rollout, 2)
    assert joined.ids[1].tolist() == row_of(rollout, 0)
    assert joined.lengths.tolist() == [5, 8]
    assert joined.state.tolist() == [0, 1, 2, 3, 2, 3, 4, 5, 6]
    assert joined.targets.tolist() == row_of(rollout, 2)[1:] + row_of(rollout, 0)[3:]


@pytest.mark.parametrize("family", CONFIGS)
def test_log_probabilities_entropies_and_gradients_are_those_of_the_plain_forward(
    family, monkeypatch
):
    monkeypatch.setattr(lm_head, "LOGITS_PER_CHUNK", 3 * VOCABULARY)  # several chunks
    policy, rollout = make_policy(family).double(), make_rollout()
    logprobs, entropies = LanguageModel(policy)(rollout.token_rows(torch.arange(3)), TEMPERATURE)
    logprobs.sum().backward()
    gradients = {name: p.grad.clone() for name, p in policy.named_parameters()}

    policy.zero_grad()
    expected, expected_entropies = [], []
    for b in range(3):
        row = torch.tensor(row_of(rollout, b))
        start = int(rollout.prompt_lengths[b])
        logits = policy(row[None]).logits[0, start - 1 : -1] / TEMPERATURE
        plain = torch.log_softmax(logits, -1)
        expected.append(plain[torch.arange(len(plain)), row[start:]])
        expected_entropies.append(torch.distributions.Categorical(logits=logits).entropy())
    torch.cat(expected).sum().backward()

    assert_close(logprobs.double(), torch.cat(expected), rtol=0, atol=1e-6)
    assert_close(entropies.double(), torch.cat(expected_entropies), rtol=0, atol=1e-6)
    for name, parameter in policy.named_parameters():
        assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-6, msg=name)


CAPPED = Gemma2Config(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    final_logit_softcapping=2.0,
)


def gradients_of(policy: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    policy.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("case", [*CONFIGS, "capped", "adapter"])
def test_a_loss_of_each_token_has_the_gradient_of_its_log_probabilities(case, monkeypatch):
    monkeypatch.setattr(lm_head, "LOGITS_PER_CHUNK", 3 * VOCABULARY)  # several chunks
    if case == "capped":
        torch.manual_seed(0)
        policy = Gemma2ForCausalLM(CAPPED).eval()
    else:
        policy = make_policy("llama" if case == "adapter" else case)
    if case == "adapter":
        policy = add_adapter(policy, peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
        torch.nn.init.normal_(policy.base_model.model.lm_head.lora_B["default"].weight)
    policy.double()
    model = LanguageModel(plain_model(policy) if case == "adapter" else policy)
    rows, targets = make_rollout().token_rows(torch.arange(3)), torch.randn(11).double()

    def of_tokens(logprobs: Tensor, part: slice) -> Tensor:
        return (logprobs - targets[part]) ** 2

    head, states = model.lm_head(TEMPERATURE), model.backbone.states(rows)
    loss, logprobs, entropies = head.loss(states, rows.targets, of_tokens)
    fused = gradients_of(policy, 3 * loss)
    expected, expected_entropies = model(rows, TEMPERATURE)
    plain = gradients_of(policy, 3 * of_tokens(expected, slice(None)).sum())
    assert_close(logprobs, expected.detach(), rtol=0, atol=1e-12)
    assert_close(entropies, expected_entropies, rtol=0, atol=1e-12)
    assert fused.keys() == plain.keys()
    for name, gradient in plain.items():
        assert_close(fused[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


def test_logits_of_one_chunk_are_all_that_exists(monkeypatch):
    monkeypatch.setattr(lm_head, "LOGITS_PER_CHUNK", 4 * VOCABULARY)
    policy = LanguageModel(make_policy())
    widths = []
    policy.head.register_forward_hook(lambda _, __, product: widths.append(len(product)))
    policy(make_rollout().token_rows(torch.arange(3)), TEMPERATURE)
    assert widths == [4, 4, 3]


def test_a_head_that_caps_its_logits_is_followed():
    model = Gemma2ForCausalLM(CAPPED).eval()
    ids = torch.tensor([[5, 6, 7]])
    policy = LanguageModel(model)
    assert_close(policy.logits(policy.backbone.hidden_states(ids)[0]), model(ids).logits[0])


def test_a_head_of_unknown_kind_is_refused_before_it_lies():
    model = make_policy()
    plain = model.forward

    def forward(**inputs):
        output = plain(**inputs)
        output.logits = output.logits * 3
        return output

    model.forward = forward
    with pytest.raises(ModelError, match="LlamaForCausalLM transforms its logits"):
        LanguageModel(model)


@pytest.mark.parametrize("family", CONFIGS)
def test_scores_are_those_of_the_plain_forward(family):
    model = make_classifier(family)
    rows = make_prompts([9, 4, 6])
    reward_model = RewardModel(model, make_tokenizer(), bias=0.5, gain=2.0)
    scores = reward_model.score_encoded(rows, batch_size=2)
    for row, score in zip(rows, scores, strict=True):
        assert_close(score, 2 * (model(torch.tensor([row])).logits[0, 0].detach() - 0.5))


def test_an_end_token_equal_to_the_pad_token_is_still_the_one_that_is_scored():
    model = make_classifier()
    model.config.pad_token_id = EOS
    rows = [[5, 6, EOS], [5, 6, 7, 8]]
    actual = RewardModel(model, make_tokenizer()).score_encoded(rows, batch_size=2)
    hidden = model.model(torch.tensor([rows[0]])).last_hidden_state
    assert_close(actual[0], model.score(hidden[0, -1])[0].detach())


def test_an_encoder_is_a_reward_model_too():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=1,
    )
    model = BertForSequenceClassification(config).eval()
    reward_model = RewardModel(model, make_tokenizer())
    rows = [[5, 6, 7], [8, 9]]
    actual = reward_model.score_encoded(rows, batch_size=2)
    for row, score in zip(rows, actual, strict=True):
        assert_close(score, model(torch.tensor([row])).logits[0, 0].detach())
    with pytest.raises(ModelError, match="value_model=None"):
        Critic.from_reward_model(reward_model)


def test_a_text_longer_than_the_reward_model_reads_is_refused():
    reward_model = RewardModel(make_classifier(), make_tokenizer())
    with pytest.raises(DataError, match=r"65 tokens .* context is 64"):
        reward_model.score_encoded([[5] * 65], batch_size=1)


def test_a_text_without_a_token_is_refused():
    reward_model = RewardModel(make_classifier(), make_tokenizer(), end_of_text=False)
    with pytest.raises(DataError, match="Text 1 has no token"):
        reward_model.score_texts(["w1", ""], ["w2", ""])


def test_the_critic_starts_as_the_centred_score_of_the_response_so_far():
    reward_model = RewardModel(make_classifier(), make_tokenizer(), bias=0.3, gain=2.0)
    critic = Critic.from_reward_model(reward_model)
    rollout = make_rollout()
    values = critic(rollout.token_rows(torch.tensor([0])))
    row = row_of(rollout, 0)
    expected = reward_model.score_encoded([row[: 3 + t] for t in range(5)], batch_size=8)
    assert_close(values.detach(), expected)


def test_training_the_critic_leaves_the_reward_model_alone():
    reward_model = RewardModel(make_classifier(), make_tokenizer())
    critic = Critic.from_reward_model(reward_model)
    shared = {id(p) for p in reward_model.model.parameters()} & {id(p) for p in critic.parameters()}
    assert not shared


def test_a_critic_from_the_policy_starts_by_expecting_nothing():
    critic = Critic.from_policy(make_policy("gpt2"))
    values = critic(make_rollout().token_rows(torch.arange(3)))
    assert_close(values, torch.zeros(11))


def test_neighbours_and_padding_change_no_row():
    rollout = make_rollout()
    module = ActorCritic(LanguageModel(make_policy()), Critic.from_policy(make_policy(seed=3)))
    torch.nn.init.normal_(module.critic.head.weight)
    module.double()

    def of_rows(rows: Tensor) -> tuple[Tensor, ...]:
        predictions, values = module(
            rollout.token_rows(rows), TEMPERATURE, lambda logprobs, _: logprobs**2
        )
        return predictions.loss, predictions.logprobs, predictions.entropies, values

    together = of_rows(torch.arange(3))
    alone = [of_rows(torch.tensor([b])) for b in range(3)]
    assert_close(together[0], sum(one[0] for one in alone), rtol=1e-6, atol=0)
    for full, *parts in zip(together[1:], *(one[1:] for one in alone), strict=True):
        assert_close(full, torch.cat(parts), rtol=0, atol=1e-6)


def test_models_survive_the_way_to_a_folder_and_back(tmp_path):
    policy, classifier, tokenizer = make_policy(), make_classifier(), make_tokenizer()
    policy.save_pretrained(tmp_path / "policy")
    classifier.save_pretrained(tmp_path / "reward")
    for name in ("policy", "reward"):
        tokenizer.save_pretrained(tmp_path / name)
    ids = torch.tensor([[5, 6]])
    assert_close(load_policy(tmp_path / "policy")(ids).logits, policy(ids).logits)
    assert load_tokenizer(tmp_path / "policy").get_vocab() == tokenizer.get_vocab()
    reward_model = load_reward_model(tmp_path / "reward", bias=1.0, gain=2.0)
    assert reward_model.reads_tokens_of(tokenizer)
    expected = 2 * (classifier(ids).logits[0].detach() - 1.0)
    assert_close(reward_model.score_encoded([[5, 6]], 1), expected)


def test_what_cannot_be_a_policy_or_a_reward_model_is_refused_by_name(tmp_path):
    make_classifier(labels=3).save_pretrained(tmp_path / "three")
    make_policy().save_pretrained(tmp_path / "policy")
    T5ForConditionalGeneration(
        T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    ).save_pretrained(tmp_path / "t5")
    scorer = T5Config(is_encoder_decoder=True, num_labels=1)
    scorer.architectures = ["T5ForSequenceClassification"]
    scorer.save_pretrained(tmp_path / "t5-scorer")
    with pytest.raises(ModelError, match="encoder and a decoder"):
        check_reward_config(tmp_path / "t5-scorer")
    with pytest.raises(ModelError, match="has 3 labels"):
        check_reward_config(tmp_path / "three")
    with pytest.raises(ModelError, match=r"not a \.\.\.ForSequenceClassification"):
        load_reward_model(tmp_path / "policy")
    with pytest.raises(ModelError, match="has an encoder"):
        load_policy(tmp_path / "t5")
    with pytest.raises(ModelError, match="a model that scores"):
        load_policy(tmp_path / "three")
    torn = tmp_path / "policy" / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:1000])
    with pytest.raises(ModelError, match="No causal language model can be loaded"):
        load_policy(tmp_path / "policy")
    with pytest.raises(ModelError, match="nowhere"):
        load_policy(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="nowhere"):
        load_tokenizer(tmp_path / "nowhere")
