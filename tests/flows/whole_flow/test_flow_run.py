"""The flow from end to end on tiny inputs: refused, failing, mended, and repeated."""

import base64
import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
import pytest
import tomli_w

import runs
from pipeline.tracking.run_log import FIGURES, HEADLINES
from tests.helpers.inputs.pipeline_inputs import JUDGE, tiny_table
from tests.helpers.runs.flow_runs import Ran, artifacts_of, client_of, run_flow, runs_of
from tests.helpers.servers.mlflow_store import tracking_to

RUN = ("--config", "settings", "tiny.toml", "run", "--summary-json")

pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True)
class Journey:
    """A run whose reward model is refused; with it accepted, a run that fails at the judge, and its
    resumption."""

    folder: Path
    refused: Ran
    card: Ran
    failed: Ran
    versions_after_failure: int
    resumed: Ran


def versions(folder: Path) -> int:
    return len(client_of(folder).search_model_versions("name='tiny-policy'"))


@pytest.fixture(scope="module")
def journey(tmp_path_factory) -> Journey:
    folder: Path = tmp_path_factory.mktemp("flow")
    table = tiny_table(folder) | {"registered_model": "tiny-policy"}
    # Long enough to learn that the chosen texts repeat a word, for which it is refused.
    table["reward_model_training"] |= {"num_epochs": 15, "learning_rate": 1e-2}
    (folder / "tiny.toml").write_text(tomli_w.dumps(table))
    (folder / "judge.py").write_text(
        # Of no use in the evaluation alone.
        f"EVALUATED = open({str(folder / 'eval.jsonl')!r}).read()\n"
        "def judge(prompts, pairs):\n"
        "    return ['maybe' if prompts[0] in EVALUATED else 'first'] * len(pairs)"
    )
    refused = run_flow(folder, *RUN, "none.json")
    card = run_flow(folder, "card", "get", f"{refused.number}/validate_reward_model")
    command = re.search(r"python flows/rlhf\.py (.* --accept-reward-model)", refused.log)
    assert command, refused.log
    changes = ("--set", "promotion.max_kl=19.5", "--set", "judging.attempts=2")
    failed = run_flow(folder, *shlex.split(command[1]), "--summary-json", "first.json", *changes)
    registered = versions(folder)
    (folder / "judge.py").write_text(JUDGE)
    resumed = run_flow(folder, "resume")
    return Journey(folder, refused, card, failed, registered, resumed)


@pytest.fixture(scope="module")
def summary(journey: Journey) -> dict[str, Any]:
    assert journey.resumed.code == 0, journey.resumed.log
    return json.loads((journey.folder / "first.json").read_text())


def test_a_reward_model_that_is_not_fit_stops_the_run_with_the_reasons(journey: Journey):
    assert journey.refused.code == 1
    assert "The reward model is not fit to train against:" in journey.refused.log
    assert re.search(
        r"- It prefers degenerate text \(repeated answer\) for .* of 6", journey.refused.log
    )
    assert "--accept-reward-model" in journey.refused.log
    assert "Traceback" not in journey.refused.log
    assert journey.refused.log.count("The reward model is not fit to train against:") == 1
    assert " train_policy (pid" not in journey.refused.log
    assert not (journey.folder / "none.json").exists()


def test_the_report_on_a_refused_reward_model_is_there_to_be_read(journey: Journey):
    assert journey.card.code == 0, journey.card.log
    (data,) = re.findall(r'window\.__MF_DATA__\["[^"]+"\] = "([^"]+)"', journey.card.log)
    assert '"Refused"' in base64.b64decode(data).decode()
    runs = runs_of(journey.folder, f"RLHF/{journey.refused.number}")
    assert runs["parent"].data.tags["reward_model"] == "refused"
    assert runs["parent"].info.status == "FAILED"
    assert runs["validate_reward_model"].info.status == "FINISHED"
    assert runs["train_policy"].info.status == runs["register"].info.status == "KILLED"
    why = "The reward model is not fit to train against."
    assert runs["parent"].data.tags["ended_early"] == why
    assert runs["train_policy"].data.tags["ended_early"] == f"not reached: {why}"
    description = runs["parent"].data.tags["mlflow.note.content"]
    assert description.startswith(f"**Refused**\n\n- {why}\n- ")
    assert "\n- It prefers degenerate text" in description
    (report,) = re.findall(
        r"(outputs/runs/\d+/reward-model\.json), and reward-model/report", journey.refused.log
    )
    assert not json.loads((journey.folder / report).read_text())["fit"]
    kept = artifacts_of(journey.folder, runs["validate_reward_model"], "reward-model")
    assert {"reward-model/report.json", "reward-model/report.html"} == kept


