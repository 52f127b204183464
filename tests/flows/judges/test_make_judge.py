"""From a setting to a judge: functions, reward models, chat models, and what is refused."""

import json
from math import exp, inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.judges.chat_judge import ChatJudge
from pipeline.judges.judge_names import JUDGED_ELSEWHERE, calls_per_question, check_judge_name
from pipeline.judges.make_judge import Ensemble, check_judge, make_judge
from pipeline.judges.reward_model_judge import RewardModelJudge, verdict_by_score
from pipeline.judges.verdict import Judge, Verdict, swapped
from pipeline.settings.judge_config import JudgingConfig
from ppo_core.errors import ConfigError, DataError, JudgeError, ModelError
from ppo_core.models.loading import load_reward_model
from tests.helpers.inputs.pipeline_inputs import JUDGE, write_model
from tests.helpers.models.chat import STRICT, make_chat_tokenizer
from tests.helpers.models.tiny import make_tokenizer
from tests.helpers.servers.fault_server import fault_server, say

PAIRS = [("w1 w1", "w2"), ("w2", "w1"), ("w2", "w3")]
PROMPTS = ["w4"] * 3


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-none")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def make(spec: str, *, cache_folder: Path = Path("unused"), end_of_text: bool = True) -> Judge:
    return make_judge(
        spec, config=JudgingConfig(), cache_folder=cache_folder, end_of_text=end_of_text
    )


def check(spec: str, reward_model: str = "", **judging: object) -> None:
    check_judge(spec, reward_model, JudgingConfig(**judging))


def write_judge(path: Path, body: str = JUDGE) -> str:
    path.write_text(body)
    return f"python:{path}:judge"


def write_chat(folder: Path, **template: str) -> str:
    path = write_model(folder)
    make_chat_tokenizer(**template).save_pretrained(folder)
    return path


def test_a_key_that_is_missing_is_named_before_anything_is_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(ConfigError, match=r"judge='openai:m': .* Set .*OPENAI_API_KEY"):
        check_judge_name("rule,openai:m", "", "")
    check_judge_name("openai:m", "", "http://127.0.0.1:1/v1")


