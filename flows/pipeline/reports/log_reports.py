"""Log the reports to MLflow as metrics, pages and tables."""

from pathlib import Path

from pipeline.inputs.json_lines import read_jsonl
from pipeline.reports.evaluation_report import evaluation_document
from pipeline.reports.headline_metrics import evaluation_numbers, reward_model_numbers
from pipeline.reports.html_page import document_page
from pipeline.reports.reward_model_report import reward_document
from pipeline.reports.run_page.answer_sections import JudgedPair
from pipeline.reports.terminal import reward_verdict
from pipeline.results.report_files import as_json
from pipeline.results.reward_report import RewardReport
from pipeline.results.step_records import EvaluatedPolicy
from pipeline.tracking.tracker import Tracker
from ppo_core.io.validation import read_record

NUM_SAMPLES = 200
"""Maximum number of rows in the table of answers, and in the table of judged pairs."""


def log_reward_report(tracker: Tracker, report: RewardReport) -> None:
    """Log the report on a reward model."""
    tracker.parent.log_figures(reward_model_numbers(report))
    for log in (tracker.step, tracker.parent):
        log.set_tags({"reward_model": reward_verdict(report)})
    tracker.step.log_json(as_json(report), "reward-model/report.json")
    tracker.step.log_text(document_page(reward_document(report)), "reward-model/report.html")


def log_evaluation(tracker: Tracker, evaluated: EvaluatedPolicy) -> None:
    """Log the report on an evaluation, with samples and all judgements."""
    evaluation = evaluated.report()
    tracker.parent.log_figures(evaluation_numbers(evaluation))
    page = document_page(evaluation_document(evaluation))
    tracker.step.log_text(page, "evaluation/report.html")
    tracker.parent.log_table(read_jsonl(evaluated.samples)[:NUM_SAMPLES], "samples.json")
    tracker.parent.log_table(_pairs(evaluated.judgements), "pairs.json")
    tracker.step.log_artifact(evaluated.judgements)
    tracker.step.log_artifact(evaluated.guard_scores)
    if evaluated.task_scores.exists():
        tracker.step.log_artifact(evaluated.task_scores)


def _pairs(judgements: Path) -> list[dict[str, str]]:
    """Return judged pairs as rows of a table; pairs of PPO come first."""
    rows = sorted(read_jsonl(judgements), key=lambda row: not row["contest"].startswith("ppo_vs_"))
    pairs = [read_record(row, JudgedPair) for row in rows[:NUM_SAMPLES]]
    return [
        {
            "contest": pair.contest,
            "outcome": pair.outcome,
            "prompt": pair.prompt,
            "candidate": pair.candidate,
            "opponent": pair.opponent,
            "reason": pair.straight.reason,
        }
        for pair in pairs
    ]
