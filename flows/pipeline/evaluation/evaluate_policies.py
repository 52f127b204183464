"""Sample the policies' answers to unseen prompts, and let a judge compare the answers."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.evaluation.compare_in_both_orders import contests_between
from pipeline.evaluation.notes import doubts_about_trained_judge, note_on_copies, notes_on
from pipeline.inputs.contamination import COPIED, split_words
from pipeline.inputs.human_labels_to_pairs import votes_of
from pipeline.inputs.json_lines import read_jsonl, write_jsonl
from pipeline.inputs.run_data import RunData, references_of
from pipeline.judges.judge_budget import Budget, Spent
from pipeline.judges.make_judge import make_judge_of_run
from pipeline.judges.verdict import JudgedPrompt
from pipeline.launch.answers import answer_in_run, job_of_ppo
from pipeline.results.evaluation import Evaluation, GuardResult, TrainedJudge
from pipeline.results.report_files import EVALUATION_FILE, write_report
from pipeline.results.selection import Selection
from pipeline.results.step_records import (
    EvaluatedPolicy,
    FetchedChampion,
    PreparedModel,
)
from pipeline.settings.gate_configs import GuardsConfig, PromotionConfig
from pipeline.settings.settings import Settings
from ppo_core.algorithm.repetition import repeated_ngrams
from ppo_core.models.loading import is_same_architecture
from ppo_core.rollout.token_sampling import server_of
from ppo_core.training.answer_job import AnswerJob
from ppo_core.training.answer_prompts import Answers

if TYPE_CHECKING:
    from pipeline.evaluation.baselines import JudgedBaselines, Score
    from pipeline.evaluation.compare_in_both_orders import Comparison
    from pipeline.evaluation.contests import Contest, Contests
    from pipeline.evaluation.guards.tasks import PolicyFiles, TaskScore
    from pipeline.evaluation.sequential.sequential_test import StoppingRule


def evaluate_policies(
    settings: Settings,
    sft: str,
    policy: str,
    champion: FetchedChampion | None,
    folder: Path,
    *,
    judge: TrainedJudge | None = None,
    selection: Selection | None = None,
    score: "Score | None" = None,
    calls: Path | None = None,
) -> EvaluatedPolicy:
    """Judge the answers of the trained policy against SFT, the champion, and any references.

    Args:
        settings: settings of the run.
        sft: folder or hub id of the policy from which PPO started.
        policy: folder of the trained policy.
        champion: current champion; None if the registered model has no champion.
        folder: existing folder for the report, the samples and the judgements.
        judge: the judge that the run trained; None for the judge of the settings.
        selection: how the policy was chosen; None if `selection.method` is `last`.
        score: function that returns the rewards of answers; None to skip the baselines.
        calls: file of the judge's calls, see `Budget`; None to count only this attempt.
    """
    # Imported here because scipy and statsmodels are slow to import, see `_judge`.
    from pipeline.evaluation.baselines import JudgedBaselines, measure_baselines
    from pipeline.evaluation.guards.tasks import PolicyFiles

    def without_ppo(against_sft: "Comparison", budget: Budget) -> JudgedBaselines:
        if score is None or not settings.evaluation.baseline_prompts:
            return JudgedBaselines(None)

        def answer(prompts: Sequence[JudgedPrompt], *, kl: bool, **changes: Any) -> Answers:
            reference = sft if kl else None
            return answer_as_evaluated(settings, sft, prompts, reference, folder, **changes)

        spec = judge_of_run(settings, judge)
        return measure_baselines(settings, prompts, against_sft, answer, score, spec, budget)

    data = RunData(settings)
    rows = data.examples(None if champion is None else champion.version)
    prompts = [row["prompt"] for row in rows]
    answers = {
        "sft": answer_as_evaluated(settings, sft, prompts, sft, folder),
        "ppo": answer_as_evaluated(settings, policy, prompts, sft, folder),
    }
    policies = {"sft": PolicyFiles(sft, sft), "ppo": PolicyFiles(policy, policy)}
    answered = _Answered(prompts, references_of(rows), answers, policies)
    spent = selection.spent if selection else {}
    budget = Budget.of(settings.judging, calls)
    return _judge(data, answered, champion, folder, judge, selection, spent, budget, without_ppo)


def evaluate_again(
    settings: Settings,
    evaluation: EvaluatedPolicy,
    champion: FetchedChampion | None,
    folder: Path,
    *,
    judge: TrainedJudge | None,
    spent: Mapping[str, Spent],
    calls: Path | None = None,
) -> EvaluatedPolicy:
    """Judge the answers of an earlier evaluation against another champion, or with another alpha.

    If the champion is the same, its answers are the same too, so the judge continues the earlier
    test. The new report repeats the baselines of the earlier evaluation, because they do not depend
    on the champion.

    Args:
        settings: settings of the run, with the alpha of the decision.
        evaluation: the earlier evaluation.
        champion: see `evaluate_policies`.
        folder: see `evaluate_policies`.
        judge: see `evaluate_policies`.
        spent: what the judge has spent on all earlier evaluations.
        calls: see `evaluate_policies`; each evaluation has its own file.
    """
    from pipeline.evaluation.baselines import JudgedBaselines, baseline_contest
    from pipeline.evaluation.guards.tasks import TaskScore

    rows, earlier = read_jsonl(evaluation.samples), evaluation.report()
    texts = {who: [row[who] for row in rows] for who in rows[0]}
    answering = list(earlier.kl)
    if champion is not None and champion.version == earlier.champion:
        answering.append("champion")
    stopped = _stopped(evaluation)
    scored = read_jsonl(evaluation.task_scores) if settings.promotion.guards.tasks else []
    answered = _Answered(
        texts["prompt"],
        texts.get("reference"),
        {
            who: Answers(texts=texts[who], kl=earlier.kl.get(who), stopped=stopped.get(who))
            for who in answering
        },
        {},
        [TaskScore(**row) for row in scored if row["policy"] in answering],
    )
    found = earlier.baselines.found if earlier.baselines else {}
    judged = {baseline_contest(name) for name in found}
    baselines = JudgedBaselines(
        earlier.baselines,
        [row for row in read_jsonl(evaluation.judgements) if row["contest"] in judged],
    )
    return _judge(
        RunData(settings),
        answered,
        champion,
        folder,
        judge,
        evaluation.selection,
        spent,
        Budget.of(settings.judging, calls),
        lambda against_sft, budget: baselines,
    )


def _stopped(evaluation: EvaluatedPolicy) -> dict[str, list[bool]]:
    """Return, by policy, whether each answer of an earlier evaluation ended in the stop token.

    A policy without scores of the guard `stops` is missing. Without this guard, the result is
    empty.
    """
    rows = [row["scores"].get("stops", {}) for row in read_jsonl(evaluation.guard_scores)]
    return {who: [bool(row[who]) for row in rows] for who in rows[0]}


class _Answered(NamedTuple):
    """Prompts, references, answers by policy, and the policies to score on tasks."""

    prompts: Sequence[JudgedPrompt]
    references: Sequence[str] | None
    answers: Mapping[str, Answers]
    policies: "Mapping[str, PolicyFiles]"
    """The policies to score on the tasks that are guards."""

    task_scores: "Sequence[TaskScore]" = ()
    """Scores of other policies on these tasks."""

    @property
    def texts(self) -> dict[str, Sequence[str]]:
        """References and answers, by contestant."""
        references = {} if self.references is None else {"reference": self.references}
        return references | {who: given.texts for who, given in self.answers.items()}


def judge_of_run(settings: Settings, trained: TrainedJudge | PreparedModel | None) -> str:
    """Return the name of the judge that the run trained; without one, the judge of the settings."""
    return f"reward-model:{trained.path}" if trained else settings.judge


def _judge(
    data: RunData,
    answered: _Answered,
    champion: FetchedChampion | None,
    folder: Path,
    trained_judge: TrainedJudge | None,
    selection: Selection | None,
    spent_before: Mapping[str, Spent],
    budget: Budget,
    without_ppo: "Callable[[Comparison, Budget], JudgedBaselines]",
) -> EvaluatedPolicy:
    # Imported here because scipy and statsmodels are slow to import and most importers of this
    # module judge nothing.
    from pipeline.evaluation.contests import distinct_share, judgements

    settings, prompts = data.settings, answered.prompts
    kl = {who: given.kl for who, given in answered.answers.items() if who != "champion"}
    if champion is not None and "champion" not in answered.answers:
        answered = _with_champion(settings, answered, champion, folder)
    version = None if champion is None else champion.version
    evaluated = EvaluatedPolicy(
        champion=version, kl=kl["ppo"], folder=str(folder), selection=selection
    )
    # Apply the guards before asking the judge: a user's guard may fail, and a judge may cost money.
    guards, not_applied = _compare_by_guards(settings.promotion.guards, answered, evaluated)
    guards |= _compare_on_tasks(settings, answered, evaluated)
    texts = answered.texts
    contests = _contests(data, answered, trained_judge, budget)
    baselines = without_ppo(contests.comparisons["ppo_vs_sft"], budget)
    reasons = [*contests.result.reasons, *doubts_about_trained_judge(trained_judge)]
    _write_samples(evaluated, {"prompt": prompts, **texts})
    write_jsonl(evaluated.judgements, judgements(contests.comparisons) + baselines.judgements)
    report = Evaluation(
        **vars(replace(contests.result, conclusive=not reasons, reasons=reasons)),
        notes=[
            *([str(selection)] if selection else []),
            *notes_on(
                trained_judge,
                contests.result.canaries,
                is_reward_model_given=bool(settings.reward_model),
                has_references="reference" in texts,
            ),
            *not_applied,
            *note_on_copies(data.evaluation_rows().left_out.get(COPIED, 0)),
        ],
        trained_judge=trained_judge,
        champion=version,
        improvement=contests.improvement(),
        distinct={who: distinct_share(given) for who, given in texts.items()},
        length={who: mean_words(given) for who, given in texts.items()},
        repetition={who: repeated_share(given) for who, given in texts.items()},
        kl=kl,
        spent=budget.spent(spent_before),
        guards=guards,
        baselines=baselines.results,
    )
    write_report(folder / EVALUATION_FILE, report)
    return evaluated


def _with_champion(
    settings: Settings, answered: _Answered, champion: FetchedChampion, folder: Path
) -> _Answered:
    """Return `answered` with the champion's answers and files added."""
    from pipeline.evaluation.guards.tasks import PolicyFiles

    given = _answer_as_champion(settings, champion, answered.prompts, folder)
    files = PolicyFiles(champion.model, champion.tokenizer)
    return answered._replace(
        answers={**answered.answers, "champion": given},
        policies={**answered.policies, "champion": files},
    )