def test_a_deployed_step_without_the_key_neither_needs_it_nor_asks_the_judge(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.delenv("OPENAI_API_KEY")
    with fault_server([say("A")]) as server:
        monkeypatch.setenv(JUDGED_ELSEWHERE, "1")
        check_judge_name("openai:m", "", "")
        check("openai:m", base_url=server.url)
        assert server.requests == []
        monkeypatch.delenv(JUDGED_ELSEWHERE)
        check("openai:m", base_url=server.url)
        assert len(server.requests) == 1


# --- Functions ---------------------------------------------------------------------


def test_a_function_of_a_file_judges(tmp_path: Path):
    spec = write_judge(tmp_path / "own.py")
    judge = make(spec)
    assert judge(PROMPTS, PAIRS) == [Verdict("first"), Verdict("second"), Verdict("tie")]
    assert judge.name == spec
    assert judge.members == ()


def test_a_function_of_a_module_judges(tmp_path: Path, monkeypatch):
    (tmp_path / "own_judge_module.py").write_text(JUDGE)
    monkeypatch.syspath_prepend(tmp_path)
    of_module = make("python:own_judge_module:judge")
    assert [verdict.winner for verdict in of_module(PROMPTS, PAIRS)] == ["first", "second", "tie"]
    assert of_module.version == make(f"python:{tmp_path / 'own_judge_module.py'}:judge").version


def test_a_file_is_no_module_of_its_name(tmp_path: Path):
    assert make(write_judge(tmp_path / "json.py"))(PROMPTS[:1], PAIRS[:1]) == [Verdict("first")]
    assert json.loads("1") == 1
    import json as again

    assert again is json


def test_a_function_may_say_how_sure_it_is_and_why(tmp_path: Path):
    body = """
from __future__ import annotations

from dataclasses import dataclass

@dataclass
class Own:
    winner: str
    probability: float

def judge(prompts, pairs):
    yield {"winner": "first", "probability": 1, "reason": "shorter"}
    yield {"winner": "invalid", "probability": None, "reason": None}
    yield Own("second", 0.25)
"""
    assert make(write_judge(tmp_path / "own.py", body))(PROMPTS, PAIRS) == [
        Verdict("first", 1.0, "shorter"),
        Verdict("invalid"),
        Verdict("second", 0.25),
    ]


def test_a_function_may_return_verdicts_and_numbers_of_numpy(tmp_path: Path):
    body = """
import numpy
from pipeline.judges.verdict import Verdict

def judge(prompts, pairs):
    return numpy.array([Verdict("tie", numpy.float32(0.5), "as good")] * 3)
"""
    verdicts = make(write_judge(tmp_path / "own.py", body))(PROMPTS, PAIRS)
    assert verdicts == [Verdict("tie", 0.5, "as good")] * 3
    assert type(verdicts[0].probability) is float
    words = "import numpy\ndef judge(prompts, pairs): return numpy.array(['tie'] * len(pairs))"
    word = make(write_judge(tmp_path / "words.py", words))(PROMPTS, PAIRS)[0].winner
    assert type(word) is str
    assert not isinstance(word, np.str_)


def test_the_version_of_a_function_follows_its_source(tmp_path: Path):
    one = make(write_judge(tmp_path / "one.py")).version
    assert one == make(write_judge(tmp_path / "same.py")).version
    assert one != make(write_judge(tmp_path / "one.py", JUDGE + "# changed\n")).version


def test_the_rule_is_the_built_in_tasks_own():
    judge = make("rule")
    assert judge(["no post of the grammar"], [("a", "b")]) == [Verdict("invalid")]
    post = "title : a strange week . i felt angry . tl;dr :"
    assert judge([post], [("felt angry", "felt sad")]) == [Verdict("first")]
    assert judge.name == "rule"
    assert len(judge.version) == 16


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("['first']", "1 verdicts for 3 pairs"),
        ("['first'] * 4", "more than 3 verdicts for 3 pairs"),
        ("None", "returned None. Return a list"),
        ("[1] * 3", "gave 1 for pair 1"),
        ("['tie', 'First', 'tie']", r"'First' for pair 2\. Return one of"),
        ("[['first']] * 3", r"gave \['first'\] for pair 1"),
        ("[{'winer': 'first'}] * 3", "gave {'winer': 'first'} for pair 1"),
        ("[{'winner': 'tie', 'probability': 1.5}] * 3", "probability 1.5 for pair 1"),
        ("[{'winner': 'tie', 'probability': -0.1}] * 3", "probability -0.1 for pair 1"),
        ("[{'winner': 'tie', 'probability': float('nan')}] * 3", "probability nan for pair 1"),
        ("[{'winner': 'tie', 'probability': '0.5'}] * 3", "probability '0.5' for pair 1"),
        ("[{'winner': 'tie', 'probability': True}] * 3", "probability True for pair 1"),
    ],
)
def test_what_a_function_returns_is_checked(tmp_path: Path, returned: str, message: str):
    spec = write_judge(tmp_path / "own.py", f"def judge(prompts, pairs): return {returned}")
    with pytest.raises(DataError, match=message) as refused:
        make(spec)(PROMPTS, PAIRS)
    assert spec in str(refused.value)


def test_half_a_character_in_a_reason_can_be_written(tmp_path: Path):
    spec = write_judge(
        tmp_path / "own.py",
        "def judge(prompts, pairs):\n"
        "    return [{'winner': 'tie', 'reason': 'so \\ud83d'} for _ in pairs]",
    )
    assert make(spec)(PROMPTS[:1], PAIRS[:1]) == [Verdict("tie", reason="so ?")]


# --- Reward models -----------------------------------------------------------------


