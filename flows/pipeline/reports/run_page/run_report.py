"""Make the report on a run, with one section for each question of the reader."""

from collections.abc import Callable
from dataclasses import replace
from shlex import quote

from metaflow import current

from pipeline.registry.decisions import Decision, timestamp
from pipeline.reports.baselines import worth_of_ppo
from pipeline.reports.document import Document, Section, Tone, describe_annotator_test
from pipeline.reports.evaluation_report import (
    better_sections,
    describe_rate,
    honesty_sections,
    judge_sections,
    without_ppo_section,
)
from pipeline.reports.promotion_report import promotion_document
from pipeline.reports.reward_model_report import (
    reward_reasons,
    reward_sections,
)
from pipeline.reports.run_page.answer_sections import (
    NEWEST_SAMPLES,
    PAIRS,
    PROMPTS,
    newest_section,
    pairs_section,
    prompts_section,
    watched_section,
)
from pipeline.reports.run_page.facts import RunFacts
from pipeline.reports.run_page.training import ppo_section, supervised_section
from pipeline.reports.terminal import cost_in_words
from pipeline.results.evaluation import Evaluation
from pipeline.results.run_cost import RunCost
from pipeline.results.step_records import RegisteredPolicy
from pipeline.tracking.mlflow_facts import shown_server
from ppo_core.data.rows.row_error import list_reasons
from ppo_core.errors import DataError

BETTER, FRONT = "Did it get better, and by how much?", "Was PPO worth it? KL against win rate"
"""Titles of sections."""

FAILED = "Rule that failed: {}"

REFRESH_SECONDS = 10
"""Seconds after which the page reloads itself while the run has no outcome."""


def run_report(facts: RunFacts) -> Document:
    """Return the report on a run, with everything that the run has measured so far."""
    verdict, tone, reasons = _verdict(facts)
    sections = [
        *([Section(title="How far is it?", progress=facts.progress)] if facts.progress else []),
        *_evaluated(facts),
        ppo_section(facts),
        supervised_section(facts),
        *_answers(facts),
        *_trust(facts),
        *([facts.since_champion] if facts.since_champion else []),
        _data(facts),
        _cost(facts.cost),
        _commands(facts),
    ]
    return Document(
        subject=f"Run {facts.run.id} of {facts.settings.registered_model}",
        verdict=verdict,
        tone=tone,
        reasons=reasons,
        sections=tuple(sections),
        refresh=0 if facts.has_outcome else REFRESH_SECONDS,
    )


def _verdict(facts: RunFacts) -> tuple[str, Tone, tuple[str, ...]]:
    if facts.registered and facts.evaluation:
        return _decided(facts.registered.promotion, facts.evaluation)
    if facts.reward_model and facts.is_reward_model_refused:
        why = "PPO was not started, because it would exploit the faults of the reward model."
        reasons = (why, *map(FAILED.format, facts.reward_model.reasons))
        return "The reward model was refused", "danger", reasons
    if facts.failure:
        return "The run failed, and nothing is decided", "danger", (facts.failure,)
    reasons = (f"Nothing is decided yet. Written at {timestamp()}.",)
    return "The run is not finished", "warning", reasons


def _decided(made: Decision, evaluation: Evaluation) -> tuple[str, Tone, tuple[str, ...]]:
    if made.is_promoted:
        reasons = (*made.reasons, *evaluation.notes)
        return f"Promoted: production loads version {made.version}", "success", reasons
    stays = "there is no champion"
    if made.champion is not None:
        stays = f"production still loads version {made.champion}"
    rival = "SFT" if evaluation.champion is None else "the champion"
    sentence = describe_rate(evaluation.win_rate[evaluation.direct_contest], rival)
    reasons = (sentence, *map(FAILED.format, made.reasons), *evaluation.notes)
    return f"Version {made.version} was refused, and {stays}", "danger", reasons


def _evaluated(facts: RunFacts) -> list[Section]:
    """Return the sections on win rates, the decision, and what SFT reaches without PPO."""
    evaluation, registered = facts.evaluation, facts.registered
    if not (evaluation and registered):
        text = ("The run has not judged the policy, so nothing is known.",)
        return [Section(title=BETTER, text=text)]
    decision = promotion_document(
        registered,
        evaluation,
        facts.settings.promotion,
        reward_model_fit=(
            (not facts.reward_model or facts.reward_model.fit)
            if facts.settings.uses_reward_model
            else None
        ),
    )
    refused = not registered.promotion.is_promoted
    return [
        Section(
            title=BETTER,
            text=tuple(evaluation.reasons),
            parts=tuple(better_sections(evaluation)),
        ),
        Section(
            title=f"Why was it {'refused' if refused else 'promoted'}? Measured values and limits",
            text=decision.reasons if refused else (),
            parts=decision.sections,
        ),
        _front(evaluation),
    ]


def _front(evaluation: Evaluation) -> Section:
    baselines = evaluation.baselines
    if baselines is None:
        return Section(title=FRONT, text=("Not measured: evaluation.baseline_prompts is 0.",))
    text = tuple(worth_of_ppo(baselines))
    if baselines.ppo is None:
        return Section(title=FRONT, text=text)
    if evaluation.kl_of_ppo is None:
        unknown = "The KL divergence cannot be measured with this decoding, so there is no chart."
        text = (*text, unknown)
    return replace(without_ppo_section(evaluation), title=FRONT, text=text)


