"""Rewards as scripts hand them over: models and functions, weighted, each by its name."""

import dataclasses
import functools

import peft
import pytest
import torch
from torch.testing import assert_close

from ppo_core.data.encode_prompts import encode_prompt, response_texts
from ppo_core.data.types import Rollout
from ppo_core.errors import ConfigError, DataError, ModelError, user_code_errors
from ppo_core.models.policy import LanguageModel
from ppo_core.models.reward_model import RewardModel
from ppo_core.ppo.rewards import RewardMix, make_rewards, score_tokens
from tests.helpers.models.chat import ENDED, OPEN, make_chat_tokenizer, say
from tests.helpers.models.tiny import EOS, make_classifier, make_policy, make_tokenizer
from tests.helpers.paths import ROOT
from tests.ppo_core.rollout.test_sample_responses import sample
from tests.ppo_core.training.test_trainer import CONFIG, make_trainer

PROMPTS = ["w1 w2 w3", "w4", "w5 w6"]


def count_words(prompts: list[str], responses: list[str]) -> list[float]:
    return [float(len(response.split())) for response in responses]


def test_an_error_names_the_line_of_a_users_file_beside_the_package():
    names: dict = {}
    for file in ("ppo_core_rewards.py", "flows_x.py"):
        code = "def reward(prompts, responses):\n    raise ValueError('bad')"
        exec(compile(code, str(ROOT / file), "exec"), names)
        with (
            pytest.raises(ModelError, match=rf"{file}:2 \(reward\)"),
            user_code_errors(ModelError, "The reward"),
        ):
            names["reward"]([], [])


def test_an_error_of_users_code_is_shown_instead_of_its_cause():
    with (
        pytest.raises(ModelError, match=r"raised RuntimeError in .*: no number in row 5\."),
        user_code_errors(ModelError, "The reward"),
    ):
        raise RuntimeError("no number in row 5") from ValueError("could not convert")


def prompt_length(prompts: list[str], responses: list[str]) -> torch.Tensor:
    return torch.tensor([len(prompt) for prompt in prompts])


def make_rollout(tokenizer, prompts) -> Rollout:
    tokens = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    return sample(LanguageModel(make_policy()), tokens, length=6)


def scores_of(given, *, prompts=PROMPTS, tokenizer=None, **settings):
    tokenizer = tokenizer or make_tokenizer()
    rollout = make_rollout(tokenizer, prompts)
    rewards = make_rewards(given, tokenizer, batch_size=2, **settings)
    return (*rewards(prompts, rollout), rollout)


# --- Functions ---


def test_a_plain_function_is_a_reward():
    # Known defect, row 34: TRL #2273, #3292.
    trainer = make_trainer(reward_model=count_words)
    metrics = trainer.train()[0]
    assert metrics["rewards/count_words"] > 0
    # No reward model is there to copy: the critic starts from the policy and expects nothing.
    assert type(trainer.critic.model) is type(trainer.policy.model.base_model)
    assert trainer.critic.backbone is not trainer.policy.backbone
    scores, parts, rollout = scores_of(count_words)
    texts = response_texts(make_tokenizer(), rollout)
    assert scores.tolist() == [len(text.split()) for text in texts]
    assert list(parts) == ["count_words"]


def test_a_function_gets_prompts_and_responses_as_texts():
    seen = []

    def remember(prompts, responses):
        seen.append((prompts, responses))
        return [0.0] * len(prompts)

    _, _, rollout = scores_of(remember, prompts=["w1 w2 w3", [7], say("w5")][:2])
    assert seen == [(["w1 w2 w3", "w4"], response_texts(make_tokenizer(), rollout))]