def _write_samples(evaluated: EvaluatedPolicy, columns: Mapping[str, Sequence[Any]]) -> None:
    rows = zip(*columns.values(), strict=True)
    write_jsonl(evaluated.samples, [dict(zip(columns, row, strict=True)) for row in rows])


def _contests(
    data: RunData, answered: _Answered, trained_judge: TrainedJudge | None, budget: Budget
) -> "Contests":
    """Let the judge of the run compare the answers of all contests."""
    from pipeline.evaluation.contests import Contestants, evaluate

    settings, texts = data.settings, answered.texts
    return evaluate(
        make_judge_of_run(settings, judge_of_run(settings, trained_judge), budget),
        Contestants(answered.prompts, texts),
        contests_between(texts),
        rules=_rules(settings.promotion, texts),
        people=votes_of(data.labels()),
        config=settings.evaluation,
        # Canaries do not disqualify a trained judge: a reward model follows no instructions, and
        # its accuracy on held-out pairs was measured.
        canaries_decide=trained_judge is None,
        seed=settings.seed,
    )


def _compare_by_guards(
    config: GuardsConfig, answered: _Answered, evaluated: EvaluatedPolicy
) -> tuple[dict[str, GuardResult], list[str]]:
    """Compare the answers by the guards, and write the scores of all answers.

    Return the results by guard, and sentences on guards that were not applied.
    """
    from pipeline.evaluation.guards.compare import compare_by_guards

    rival = "sft" if evaluated.champion is None else "champion"
    compared = compare_by_guards(config, answered.prompts, answered.answers, rival)
    write_jsonl(
        evaluated.guard_scores,
        [
            {
                "prompt": prompt,
                "scores": {
                    name: {who: float(each[number]) for who, each in scores.items()}
                    for name, scores in compared.scores.items()
                },
            }
            for number, prompt in enumerate(answered.prompts)
        ],
    )
    return compared.results, compared.notes