def test_a_reward_model_accepted_by_hand_is_on_record(journey: Journey, summary: dict[str, Any]):
    assert not summary["reward_model"]["fit"]
    assert summary["reward_model"]["accepted_by_hand"]
    assert summary["settings"]["accept_reward_model"]
    assert (
        "A person accepted the reward model. It was refused for these reasons:"
        in journey.failed.log
    )
    run = client_of(journey.folder).get_run(summary["model"]["run_id"])
    assert run.data.tags["reward_model"] == "accepted by hand"


def test_a_run_that_failed_and_was_resumed_is_one_run_with_its_steps_below(
    journey: Journey, summary: dict[str, Any]
):
    parent = client_of(journey.folder).get_run(summary["model"]["run_id"])
    runs = runs_of(journey.folder, parent.data.tags["flow_run"])
    assert runs["parent"].info.run_id == parent.info.run_id
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    description = parent.data.tags["mlflow.note.content"]
    assert description.startswith(
        "**Refused**\n\n- models:/tiny-policy/1: refused, and there is no"
    )
    assert "reward model failed validation" in description
    children = {step for step in runs if step != "parent"}
    assert {runs[step].data.tags["mlflow.parentRunId"] for step in children} == {parent.info.run_id}
    assert "system/cpu_utilization_percentage" in runs["train_policy"].data.metrics


def test_a_policy_that_won_nothing_is_registered_and_refused(
    journey: Journey, summary: dict[str, Any]
):
    assert summary["promotion"]["action"] == "refused"
    version = client_of(journey.folder).get_model_version("tiny-policy", "1")
    assert version.tags["promotion"] == "refused"
    parent = client_of(journey.folder).get_run(version.run_id)
    assert json.loads(parent.data.tags["self_check"])["policy_padded"] < 1e-3
    assert len(version.tags) == 11
    assert "min_win_rate" in version.tags["promotion_reasons"]
    assert "reward model failed validation" in version.tags["promotion_reasons"]
    assert "**Refused** by run RLHF/" in version.description
    aliases = client_of(journey.folder).get_registered_model("tiny-policy").aliases
    assert {alias: int(version) for alias, version in aliases.items()} == {"challenger": 1}


def test_a_failing_step_says_what_to_mend_and_registers_nothing(journey: Journey):
    assert journey.failed.code == 1
    assert "gave 'maybe' for pair 1. Return one of" in journey.failed.log
    assert "If you corrected something other than the settings, continue with" in journey.failed.log
    assert "If you corrected something" not in journey.refused.log
    assert "Traceback" not in journey.failed.log
    assert journey.versions_after_failure == 0


def test_a_resumed_run_does_not_train_again(journey: Journey, summary: dict[str, Any]):
    assert f"Resuming run {journey.failed.number}." in journey.resumed.log
    assert "train_policy: Cloning previously run task" in journey.resumed.log
    assert " train_policy (pid" not in journey.resumed.log
    assert " evaluate_win_rate (pid" in journey.resumed.log


def test_the_summary_has_its_parts(summary: dict[str, Any]):
    assert set(summary["win_rate"]) == {"sft_vs_reference", "ppo_vs_reference", "ppo_vs_sft"}
    for win_rate in summary["win_rate"].values():
        assert 0 <= win_rate["low"] <= win_rate["rate"] <= win_rate["high"] <= 1
        assert win_rate["n"] == 16
        assert win_rate["judge"].startswith("python:")
        assert 0 <= win_rate["length_controlled"] <= 1
    assert summary["reward_model"]["accuracy"]["n"] == 6
    assert summary["improvement"]["n"] == 16
    assert summary["canaries"]["kinds"]["same"]["won"] == 0
    assert summary["people"] is None
    assert summary["judge"]["version"]
    assert set(summary["objective"]["objective/kl"]) == {"first", "last"}
    assert summary["objective"]["episode"] == {"first": 8.0, "last": 24.0}
    assert summary["timings"]["episodes_per_second"] > 0
    assert 2**27 < summary["timings"]["peak_rss_bytes"] < 3 * 2**30
    assert set(summary["timings"]["seconds"]) == {
        "start",
        "load_policy",
        "load_reward_model",
        "validate_reward_model",
        "train_policy",
        "evaluate_win_rate",
        "register",
    }
    assert summary["settings"]["ppo"]["response_length"] == 6
    # Given by --set, and kept when the run was resumed.
    assert summary["settings"]["promotion"]["max_kl"] == 19.5
    assert summary["settings"]["judging"]["attempts"] == 2
    assert summary["model"]["uri"] == "models:/tiny-policy/1"