def test_a_tensor_with_a_graph_behind_it_is_a_number_all_the_same():
    # The policy's loss would reach into the function, and a second microbatch would fail there.
    weight = torch.ones(1, requires_grad=True)

    def score(prompts, responses):
        return weight * torch.arange(len(responses))

    scores, _, _ = scores_of(score)
    assert not scores.requires_grad
    make_trainer(reward_model=score).step()
    assert weight.grad is None


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([1.0, 2.0], r"shape \(2,\) for 3 responses"),
        ([[1.0], [2.0], [3.0]], r"shape \(3, 1\) for 3 responses"),
        (1.0, r"shape \(\) for 3 responses"),
        (None, "returned None, which is not a sequence"),
        (["good", "bad", "good"], "not a sequence of numbers"),
        ([1.0, None, 2.0], "not a sequence of numbers"),
        ([[1.0], [1.0, 2.0], []], "not a sequence of numbers"),
    ],
)
def test_a_function_that_does_not_give_one_number_a_response_is_refused(answer, words):
    def answers(prompts, responses):
        return answer

    with pytest.raises(ModelError, match=f"The reward function answers gave.*{words}|{words}"):
        scores_of(answers)


# --- Several ---


def test_several_rewards_are_added_by_their_weights_and_logged_by_their_names():
    scores, parts, _ = scores_of([count_words, prompt_length], weights=[2.0, -0.5])
    assert_close(scores, 2.0 * parts["count_words"] - 0.5 * parts["prompt_length"])
    assert parts["prompt_length"].tolist() == [8.0, 2.0, 5.0]

    config = dataclasses.replace(CONFIG, reward_weights=[2.0, -0.5], missing_eos_penalty=None)
    metrics = make_trainer(config, reward_model=[count_words, prompt_length]).step()
    expected = 2 * metrics["rewards/count_words"] - 0.5 * metrics["rewards/prompt_length"]
    assert metrics["objective/scores"] == pytest.approx(expected, rel=1e-5)


def test_without_weights_all_count_alike():
    scores, parts, _ = scores_of((count_words, prompt_length))
    assert_close(scores, parts["count_words"] + parts["prompt_length"])


def test_a_dict_gives_the_names():
    model = RewardModel(make_classifier(), make_tokenizer())
    _, parts, _ = scores_of({"long": count_words, "also long": count_words, "good": model})
    assert list(parts) == ["long", "also long", "good"]


def test_a_model_is_called_by_its_class_and_an_object_by_its_own():
    _, parts, _ = scores_of(
        [
            RewardModel(make_classifier("gpt2"), make_tokenizer()),
            make_classifier(),
            functools.partial(count_words),
        ]
    )
    assert list(parts) == [
        "GPT2ForSequenceClassification",
        "LlamaForSequenceClassification",
        "partial",
    ]


def test_two_rewards_of_one_name_are_refused():
    with pytest.raises(ConfigError, match=r"the name 'count_words'.*dict"):
        scores_of([count_words, count_words])


@pytest.mark.parametrize("weights", [[1.0], [1.0, 2.0, 3.0]])
def test_weights_that_are_not_one_for_each_are_refused(weights):
    with pytest.raises(ConfigError, match=r"reward_weights=.* 2 rewards \(count_words, "):
        scores_of([count_words, prompt_length], weights=weights)


@pytest.mark.parametrize("given", [[], {}, ()])
def test_no_reward_at_all_is_refused(given):
    with pytest.raises(ConfigError, match="There is no reward"):
        scores_of(given)


@pytest.mark.parametrize("given", [None, 1.0, "reward/path"])
def test_what_is_neither_model_nor_function_is_refused(given):
    with pytest.raises(ModelError, match="Pass a model or a function"):
        make_rewards({"best": given}, make_tokenizer(), batch_size=2)


def test_only_reward_models_are_among_the_models():
    rewards = make_rewards([count_words, make_classifier()], make_tokenizer(), batch_size=2)
    assert isinstance(rewards, RewardMix)
    assert [type(each) for each in rewards.models()] == [RewardModel]


# --- Models ---