@pytest.mark.parametrize("end_of_text", [True, False])
def test_a_reward_model_prefers_what_it_scores_higher(tmp_path: Path, end_of_text: bool):
    path = write_model(tmp_path / "judge", labels=1)
    judge = make(f"reward-model:{path}", end_of_text=end_of_text)
    verdicts = judge(PROMPTS, PAIRS)
    assert {verdict.winner for verdict in verdicts} <= {"first", "second"}
    turned = judge(PROMPTS, [(second, first) for first, second in PAIRS])
    assert [verdict.winner for verdict in map(swapped, turned)] == [v.winner for v in verdicts]
    assert judge.name == f"reward-model:{path}"

    model = load_reward_model(path, end_of_text=end_of_text)
    first, second = model.score_texts(["w4", "w4"], PAIRS[0]).tolist()
    assert verdicts[0].winner == ("first" if first > second else "second")
    assert verdicts[0].probability == pytest.approx(1 / (1 + exp(second - first)), abs=1e-6)


def test_the_same_text_is_a_tie_whatever_is_judged_beside_it(tmp_path: Path):
    judge = make(f"reward-model:{write_model(tmp_path / 'judge', labels=1)}")
    # By length there are 63 short texts, the same one twice, and 63 long ones, so that of two
    # batches of 64 each holds it once, and pads it to another length.
    long = " ".join(["w5"] * 40)
    pairs = [(f"w{i}", f"w{i} {long}") for i in range(63)] + [("w2 w3", "w2 w3")]
    assert judge(["w1"] * 64, pairs)[-1] == Verdict("tie", 0.5)


def test_a_text_that_the_model_cannot_read_costs_its_own_verdict_alone(tmp_path: Path):
    judge = make(f"reward-model:{write_model(tmp_path / 'judge', labels=1)}")
    # The context has 64 tokens.
    pairs = [("w1 " * 64, "w2"), ("w2", "w3"), ("w2", "w1 " * 64)]
    unreadable, read, other = judge(PROMPTS, pairs)
    assert read.winner == judge(PROMPTS[:1], pairs[1:2])[0].winner != "invalid"
    assert unreadable.winner == other.winner == "invalid"
    assert "more tokens than the context" in unreadable.reason
    assert [one.winner for one in judge(PROMPTS[:1], pairs[:1])] == ["invalid"]


def test_verdicts_by_score_done_by_hand():
    # 1 / (1 + e^-ln 3) = 1 / (1 + 1/3)
    assert verdict_by_score(1.0986122886681098, 0.0) == Verdict("first", pytest.approx(0.75))
    assert verdict_by_score(0.0, 1.0986122886681098) == Verdict("second", pytest.approx(0.25))
    assert verdict_by_score(2.0, 2.0) == Verdict("tie", 0.5)
    assert verdict_by_score(1000.0, -1000.0) == Verdict("first", 1.0)


@pytest.mark.parametrize("scores", [(nan, 1.0), (1.0, nan), (inf, 0.0), (-inf, -inf)])
def test_a_score_that_is_no_number_is_no_verdict(scores: tuple[float, float]):
    verdict = verdict_by_score(*scores)
    assert (verdict.winner, verdict.probability) == ("invalid", None)
    assert verdict.reason == f"The scores are {scores[0]} and {scores[1]}."


def test_the_version_of_a_reward_model_follows_its_files_and_how_it_is_read(tmp_path: Path):
    path = write_model(tmp_path / "judge", labels=1)
    one = make(f"reward-model:{path}").version
    assert one != make(f"reward-model:{path}", end_of_text=False).version
    copy = write_model(tmp_path / "copy", labels=1)
    assert one == make(f"reward-model:{copy}").version
    (tmp_path / "copy" / "notes.txt").write_text("changed")
    assert one != make(f"reward-model:{copy}").version


# --- Chat models and several judges --------------------------------------------------


def test_chat_models_judge_by_their_replies(tmp_path: Path):
    path = write_chat(tmp_path / "chat")
    local = make(f"transformers:{path}", cache_folder=tmp_path / "cache")
    remote = make("openai:some-model", cache_folder=tmp_path / "cache")
    assert isinstance(local, ChatJudge)
    assert isinstance(remote, ChatJudge)
    assert local.name.startswith(f"transformers:{path}")
    assert remote.name.startswith("openai:some-model")