def _compare_on_tasks(
    settings: Settings, answered: _Answered, evaluated: EvaluatedPolicy
) -> dict[str, GuardResult]:
    """Compare the policies on the tasks that are guards, and write the scores of all documents."""
    from pipeline.evaluation.guards.tasks import compare_on_tasks

    if not settings.promotion.guards.tasks:
        return {}
    results, scores = compare_on_tasks(
        settings,
        answered.policies,
        answered.task_scores,
        "sft" if evaluated.champion is None else "champion",
        Path(evaluated.folder),
    )
    write_jsonl(evaluated.task_scores, [score._asdict() for score in scores])
    return results


def _rules(limits: PromotionConfig, contestants: Collection[str]) -> "dict[Contest, StoppingRule]":
    """Return the rules of the contests that decide about a promotion.

    The first contest is against the champion, or against SFT if there is no champion.
    """
    from pipeline.evaluation.sequential.sequential_test import StoppingRule

    least = {"champion" if "champion" in contestants else "sft": limits.min_win_rate}
    if "reference" in contestants:
        least["reference"] = limits.min_reference_win_rate
    return {
        ("ppo", opponent): StoppingRule(
            least=rate, gain=limits.gain_above(rate), alpha=limits.alpha
        )
        for opponent, rate in least.items()
    }


