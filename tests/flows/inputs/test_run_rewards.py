"""`rewards` of a run: digests, columns of the prompts, and what the first step refuses."""

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from pipeline.inputs.run_data import RunData
from pipeline.inputs.run_rewards import RunRewards
from pipeline.judges.judge_names import SCORED_ELSEWHERE, check_reward_names
from pipeline.launch.job import JobModels, write_job
from pipeline.preflight.fetch_inputs import fetch_inputs
from pipeline.preflight.reward_trial import try_rewards
from pipeline.settings.make_settings import make_settings
from pipeline.settings.settings import Settings
from pipeline.stages.given_settings import read_settings
from pipeline.stages.start import trace_run
from ppo_core.config.reward_names import read_rewards
from ppo_core.errors import ConfigError, DataError, JudgeError, PPOError
from tests.helpers.inputs.pipeline_inputs import tiny_table, write_model, write_rows
from tests.helpers.models.chat import ASSISTANT, LETTER_A, write_parrot
from tests.helpers.models.tiny import EOS
from tests.helpers.runs.forked_python import run_python

SERVER = "http://127.0.0.1:1/v1"

REWARDS = """
def brevity(prompts, responses):
    return [-float(len(response.split())) for response in responses]

def level(prompts, responses, level):
    return [float(n) for n in level]

def misspelt(prompts, responses, levle):
    return [0.0] * len(responses)

def everything(prompts, responses, **columns):
    return [0.0] * len(responses)

def when(prompts, responses, when):
    return [0.0] * len(responses)

def first_word(prompts, responses):
    return [float(len(response.split()[0])) for response in responses]

def one_number(prompts, responses):
    return 1.0

def quits(prompts, responses):
    raise SystemExit(0)

def none(prompts, responses):
    return None

def hangs(prompts, responses):
    import time
    time.sleep(60)

def few(prompts, responses):
    return [1.0]

def of_prompts(prompts):
    return [1.0] * len(prompts)
"""


def with_rewards(folder: Path, *rewards: str, **changes: Any) -> Settings:
    table = tiny_table(folder)
    (folder / "rewards.py").write_text(REWARDS)
    rows = [json.loads(line) for line in Path(table["prompts"]).read_text().splitlines()]
    write_rows(
        Path(table["prompts"]),
        [{**row, "level": n, "completion": f"w{n}"} for n, row in enumerate(rows)],
    )
    entries = [one.replace("HERE", str(folder)) for one in rewards]
    return make_settings({**table, "rewards": entries, **changes}, {})


def rewards_of(settings: Settings) -> RunRewards:
    return RunRewards(RunData(settings))


# --- The job of PPO ---


def job_of(settings: Settings) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    folder = Path(settings.output_dir) / "ppo"
    path = write_job(
        rewards_of(settings),
        JobModels(policy="sft", reward_model="trained", reward_bias=0.5, reward_gain=2.0),
        folder=folder,
        policy_dir=folder / "policy",
    )
    rows = (folder / "prompts.jsonl").read_text().splitlines()
    return json.loads(path.read_text()), [json.loads(row) for row in rows]


def test_without_rewards_the_job_has_prompts_and_the_reward_model_alone(tmp_path: Path):
    settings, rows = job_of(with_rewards(tmp_path))
    assert settings["rewards"] is None and settings["reward_model_path"] == "trained"
    assert (settings["reward_bias"], settings["reward_gain"]) == (0.5, 2.0)
    assert all(row.keys() == {"prompt"} for row in rows) and len(rows) == 32


def test_the_job_has_the_columns_that_functions_take_and_no_others(tmp_path: Path):
    rewards = ["reward-model", "python:HERE/rewards.py:brevity", "python:HERE/rewards.py:level"]
    settings, rows = job_of(with_rewards(tmp_path, *rewards))
    assert [one.name for one in read_rewards(settings["rewards"])] == [
        "reward-model",
        "brevity",
        "level",
    ]
    assert settings["reward_model_path"] == "trained"
    assert [row["level"] for row in rows] == [*range(32)]
    assert all(row.keys() == {"prompt", "level"} for row in rows)


