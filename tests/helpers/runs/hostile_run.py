"""A run of the flow whose every text from a user, a data set or a model is hostile, in MLflow."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from pipeline import stages
from pipeline.inputs.flow_run import FlowRun
from pipeline.inputs.json_lines import write_jsonl
from pipeline.registry.change_champion import promote_by_hand
from pipeline.reports.log_reports import log_evaluation, log_reward_report
from pipeline.results.reward_report import RewardReport
from pipeline.results.step_records import (
    GUARD_SCORES,
    JUDGEMENTS,
    SAMPLES,
    Change,
    EvaluatedPolicy,
    PreparedModel,
    TrainedPolicy,
)
from pipeline.settings.make_settings import make_settings
from pipeline.settings.settings import Settings
from pipeline.stages.registration import Candidate, register_policy
from pipeline.stages.tracked import track
from ppo_core.errors import ProcessError
from ppo_core.io.folder_cache import digest_of_folder
from tests.helpers.inputs.pipeline_inputs import write_rows
from tests.helpers.inputs.sample_reports import (
    HOSTILE,
    evaluated,
    evaluation_result,
    reward_report,
    validated,
)
from tests.helpers.runs.candidates import write_policy

RUN = "new Image().src='http://192.0.2.1/ran'"
"""A script whose effect is a request, which is seen from every frame."""

MARKDOWN = (
    f"[x](javascript:{RUN}) <javascript:{RUN}> [y][r] [r]: http://192.0.2.1/ref",
    "![image](http://192.0.2.1/image) ![](//192.0.2.1/relative)",
    "http://192.0.2.1/bare www.example.org me@example.org @ada :smile:",
)
"""What Markdown makes links and images of."""

TEXTS = (
    HOSTILE,
    f"<script>{RUN}</script>",
    f'<img src=http://192.0.2.1/img onerror="{RUN}">',
    f'<svg onload="{RUN}"><script href=http://192.0.2.1/svg /></svg>',
    f'<iframe src="javascript:{RUN}"></iframe><iframe srcdoc="<script>{RUN}</script>"></iframe>',
    "<!-- hidden --> shown --> after <!-- the rest",
    f"{{{{constructor.constructor(`{RUN}`)()}}}} ${{{RUN}}}",
    "</td></table></textarea></title></script><h1>stranger</h1> **stranger** `stranger`",
    *MARKDOWN,
    "left \u202etfel\u202c \u2066isolate\u2069 zero\u200bwidth",
)
"""What a model, a data set or a judge may write."""

NAME = (
    '<img src=stranger onerror="document.title=`fell`"> **stranger** @ada www.example.org '
    r"![x](\\192.0.2.1\name) ![y](&#47;&#47;192.0.2.1&#47;name)"
)
"""Name of the registered model: it has no slash and no colon, which MLflow refuses."""

FOLDER = "<img src=stranger onerror=\"document.title='fell'\"> ![x](http:&#47;&#47;192.0.2.1)"
"""Name of the folder of the inputs."""

PERSON = f"person {MARKDOWN[0]}"

ORIGIN = {
    "mlflow.user": HOSTILE,
    "mlflow.source.name": FOLDER,
    "mlflow.source.git.branch": TEXTS[1],
    "mlflow.source.git.repoURL": f"javascript:{RUN}",
}
"""What MLflow itself reads of the user's name and of the git repository."""

STEPS = ("validate_reward_model", "train_policy", "evaluate_win_rate", "register")


@dataclass(frozen=True)
class HostileRun:
    """The run, and its registered version."""

    runs: Mapping[str, str]
    """Ids of the MLflow runs by step name."""

    version: str


def log_hostile_run(folder: Path) -> HostileRun:
    """Track a run with the functions of the flow's steps, and promote its version by hand."""
    settings = _settings(folder)
    with patch.dict("os.environ", MLFLOW_RUN_CONTEXT=json.dumps(ORIGIN)):
        run = stages.start.start_run(settings, settings, "RLHF", "hostile", STEPS)
    report = replace(
        reward_report(quoted=HOSTILE),
        fit=False,
        accepted_by_hand=True,
        reasons=[f"It likes {text}" for text in TEXTS],
    )
    with track(run, "validate_reward_model") as tracker:
        log_reward_report(tracker, report)
    with suppress(ProcessError), track(run, "train_policy"):
        raise ProcessError(f"It said {HOSTILE} {MARKDOWN[2]}")
    evaluation = _evaluation(run.folder)
    with track(run, "evaluate_win_rate") as tracker:
        log_evaluation(tracker, evaluation)
    candidate = _candidate(settings, run, evaluation, report)
    registered = register_policy(candidate)
    version = registered.model["version"]
    promote_by_hand(NAME, int(version), reason=" ".join((HOSTILE, MARKDOWN[2])), by=PERSON)
    stages.summary.summarize(
        settings, candidate.validation, candidate.trained, registered, run, {"start": 1.0}
    )
    return HostileRun(run.tracking, version)


def _settings(folder: Path) -> Settings:
    inputs = folder / FOLDER
    inputs.mkdir()
    rows = [{"prompt": text, "reference": text, "chosen": text, "rejected": ""} for text in TEXTS]
    policy = write_policy(inputs / "policy", 2.0)
    table = {
        "policy": policy,
        "reward_model": policy,
        "preferences_test": write_rows(inputs / "pairs.jsonl", rows),
        "prompts": write_rows(inputs / "prompts.jsonl", rows),
        "eval_prompts": write_rows(inputs / "eval.jsonl", rows),
        "judge": f"python:{inputs / 'judge.py'}:judge",
        "registered_model": NAME,
        "output_dir": str(folder / "outputs"),
    }
    return make_settings(table, {})


def _judgement(text: str) -> dict[str, Any]:
    verdict = {"winner": "first", "reason": text}
    texts = dict.fromkeys(("prompt", "candidate", "opponent"), text)
    contest = {"contest": "ppo_vs_sft", "outcome": "first"}
    return {**contest, **texts, "straight": verdict, "swapped": verdict}


def _evaluation(folder: Path) -> EvaluatedPolicy:
    report = replace(
        evaluation_result(judge=f"python:{FOLDER}:judge"),
        conclusive=False,
        reasons=[f"The judge said {text}" for text in TEXTS],
    )
    write_jsonl(folder / GUARD_SCORES, [{"prompt": text, "scores": {}} for text in TEXTS])
    write_jsonl(
        folder / SAMPLES,
        [dict.fromkeys(("prompt", "reference", "sft", "ppo"), text) for text in TEXTS],
    )
    write_jsonl(folder / JUDGEMENTS, map(_judgement, TEXTS))
    return evaluated(report, folder)


def _candidate(
    settings: Settings, run: FlowRun, evaluation: EvaluatedPolicy, report: RewardReport
) -> Candidate:
    model = PreparedModel(path=settings.policy, digest="", metrics={})
    names = ("scores", "rlhf_reward", "kl", "entropy")
    return Candidate(
        settings=settings,
        run=run,
        sft=model,
        reward_model=model,
        trained=TrainedPolicy(
            path=settings.policy,
            digest=digest_of_folder(Path(settings.policy)),
            objective={f"objective/{name}": Change(first=0.0, last=1.0) for name in names},
            warnings=[f"Update 1. {HOSTILE}"],
            episodes_per_second=1.0,
            peak_rss_bytes=2**20,
            tokens_sampled=1_000,
            tokens_trained=4_000,
            self_check={"backend": "fast", "policy_padded": 1e-7},
        ),
        validation=validated(report, run.folder),
        evaluation=evaluation,
    )