def test_the_policy_starts_as_its_own_reference(summary: dict[str, Any]):
    assert summary["objective"]["objective/kl"]["first"] == pytest.approx(0, abs=1e-4)


def test_the_terminal_shows_the_result(journey: Journey, summary: dict[str, Any]):
    assert "PPO against the references" in journey.resumed.log
    assert f"{summary['win_rate']['ppo_vs_sft']['rate']:.1%}" in journey.resumed.log
    assert "models:/tiny-policy/1" in journey.resumed.log


def test_ppo_is_compared_with_what_sft_reaches_without_it(
    journey: Journey, summary: dict[str, Any]
):
    baselines, decided = summary["baselines"], summary["win_rate"]["ppo_vs_sft"]
    assert set(baselines["found"]) == {"greedy", "best_of_4"}
    for one in baselines["found"].values():
        assert one["why"] == ""
        assert one["gain"]["n"] == baselines["ppo"]["n"] == decided["n"]
        assert one["gain"]["difference"] == pytest.approx(decided["rate"] - one["win_rate"]["rate"])
    assert baselines["found"]["greedy"]["kl"] > 0
    assert "the best of 4 samples by the reward model wins" in journey.resumed.log
    run = client_of(journey.folder).get_run(summary["model"]["run_id"])
    evaluated = runs_of(journey.folder, run.data.tags["flow_run"])["evaluate_win_rate"]
    kept = artifacts_of(journey.folder, evaluated, "evaluation")
    assert "evaluation/report.html" in kept
    address = f"{summary['model']['uri']}/README.md"
    with tracking_to(f"sqlite:///{journey.folder / 'mlflow.db'}"):
        assert "## Without PPO" in mlflow.artifacts.load_text(address)


def test_the_summary_repeats_the_warnings_of_the_training(
    journey: Journey, summary: dict[str, Any]
):
    at_the_end = re.findall(r"What was wrong in this training: (.*)", journey.failed.log)
    # The judge may add one.
    assert summary["warnings"][: len(at_the_end)] == at_the_end
    shown = [f"Warning: {warning[:60]}" for warning in summary["warnings"]]
    assert all(warning in journey.resumed.log for warning in shown)


def test_a_log_has_few_lines_and_no_bars(journey: Journey):
    for ran in (journey.refused, journey.failed, journey.resumed):
        assert len(ran.log.splitlines()) < 60
        assert "%|" not in ran.log and "\r" not in ran.log and "[MFLOG" not in ran.log
    assert re.search(r"^ppo 100 %: 24/24 episode, .*kl=", journey.failed.log, re.M)
    # The details are in the logs of the steps.
    assert "prompts.jsonl: " in journey.failed.steps["start"]
    assert "prompts.jsonl: " not in journey.failed.log


def test_a_run_ends_with_where_everything_is(journey: Journey):
    lines = journey.resumed.log.splitlines()
    end = lines[[line.startswith("Win rates, judged by ") for line in lines].index(True) :]
    assert max(map(len, end)) <= 100
    page, card, tracked, policy, following = end[-5:]
    number = journey.resumed.number
    assert re.match(r"Page of the run: outputs/runs/\d+/index\.html, and ", page)
    assert card == f"Card: python flows/rlhf.py card view {number}/evaluate_win_rate"
    assert tracked == "MLflow: mlflow ui --backend-store-uri sqlite:///mlflow.db"
    assert policy == "Policy: models:/tiny-policy/1, refused, and there is no champion"
    overrules = "python flows/registry.py promote tiny-policy 1 --reason TEXT"
    assert following == f"Next: to overrule, {overrules}"