def test_a_list_without_the_reward_model_leaves_it_out(tmp_path: Path):
    given = with_rewards(tmp_path, "python:HERE/rewards.py:everything")
    section = replace(given.reward_model_training, end_of_text=False)
    settings, rows = job_of(replace(given, reward_model_training=section))
    assert settings["reward_model_path"] is None
    assert (settings["reward_bias"], settings["reward_gain"]) == (0.0, 1.0)
    assert settings["reward_end_of_text"] is True
    assert rows[5] | {"prompt": ""} == {
        "prompt": "",
        "level": 5,
        "completion": "w5",
        "reference": "w5",
    }


def test_columns_follow_their_rows_where_some_are_split_off(tmp_path: Path):
    given = with_rewards(tmp_path, "python:HERE/rewards.py:level", eval_prompts="")
    by_prompt = {
        row["prompt"]: row["level"]
        for row in map(json.loads, Path(given.prompts).read_text().splitlines())
    }
    rows = rewards_of(given).prompts()
    assert 0 < len(rows) < 32
    assert all(by_prompt[row["prompt"]] == row["level"] for row in rows)


def test_a_renamed_prompt_keeps_its_columns(tmp_path: Path):
    given = with_rewards(tmp_path, "python:HERE/rewards.py:level", columns={"prompt": "completion"})
    assert rewards_of(given).prompts()[3] == {"prompt": "w3", "level": 3}


# --- What decides the policy ---


def test_each_change_of_a_reward_trains_another_policy(tmp_path: Path):
    level = "python:HERE/rewards.py:level"

    def key(*rewards: str) -> str:
        given = [one.replace("HERE", str(tmp_path)) for one in rewards]
        return json.dumps(rewards_of(replace(plain, rewards=given)).decides_the_result())

    plain = with_rewards(tmp_path)
    assert key() == "{}"
    write_model(tmp_path / "other", labels=1)
    keys = [
        key("reward-model"),
        key("reward-model", level),
        key(level, "reward-model"),
        key(level),
        key("reward-model", "python:HERE/rewards.py:brevity"),
        key("reward-model", "reward-model:HERE/other"),
    ]
    (tmp_path / "rewards.py").write_text(REWARDS + "# Changed.\n")
    keys.append(key(level))
    rows = [json.loads(line) for line in Path(plain.prompts).read_text().splitlines()]
    write_rows(Path(plain.prompts), [{**row, "level": 0} for row in rows])
    keys.append(key(level))
    assert len(set(keys)) == len(keys)
    # A column that nobody takes decides nothing.
    write_rows(Path(plain.prompts), [{**row, "level": 0, "note": "x"} for row in rows])
    assert key(level) == keys[-1]


def test_the_lineage_names_each_function(tmp_path: Path):
    settings = with_rewards(tmp_path, "reward-model", "short=python:HERE/rewards.py:brevity")
    tags = trace_run("RLHF/1", settings, settings).tags
    assert [name for name in tags if name.startswith("reward/")] == ["reward/short"]
    assert tags["reward/short"].startswith("brevity@")


# --- What the first step refuses ---


def test_each_function_is_tried_on_two_rows(tmp_path: Path, capsys):
    write_model(tmp_path / "other", labels=1)
    try_rewards(
        RunData(
            with_rewards(
                tmp_path,
                "reward-model",
                "python:HERE/rewards.py:brevity",
                "python:HERE/rewards.py:level",
                "reward-model:HERE/other",
            )
        )
    )
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("rewards.py:")[2] for line in lines] == [
        "brevity: -5 for an answer to another prompt, 0 for an empty one",
        "level: 0 for an answer to another prompt, 1 for an empty one",
    ]


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ("python:HERE/rewards.py:misspelt", r"needs the column 'levle'.*Did you mean level\?"),
        ("python:HERE/rewards.py:first_word", r"first_word raised IndexError in .*rewards\.py:\d+"),
        ("python:HERE/rewards.py:one_number", r"one_number returned numbers of shape \(\) for 2"),
        ("python:HERE/rewards.py:quits", "quits raised SystemExit"),
        ("python:HERE/rewards.py:none", "none returned None"),
        ("python:HERE/rewards.py:few", r"shape \(1,\) for 2 responses"),
        ("python:HERE/rewards.py:of_prompts", r"but takes \(prompts\)"),
        ("python:HERE/rewards.py:gone", "has no function 'gone'"),
        ("python:HERE/gone.py:f", "gone.py does not exist"),
        ("reward-model:HERE/policy", "policy"),
        ("reward-model:HERE/gone", "gone"),
    ],
)
def test_a_reward_that_would_fail_is_named_before_the_training(tmp_path, reward, says):
    # Of several entries, the wrong one is named, and once.
    given = ["python:HERE/rewards.py:brevity", reward, "python:HERE/rewards.py:level"]
    with pytest.raises(PPOError, match=says) as refused:
        try_rewards(RunData(with_rewards(tmp_path, *given)))
    named = str(refused.value).partition(": ")[0]
    here = f"rewards='{reward.replace('HERE', str(tmp_path))}'"
    assert named == here or str(refused.value).startswith("The reward function misspelt needs")
    assert str(refused.value).count("rewards='") <= 1


