"""Greedy SFT and the best of four samples beside PPO: judged after the decision, which stays."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.evaluation import baselines
from pipeline.evaluation.baselines import SAMPLES, baseline_answers, measure_baselines
from pipeline.evaluation.evaluate_policies import evaluate_again, evaluate_policies
from pipeline.inputs.json_lines import read_jsonl
from pipeline.judges.judge_budget import Budget
from pipeline.judges.verdict import Verdict
from pipeline.reports.baselines import worth_of_ppo
from pipeline.results.evaluation import Baselines, Evaluation
from pipeline.results.report_files import as_json
from pipeline.results.step_records import EvaluatedPolicy
from pipeline.settings.evaluation_config import EvaluationConfig, SelectionConfig
from pipeline.settings.judge_config import JudgingConfig
from pipeline.settings.settings import Settings
from ppo_core.errors import JudgeError, ModelError
from ppo_core.training.answer_prompts import Answers
from tests.flows.evaluation.test_compare_in_both_orders import judged
from tests.helpers.runs.candidates import World, make_world
from tests.helpers.servers.fault_server import Behavior, Request, fault_server, say
from tests.helpers.slow_cases import slow


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def words_w1(prompts: Sequence[Any], texts: Sequence[str]) -> np.ndarray:
    """A reward that has the taste of the judge of these worlds."""
    return np.array([text.split().count("w1") for text in texts], dtype=float)


def evaluated(
    world: World, folder: Path, *, score: Any = words_w1, **config: Any
) -> EvaluatedPolicy:
    folder.mkdir()
    settings = replace(world.settings, evaluation=EvaluationConfig(**config))
    sft, policy = world.policies["sft"], world.policies["weak"]
    return evaluate_policies(settings, sft, policy, None, folder, score=score)


def without_baselines(report: Evaluation) -> str:
    return json.dumps(as_json(replace(report, baselines=None)))


@pytest.mark.slow
def test_the_baselines_are_judged_on_the_prompts_of_the_decision_and_change_nothing_of_it(
    world: World, tmp_path: Path
):
    off = evaluated(world, tmp_path / "off", baseline_prompts=0)
    on = evaluated(world, tmp_path / "on", baseline_prompts=12)
    report, found = on.report(), on.report().baselines
    assert off.report().baselines is None
    assert without_baselines(report) == without_baselines(off.report())
    assert read_jsonl(on.samples) == read_jsonl(off.samples)
    before, after = read_jsonl(off.judgements), read_jsonl(on.judgements)
    assert after[: len(before)] == before
    new = {
        name: [row for row in after if row["contest"] == f"{name}_vs_sft"] for name in found.found
    }
    assert [len(rows) for rows in new.values()] == [12, 12]
    # The same prompts, and the same ordinary samples of SFT, as in the contest that decided.
    decided = [row for row in before if row["contest"] == "ppo_vs_sft"][:12]
    for rows in new.values():
        assert [(r["prompt"], r["opponent"]) for r in rows] == [
            (r["prompt"], r["opponent"]) for r in decided
        ]
    # Greedy texts of this policy repeat one token; those that are chosen say w1 most often.
    greedy, best = found.found["greedy"], found.found["best_of_4"]
    assert len({row["candidate"] for row in new["greedy"]}) == 1
    points = {"first": 1.0, "tie": 0.5, "second": 0.0}
    for one, rows in ((greedy, new["greedy"]), (best, new["best_of_4"])):
        assert one.win_rate.rate == np.mean([points[row["outcome"]] for row in rows])
        assert one.gain.difference == pytest.approx(found.ppo.rate - one.win_rate.rate)
    assert found.ppo.rate == np.mean([points[row["outcome"]] for row in decided])
    assert best.win_rate.rate > 0.5
    # All tokens are equally likely; ln 4 - 3/4.
    assert best.kl == pytest.approx(log(4) - 0.75)
    again = evaluate_again(world.settings, on, None, tmp_path, judge=None, spent={}).report()
    assert again.baselines == found


@pytest.mark.slow
def test_the_best_of_four_has_the_highest_reward_among_new_samples(world: World, tmp_path: Path):
    asked: list[str] = []

    def score(prompts: Sequence[Any], texts: Sequence[str]) -> np.ndarray:
        asked.extend(texts)
        return words_w1(prompts, texts)

    # The choice of a policy needs samples, so these settings refuse a temperature of 0.
    chosen = SelectionConfig(method="kl")
    chooses = replace(world, settings=replace(world.settings, selection=chosen))
    on = evaluated(chooses, tmp_path / "on", score=score, num_examples=8)
    assert on.report().baselines.found["greedy"].why == ""
    groups = [asked[start : start + SAMPLES] for start in range(0, len(asked), SAMPLES)]
    rows = [row for row in read_jsonl(on.judgements) if row["contest"] == "best_of_4_vs_sft"]
    for row, group in zip(rows, groups, strict=True):
        assert words_w1([], [row["candidate"]]) == words_w1([], group).max()
        assert row["candidate"] in group
    assert all(row["opponent"] not in group for row, group in zip(rows, groups, strict=True))


@pytest.mark.parametrize("config", [{"temperature": 0.0}, *slow({"top_k": 1})])
def test_without_sampling_greedy_sft_is_no_baseline(
    world: World, tmp_path: Path, config: dict[str, Any]
):
    scored: list[str] = []

    def score(prompts: Sequence[Any], texts: Sequence[str]) -> np.ndarray:
        scored.extend(texts)
        return words_w1(prompts, texts)

    greedy = evaluated(world, tmp_path / "greedy", score=score, **config)
    assert len(set(scored)) > len(scored) // SAMPLES
    found = greedy.report().baselines
    again = evaluate_again(world.settings, greedy, None, tmp_path, judge=None, spent={})
    assert again.report().baselines == found
    assert read_jsonl(again.judgements) == read_jsonl(greedy.judgements)
    assert list(found.found) == ["best_of_4"]
    assert found.found["best_of_4"].kl is None
    counts = [baseline_answers(EvaluationConfig(**one)) for one in ({}, config)]
    assert counts == [5, 4]


@dataclass
class PaidJudge:
    """A judge whose every question is a call of a budget."""

    budget: Budget
    name: str = "openai:j"
    version: str = "1"
    members: tuple[str, ...] = ()

    def __call__(self, prompts: Sequence[Any], pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        for number, _ in enumerate(pairs):
            self.budget.start_call(self.name, len(pairs) - number)
        return [Verdict("first" if a > b else "second" if b > a else "tie") for a, b in pairs]


def measure(
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    *,
    calls: int | None,
    spent: int = 0,
    judge: type = PaidJudge,
    score: Any = words_w1,
) -> tuple[Baselines, list[int]]:
    """Baselines of 40 prompts, and how many prompts SFT was asked at a time."""
    asked: list[int] = []

    def answer(prompts: Sequence[Any], **_: Any) -> Answers:
        asked.append(len(prompts))
        return Answers(texts=["w1"] * len(prompts), kl=None, stopped=None)

    budget = Budget(calls, None)
    for _ in range(spent):
        budget.start_call("openai:j", 1)
    monkeypatch.setattr(baselines, "make_judge_of_run", lambda *_: judge(budget))
    ppo = replace(judged(["first"] * 40), judge="openai:j")
    prompts = [str(number) for number in range(40)]
    found = measure_baselines(settings, prompts, ppo, answer, score, "openai:j,rule", budget)
    return found.results, asked


@pytest.mark.slow
def test_the_baselines_use_what_the_judges_limit_leaves(world: World, monkeypatch):
    settings = world.settings
    # Each prompt takes two questions for each of two baselines, and the rule costs nothing.
    for calls, spent, prompts in (
        (None, 7, 40),
        (167, 7, 40),
        (166, 7, 39),
        (30, 7, 5),
        (11, 7, 1),
    ):
        found, asked = measure(settings, monkeypatch, calls=calls, spent=spent)
        assert found.ppo.n == found.found["greedy"].win_rate.n == prompts
        assert asked == [prompts, SAMPLES * prompts]
    found, asked = measure(settings, monkeypatch, calls=10, spent=7)
    assert asked == []
    assert found.found["best_of_4"].why == (
        "judging.max_calls leaves 3 calls, but each prompt needs 4."
    )
    assert worth_of_ppo(found) == [
        "PPO was not compared with what SFT reaches without PPO: judging.max_calls leaves 3 calls, "
        "but each prompt needs 4."
    ]


class Costly(PaidJudge):
    """A judge that asks each question twice."""

    def __call__(self, prompts: Sequence[Any], pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        super().__call__(prompts, pairs)
        return super().__call__(prompts, pairs)


@pytest.mark.slow
def test_a_judge_that_fails_leaves_what_was_judged_and_never_fails_the_run(
    world: World, monkeypatch
):
    # Of 160 calls, the first 16 prompts take 128; the next ones would take 128 again.
    found, _ = measure(world.settings, monkeypatch, calls=160, judge=Costly)
    assert found.ppo.n == found.found["best_of_4"].gain.n == 16
    found, _ = measure(world.settings, monkeypatch, calls=20, judge=Costly)
    assert found.ppo is None
    assert "The budget is spent: 20 used, and judging.max_calls=20" in found.found["greedy"].why

    def gone(*_: Any) -> PaidJudge:
        raise JudgeError("The server does not answer.")

    def broken(*_: Any) -> np.ndarray:
        raise ModelError("The scores are not finite.")

    for changes in ({"judge": gone}, {"score": broken}):
        found, _ = measure(world.settings, monkeypatch, calls=None, **changes)
        assert found.found["best_of_4"].win_rate is None
        assert worth_of_ppo(found)[0].endswith(("does not answer.", "are not finite."))


def more_w1(request: Request) -> Behavior:
    """The reply of a chat model with the taste of the judge of these worlds."""
    answers = json.loads(request.question.split("\n")[1])
    a, b = (answers[name].split().count("w1") for name in ("answer_a", "answer_b"))
    return say(f"VERDICT: {'TIE' if a == b else 'A' if a > b else 'B'}")


@pytest.mark.slow
def test_a_paid_judge_is_asked_only_about_the_baselines_and_nothing_twice(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with fault_server(more_w1) as server:
        judging = JudgingConfig(base_url=server.url)
        paid = replace(world, settings=replace(world.settings, judge="openai:j", judging=judging))
        off = evaluated(paid, tmp_path / "off", baseline_prompts=0).report()
        before = len(server.requests)
        assert off.spent["openai:j"].calls == before
        on = evaluated(paid, tmp_path / "on").report()
        asked = len(server.requests) - before
        assert on.baselines and on.baselines.ppo
        assert 0 < on.spent["openai:j"].calls == asked <= 4 * on.baselines.ppo.n
        assert evaluated(paid, tmp_path / "again").report().baselines == on.baselines
        assert len(server.requests) == before + asked
    assert on.win_rate == off.win_rate


@pytest.mark.slow
def test_a_reader_learns_which_reward_chose_where_ppo_has_several(world: World, monkeypatch):
    settings = replace(world.settings, rewards=["reward-model", "python:builtins:len"])
    found, _ = measure(settings, monkeypatch, calls=None)
    assert "chosen by the reward model of the run alone" in worth_of_ppo(found)[-1]
    assert len(worth_of_ppo(measure(world.settings, monkeypatch, calls=None)[0])) == 2