def test_the_registry_keeps_settings_metrics_and_samples(journey: Journey, summary: dict[str, Any]):
    client = client_of(journey.folder)
    parent = client.get_run(summary["model"]["run_id"])
    runs = runs_of(journey.folder, parent.data.tags["flow_run"])
    assert parent.data.params["ppo.response_length"] == "6"
    rate = summary["win_rate"]["ppo_vs_sft"]["rate"]
    assert parent.data.metrics["win_rate/ppo_vs_sft/rate"] == rate
    history = client.get_metric_history(parent.info.run_id, "objective/kl")
    assert [metric.step for metric in history] == [1, 2, 3]
    # Single values besides the curves: bars in MLflow's charts.
    single = {
        name
        for name in parent.data.metrics
        if not client.get_metric_history(parent.info.run_id, name)[0].step
    }
    assert single <= {name for name in single if HEADLINES.fullmatch(name)} and len(single) < 15
    with tracking_to(f"sqlite:///{journey.folder / 'mlflow.db'}"):
        of_run = {"experiment_id": parent.info.experiment_id, "run_ids": [parent.info.run_id]}
        table = client.load_table(artifact_file=FIGURES, **of_run)
        pairs = client.load_table(artifact_file="pairs.json", **of_run)
    figures = dict(zip(table["figure"], table["value"], strict=True))
    assert figures["win_rate/ppo_vs_sft/rate"] == rate
    assert {"guards/stops", "cost/tokens_sampled", "reward_model/bias"} <= figures.keys()
    assert set(pairs["contest"]) >= {"ppo_vs_sft"} and pairs["prompt"].str.len().min() > 0
    assert len(parent.inputs.dataset_inputs) == 5
    evaluated = artifacts_of(journey.folder, runs["evaluate_win_rate"])
    assert evaluated == {"judgements.jsonl", "guards.jsonl", "evaluation"}
    tables = {FIGURES, "samples.json", "pairs.json"}
    kept = {"index.html", "packages.txt", "settings.toml", "summary.json", *tables}
    assert artifacts_of(journey.folder, parent) == kept


def test_every_run_has_a_page_that_the_terminal_names(journey: Journey, summary: dict[str, Any]):
    pages = {}
    for ran in (journey.refused, journey.resumed):
        (name,) = re.findall(r"Page of the run: (outputs/runs/\d+/index\.html), and ", ran.log)
        pages[ran.log] = (journey.folder / name).read_text()
    # The first training that writes the page names it.
    early = f"Page of the run: {name}, updated until the run ends"
    assert (journey.failed.log + journey.resumed.log).count(early) == 1
    assert "The reward model was refused" in pages[journey.refused.log]
    assert "sft/loss" in pages[journey.refused.log]
    text = pages[journey.resumed.log]
    assert text.count("Before PPO") == text.count("Training prompt ") == 8
    assert "Version 1 was refused, and there is no champion" in text
    assert "Rule that failed: " in text
    assert f"{summary['win_rate']['ppo_vs_sft']['rate']:.1%} of 16 pairs" in text
    assert text.count('<polyline class="line"') > 10
    assert text.count("<h3>") > 16
    assert "Not shown" not in text
    client = client_of(journey.folder)
    logged = client.download_artifacts(summary["model"]["run_id"], "index.html")
    assert Path(logged).read_text() == text


def ask_runs(journey: Journey, *arguments: str) -> int:
    with (
        chdir(journey.folder),
        tracking_to(f"sqlite:///{journey.folder / 'mlflow.db'}"),
    ):
        return runs.main(arguments)