def test_a_bare_classifier_reads_the_policys_tokens():
    model, tokenizer = make_classifier(), make_tokenizer()
    scores, _, rollout = scores_of(model)
    assert_close(scores, score_tokens(RewardModel(model, tokenizer), rollout, batch_size=3))
    for b in range(3):
        ids = encode_prompt(tokenizer, PROMPTS[b])
        length = int(rollout.response_lengths[b]) - int(rollout.has_stop[b])
        ids = [*ids, *rollout.response_ids[b, :length].tolist(), EOS]
        assert_close(scores[b], model(torch.tensor([ids])).logits[0, 0].detach())


def test_vocabularies_are_compared_once_and_not_for_every_batch(monkeypatch):
    compared = []
    plain = RewardModel.reads_tokens_of
    monkeypatch.setattr(
        RewardModel, "reads_tokens_of", lambda *args: compared.append(1) or plain(*args)
    )
    tokenizer = make_tokenizer()
    rewards = make_rewards(make_classifier(), tokenizer, batch_size=2)
    rollout = make_rollout(tokenizer, PROMPTS)
    first, second = (rewards(PROMPTS, rollout)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert len(compared) == 1


def test_a_language_model_is_no_reward():
    with pytest.raises(ModelError, match="has no classification head"):
        scores_of(make_policy())


def test_an_adapter_on_a_reward_model_is_merged_into_a_copy_or_to_be_merged_first():
    # Its head is wrapped, so it would be read at another place than the last token.
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"])
    adapted = peft.get_peft_model(make_classifier(), config)
    with pytest.raises(ModelError, match="merge_and_unload"):
        RewardModel(adapted, make_tokenizer())
    assert_close(scores_of(adapted)[0], scores_of(make_classifier())[0])
    assert isinstance(adapted, peft.PeftModel)


def make_chat_reward(template: str | None) -> RewardModel:
    model = make_classifier()
    return RewardModel(model, make_chat_tokenizer(template))


def test_chat_prompts_are_rendered_by_the_reward_models_own_template():
    conversations = [say("w1 w2"), say("w3", "w4", "w5")]
    policy_tokenizer, reward = make_chat_tokenizer(OPEN), make_chat_reward(ENDED)
    scores, _, rollout = scores_of(reward, prompts=conversations, tokenizer=policy_tokenizer)
    answers = response_texts(policy_tokenizer, rollout)
    for score, conversation, answer in zip(scores, conversations, answers, strict=True):
        whole = [*conversation, {"role": "assistant", "content": answer}]
        ids = reward.tokenizer.apply_chat_template(whole, tokenize=True, return_dict=False)
        assert ids[-1] == EOS
        expected = reward.model(torch.tensor([ids])).logits[0, 0].detach()
        assert_close(score, expected)


def test_chat_prompts_for_a_reward_model_without_a_template_are_refused():
    with pytest.raises(DataError, match="no chat template"):
        scores_of(make_chat_reward(None), prompts=[say("w1")], tokenizer=make_chat_tokenizer(OPEN))


def test_a_pad_token_more_makes_no_other_tokens():
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    reward = RewardModel(make_classifier(), make_tokenizer())
    assert reward.reads_tokens_of(tokenizer)
    for other in (make_tokenizer(words=50), make_tokenizer(prefix="v")):
        assert not reward.reads_tokens_of(other)


def test_prompts_of_token_ids_become_text_for_a_reward_model_with_other_tokens():
    policy_tokenizer = make_tokenizer(words=50)
    other = make_tokenizer(words=40)
    model = make_classifier()
    reward = RewardModel(model, other)
    seen = []
    plain = reward.encode
    reward.encode = lambda prompt, response: (
        seen.append((prompt, response)) or plain(prompt, response)
    )
    scores, _, rollout = scores_of(reward, prompts=[[4, 5], [9]], tokenizer=policy_tokenizer)
    answers = response_texts(policy_tokenizer, rollout)
    assert seen == [("w1 w2", answers[0]), ("w6", answers[1])]
    for score, (prompt, answer) in zip(scores, seen, strict=True):
        ids = [*other(prompt)["input_ids"], *other(answer)["input_ids"], EOS]
        assert_close(score, model(torch.tensor([ids])).logits[0, 0].detach())
