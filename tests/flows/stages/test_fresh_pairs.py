"""Pairs of the policy's own samples: labeled once, by a judge or by people, and trained on."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from pipeline.inputs.flow_run import REWARD_MODEL, FlowRun
from pipeline.inputs.json_lines import read_jsonl, write_jsonl
from pipeline.inputs.labeled_pairs import label_pairs
from pipeline.inputs.model_digests import digest_of_model
from pipeline.inputs.run_data import RunData
from pipeline.judges.judge_budget import Budget
from pipeline.results.step_records import FreshPairs, PreparedModel
from pipeline.reward_validation.accuracy import measure_model
from pipeline.settings.make_settings import make_settings
from pipeline.settings.settings import Settings
from pipeline.stages import validation
from pipeline.stages.given_settings import read_settings
from pipeline.stages.sft_and_reward_models import FRESH, load_policy, load_reward_models
from pipeline.stages.start import prepare_inputs, start_run
from pipeline.stages.validation import validate_reward_model
from pipeline.storage.workspace import Workspace
from ppo_core.errors import ConfigError, DataError, ModelError
from tests.helpers.inputs.pipeline_inputs import tiny_table, write_model, write_rows
from tests.helpers.models.chat import make_chat_tokenizer
from tests.helpers.models.chat import say as chat
from tests.helpers.servers.fault_server import Behavior, Request, fault_server, say
from tests.helpers.slow_cases import slow

LABELLER = """
from pathlib import Path

def prefer(prompts, pairs):
    with Path(__file__).with_suffix(".asked").open("a") as asked:
        asked.writelines("x" for _ in pairs)
    return ["first" if a > b else "second" for a, b in pairs]

def low(prompts, pairs):
    points = [[sum(int(word[1:]) < 29 for word in text.split()) for text in pair] for pair in pairs]
    return ["first" if a > b else "second" if b > a else "tie" for a, b in points]

def undecided(prompts, pairs):
    return ["tie" for _ in pairs]

def dies(prompts, pairs):
    raise RuntimeError("half-way")
