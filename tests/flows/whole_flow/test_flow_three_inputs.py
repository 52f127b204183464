"""The flow with a policy, preferences and prompts alone, on tiny inputs."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from pipeline.tracking.run_log import FIGURES, read_figures
from tests.helpers.inputs.pipeline_inputs import tiny_table
from tests.helpers.runs.flow_runs import Ran, artifacts_of, client_of, run_flow, runs_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

THREE = ("policy", "preferences", "prompts")


@dataclass(frozen=True)
class Bare:
    """A run of three inputs."""

    folder: Path
    ran: Ran
    summary: dict[str, Any]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Bare:
    folder: Path = tmp_path_factory.mktemp("bare")
    table = tiny_table(folder)
    # The file holds sizes only; the inputs are the three flags.
    sizes = {name: table[name] for name in ("reward_model_training", "ppo")}
    (folder / "sizes.toml").write_text(tomli_w.dumps(sizes))
    flags = [word for name in THREE for word in (f"--{name}", table[name])]
    ran = run_flow(
        folder,
        *("--config", "settings", "sizes.toml", "run", *flags),
        *("--accept-reward-model", "--summary-json", "summary.json"),
    )
    assert ran.code == 0, ran.log
    return Bare(folder, ran, json.loads((folder / "summary.json").read_text()))


def test_three_inputs_lead_to_a_registered_version(bare: Bare):
    assert bare.summary["model"]["uri"] == "models:/rlhf-policy/1"
    version = client_of(bare.folder).get_model_version("rlhf-policy", "1")
    assert version.tags["judge"] == bare.summary["judge"]["name"]
    tags = client_of(bare.folder).get_run(version.run_id).data.tags
    assert {"data/preferences", "data/judge-preferences", "data/eval-prompts"} <= set(tags)
    assert tags["data/preferences"] != tags["data/judge-preferences"]
    assert "this is weaker evidence than people" in version.description
    assert "There are no references" in version.description
    assert "SFT against the references" not in version.description


def test_the_judge_is_a_second_reward_model(bare: Bare):
    name = bare.summary["judge"]["name"]
    cache = bare.folder / "outputs" / "cache"
    (folder,), (reward_model,) = cache.glob("judge-*"), cache.glob("reward-model-*")
    assert name == f"reward-model:{folder}"
    weights = [(one / "model.safetensors").read_bytes() for one in (folder, reward_model)]
    assert weights[0] != weights[1]
    assert bare.summary["trained_judge"]["n"] == 6
    assert bare.summary["settings"]["judge"] == ""


def test_ppo_is_trained_on_no_prompt_that_it_is_judged_on(bare: Bare):
    samples = (
        next(bare.folder.glob("outputs/runs/*/evaluation/samples.jsonl")).read_text().splitlines()
    )
    assert [set(json.loads(line)) for line in samples] == [{"prompt", "sft", "ppo"}] * 3
    every = (bare.folder / "prompts.jsonl").read_text().splitlines()
    judged = [json.loads(line)["prompt"] for line in samples]
    # The prompts of PPO are gone with its job, whose policy is in the cache; the log counts them.
    assert judged == [json.loads(line)["prompt"] for line in every[-3:]]
    assert f"PPO: prompts {len(every) - 3}," in bare.ran.steps["start"]


def test_the_result_is_told_without_references(bare: Bare):
    assert set(bare.summary["win_rate"]) == {"ppo_vs_sft"}
    assert bare.summary["improvement"] is None
    assert set(bare.summary["canaries"]["kinds"]) == {
        "choose me", "forged verdict", "empty", "same"
    }  # fmt: skip
    assert re.search(r"Note: The judge is a reward model that the run trained", bare.ran.log)
    assert "against the references" not in bare.ran.log
    parent = client_of(bare.folder).get_run(bare.summary["model"]["run_id"])
    assert "this is weaker evidence than people" in parent.data.tags["mlflow.note.content"]
    assert not any("reference" in name for name in parent.data.metrics)
    accuracy = bare.summary["trained_judge"]["accuracy"]
    place = client_of(bare.folder).download_artifacts(parent.info.run_id, FIGURES)
    figures = read_figures(Path(place).read_text())
    assert figures["judge/accuracy"] == accuracy
    assert not any("reference" in name for name in figures)
    runs = runs_of(bare.folder, parent.data.tags["flow_run"])
    kept = artifacts_of(bare.folder, runs["evaluate_win_rate"], "evaluation")
    assert "evaluation/report.html" in kept