def test_the_settings_and_the_cache_reach_a_chat_model(tmp_path: Path):
    with fault_server([say("VERDICT: B")]) as server:
        config = JudgingConfig(base_url=server.url, criterion="Which is shorter?")
        for _ in range(2):
            judge = make_judge(
                "openai:m", config=config, cache_folder=tmp_path / "cache", end_of_text=True
            )
            assert [verdict.winner for verdict in judge(["w1"], [("w2", "w3")])] == ["second"]
    assert len(server.requests) == 1
    assert "Which is shorter?" in server.requests[0].body["messages"][0]["content"]


def test_several_judges_vote(tmp_path: Path):
    ever = "def judge(prompts, pairs): return ['second'] * len(pairs)"
    specs = [
        write_judge(tmp_path / "own.py"),
        write_judge(tmp_path / "one.py", ever),
        write_judge(tmp_path / "two.py", ever),
    ]
    judge = make(" , ".join(specs))
    assert isinstance(judge, Ensemble)
    assert judge.members == tuple(specs)
    assert [verdict.winner for verdict in judge(PROMPTS, PAIRS)] == ["second"] * 3


def test_judges_that_vote_share_one_budget(tmp_path: Path):
    with fault_server([say("VERDICT: B")]) as server:
        judge = make_judge(
            "openai:a,openai:b",
            config=JudgingConfig(base_url=server.url, max_calls=3),
            cache_folder=tmp_path,
            end_of_text=True,
        )
        with pytest.raises(JudgeError, match=r"only 1 of judging\.max_calls=3 are left"):
            judge(["w1", "w2"], [("w2", "w3")] * 2)
    assert len(server.requests) == 2


def test_a_question_costs_a_call_for_each_judge_on_a_server():
    specs = ("rule", "rule,openai:a", "openai:a,openai:b", "python:builtins:len")
    assert [calls_per_question(spec) for spec in specs] == [0, 1, 2, 0]


# --- What is refused before training -------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "judge='' is unknown"),
        ("gpt-4", "judge='gpt-4' is unknown"),
        ("rule:x", "is unknown"),
        ("rule:", "is unknown"),
        ("reward-model:", "is unknown"),
        ("openai:", "is unknown"),
        ("rule,gpt-4", "judge='gpt-4' is unknown"),
        ("rule,", "judge='' is unknown"),
        ("rule, rule", "names rule twice"),
        ("openai:m,rule,openai:m", "names openai:m twice"),
        ("reward-model:a,reward-model:./a", r"names reward-model:\./a twice"),
        ("python:judge.py", r"judge='python:judge\.py': it names no function"),
        ("python:/nowhere/judge.py:judge", r"the file /nowhere/judge\.py does not exist"),
        ("python:no_such_module:judge", "judge='python:no_such_module:judge': .* be imported"),
        ("python:json:judge", "json has no function 'judge'"),
        ("python:json:__name__", "json has no function '__name__'"),
        ("python:builtins:min", "builtins is part of Python"),
    ],
)
def test_a_judge_that_cannot_be_asked_is_refused_before_training(spec: str, message: str):
    with pytest.raises(ConfigError, match=message):
        check(spec)
    with pytest.raises(ConfigError, match=message):
        make(spec)


def test_judges_that_can_be_asked_pass(tmp_path: Path):
    reward_model = write_model(tmp_path / "rm", labels=1)
    chat = write_chat(tmp_path / "chat")
    own = write_judge(tmp_path / "own.py")
    check(f"rule,{own},reward-model:{reward_model},transformers:{chat}", str(tmp_path / "other"))


def test_no_weights_are_read_to_check_a_model(tmp_path: Path):
    reward_model, chat = write_model(tmp_path / "rm", labels=1), write_chat(tmp_path / "chat")
    for folder in (reward_model, chat):
        (Path(folder) / "model.safetensors").unlink()
    check(f"reward-model:{reward_model},transformers:{chat}")


def test_a_reward_model_without_a_tokenizer_is_refused_before_training(tmp_path: Path):
    reward_model = write_model(tmp_path / "rm", labels=1)
    for file in (tmp_path / "rm").glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match=r"judge='reward-model:.*No tokenizer can be loaded"):
        check(f"reward-model:{reward_model}")


def test_a_broken_file_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be imported"):
        check(write_judge(tmp_path / "own.py", "def judge(:"))