HANGING = """
from pathlib import Path
from pipeline.inputs.run_data import RunData
from pipeline.preflight.reward_trial import try_rewards
from tests.flows.inputs.test_run_rewards import with_rewards
try_rewards(RunData(with_rewards(Path("."), "python:HERE/rewards.py:hangs", stall_minutes=0.02)))
"""


def test_a_function_that_hangs_ends_the_step(tmp_path: Path):
    script = tmp_path / "hang.py"
    script.write_text(HANGING)
    ran = run_python(script, folder=tmp_path)
    assert ran.returncode == 1
    assert "start: 'trying' made no progress for 0.02 minutes" in ran.stderr, ran.stderr


def test_a_column_that_is_no_json_is_named(tmp_path: Path):
    rows = {"prompt": ["w1 w2", "w3"] * 8, "when": [datetime(2026, 1, 2)] * 16, "level": [1] * 16}
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "prompts.parquet")
    path = str(tmp_path / "prompts.parquet")
    for function in ("when", "everything"):
        settings = with_rewards(tmp_path, f"python:HERE/rewards.py:{function}")
        with pytest.raises(DataError, match="'when', which a reward function takes, has the value"):
            try_rewards(RunData(replace(settings, prompts=path)))
    level = with_rewards(tmp_path, "python:HERE/rewards.py:level")
    try_rewards(RunData(replace(level, prompts=path)))


@pytest.mark.parametrize(
    ("rewards", "judge"),
    [
        (["python:a.py:f"], "python:a.py:f"),
        (["reward-model", "x=python:./a.py:f"], "rule,python:a.py:f"),
        (["reward-model:org/model"], "reward-model:org/model"),
        (["reward-model:org/model@v1"], "rule,reward-model:org/model@v2,openai:gpt"),
        (["reward-model:org/model"], "transformers:org/model"),
        (["openai:gpt"], "openai:gpt"),
        (["reward-model", "x=openai:gpt"], "rule, openai:gpt"),
        (["transformers:org/model@v1"], "openai:gpt,transformers:org/model"),
    ],
)
def test_a_judge_of_the_run_is_no_reward(rewards, judge):
    with pytest.raises(ConfigError, match=r"rewards names '.*', which is also a judge of the run"):
        check_reward_names(rewards, judge, SERVER)


@pytest.mark.parametrize(
    ("rewards", "judge"),
    [
        (["python:a.py:score"], "python:a.py:judge"),
        (["reward-model"], "reward-model:other"),
        (["reward-model:org/model"], "rule,python:org/model"),
        (["reward-model", "python:a.py:f"], ""),
        ([], "rule"),
        (["openai:gpt"], "openai:other,python:gpt"),
        (["transformers:org/model"], "openai:org/model"),
    ],
)
def test_another_one_is(rewards, judge):
    check_reward_names(rewards, judge, SERVER)


def test_a_language_model_without_the_key_of_its_server_is_refused_where_it_is_asked(monkeypatch):
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"rewards='openai:gpt': .* requires a key"):
        check_reward_names(["openai:gpt"], "", "")
    monkeypatch.setenv(SCORED_ELSEWHERE, "1")
    check_reward_names(["openai:gpt"], "", "")


