"""Validate the reward model before PPO trains against it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import Any, NoReturn

from pipeline.cost.measured_cost import cost_of_run
from pipeline.evaluation.evaluate_policies import judge_of_run
from pipeline.evaluation.notes import describe_accuracy, doubts_about_trained_judge
from pipeline.inputs.flow_run import SETTINGS_FILE, FlowRun, shown_path
from pipeline.inputs.labeled_pairs import label_pairs
from pipeline.inputs.model_digests import require_recorded
from pipeline.inputs.run_data import RunData
from pipeline.inputs.training_prompts import one_row_per_prompt
from pipeline.judges.judge_budget import Budget, Payment, Spent, spent_by, sum_spent
from pipeline.judges.judge_names import calls_per_question, can_ask
from pipeline.judges.make_judge import digest_of_judge, make_judge_of_run
from pipeline.launch.answers import answer_as_ppo, inputs_of_samples
from pipeline.reports.log_reports import log_reward_report
from pipeline.reports.run_page.facts import RunFacts, curves_of
from pipeline.reports.run_page.write_page import write_run_page
from pipeline.reports.terminal import reward_model_in_words
from pipeline.results.evaluation import TrainedJudge
from pipeline.results.report_files import REWARD_REPORT_FILE, read_report, write_report
from pipeline.results.reward_report import OnPolicy, RewardReport
from pipeline.results.step_records import FreshPairs, PreparedModel, ValidatedReward
from pipeline.reward_validation.accuracy import measure_model
from pipeline.reward_validation.on_policy import measure_on_policy
from pipeline.reward_validation.samples import draw_samples
from pipeline.reward_validation.scores import TextScorer
from pipeline.reward_validation.validate import (
    Compare,
    Preferences,
    SampleResponses,
    scored_samples,
    validate,
)
from pipeline.settings.settings import Settings
from pipeline.stages.tracked import stage
from pipeline.storage.addresses import is_in_s3
from pipeline.storage.cached_results import as_values, can_be_reused, make_or_reuse
from pipeline.tracking.tracker import Tracker
from ppo_core.config.placement import is_fast_in_bf16, placement_for_reading
from ppo_core.data.chat_template import Messages
from ppo_core.data.text_config import text_config
from ppo_core.errors import ModelError
from ppo_core.io.folder_cache import digest_of, digest_of_code
from ppo_core.io.imported_modules import imported_modules
from ppo_core.io.validation import read_record
from ppo_core.models.loading import load_config, load_reward_model

MEASURED = "reward-report"
"""First part of the name of a report's folder in the cache."""

CODE = (
    "pipeline.reward_validation.validate",
    "pipeline.judges.make_judge",
    "ppo_core.training.answer_job",
)
"""Modules whose code, with the code of their imports, determines the report."""


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """What the cache stores about a report, besides the report's file."""

    payment: Payment | None = None


@stage(
    "validate_reward_model",
    "settings",
    "sft",
    "reward_model",
    "judge_model",
    "fresh",
    patient=True,
)
def validate_reward_model(
    tracker: Tracker,
    settings: Settings,
    sft: PreparedModel,
    reward_model: PreparedModel,
    judge_model: PreparedModel | None,
    run: FlowRun,
    fresh: FreshPairs | None = None,
) -> ValidatedReward:
    """Measure the reward model on held-out preferences and samples, and log the report.

    A judge that the run trained is also measured on held-out preferences.

    If the reward model is refused, the MLflow runs of this run are ended, and the caller must call
    `stop_run`.

    Raises:
        ModelError: the files of a model were changed after the run read them.
        DataError, JudgeError: see `validate`.
    """
    require_recorded(sft.path, sft.digest, "policy")
    require_recorded(reward_model.path, reward_model.digest, "reward model")
    data = RunData(settings)
    report, spent = _measure(data, sft, reward_model, judge_model, run, fresh)
    by_hand = settings.accept_reward_model and not report.fit
    report = replace(report, accepted_by_hand=by_hand)
    print(f"reward model: {reward_model_in_words(report)}", flush=True)
    file = run.folder / REWARD_REPORT_FILE
    write_report(file, report)
    log_reward_report(tracker, report)
    validation = ValidatedReward(
        fit=report.fit,
        accepted_by_hand=report.accepted_by_hand,
        reasons=report.reasons,
        bias=report.bias,
        gain=report.gain,
        report_file=str(file),
        spent=sum_spent(reward_model.spent, spent),
        judge=_measure_judge(data, judge_model) if judge_model else None,
        is_used=settings.uses_reward_model,
    )
    if validation.refused:
        facts = RunFacts(
            run=run,
            settings=settings,
            curves=curves_of(run, tracker.journal),
            reward_model=report,
            cost=cost_of_run(
                run,
                settings.hardware,
                None,
                sum_spent(fresh.spent if fresh else {}, validation.spent),
            ),
        )
        print(write_run_page(facts, tracker.parent), flush=True)
        tracker.refuse("The reward model is not fit to train against.", validation.reasons)
    _warn(validation)
    return validation


