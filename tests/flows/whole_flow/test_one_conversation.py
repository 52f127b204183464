"""One conversation, token by token, through every place that reads or writes it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)

from pipeline.judges.judge_prompt import pose
from pipeline.judges.reward_model_judge import RewardModelJudge
from pipeline.registry.artifact import VersionContents, write_artifact
from pipeline.settings.decoding import Decoding
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.data.prompt_set import make_prompt_set
from ppo_core.data.rows.dialogues import shown_prompt
from ppo_core.data.rows.read_rows import Rows, read_rows
from ppo_core.data.types import Rollout
from ppo_core.models.loading import load_policy, load_reward_model, load_tokenizer
from ppo_core.models.reward_model import RewardModel
from ppo_core.ppo.rewards import make_rewards
from ppo_core.supervised.examples.encoded_rows import encode_rows
from ppo_core.supervised.supervised_config import SupervisedConfig
from ppo_core.training import answer_prompts
from tests.helpers.inputs.pipeline_inputs import write_rows
from tests.helpers.models.chat_models import (
    TEMPLATES,
    make_instruct_config,
    make_instruct_tokenizer,
)

ASKED, REPLIED, AGAIN, ANSWER = "Hi there", "Hello!", "How are you?", "Fine, thanks."


@dataclass(frozen=True)
class Case:
    """A family's models on disk, and the conversation in token ids of its own template."""

    folder: Path
    policy: str
    reward_model: str
    messages: list[dict[str, str]]
    """The prompt: three turns, after a message of the system where the template allows it."""

    prompt: list[int]
    """Token ids of the prompt and the start of the answer."""

    answer: list[int]
    """Token ids of the answer and of the token that ends it."""

    whole: list[int]
    """Token ids of the conversation with its answer, as the template writes it."""


@pytest.fixture(scope="module", params=TEMPLATES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family = request.param
    folder = tmp_path_factory.mktemp(family)
    tokenizer = make_instruct_tokenizer(family)
    config = make_instruct_config(family, tokenizer)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "policy")
    config.num_labels = 1
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / "reward")
    for name in ("policy", "reward"):
        tokenizer.save_pretrained(folder / name)
    texts = zip(("user", "assistant", "user"), (ASKED, REPLIED, AGAIN), strict=True)
    messages = [{"role": role, "content": text} for role, text in texts]
    if family != "no-system":
        messages = [{"role": "system", "content": "Be kind."}, *messages]
    ended = [*messages, {"role": "assistant", "content": ANSWER}]
    end = tokenizer.convert_tokens_to_ids(TEMPLATES[family][2])
    return Case(
        folder=folder,
        policy=str(folder / "policy"),
        reward_model=str(folder / "reward"),
        messages=messages,
        prompt=tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"],
        answer=[*tokenizer(ANSWER, add_special_tokens=False)["input_ids"], end],
        whole=tokenizer.apply_chat_template(ended)["input_ids"],
    )


@pytest.fixture
def tokenizer(case: Case) -> PreTrainedTokenizerBase:
    return load_tokenizer(case.policy)


def read(case: Case, kind: Any, row: dict[str, Any]) -> Rows:
    return read_rows(write_rows(case.folder / f"{kind}.jsonl", [row]), kind, is_chat=True)


def encode(kind: Any, rows: Rows, tokenizer: PreTrainedTokenizerBase) -> Rows:
    return encode_rows(kind, rows, tokenizer, SupervisedConfig(), limit=512, overlong="error")


def plain_end(case: Case, ids: list[int]) -> list[int]:
    """The tokens without the line break that a template writes after a turn."""
    return ids[: len(ids) - 1 - ids[::-1].index(case.answer[-1]) + 1]


def test_the_parts_are_the_whole(case: Case):
    assert [*case.prompt, *case.answer] == plain_end(case, case.whole)


def test_fine_tuning_learns_the_answer_and_its_end(case: Case, tokenizer):
    rows = read(case, "demonstrations", {"prompt": case.messages, "completion": ANSWER})
    encoded = encode("demonstrations", rows, tokenizer)
    (example,) = encoded.table
    assert example["input_ids"] == case.whole
    learned = [token for token in example["labels"] if token != -100]
    assert learned == case.answer
    assert example["labels"][: len(case.prompt)] == [-100] * len(case.prompt)


def test_fine_tuning_on_messages_learns_every_answer(case: Case, tokenizer):
    ended = [*case.messages, {"role": "assistant", "content": ANSWER}]
    rows = read(case, "demonstrations", {"messages": ended})
    encoded = encode("demonstrations", rows, tokenizer)
    (example,) = encoded.table
    assert example["input_ids"] == case.whole
    replied = [*tokenizer(REPLIED, add_special_tokens=False)["input_ids"], case.answer[-1]]
    assert [token for token in example["labels"] if token != -100] == [*replied, *case.answer]


