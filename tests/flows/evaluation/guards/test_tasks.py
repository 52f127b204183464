"""Tasks of lm-evaluation-harness as guards, on a task file of a few questions."""

import json
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.evaluation.evaluate_policies import evaluate_again, evaluate_policies
from pipeline.evaluation.guards.tasks import load_tasks, score_by_task
from pipeline.inputs.json_lines import read_jsonl
from pipeline.preflight.check_inputs import check_inputs
from pipeline.preflight.guard_trial import try_tasks
from pipeline.promotion.promotion_gate import reasons_to_refuse
from pipeline.results.step_records import FetchedChampion
from pipeline.settings.gate_configs import GuardsConfig
from pipeline.settings.make_settings import make_settings
from pipeline.settings.settings import Settings
from ppo_core.errors import ConfigError, PPOError
from tests.helpers.inputs.pipeline_inputs import tiny_table
from tests.helpers.models.tiny import make_policy, make_tokenizer

needs_lm_eval = pytest.mark.skipif(
    find_spec("lm_eval") is None, reason="needs the extra lm-eval, which dev does not install"
)

DOCUMENTS = 24
CHOICES = """
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
"""
METRICS = "metric_list:\n  - metric: acc\n    aggregation: mean\n    higher_is_better: true\n"


def write_task(folder: Path, name: str = "words", more: str = CHOICES + METRICS) -> str:
    """A task whose right answer is w1 and whose wrong answer is w2."""
    data = folder / f"{name}.jsonl"
    rows = [
        {"question": f"w{3 + number % 20} w5 w{number}", "choices": ["w1", "w2"], "answer": 0}
        for number in range(DOCUMENTS)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = folder / f"{name}.yaml"
    file.write_text(
        f"task: {name}\ndataset_path: json\ntest_split: test\n"
        f"dataset_kwargs:\n  data_files:\n    test: {data}\n{more}"
    )
    return str(file)


def with_tasks(folder: Path, tasks: dict[str, int], **changes: Any) -> Settings:
    table = tiny_table(folder) | {"promotion": {"guards": {"tasks": tasks}}} | changes
    return make_settings(table, {})


def write_llama(folder: Path, liked: str) -> str:
    """A Llama that prefers one word after every text."""
    model, tokenizer = make_policy("llama"), make_tokenizer()
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 9.0
        model.lm_head.weight.data.mul_(0.01)
        model.lm_head.weight[tokenizer.convert_tokens_to_ids(liked), 0] = 9.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def policies(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("policies")
    return {word: write_llama(folder / word, word) for word in ("w1", "w2")}


@pytest.mark.slow
@needs_lm_eval
def test_a_policy_that_lost_a_task_is_refused_by_its_name(tmp_path: Path, policies):
    task = write_task(tmp_path)
    settings = with_tasks(tmp_path, {task: 20}, policy=policies["w1"])
    folder = tmp_path / "evaluation"
    folder.mkdir()
    evaluated = evaluate_policies(settings, policies["w1"], policies["w2"], None, folder)
    report = evaluated.report()
    result = report.guards["words"]
    assert (result.policy, result.rival, result.n, result.passed) == (0.0, 1.0, 20, False)
    assert result.source.startswith("lm_eval 0.4.") and result.source.endswith(f"acc of {task}")
    reasons = reasons_to_refuse(
        report, settings.promotion, reward_model_fit=True, candidate=1, champion=None, kl=1.0
    )
    (reason,) = [one for one in reasons if one.startswith("Guard words")]
    assert reason.startswith("Guard words: the policy scores 0.0% on this task, and SFT 100.0%.")
    assert "on 20 documents" in reason and "tasks.jsonl" in reason
    scores = read_jsonl(evaluated.task_scores)
    assert [row["policy"] for row in scores] == ["sft"] * 20 + ["ppo"] * 20

    # The champion alone is scored when the policy is judged again.
    again = tmp_path / "again"
    again.mkdir()
    champion = FetchedChampion(version=7, model=policies["w2"], tokenizer=policies["w2"])
    judged = evaluate_again(settings, evaluated, champion, again, judge=None, spent={})
    result = judged.report().guards["words"]
    assert (result.policy, result.rival, result.passed) == (0.0, 0.0, True)
    assert [path.name.rpartition("-")[0] for path in again.glob("tasks-*")] == ["tasks-champion"]


@pytest.mark.slow
@needs_lm_eval
def test_equal_policies_have_equal_scores_whatever_was_scored_before(tmp_path: Path, policies):
    from lm_eval.models.huggingface import HFLM

    from ppo_core.models.loading import load_policy, load_tokenizer

    (task,) = load_tasks(GuardsConfig(tasks={write_task(tmp_path): 5})).values()
    model, tokenizer = load_policy(policies["w1"]), load_tokenizer(policies["w1"])

    def model_of(size: int) -> HFLM:
        return HFLM(model, tokenizer=tokenizer, batch_size=size)

    given = [score_by_task("words", task, model_of, size=size, limit=5, seed=0) for size in (1, 4)]
    assert given[0] == given[1]
    assert [score for _, score in given[0]] == [1.0] * 5
    assert len({document for document, _ in given[0]}) == 5


@pytest.mark.slow
@needs_lm_eval
def test_a_task_is_tried_before_the_training(tmp_path: Path, capsys):
    try_tasks(with_tasks(tmp_path, {write_task(tmp_path): 20}))
    assert "promotion.guards.tasks: words can be scored" in capsys.readouterr().out


TARGETS = "doc_to_text: question\ndoc_to_target: '{{choices[0]}}'\n"


@pytest.mark.slow
@needs_lm_eval
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            CHOICES + METRICS.replace("acc", "f1").replace("mean", "f1"),
            r"The task words gives \(.*\) for a document by its first metric, f1",
        ),
        (
            TARGETS
            + "output_type: generate_until\n"
            + METRICS.replace("acc", "bleu").replace("mean", "bleu"),
            r"The task words gives .* by its first metric, bleu",
        ),
        (
            TARGETS + "output_type: loglikelihood_rolling\n",
            r"its first metric, word_perplexity, is better if lower",
        ),
        (CHOICES + METRICS + "unsafe_code: true\n", r"The task words cannot be run: .*unsafe"),
        (
            CHOICES + METRICS.replace("acc", "no_such_metric"),
            "The task words gives None .* no_such_metric",
        ),
        (CHOICES + METRICS + "process_docs: !function gone.f\n", r"words\.yaml cannot be loaded"),
    ],
)
def test_a_task_without_a_score_of_each_document_is_refused(tmp_path, more: str, message: str):
    with pytest.raises(PPOError, match=message) as raised:
        try_tasks(with_tasks(tmp_path, {write_task(tmp_path, more=more): 5}))
    assert "words" in str(raised.value)