def answer_as_evaluated(
    settings: Settings,
    path: str,
    prompts: Sequence[JudgedPrompt],
    reference: str | None,
    folder: Path,
    **changes: Any,
) -> Answers:
    """Return a policy's answers in an evaluation, and its KL divergence from a reference policy.

    The divergence is None if `reference` is None, or if the decoding settings allow no estimate.
    `changes` override fields of the `AnswerJob` that otherwise come from the settings.
    """
    job = replace(_job_of_evaluation(settings, path, prompts), reference=reference, **changes)
    return answer_in_run(job, settings, folder)


def _answer_as_champion(
    settings: Settings, champion: FetchedChampion, prompts: Sequence[JudgedPrompt], folder: Path
) -> Answers:
    """Return the champion's answers, which end at the champion's own stop token."""
    server = server_of(settings.ppo)
    # A running server cannot change to another architecture.
    if server and not is_same_architecture(champion.model, settings.policy):
        server = None
    job = replace(
        _job_of_evaluation(settings, champion.model, prompts),
        tokenizer=champion.tokenizer,
        prompt_format="auto",
        # If the champion has no stop token, its answers have full length, as when it is served.
        stop="own",
        stop_token_id=None,
        server=server,
    )
    return answer_in_run(job, settings, folder)


def _job_of_evaluation(
    settings: Settings, policy: str, prompts: Sequence[JudgedPrompt]
) -> AnswerJob:
    """Return the job that answers prompts as PPO does, but with the decoding of the evaluation."""
    decoding = settings.evaluation
    return replace(
        job_of_ppo(settings, policy, prompts),
        temperature=decoding.temperature,
        top_k=decoding.top_k,
        top_p=decoding.top_p,
    )


def mean_words(texts: Sequence[str]) -> float:
    """Return the mean number of words per text; `texts` must not be empty.

    In a script without spaces, each character is a word, here and in `repeated_share`.
    """
    return fmean(map(len, split_words(texts)))


def repeated_share(texts: Sequence[str], n: int = 3) -> float:
    """Return the mean over texts of the fraction of word n-grams that repeat an earlier n-gram.

    Equal texts count once, so that a stock answer does not hide the repetition in other answers.
    """
    return fmean(repeated_ngrams(words, n) for words in split_words([*dict.fromkeys(texts)]))