def test_the_reward_model_is_trained_and_validated_on_the_same_tokens(case: Case, tokenizer):
    rows = read(case, "pairs", {"prompt": case.messages, "chosen": ANSWER, "rejected": "No."})
    encoded = encode("pairs", rows, tokenizer)
    (pair,) = encoded.table
    assert pair["chosen"] == case.whole
    reward_model = load_reward_model(case.reward_model)
    assert reward_model.encode(rows.table[0]["prompt"], ANSWER) == case.whole
    assert reward_model.encode(rows.table[0]["prompt"], "No.") == pair["rejected"]


def test_ppo_samples_from_the_prompt_and_stops_at_the_end_of_the_turn(case: Case, tokenizer):
    rows = read(case, "prompts", {"prompt": case.messages})
    prompts = make_prompt_set(rows.table, tokenizer, load_policy(case.policy), PPOConfig())
    assert prompts.tokens == [case.prompt]
    assert tokenizer.eos_token_id == case.answer[-1]


def test_ppo_scores_the_tokens_that_the_reward_model_was_trained_on(
    case: Case, tokenizer, monkeypatch: pytest.MonkeyPatch
):
    scored: list[list[int]] = []
    reward_model = load_reward_model(case.reward_model)

    def heard(self: RewardModel, rows: list[list[int]], batch_size: int) -> torch.Tensor:
        scored.extend(rows)
        return score_encoded(self, rows, batch_size)

    score_encoded = RewardModel.score_encoded
    monkeypatch.setattr(RewardModel, "score_encoded", heard)
    rewards = make_rewards(reward_model, tokenizer, batch_size=4)
    rewards([case.messages], rollout_of(case))
    assert scored == [case.whole]


def rollout_of(case: Case) -> Rollout:
    answer = torch.tensor([case.answer])
    return Rollout(
        prompt_ids=torch.tensor([case.prompt]),
        prompt_lengths=torch.tensor([len(case.prompt)]),
        response_ids=answer,
        response_lengths=torch.tensor([len(case.answer)]),
        has_stop=torch.ones(1, dtype=torch.bool),
        logprobs=torch.zeros(answer.shape),
        temperature=1.0,
        response_mask=torch.ones(answer.shape, dtype=torch.bool),
    )


def test_answers_are_sampled_from_the_prompt(case: Case, tokenizer, monkeypatch):
    asked: list[Any] = []

    def sample(policy, prompts, uniforms, sampling, **options):
        asked.append((prompts, sampling.stop_token_id))
        return sample_responses(policy, prompts, uniforms, sampling, **options)

    sample_responses = answer_prompts.sample_responses
    monkeypatch.setattr(answer_prompts, "sample_responses", sample)
    answer_prompts.answer_prompts(
        load_policy(case.policy),
        tokenizer,
        [case.messages],
        response_length=4,
        temperature=1.0,
        seed=1,
    )
    assert asked == [([case.prompt], case.answer[-1])]


def test_a_judge_reads_the_conversation_and_a_reward_model_judges_its_tokens(
    case: Case, monkeypatch: pytest.MonkeyPatch
):
    (_, question) = pose("good", shown_prompt(case.messages), ANSWER, "No.", attempt=1)
    shown = json.loads(question["content"].split("\n")[1])
    assert shown["prompt"].endswith(f"user: {ASKED}\n\nassistant: {REPLIED}\n\nuser: {AGAIN}")
    judged: list[list[int]] = []
    judge = RewardModelJudge(case.reward_model, end_of_text=True)

    def heard(self: RewardModel, rows: list[list[int]], batch_size: int) -> torch.Tensor:
        judged.extend(rows)
        return torch.zeros(len(rows))

    monkeypatch.setattr(RewardModel, "score_encoded", heard)
    judge([case.messages], [(ANSWER, "No.")])
    assert judged[0] == case.whole


def test_the_served_version_reads_the_tokens_of_training(case: Case, tokenizer):
    policy = case.folder / "trained"
    load_policy(case.policy).save_pretrained(policy)
    tokenizer.save_pretrained(policy)
    version = case.folder / "version"
    contents = VersionContents(
        name="chat",
        decoding=Decoding(response_length=4, temperature=0.0),
        example=case.messages,
        card="# A card",
    )
    write_artifact(policy, version, contents, run_id="0" * 32, model_id="m-" + "0" * 32)
    read_ids: list[list[int]] = []
    served = mlflow.pyfunc.load_model(str(version))
    model = _model_of(served)
    model.register_forward_pre_hook(
        lambda module, args, options: read_ids.append(options["input_ids"][0].tolist()),
        with_kwargs=True,
    )
    served.predict({"messages": case.messages})
    assert read_ids[0] == case.prompt
    assert model.generation_config.eos_token_id == case.answer[-1]
    assert (
        AutoTokenizer.from_pretrained(version / "components/tokenizer").eos_token_id
        == (case.answer[-1])
    )


def _model_of(served: Any) -> Any:
    return served._model_impl.pipeline.model