def _warn(validation: ValidatedReward) -> None:
    """Print the reasons against a model that is not used, or that a person accepted."""
    if not (validation.fit or validation.is_used):
        words = "PPO does not learn from the reward model. The model is not fit, for these reasons:"
    elif validation.accepted_by_hand:
        words = "A person accepted the reward model. It was refused for these reasons:"
    else:
        return
    print(f"Warning: {words}\n{_listed(validation)}", flush=True)


def stop_run(validation: ValidatedReward, run: FlowRun) -> NoReturn:
    """Raise the error that ends a run whose reward model was refused.

    Raises:
        ModelError: always; the message contains the reasons, the place of the report, and the
            commands to continue.
    """
    report = validation.report_file
    shown = report if is_in_s3(report) else shown_path(Path(report))
    same_run = f"--config settings {quote(run.place_of(SETTINGS_FILE))} run"
    raise ModelError(
        f"The reward model is not fit to train against:\n{_listed(validation)}\n"
        "PPO would exploit these faults, so it was not started. Three places have the report: the "
        "card (python flows/rlhf.py card view validate_reward_model), the file "
        f"{shown}, and reward-model/report.html in MLflow.\n"
        "Do what the reasons say, or change the limits in [reward_gate], and run again; models "
        "that are already trained are reused. To train against this reward model all the same:\n"
        f"python flows/rlhf.py {same_run} --accept-reward-model"
    )


def _measure(
    data: RunData,
    sft: PreparedModel,
    reward_model: PreparedModel,
    judge_model: PreparedModel | None,
    run: FlowRun,
    fresh: FreshPairs | None,
) -> tuple[RewardReport, dict[str, Spent]]:
    """Return the report, and what this run has spent on it; reuse the report for equal inputs.

    So a run with other settings of PPO does not measure the reward model again. A report in which
    the judge has left pairs without a verdict is not reused, because its server may answer again.
    """
    settings = data.settings
    budget = Budget.of(settings.judging, run.folder / f"{MEASURED}-calls.jsonl")
    preferences = Preferences(
        data.test_pairs(), data.voted_pairs(None if fresh is None else fresh.path)
    )
    inputs = _inputs_of_report(data, sft, reward_model, judge_model, preferences)
    report = None
    if not can_be_reused(run.workspace, MEASURED, inputs):
        report = examine_reward_model(
            data,
            sft,
            reward_model,
            preferences,
            run.folder,
            compare=judge_samples(settings, judge_model, budget),
        )
        if report.on_policy is not None and report.on_policy.invalid:
            return report, budget.spent({})

    def store(folder: Path) -> dict[str, Any]:
        assert report is not None
        write_report(folder / REWARD_REPORT_FILE, report)
        return as_values(_Measured(payment=Payment(run=run.id, spent=budget.spent({}))))

    made = make_or_reuse(run.workspace, MEASURED, inputs, store)
    report = read_report(Path(run.workspace.fetch(made.place), REWARD_REPORT_FILE), RewardReport)
    return report, spent_by(run.id, read_record(made.values, _Measured).payment)


def _inputs_of_report(
    data: RunData,
    sft: PreparedModel,
    reward_model: PreparedModel,
    judge_model: PreparedModel | None,
    preferences: Preferences,
) -> dict[str, Any]:
    """Return everything that decides the report on a reward model."""
    settings, judging = data.settings, data.settings.judging
    judge = judge_of_run(settings, judge_model)
    return {
        "samples": inputs_of_samples(settings, sft.digest),
        "reward_model": reward_model.digest,
        "training": reward_model.metrics,
        "pairs": preferences.given.digest,
        "votes": digest_of([asdict(pair) for pair in preferences.samples]),
        "prompts": data.training_prompts().digest,
        "reward_format": data.reward_format,
        "end_of_text": settings.reward_model_training.end_of_text,
        "bf16": _scores_in_bf16(settings),
        "device": placement_for_reading().device.type,
        "limits": asdict(settings.reward_gate),
        "judge": can_ask(judge) and digest_of_judge(settings, judge),
        # With too small a budget, the judge compares fewer samples, or none.
        "budget": [judging.max_calls, judging.max_tokens],
        "code": digest_of_code(*imported_modules(*CODE)),
    }