def test_rubric_and_model_of_a_language_model_decide_the_policy_and_its_server_does_not(tmp_path):
    rubric = tmp_path / "rubric.md"

    def key(text: str = "Be kind.", **changes: Any) -> str:
        rubric.write_text(text)
        table = {"rewards_rubric": str(rubric), "judging": {"base_url": SERVER}}
        settings = make_settings({**plain, "rewards": ["openai:gpt"], **table, **changes}, {})
        return json.dumps(rewards_of(settings).decides_the_result())

    plain = tiny_table(tmp_path)
    chat = [f"transformers:{write_model(tmp_path / name)}" for name in ("one", "two")]
    (tmp_path / "two" / "config.json").write_text("{}")
    others = [
        key("Be brief."),
        key(rewards=["openai:gpt-2"]),
        key(rewards=[chat[0]]),
        key(rewards=[chat[1]]),
        key(judging={"sampling": "default"}),
        key(judging={"attempts": 1}),
    ]
    assert len({key(), *others}) == 1 + len(others)
    assert key() == key(judging={"base_url": "http://other:1/v1", "max_calls": 5})
    with pytest.raises(ConfigError, match="is empty, so a language model would not know"):
        key(" \n")


def test_a_model_that_gives_no_score_is_named_before_the_training(tmp_path: Path):
    rubric = tmp_path / "rubric.md"
    rubric.write_text("Be kind.")
    reward = f"transformers:{write_parrot(tmp_path / 'chat', [ASSISTANT, LETTER_A, EOS])}"
    judging = {"max_reply_tokens": 4, "attempts": 1}
    settings = with_rewards(tmp_path, reward, rewards_rubric=str(rubric), judging=judging)
    with pytest.raises(JudgeError, match=r"rewards='transformers:.*it gave no score to a chosen"):
        try_rewards(RunData(settings))


def test_the_judge_is_refused_before_anything_is_read(tmp_path: Path):
    table = {"policy": "gone", "preferences": "gone", "prompts": "gone", "eval_prompts": "gone"}
    table |= {"judge": "rule,python:own.py:f", "rewards": ["reward-model", "python:own.py:f"]}
    with pytest.raises(ConfigError, match="also a judge of the run"):
        read_settings(table, {}, [])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ppo": {"reward_weights": [1.0, 2.0]}}, r"2 numbers for 1 rewards \(reward-model\)"),
        (
            {"rewards": ["reward-model", "python:a.py:f"], "ppo": {"reward_weights": [1.0]}},
            r"ppo.reward_weights=\[1.0\] has 1 numbers for 2 rewards \(reward-model, f\)",
        ),
        ({"rewards": ["reward_model"]}, r"Did you mean reward-model\?"),
        ({"rewards": "reward-model"}, "rewards='reward-model' must be a list"),
        ({"rewards": ["reward-model:R"], "reward_model": "R"}, "the reward_model of the run"),
        (
            {"rewards": ["openai:gpt"]},
            "names 'openai:gpt', a language model, and no rubric",
        ),
        ({"rewards_rubric": "r.md"}, "rewards_rubric='r.md' would be ignored"),
        ({"rewards": ["openai:g"], "rewards_rubric": "r.md", "num_nodes": 2}, "and num_nodes=2"),
        (
            {"reward_model": "r", "reward_model_training": {"members": 2}},
            "members=2 would be ignored, because no reward model is trained",
        ),
        (
            {"rewards": ["disagreement=reward-model"], "reward_model_training": {"members": 2}},
            "A reward has the name 'disagreement'",
        ),
        ({"sft": {"members": 2}}, "sft.members"),
        ({"rewards": ["opnai:gpt"]}, "Did you mean openai:gpt"),
        ({"hardware": {"judge_prices": {"openai:g": 1.0}}}, "is a server of this name"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tmp_path, changes, says):
    table = {"policy": "p", "preferences": "p", "prompts": "p", "judge": "rule"}
    with pytest.raises(ConfigError, match=says):
        make_settings({**table, **changes}, {})


def test_paths_of_rewards_stay_as_they_are(tmp_path: Path):
    settings = with_rewards(tmp_path, "reward-model", "python:HERE/rewards.py:level")
    assert fetch_inputs(settings) == settings