def _answers(facts: RunFacts) -> list[Section]:
    evaluation, registered, samples = facts.evaluation, facts.registered, facts.samples
    watched = [watched_section(facts.watched)] if facts.watched else []
    if samples is not None:
        return [_or_why(NEWEST_SAMPLES, lambda: newest_section(samples)), *watched]
    if not (evaluation and registered):
        return [Section(title=PROMPTS, text=("There are no answers of a trained policy yet.",))]
    evaluated, contest = registered.evaluation, evaluation.direct_contest
    return [
        _or_why(PAIRS, lambda: pairs_section(evaluated, contest)),
        _or_why(PROMPTS, lambda: prompts_section(evaluated)),
        *watched,
    ]


def _or_why(title: str, make: Callable[[], Section]) -> Section:
    """Return a section, or a section with the error if a file cannot be read."""
    try:
        return make()
    except DataError as error:
        return Section(title=title, text=(f"Not shown: {error}",))


def _trust(facts: RunFacts) -> list[Section]:
    """Return the sections on whether the policy cheats, on the judge and on the reward model."""
    found = []
    if evaluation := facts.evaluation:
        failed = [name for name, one in evaluation.guards.items() if not one.passed]
        guards = f"Guards that failed: {', '.join(failed)}." if failed else "No guard failed."
        cheated = (guards, *(facts.warnings or ["PPO gave no warning."]))
        people = evaluation.people and evaluation.people.alternative
        doubts = evaluation.canaries.reasons or ["The judge passed the test with canaries."]
        trusted = (*doubts, *([describe_annotator_test(people)] if people else []))
        parts = tuple(honesty_sections(evaluation))
        found += [
            Section(title="Did it cheat? Length, repetition, guards", text=cheated, parts=parts),
            Section(
                title="Can I trust the judge?",
                text=trusted,
                parts=tuple(judge_sections(evaluation)),
            ),
        ]
    if report := facts.reward_model:
        title, parts = "Can I trust the reward model?", tuple(reward_sections(report))
        found.append(Section(title=title, text=reward_reasons(report), parts=parts))
    return found


def _data(facts: RunFacts) -> Section:
    run = facts.run
    code = Section(
        title="Code, models and digests",
        headers=("", "Value"),
        rows=tuple(one for one in sorted(run.origin.items()) if not one[0].startswith("data/")),
    )
    return Section(
        title="Which data, code and models?",
        headers=("Used as", "Data", "Rows", "Left out", "Digest"),
        rows=tuple(
            (one.name, one.source, f"{one.rows:,}", list_reasons(one.left_out) or "0", one.digest)
            for one in run.data
        ),
        parts=(code,),
    )


def _cost(cost: RunCost | None) -> Section:
    title = "What did it cost?"
    if cost is None:
        return Section(title=title, text=("The cost is known at the end of the run.",))
    steps = tuple(
        (
            name,
            str(step.attempts),
            f"{step.seconds:,.0f}",
            f"{step.gpu_seconds:,.0f}",
            f"{step.cpu_seconds:,.0f}",
            "unknown" if step.price is None else f"{step.price:.2f}",
        )
        for name, step in cost.steps.items()
    )
    headers = ("Step", "Attempts", "Seconds", "GPU seconds", "CPU seconds", "US dollars")
    return Section(title=title, text=(f"{cost_in_words(cost)}.",), headers=headers, rows=steps)


def _commands(facts: RunFacts) -> Section:
    repeat = f"python flows/rlhf.py --config settings {quote(facts.settings_file)} run"
    commands = [("Repeat this run with the same settings", repeat)]
    text: tuple[str, ...] = (
        "Run the commands in the folder and the environment of the project. In Python, first call "
        f"mlflow.set_tracking_uri({shown_server()!r}).",
    )
    if facts.run.workspace.store:
        text = (*text, "The file settings.toml is an artifact of the run in MLflow.")
    if registered := facts.registered:
        made, name = registered.promotion, quote(facts.settings.registered_model)
        uri = registered.model["uri"]
        load = f"import mlflow; pipeline = mlflow.transformers.load_model({uri!r})"
        commands = [
            ("Load this version in Python", load),
            *_undo(registered, facts.settings.registered_model),
            (
                "Promote this version by hand",
                f"python flows/registry.py promote {name} {made.version} --reason TEXT",
            ),
            ("See the champion, and all decisions", f"python flows/registry.py history {name}"),
            *commands,
        ]
        if not facts.run.workspace.store:
            ask = (
                f"python flows/feedback.py choose {quote(facts.run.place_of(''))} "
                f"--policy {quote(uri)} --labels 200"
            )
            commands.append(("Write 200 pairs of its answers for people to label", ask))
    elif not facts.is_reward_model_refused:
        # In a resumed run, `facts.run.id` is the id of the original run.
        number = current.run_id or facts.run.id.rpartition("/")[2]
        resume = f"python flows/rlhf.py resume --origin-run-id {number}"
        label = "Continue this run after a correction (if Retrain started it, start Retrain again)"
        commands.append((label, resume))
    if facts.is_reward_model_refused:
        accept = f"{repeat} --accept-reward-model"
        commands.append(("Train against this reward model all the same", accept))
    title = "How do I load the version, undo a promotion, label or repeat?"
    return Section(title=title, text=text, commands=tuple(commands))


def _undo(registered: RegisteredPolicy, name: str) -> list[tuple[str, str]]:
    """Return how to undo the last promotion; for the first champion, how to delete its alias."""
    made, previous = registered.promotion, registered.previous
    if previous is not None:
        other = "the last promotion, which this run did not make"
        what = "this promotion" if made.is_promoted else other
        label = f"Undo {what}: production loads version {previous} again"
        return [(label, f"python flows/registry.py rollback {quote(name)} --reason TEXT")]
    if made.champion is None:
        return []
    return [
        (
            "Leave production without a champion, since no earlier version was champion",
            "import mlflow; mlflow.MlflowClient().delete_registered_model_alias"
            f"({name!r}, 'champion')",
        )
    ]
