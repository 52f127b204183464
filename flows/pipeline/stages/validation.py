"""Validate the reward model before PPO trains against it."""

from functools import partial
from typing import Any

from pipeline.inputs import data_sets
from pipeline.inputs.flow_run import FlowRun
from pipeline.reports.log_reports import log_reward_report
from pipeline.results import REWARD_REPORT_FILE, PreparedModel, ValidatedReward, write_report
from pipeline.reward_validation.samples import draw_samples
from pipeline.reward_validation.validate import validate
from pipeline.settings.decoding import Decoding
from pipeline.settings.settings import Settings
from pipeline.stages.tracked import track
from ppo_core.models.loading import load_reward_model


def validate_reward_model(
    settings: Settings, sft: PreparedModel, reward_model: PreparedModel, run: FlowRun
) -> ValidatedReward:
    """Measure the reward model on held-out preferences and samples, and log the report."""
    with track(run, "validate_reward_model", patient=True) as tracker:
        report = examine_reward_model(settings, sft, reward_model)
        report["accepted_by_hand"] = settings.accept_reward_model and not report["fit"]
        file = run.folder / REWARD_REPORT_FILE
        write_report(file, report)
        log_reward_report(tracker, report)
    return ValidatedReward(
        fit=report["fit"],
        accepted_by_hand=report["accepted_by_hand"],
        reasons=report["reasons"],
        bias=report["bias"],
        gain=report["gain"],
        report_file=str(file),
    )


def examine_reward_model(
    settings: Settings, sft: PreparedModel, reward_model: PreparedModel
) -> dict[str, Any]:
    """Return the report on the reward model that `reward_validation.validate` writes."""
    model = load_reward_model(
        reward_model.path, end_of_text=settings.reward_model_training.end_of_text
    )
    return validate(
        model,
        data_sets.test_pairs(settings),
        data_sets.training_prompts(settings),
        partial(
            draw_samples,
            sft.path,
            decoding=Decoding(
                response_length=settings.ppo.response_length,
                temperature=settings.ppo.temperature,
                stop_token=settings.ppo.stop_token,
                stop_token_id=settings.ppo.stop_token_id,
            ),
            seed=settings.seed,
            batch_size=settings.ppo.local_rollout_forward_batch_size,
        ),
        settings.reward_gate,
        seed=settings.seed,
    )