"""


def fresh(folder: Path, labeller: str = "prefer", **changes: Any) -> dict[str, Any]:
    """Settings of a run with 32 pairs of samples; of two texts, the later one by name is better."""
    (folder / "labeller.py").write_text(LABELLER)
    prompts = [{"prompt": f"w{number} w2 w3"} for number in range(40)]
    table = tiny_table(folder) | {"prompts": write_rows(folder / "many.jsonl", prompts)}
    pairs = {"count": 32, "labeller": f"python:{folder / 'labeller.py'}:{labeller}"}
    return table | {"sft_data": "", "fresh_pairs": pairs | changes}


def asked(folder: Path) -> int:
    file = folder / "labeller.asked"
    return len(file.read_text()) if file.exists() else 0


@pytest.fixture
def start(mlflow_client) -> Callable[[Settings], FlowRun]:
    """Start a run of the steps that train models before PPO."""
    steps = ["load_policy", "load_reward_model", "validate_reward_model"]
    return lambda settings: start_run(settings, settings, "RLHF", "1", steps)


def label(settings: Settings, run: FlowRun) -> FreshPairs | None:
    """The labeled pairs alone, as several machines need them before they train."""
    return load_policy(replace(settings, num_nodes=2), run)[1]


def rows_of(pairs: FreshPairs) -> list[dict[str, Any]]:
    return read_jsonl(Path(pairs.path) / "pairs.jsonl")


def test_without_the_section_nothing_is_sampled(tmp_path: Path, start):
    settings = make_settings(tiny_table(tmp_path) | {"sft_data": ""}, {})
    assert load_policy(settings, start(settings))[1] is None


def test_a_labeller_is_asked_once_in_both_orders(tmp_path: Path, start, capsys):
    settings = make_settings(fresh(tmp_path), {})
    run = start(settings)
    pairs = label(settings, run)
    assert pairs
    rows = rows_of(pairs)
    assert len({row["prompt"] for row in rows}) == len(rows) > 20
    assert all(row["chosen"] > row["rejected"] for row in rows)
    # Equal texts are ties that nobody is asked about.
    assert asked(tmp_path) == 2 * len(rows)
    assert f"{len(rows)} of 32 pairs have a preference" in capsys.readouterr().out
    assert label(settings, run) == pairs
    assert asked(tmp_path) == 2 * len(rows)
    # Another seed of the run draws other samples, and another precision may do so.
    for change in ({"seed": 7}, {"precision": "bf16"}):
        others = label(make_settings(fresh(tmp_path) | change, {}), run)
        assert others
        assert others.path != pairs.path
        if "seed" in change:
            assert rows_of(others) != rows


def test_the_environment_changes_no_pair_that_trains_a_model(tmp_path: Path, start, monkeypatch):
    settings = make_settings(fresh(tmp_path), {})
    run = start(settings)
    pairs = label(settings, run)
    assert pairs
    rows = rows_of(pairs)
    # Texts that contain a secret of the environment are masked in files for people.
    monkeypatch.setenv("DATABASE_PASSWORD", rows[0]["chosen"])
    again = label(settings, replace(run, workspace=Workspace(str(tmp_path / "again"))))
    assert again and again.path != pairs.path
    assert rows_of(again) == rows


def contradicting(folder: Path, **changes: Any) -> dict[str, Any]:
    """Settings with 400 pairs of samples; the given pairs prefer what the labeller rejects."""
    table = fresh(folder, "low", **{"count": 400, **changes})
    prompts = [{"prompt": f"w{one} w{other}"} for one in range(20) for other in range(20)]
    table["prompts"] = write_rows(folder / "400.jsonl", prompts)
    pairs = [{"prompt": "w1", "chosen": f"w50 w{i}", "rejected": f"w5 w{i}"} for i in range(40)]
    table["preferences"] = write_rows(folder / "opposite.jsonl", pairs)
    training = {"num_epochs": 6, "batch_size": 16, "max_length": 32, "learning_rate": 3e-3}
    return table | {"reward_model_training": training}


@pytest.mark.slow
def test_the_better_reward_model_on_held_out_pairs_of_samples_is_used(
    tmp_path: Path, start, capsys
):
    settings = make_settings(contradicting(tmp_path), {})
    run = start(settings)
    sft, _ = load_policy(settings, run)
    model, _, _ = load_reward_models(settings, sft, run)
    told = capsys.readouterr().out
    given, trained = (
        float(told.split(f"\n{name}: right in ")[1].split("%")[0]) for name in (REWARD_MODEL, FRESH)
    )
    assert given < 50 < 70 < trained
    assert Path(model.path).name.startswith(f"{FRESH}-")


@pytest.mark.slow
def test_the_given_reward_model_is_kept_if_it_is_ahead(tmp_path: Path, start, capsys):
    # The labeler is a copy of the given reward model, so this model is always right.
    table = contradicting(tmp_path, enough_agreement=1.0)
    copy = write_model(tmp_path / "copy", labels=1)
    table["fresh_pairs"]["labeller"] = f"reward-model:{copy}"
    table |= {"reward_model": write_model(tmp_path / "reward", labels=1), "preferences_test": ""}
    table["reward_model_training"] |= {"num_epochs": 1, "learning_rate": 1e-6}
    settings = make_settings(table, {})
    run = start(settings)
    sft, _ = load_policy(settings, run)
    model, _, labeled = load_reward_models(settings, sft, run)
    assert labeled
    assert f"{REWARD_MODEL}: right in 100.0%" in capsys.readouterr().out
    assert model.path == settings.reward_model


@pytest.mark.parametrize("labeller", [*slow("a judge"), "people"])
def test_nobody_is_asked_for_labels_that_would_gain_little(
    tmp_path: Path, start, capsys, labeller: str
):
    # The judge is a copy of the reward model, so they agree on each pair that is decided.
    table = fresh(tmp_path)
    table |= {"reward_model": write_model(tmp_path / "reward", labels=1), "preferences_test": ""}
    table["judge"] = f"reward-model:{write_model(tmp_path / 'copy', labels=1)}"
    if labeller == "people":
        table["fresh_pairs"]["labeller"] = "people"
    settings = make_settings(table, {})
    run = start(settings)
    sft, _ = load_policy(settings, run)
    model, _, labeled = load_reward_models(settings, sft, run)
    assert labeled is None and model.path == settings.reward_model
    assert asked(tmp_path) == 0 and not (run.folder / "to-label.jsonl").exists()
    told = capsys.readouterr().out
    assert re.search(r"orders 100\.0% of \d+ decided pairs .* so labels would gain little", told)

    always = replace(settings, fresh_pairs=replace(settings.fresh_pairs, enough_agreement=1))
    if labeller == "people":
        with pytest.raises(DataError, match="People have to label 32 pairs"):
            load_reward_models(always, sft, run)
    else:
        assert load_reward_models(always, sft, run)[2]
        assert asked(tmp_path) > 0


@pytest.mark.slow
def test_the_judge_is_asked_once_before_the_labels_and_not_again_by_the_validation(
    tmp_path: Path, start, capsys, monkeypatch
):
    def longer(request: Request) -> Behavior:
        shown = json.loads(request.question.split("\n")[1])
        a, b = shown["answer_a"], shown["answer_b"]
        return say(f"VERDICT: {'A' if a > b else 'B'}")

    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with fault_server(longer) as server:
        table = fresh(tmp_path) | {"judge": "openai:judge", "accept_reward_model": True}
        table["judging"] = {"base_url": server.url, "concurrency": 16}
        table |= {"reward_model": write_model(tmp_path / "reward", labels=1)}
        settings = make_settings(table, {})
        run = start(settings)
        sft, _ = load_policy(settings, run)
        model, _, labeled = load_reward_models(settings, sft, run)
        told = capsys.readouterr().out
        assert labeled and "so pairs are labeled" in told
        before = len(server.requests)
        assert model.spent["openai:judge"].calls == before > 100
        validation = validate_reward_model(settings, sft, model, None, run, labeled)
        # The validation asks about further prompts, and not again about the first ones.
        questions = [request.question for request in server.requests]
        assert len({*questions}) == len(questions) >= before
        assert validation.spent["openai:judge"].calls == len(questions)

        # Without the key of the judge, labels are asked for as if it had not been asked.
        monkeypatch.setenv("RLHF_JUDGED_ELSEWHERE", "1")
        again, _, labeled = load_reward_models(settings, sft, run)
        assert labeled and again == replace(model, spent={})


def test_calls_of_a_judge_whose_budget_ends_in_its_first_batch_are_counted(
    tmp_path: Path, start, monkeypatch
):
    def spend(judge: Any, budget: Budget, *blocks: Any, **options: Any) -> None:
        budget.start_call("openai:judge", 1)

    monkeypatch.setattr(validation, "measure_on_policy", spend)
    table = fresh(tmp_path) | {"preferences_test": "", "accept_reward_model": True}
    table["reward_model"] = write_model(tmp_path / "reward", labels=1)
    table["judge"] = f"reward-model:{write_model(tmp_path / 'copy', labels=1)}"
    settings = make_settings(table, {})
    run = start(settings)
    sft, _ = load_policy(settings, run)
    digest = digest_of_model(settings.reward_model)
    given = PreparedModel(path=settings.reward_model, digest=digest, metrics={})
    found, spent = validation.measure_given_model(RunData(settings), sft, given, run.folder)
    assert (found, spent["openai:judge"].calls) == (None, 1)
    measured = validate_reward_model(settings, sft, replace(given, spent=spent), None, run)
    assert measured.spent["openai:judge"].calls == 2


@pytest.mark.parametrize("changed", [0, 1])
def test_a_model_that_was_changed_in_place_needs_a_new_run(tmp_path: Path, start, changed: int):
    table = fresh(tmp_path) | {"reward_model": write_model(tmp_path / "reward", labels=1)}
    settings = make_settings(table | {"preferences_test": ""}, {})
    run, path = start(settings), settings.reward_model
    sft, _ = load_policy(settings, run)
    given = PreparedModel(path=path, digest=digest_of_model(path), metrics={})
    config = Path((sft, given)[changed].path, "config.json")
    config.write_text(config.read_text() + "\n")
    message = f"{config.parent}' was changed after .* Start a new run: python"
    with pytest.raises(ModelError, match=message):
        validate_reward_model(settings, sft, given, None, run)


@pytest.mark.slow
def test_given_pairs_count_by_weight_beside_pairs_of_samples(tmp_path: Path, start):
    found, run = [], start(make_settings(contradicting(tmp_path), {}))
    for weight in (0.001, 1.0):
        settings = make_settings(contradicting(tmp_path, count=150, given_weight=weight), {})
        sft, _ = load_policy(settings, run)
        model, _, labeled = load_reward_models(settings, sft, run)
        assert labeled
        assert Path(model.path).name.startswith(f"{FRESH}-")
        given = label_pairs(RunData(settings).training_pairs())
        found.append(measure_model(model.path, given, end_of_text=True, prompt_format="text"))
    assert found[0].accuracy < 0.3
    assert found[1].accuracy > 0.9


@pytest.mark.slow
def test_pairs_of_a_chat_keep_its_messages(tmp_path: Path, start):
    table = fresh(tmp_path)
    make_chat_tokenizer().save_pretrained(table["policy"])
    turns = [chat(f"w{number}", "w1", "w2") for number in range(40)]
    table["prompts"] = write_rows(tmp_path / "chats.jsonl", [{"messages": turn} for turn in turns])
    settings = make_settings(table, {})
    run = start(settings)
    sft, _ = load_policy(settings, run)
    model, _, labeled = load_reward_models(settings, sft, run)
    assert labeled
    assert all(row["prompt"] in turns for row in rows_of(labeled))
    training, held_out = RunData(settings).fresh_pairs(labeled.path)
    assert len(training) + len(held_out) == len(rows_of(labeled))
    assert Path(model.path).is_dir()


def test_people_get_a_file_and_the_labeled_file_continues_the_run(tmp_path: Path, start):
    table = fresh(tmp_path, labeller="prefer")
    table["fresh_pairs"] = {"count": 32, "labeller": "people"}
    settings = make_settings(table, {})
    run = start(settings)
    with pytest.raises(DataError, match="People have to label 32 pairs") as error:
        label(settings, run)
    file = run.folder / "to-label.jsonl"
    assert str(file) in str(error.value)
    rows = read_jsonl(file)
    assert [set(row) for row in rows] == [{"prompt", "first", "second", "label"}] * 32
    for number, row in enumerate(rows):
        row["label"] = "" if number < 3 else "tie" if number < 5 else "second"
    write_jsonl(tmp_path / "labeled.jsonl", rows)
    table["fresh_pairs"]["labels"] = str(tmp_path / "labeled.jsonl")
    pairs = label(make_settings(table, {}), run)
    assert pairs
    assert rows_of(pairs) == [
        {"prompt": row["prompt"], "chosen": row["second"], "rejected": row["first"]}
        for row in rows[5:]
    ]


def test_a_label_that_is_none_is_refused_by_name(tmp_path: Path, start):
    rows = [{"prompt": "w1", "first": "w2", "second": "w3", "label": "best"}] * 30
    file = write_rows(tmp_path / "labeled.jsonl", rows)
    settings = make_settings(
        fresh(tmp_path) | {"fresh_pairs": {"count": 0, "labels": file, "labeller": ""}}, {}
    )
    with pytest.raises(DataError, match=r"fresh_pairs.labels=.*: the label 'best' is none of"):
        label(settings, start(settings))


def test_a_weight_of_given_pairs_that_train_no_model_is_refused(tmp_path: Path):
    table = fresh(tmp_path, given_weight=0.5) | {"reward_model": "reward"}
    with pytest.raises(ConfigError, match=r"given_weight=0.5 would be ignored.*='reward'"):
        make_settings(table, {})


@pytest.mark.parametrize(
    ("labeller", "message"),
    [
        ("undecided", "Only 0 of 32 pairs of the policy's samples have a preference"),
        ("dies", "half-way"),
    ],
)
def test_a_labeller_that_is_of_no_use_ends_the_step(
    tmp_path: Path, start, labeller: str, message: str
):
    settings = make_settings(fresh(tmp_path, labeller), {})
    with pytest.raises(DataError, match=message):
        label(settings, start(settings))


def test_a_labeller_is_not_called_without_pairs(tmp_path: Path, start):
    table = fresh(tmp_path, "dies")
    table["ppo"]["temperature"] = 1e-7  # Both samples of a prompt are equal.
    settings = make_settings(table, {})
    with pytest.raises(DataError, match="Only 0 of 32 pairs"):
        label(settings, start(settings))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"count": 8}, "need each other"),
        ({"labeller": "people"}, "need each other"),
        ({"count": -1, "labeller": "people"}, "count=-1 must be at least 0"),
        ({"count": 8, "labeller": "python:j.py:f", "labels": "x.jsonl"}, "would be ignored"),
        ({"count": 8, "labellor": "people"}, "labeller"),
        ({"count": 8, "labeller": "persons"}, "persons"),
        ({"given_weight": 0.5}, "given_weight=0.5 would be ignored"),
        ({"count": 8, "labeller": "people", "enough_agreement": 1.1}, "enough_agreement=1.1 must"),
        ({"count": 8, "labeller": "people", "given_weight": -1}, "given_weight=-1 must be"),
        ({"count": 80, "labeller": "people", "rounds": 2}, "people label after the run"),
        ({"labels": "x.jsonl", "rounds": 2}, "people label after the run"),
        ({"count": 59, "labeller": "python:j.py:f", "rounds": 3}, "Raise count to at least 60"),
        ({"count": 80, "labeller": "python:j.py:f", "rounds": 0}, "rounds=0 must be"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    tmp_path: Path, section: dict[str, Any], message: str
):
    with pytest.raises(ConfigError, match=message):
        read_settings(tiny_table(tmp_path) | {"fresh_pairs": section}, {}, ())


def test_the_labeller_is_never_the_judge(tmp_path: Path):
    table = fresh(tmp_path)
    judge = table["judge"]
    other = table["fresh_pairs"]["labeller"]
    for labeller, judges in (
        (judge, judge),
        (f"{other},{judge}", judge),
        (judge, f"{other},{judge}"),
    ):
        table["judge"], table["fresh_pairs"]["labeller"] = judges, labeller
        with pytest.raises(ConfigError, match="is also a judge of the run"):
            read_settings(table, {}, ())


def test_too_few_prompts_are_found_before_any_training(tmp_path: Path):
    settings = make_settings(fresh(tmp_path, count=641), {})
    with pytest.raises(DataError, match=r"count=641 needs 16.0 pairs for each of the 40 different"):
        prepare_inputs(settings)


def test_prompts_have_several_pairs_if_there_are_fewer_than_pairs(tmp_path: Path):
    data = RunData(make_settings(fresh(tmp_path, count=100), {}))
    prompts = data.fresh_prompts()
    assert len(prompts) == 100
    assert [len(list(same)) for _, same in groupby(prompts)] == [3] * 20 + [2] * 20


def test_a_labeller_that_cannot_be_called_is_found_before_any_training(
    tmp_path: Path, mlflow_client
):
    table = fresh(tmp_path)
    Path(tmp_path / "labeller.py").write_text("def prefer(prompt):\n    return 'first'\n")
    with pytest.raises(ConfigError, match=r"^fresh_pairs.labeller: .* is called with two lists"):
        prepare_inputs(make_settings(table, {}))