def examine_reward_model(
    data: RunData,
    sft: PreparedModel,
    reward_model: PreparedModel,
    preferences: Preferences,
    folder: Path,
    *,
    compare: Compare | None,
) -> RewardReport:
    """Load the reward model, and return the report of `reward_validation.validate`."""
    settings = data.settings
    return validate(
        load_scorer(data, reward_model.path),
        preferences,
        data.training_prompts(),
        _draw(settings, sft, folder),
        settings.reward_gate,
        compare=compare,
        training=reward_model.metrics,
        seed=settings.seed,
    )


def measure_given_model(
    data: RunData, sft: PreparedModel, reward_model: PreparedModel, folder: Path
) -> tuple[OnPolicy | None, dict[str, Spent]]:
    """Measure how often the run's judge and a given reward model prefer the same samples.

    The judge compares the samples of the first `num_prompts` prompts, as the validation does later.
    It stops early once the agreement is clearly below `fresh_pairs.enough_agreement`.
    Also return what the judge spent. The measurement is None if the judge's budget is too small.

    Raises:
        DataError, JudgeError, ModelError: see `validate`.
    """
    settings, limits = data.settings, data.settings.reward_gate
    enough = settings.fresh_pairs.enough_agreement

    def is_low(found: OnPolicy) -> bool:
        return found.accuracy is not None and found.accuracy.high < enough

    budget = Budget.of(settings.judging, folder / "given-reward-model-calls.jsonl")
    scorer, draw = load_scorer(data, reward_model.path), _draw(settings, sft, folder)
    prompts = one_row_per_prompt(data.training_prompts())
    blocks = scored_samples(scorer, prompts, draw, limits)
    found = measure_on_policy(
        make_judge_of_run(settings, settings.judge, budget),
        budget,
        islice(blocks, 1),
        calls_per_question=calls_per_question(settings.judge),
        least=limits.min_best_of_4,
        seed=settings.seed,
        is_clear=is_low,
    )
    return found, budget.spent({})


def load_scorer(data: RunData, reward_model: str) -> TextScorer:
    """Load the reward model of a run; `reward_model` is its folder or hub id."""
    model = load_reward_model(
        reward_model,
        end_of_text=data.settings.reward_model_training.end_of_text,
        prompt_format=data.reward_format,
        placement=placement_for_reading(),
    )
    return TextScorer(model, bf16=_scores_in_bf16(data.settings))


def _draw(settings: Settings, sft: PreparedModel, folder: Path) -> SampleResponses:
    def draw(
        prompts: Sequence[str | Messages], *, samples_per_prompt: int, start: int
    ) -> list[list[str]]:
        of_block = replace(settings, seed=(settings.seed + start) % 2**32)
        answer = partial(answer_as_ppo, of_block, sft.path, folder)
        return draw_samples(answer, prompts, samples_per_prompt=samples_per_prompt)

    return draw


def judge_samples(
    settings: Settings, trained: PreparedModel | None, budget: Budget
) -> Compare | None:
    """Return a function that lets the judge compare samples; None without the judge's API key."""
    spec = judge_of_run(settings, trained)
    if can_ask(spec):
        return partial(
            measure_on_policy,
            make_judge_of_run(settings, spec, budget),
            budget,
            calls_per_question=calls_per_question(spec),
            least=settings.reward_gate.min_best_of_4,
            seed=settings.seed,
        )
    print(
        f"Warning: this step has no key for judge={settings.judge}, so the judge is not asked "
        "about the policy's samples. Only the accuracy on held-out pairs decides. To measure "
        "the reward model on the policy's samples, too, give steps.validate_reward_model the "
        "secret of steps.evaluate_win_rate in the deployment file.",
        flush=True,
    )
    return None


def _scores_in_bf16(settings: Settings) -> bool:
    """Return whether PPO computes scores in bfloat16 on this machine."""
    if settings.ppo.bf16 is not None:
        return settings.ppo.bf16
    width = getattr(text_config(load_config(settings.policy)), "hidden_size", 0)
    in_fp32 = settings.lora.dtype == "float32"
    return in_fp32 and is_fast_in_bf16(width, use_cpu=settings.ppo.use_cpu)


def _measure_judge(data: RunData, judge: PreparedModel) -> TrainedJudge:
    """Print and return the accuracy of the run's own judge on held-out preferences."""
    found = measure_model(
        judge.path,
        label_pairs(data.judge_test_pairs()),
        end_of_text=data.settings.reward_model_training.end_of_text,
        prompt_format=data.settings.prompt_format,
    )
    measured = TrainedJudge(
        path=judge.path, accuracy=found.accuracy, low=found.low, high=found.high, n=found.n
    )
    doubts = [
        f"Warning: The evaluation will be inconclusive. {doubt}"
        for doubt in doubts_about_trained_judge(measured)
    ]
    print(*(doubts or [describe_accuracy(measured)]), flush=True)
    return measured


def _listed(validation: ValidatedReward) -> str:
    return "\n".join(f"- {reason}" for reason in validation.reasons)