@pytest.mark.parametrize("kind", ["reward-model", "transformers"])
@pytest.mark.parametrize("before", ["", "rule,"])
def test_the_reward_model_may_not_judge_itself(tmp_path: Path, monkeypatch, kind, before):
    monkeypatch.chdir(tmp_path)
    path = write_model(tmp_path / "reward", labels=1)
    with pytest.raises(ConfigError, match="is the reward model that PPO trains against") as refused:
        check(f"{before}{kind}:./reward", path)
    assert f"judge='{kind}:./reward'" in str(refused.value)


def test_a_reward_model_that_is_yet_to_be_trained_is_no_judge_in_this_folder(
    tmp_path: Path, monkeypatch
):
    monkeypatch.chdir(write_model(tmp_path / "judge", labels=1))
    check("reward-model:.", "")


@pytest.mark.parametrize("judge", ["team/reward", "team/reward@v2"])
@pytest.mark.parametrize("reward_model", ["team/reward", "team/reward@v1"])
def test_the_reward_models_name_on_the_hub_is_compared_without_its_revision(judge, reward_model):
    with pytest.raises(ConfigError, match="is the reward model that PPO trains against"):
        check(f"reward-model:{judge}", reward_model)


def test_a_judging_reward_model_has_one_label(tmp_path: Path):
    path = write_model(tmp_path / "two", labels=2)
    with pytest.raises(ModelError, match=f"judge='reward-model:{path}': .*2 labels"):
        check(f"reward-model:{path}")
    with pytest.raises(ModelError, match=f"judge='reward-model:{path}': .*2 labels"):
        make(f"reward-model:{path}")


def test_a_model_without_a_chat_template_cannot_be_asked(tmp_path: Path):
    path = write_model(tmp_path / "plain")
    with pytest.raises(ModelError, match=f"judge='transformers:{path}': .*no chat template"):
        check(f"transformers:{path}")


def test_a_template_that_refuses_a_judges_question_is_refused(tmp_path: Path):
    path = write_chat(tmp_path / "strict", template=STRICT)
    with pytest.raises(ModelError, match="roles system, user: roles must alternate"):
        check(f"transformers:{path}")


def test_a_classifier_cannot_chat(tmp_path: Path):
    path = write_model(tmp_path / "classifier", labels=1)
    make_chat_tokenizer().save_pretrained(path)
    with pytest.raises(ModelError, match="gives scores and no replies"):
        check(f"transformers:{path}")


def test_a_model_that_is_not_there_is_refused(tmp_path: Path):
    make_tokenizer().save_pretrained(tmp_path / "empty")
    with pytest.raises(ModelError, match=r"judge='transformers:.*No model can be loaded"):
        check(f"transformers:{tmp_path / 'empty'}")


def test_a_server_is_asked_once_before_training():
    with fault_server([say("A")]) as server:
        check("openai:some-model", base_url=server.url)
    assert [request.body["model"] for request in server.requests] == ["some-model"]


def test_a_server_that_is_not_there_is_refused_before_training():
    with fault_server([say("A")]) as gone:
        pass
    with pytest.raises(JudgeError, match=r"^judge='openai:some-model': "):
        check("openai:some-model", base_url=gone.url, retries=0)


def test_a_reward_model_that_judges_scores_each_text_once(tmp_path: Path):
    judge = RewardModelJudge(write_model(tmp_path / "rm", labels=1), end_of_text=True)
    passes: list[int] = []
    score = judge._model.score_encoded

    def counted(rows: Any, batch_size: int) -> Any:
        passes.append(len(rows))
        return score(rows, batch_size)

    judge._model.score_encoded = counted
    pairs = [("w1", "w2 w3"), ("w2 w3", "w1"), ("w1", "w1")]
    verdicts = judge(["w5"] * 3, pairs)
    assert passes == [2]
    assert verdicts[2].winner == "tie"
    assert {verdicts[0].winner, verdicts[1].winner} == {"first", "second"}
    again = judge(["w5"] * 3, [(other, one) for one, other in pairs])
    assert [one.winner for one in again[:2]] == [verdicts[1].winner, verdicts[0].winner]
    assert passes == [2]