def test_the_list_of_runs_has_their_verdicts_and_figures(
    journey: Journey, summary: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    assert ask_runs(journey, "list", "--json") == 0
    refused, decided = json.loads(capsys.readouterr().out)
    assert refused["run"] == f"RLHF/{journey.refused.number}"
    assert (refused["state"], refused["verdict"]) == ("failed", "refused its reward model")
    assert refused["win_rate"] is None
    assert (decided["state"], decided["verdict"]) == ("finished", "refused version 1")
    assert decided["win_rate"] == summary["win_rate"]["ppo_vs_sft"]["rate"]
    assert decided["rival"] == "sft"
    assert decided["folder"] == f"outputs/runs/{decided['run'].removeprefix('RLHF/')}"
    assert decided["price"] == 0.0
    assert ask_runs(journey, "list") == 0
    line = next(one for one in capsys.readouterr().out.splitlines() if decided["run"] in one)
    assert " finished refused version 1" in line
    assert f"{decided['win_rate']:.1%} against SFT" in line


def test_two_runs_are_compared_by_what_differs_and_by_their_results(
    journey: Journey, capsys: pytest.CaptureFixture[str]
):
    refused, decided = journey.refused.number, journey.failed.number
    assert ask_runs(journey, "diff", refused, f"RLHF/{decided}") == 0
    lines = capsys.readouterr().out.splitlines()
    differing = [line.split() for line in lines[: lines.index("")]][1:]
    (limit,) = [line for line in differing if line[1] == "promotion.max_kl"]
    assert (limit[0], limit[3]) == ("settings", "19.5") and limit[2] != "19.5"
    assert ["settings", "judging.attempts", "3", "2"] in differing
    assert not [line for line in differing if line[:2] == ["settings", "ppo.learning_rate"]]
    results = dict(line.split(maxsplit=1) for line in lines[lines.index("") + 1 :])
    assert results["verdict"].split() == "refused its reward model refused version 1".split()
    assert results["kl/ppo"].startswith("none")
    assert ask_runs(journey, "diff", refused, "12") == 1
    told = capsys.readouterr()
    assert not told.out
    assert "There is no run '12'" in told.err
    assert f"RLHF/{refused}" in told.err


def test_each_training_leaves_a_card_with_its_curves(journey: Journey):
    steps = journey.folder / f".metaflow/mf.cards/RLHF/runs/{journey.failed.number}/steps"
    texts = {}
    for step in ("load_policy", "load_reward_model", "train_policy"):
        (card,) = steps.glob(f"{step}/tasks/*/cards/*.html")
        (data,) = re.findall(r'window\.__MF_DATA__\["[^"]+"\] = "([^"]+)"', card.read_text())
        texts[step] = base64.b64decode(data).decode()
    assert "KL from SFT, nats" in texts["train_policy"]
    assert texts["train_policy"].count('"vegaChart"') > 10
    assert "Sampled in the last update." in texts["train_policy"]
    # The refused run has trained both.
    assert "sft: an earlier run has trained this model." in texts["load_policy"]
    assert "reward-model: an earlier run has trained this model." in texts["load_reward_model"]


CONSUMER = """
import sys
import mlflow
generate = mlflow.transformers.load_model("models:/tiny-policy/1")
text = generate("w1 w2 w3", max_new_tokens=4, min_new_tokens=4)[0]["generated_text"]
assert text.startswith("w1 w2 w3"), text
assert len(text.split()) > 3, text
assert not {"ppo_core", "pipeline", "metaflow"} & set(sys.modules)
print("continued")
"""


@pytest.mark.slow
def test_the_registered_version_continues_a_prompt_in_a_fresh_process(journey: Journey):
    assert journey.resumed.code == 0
    environment = {
        key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")
    }
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "MLFLOW_TRACKING_URI": f"sqlite:///{journey.folder / 'mlflow.db'}",
        "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
    }
    ran = subprocess.run(
        [sys.executable, "-c", CONSUMER],
        cwd=journey.folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout.strip() == "continued", ran.stderr


def test_a_later_run_reuses_what_has_not_changed(journey: Journey):
    assert re.search(r"sft: reused .*/cache/sft-", journey.failed.steps["load_policy"])
    log = journey.failed.steps["load_reward_model"]
    assert re.search(r"reward-model: reused .*/cache/reward-model-", log)


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({"ppo": {"kl_coeff": 0.1}}, (), "Unknown setting ppo.kl_coeff. Did you mean ppo.kl_coef?"),
        pytest.param({}, ("--prompts", "gone.jsonl"), "There is no file", marks=pytest.mark.slow),
    ],
)
def test_bad_input_stops_the_flow_before_any_training(
    tmp_path: Path, changes: dict[str, Any], arguments: tuple[str, ...], message: str
):
    (tmp_path / "bad.toml").write_text(tomli_w.dumps(tiny_table(tmp_path) | changes))
    ran = run_flow(tmp_path, "--config", "settings", "bad.toml", "run", *arguments)
    assert ran.code == 1
    assert message in ran.log
    assert "Traceback" not in ran.log
    assert "load_policy" not in ran.log
    assert not (tmp_path / "mlflow.db").exists()


def test_a_settings_file_that_is_no_toml_is_refused(tmp_path: Path):
    (tmp_path / "bad.toml").write_text("seed = = 1")
    ran = run_flow(tmp_path, "--config", "settings", "bad.toml", "run")
    assert ran.code == 1
    assert "not valid TOML: Invalid value (at line 1" in ran.log
    assert "Traceback" not in ran.log


@pytest.mark.slow
def test_the_same_seed_gives_the_same_weights_and_the_same_result(
    journey: Journey, summary: dict[str, Any]
):
    (trained,) = journey.folder.glob("outputs/cache/policy-*")
    trained.rename(journey.folder / "trained")
    repeated = run_flow(journey.folder, *RUN, "second.json", "--accept-reward-model")
    assert repeated.code == 0, repeated.log
    weights = [folder / "model.safetensors" for folder in (trained, journey.folder / "trained")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    second = json.loads((journey.folder / "second.json").read_text())
    for part in ("win_rate", "distinct"):
        assert second[part] == summary[part]
    # The judge compared the samples of the first run before it was mended.
    reports = [dict(run["reward_model"], on_policy=None, reasons=[]) for run in (summary, second)]
    assert reports[0] == reports[1]
    assert second["model"]["uri"] == "models:/tiny-policy/2"