@pytest.mark.slow
@needs_lm_eval
def test_a_metric_whose_code_is_on_the_hub_is_not_downloaded(tmp_path: Path, monkeypatch):
    asked: list[str] = []
    import evaluate.utils.file_utils as files

    monkeypatch.setattr(files.requests, "request", lambda *a, **k: asked.append("x"))
    more = METRICS.replace("acc\n", "exact_match\n    hf_evaluate: true\n")
    more += TARGETS + "output_type: generate_until\n"
    with pytest.raises(PPOError, match="words"):
        try_tasks(with_tasks(tmp_path, {write_task(tmp_path, more=more): 5}))
    assert not asked


@needs_lm_eval
def test_a_data_set_that_is_not_there_is_named(tmp_path: Path):
    file = write_task(tmp_path)
    (tmp_path / "words.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"words\.yaml cannot be loaded: .*words\.jsonl"):
        try_tasks(with_tasks(tmp_path, {file: 5}))
    with pytest.raises(ConfigError, match="there is no such file"):
        load_tasks(GuardsConfig(tasks={"gone.yaml": 5}))


@pytest.mark.slow
@needs_lm_eval
@pytest.mark.parametrize(
    ("task", "message"),
    [("arc_esy", "has no such task. Did you mean arc_easy"), ("mmlu", "is a group of tasks")],
)
def test_an_unknown_task_and_a_group_are_refused(task: str, message: str):
    with pytest.raises(ConfigError, match=message):
        load_tasks(GuardsConfig(tasks={task: 5}))


def test_a_task_needs_the_package(tmp_path: Path, monkeypatch):
    # None marks a module as missing for find_spec too.
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    settings = with_tasks(tmp_path, {"arc_easy": 5})
    with pytest.raises(ConfigError, match=r"lm_eval, which is not installed.*rlhf-flow\[lm-eval\]"):
        check_inputs(settings)


def test_a_task_file_needs_a_disk_that_all_steps_share(tmp_path: Path):
    settings = replace(with_tasks(tmp_path, {"words.yaml": 5}), store="s3://bucket/place")
    with pytest.raises(ConfigError, match="is a file, and the steps of this run share no disk"):
        try_tasks(settings)


def test_a_task_has_a_margin_of_its_own():
    config = GuardsConfig(tasks={"arc_easy": 200, "tasks/own.yaml": 5}, margins={"own": 0.02})
    assert config.names[-2:] == ["arc_easy", "own"]
    assert (config.margin_of("own"), config.margin_of("arc_easy")) == (0.02, 0.05)


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({"arc_easy": 0}, r"tasks\.arc_easy=0 must be a whole number, at least 1"),
        ({"arc easy": 5}, "is not a name of a task"),
        ({"language": 5}, "another guard has the name language"),
        ({"a/own.yaml": 5, "b/own.yaml": 5}, "another guard has the name own"),
    ],
)
def test_a_wrong_task_is_refused(tasks: dict[str, int], message: str):
    with pytest.raises(ConfigError, match=message):
        GuardsConfig(tasks=tasks)
