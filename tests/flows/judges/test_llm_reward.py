"""Language models as rewards: the question, the score in the reply, limits, and a training."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.cost.run_size import describe_sizes
from pipeline.inputs.model_digests import digest_of_model
from pipeline.inputs.run_data import RunData
from pipeline.inputs.run_rewards import RunRewards
from pipeline.judges.chat_model import Question, Reply
from pipeline.judges.judge_budget import Spent, read_spent
from pipeline.judges.llm_reward.job import LanguageModels, job_of_run
from pipeline.judges.llm_reward.rubric_reward import RubricReward
from pipeline.judges.llm_reward.score_question import (
    REMINDER,
    pose_score,
    read_score,
    score_wording,
)
from pipeline.judges.reply_cache import ReplyCache
from pipeline.launch.checkpoint_mirror import SPENT_FILE
from pipeline.preflight.reward_trial import try_rewards
from pipeline.results.step_records import PreparedModel, ValidatedReward
from pipeline.settings.make_settings import make_settings
from pipeline.settings.settings import Settings
from pipeline.stages.ppo_training import train_policy
from pipeline.stages.start import start_run
from ppo_core.checkpointing.folders import finished_checkpoints
from ppo_core.config.reward_names import read_rewards
from ppo_core.errors import JudgeError
from ppo_core.reporting.metrics_file import METRICS_FILE, read_metrics
from tests.flows.judges.test_judge_prompt import HOSTILE
from tests.helpers.inputs.pipeline_inputs import tiny_table, write_model
from tests.helpers.servers.fault_server import Behavior, Request, fault_server, refuse, say

RUBRIC = "# Rubric\n10: has the word w1.\n1: {has} [it] not."
(SCORER,) = read_rewards(["openai:scorer"])


# --- The question and the reply ---


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_leaves_its_string_or_holds_the_delimiter(text: str):
    for prompt, response in ((text, "r"), ("p", text), (text, text)):
        system, user = pose_score(RUBRIC, prompt, response, attempt=2)
        delimiter, data, again, *reminder = user["content"].split("\n")
        assert json.loads(data) == {"prompt": prompt, "response": response}
        assert data.isascii() and data.isprintable() and not set("<[") & set(data)
        assert delimiter == again and user["content"].count(delimiter) == 2
        assert "\n".join(reminder) == REMINDER
        assert RUBRIC in system["content"] and system["content"].count(delimiter) == 1


def test_the_version_of_the_question_changes_with_the_rubric():
    assert score_wording(RUBRIC) == score_wording(RUBRIC) != score_wording(RUBRIC + "\n")


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("SCORE: 7", 7),
        ("Short but right.\n\n**Score:** 8.5.", 8.5),
        ("It is fine.\nscore: 10/10\n", 10),
        ("<think>SCORE: 3</think>\nSCORE: 4", 4),
        ("SCORE: 4\nSCORE: 4", 4),
        ("6", 6),
        ("`1`", 1),
        ("9 / 10", 9),
        ("SCORE: 4\nSCORE: 5", None),
        ("SCORE: 0", None),
        ("SCORE: 11", None),
        ("SCORE: -5", None),
        ("SCORE: nan", None),
        ("SCORE: 1e1", None),
        ("SCORE: 7 or 8", None),
        ("SCORE: 70%", None),
        ("I give 7.", None),
        ("7\n8", None),
        ("SCORE: \u0667", None),
        ("SCORE: 99999999999999999999", None),
        ("<think>SCORE: 3", None),
        ("", None),
        (None, None),
    ],
)
def test_a_score_is_one_number_from_1_to_10_on_a_line_of_its_own(text, score):
    found = read_score(Reply(text, error="" if text is not None else "The server is on fire."))
    assert found.value == score
    assert bool(found.reason) == (score is None)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("SCORE: 0", "the score 0, which is outside 1 to 10"),
        ("Perfect.\nSCORE: 11", "the score 11, which is outside 1 to 10"),
        ("SCORE: 4\nSCORE: 5", "scores that differ"),
        ("I give 7.", "no score from 1 to 10"),
    ],
)
def test_the_reason_names_the_fault_of_a_reply(text: str, fault: str):
    assert read_score(Reply(text)).reason == f"The reply has {fault}: {text!r}"


# --- The reward ---


class Scripted:
    """A chat model that gives 9 to a response with w1 and 3 to others, and fails where told."""

    name = version = "scripted"

    def __init__(self, bad: Callable[[str], bool] = lambda response: False) -> None:
        self.bad = bad
        self.asked: list[str] = []

    def ask(self, questions: Sequence[Question], keep: Callable[[int, Reply], None]) -> None:
        for number, question in enumerate(questions):
            response = json.loads(question[1]["content"].split("\n")[1])["response"]
            self.asked.append(response)
            words = "9" if "w1" in response else "3"
            keep(number, Reply("no idea" if self.bad(response) else f"SCORE: {words}"))


def reward_of(chat: Scripted, folder: Path, **changes: Any) -> RubricReward:
    settings = {"attempts": 2, "max_invalid": 0.05, **changes}
    return RubricReward(SCORER, chat, ReplyCache(folder), RUBRIC, **settings)


def test_an_invalid_answer_takes_the_mean_of_the_others_and_nothing_is_asked_twice(tmp_path: Path):
    chat = Scripted(bad=lambda response: response == "bad")
    responses = ["w1", "w2", "w1", "bad"]
    for _ in range(2):
        # The mean of 9, 3 and 9: one for each response, although equal ones are asked once.
        assert reward_of(chat, tmp_path)(["p"] * 4, responses) == [9, 3, 9, 7]
    assert Counter(chat.asked) == {"w1": 1, "w2": 1, "bad": 2}
    # A process with few rows may have no other answer, and goes on with the last ones.
    reward = reward_of(chat, tmp_path)
    assert [reward(["p"], [text]) for text in ("w1", "w2", "bad")] == [[9], [3], [6]]


def test_too_many_invalid_answers_end_the_training_by_name(tmp_path: Path):
    chat = Scripted(bad=lambda response: response.startswith("bad"))
    reward = reward_of(chat, tmp_path)
    batches = [
        [f"{'bad' if row < 1 else 'good'}{row + 10 * number}" for row in range(10)]
        for number in range(7)
    ]
    # A tenth is invalid: too much, once there are 64 answers.
    for batch in batches[:6]:
        assert min(reward(["p"] * 10, batch)) == 3
    with pytest.raises(JudgeError, match=r"rewards='openai:scorer': 7 of the last 70 answers have"):
        reward(["p"] * 10, batches[6])
    with pytest.raises(JudgeError, match="2 of the last 2 answers have no score"):
        reward_of(chat, tmp_path)(["p"] * 2, ["bad1", "bad2"])
    assert reward_of(chat, tmp_path, max_invalid=0.2)(["p"] * 10, batches[0])


def with_model(folder: Path, url: str, **changes: Any) -> Settings:
    """Settings of a run whose reward is a language model behind a server."""
    table = tiny_table(folder)
    (folder / "rubric.md").write_text(RUBRIC)
    table["ppo"] |= {"save_steps": 1, "reward_weights": [0.5, 1.0]}
    return make_settings(
        {
            **table,
            "rewards": ["reward-model", "openai:scorer"],
            "rewards_rubric": str(folder / "rubric.md"),
            "judging": {"base_url": url, "retries": 0, **changes.pop("judging", {})},
            **changes,
        },
        {},
    )


def test_processes_share_the_limits_and_count_what_all_of_them_spent(tmp_path: Path):
    with fault_server([say("SCORE: 5", tokens=10)]) as server:
        settings = with_model(tmp_path, server.url, judging={"max_calls": 9})
        job = job_of_run(RunRewards(RunData(settings)), processes=2)
        first, second = (LanguageModels(job, tmp_path).reward(SCORER) for _ in range(2))
        assert first(["p"] * 3, ["a", "b", "c"]) == [5, 5, 5]
        with pytest.raises(JudgeError, match=r"max_calls=4 \(the part of one of 2"):
            second(["p"] * 5, list("defgh"))
        with (tmp_path / SPENT_FILE).open("a") as file:
            file.write('{"name": "openai:sco')  # killed while it wrote
        assert read_spent(tmp_path / SPENT_FILE) == {"openai:scorer": Spent(calls=3, tokens=30)}
        # After a restart with one process, 6 of 9 calls are left.
        resumed = LanguageModels(replace(job, processes=1), tmp_path)
        assert resumed.budget.calls_left == 6
        assert resumed.reward(SCORER)(["p"] * 4, ["a", "b", "c", "d"]) == [5] * 4
    assert len(server.requests) == 4


def test_the_sizes_of_a_run_say_what_it_asks_and_that_the_limit_is_too_low(tmp_path: Path):
    settings = with_model(tmp_path, "http://127.0.0.1:1/v1", judging={"max_calls": 23})
    words = describe_sizes(settings, has_champion=False)
    # 24 responses, and answers to 8 watched prompts before the first and after each of 3 updates.
    assert "rewards: questions to each of 1 language models at most 56\n" in words
    assert "judging.max_calls=23 is below the 56 calls of PPO, so PPO ends before" in words


def test_the_first_step_asks_about_a_chosen_and_an_empty_answer(tmp_path: Path, capsys):
    with fault_server([say("SCORE: 8"), say("SCORE: 2")]) as server:
        try_rewards(RunData(with_model(tmp_path, server.url, judging={"concurrency": 1})))
    assert "rewards=openai:scorer: 8 for a chosen answer, 2 for an empty one" in (
        capsys.readouterr().out
    )
    with (
        fault_server([say("I would rather not.")]) as server,
        pytest.raises(JudgeError, match="rewards='openai:scorer': it gave no score to a chosen"),
    ):
        try_rewards(RunData(with_model(tmp_path, server.url)))


# --- A training ---


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_server_that_dies_keeps_the_checkpoint_and_a_resume_asks_the_rest(
    tmp_path: Path, mlflow_client
):
    answered: Counter[str] = Counter()
    # Eight answers to the watched prompts, and eight responses of the first update.
    alive = 18

    def answer(request: Request) -> Behavior:
        if answered.total() >= alive:
            return refuse(401, "the key was revoked")
        answered[request.question] += 1
        return say("SCORE: 9" if '"w1' in request.question else "SCORE: 4", tokens=10)

    with fault_server(answer) as server:
        settings = replace(with_model(tmp_path, server.url), processes=2)
        sft, reward_model = (
            PreparedModel(path=path, digest=digest_of_model(path), metrics={})
            for path in (settings.policy, write_model(tmp_path / "reward", labels=1))
        )
        validation = ValidatedReward(
            fit=True, accepted_by_hand=False, reasons=[], bias=0.0, gain=1.0, report_file=""
        )
        run = start_run(settings, settings, "RLHF", "1", ["train_policy"])
        with pytest.raises(JudgeError, match=r"rewards='openai:scorer': .* 401: the key was"):
            train_policy(settings, sft, reward_model, validation, run)
        assert list(finished_checkpoints(run.folder / "ppo")) == [1]

        alive = 1000
        trained = train_policy(settings, sft, reward_model, validation, run)
    assert set(answered.values()) == {1} and 28 <= len(answered) <= 56
    lines = read_metrics(run.folder / "ppo" / METRICS_FILE)
    assert all(4 <= line["rewards/scorer"] <= 9 for line in lines) and len(lines) == 3
    calls = trained.spent["openai:scorer"].calls
    assert calls == len(server.requests) and calls >= len(answered)
    assert trained.spent["openai:scorer"].tokens == 10 * len(answered)
