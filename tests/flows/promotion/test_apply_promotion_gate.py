"""A candidate is promoted or refused: judged against the champion of that moment, decided once."""

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlflow
import pytest
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.evaluation.evaluate_policies import evaluate_policies
from pipeline.evaluation.notes import WITHOUT_REFERENCES
from pipeline.inputs.json_lines import read_jsonl
from pipeline.judges.judge_names import JUDGED_ELSEWHERE
from pipeline.promotion.apply_promotion_gate import apply_promotion_gate
from pipeline.promotion.fetch_champion import find_champion
from pipeline.registry import change_champion
from pipeline.registry.aliases import read_aliases, read_version
from pipeline.registry.decisions import Decision
from pipeline.results.evaluation import TrainedJudge
from pipeline.results.step_records import EvaluatedPolicy, ValidatedReward
from pipeline.settings.decoding import Decoding
from pipeline.settings.gate_configs import ALPHA, GuardsConfig
from pipeline.settings.judge_config import JudgingConfig
from pipeline.stages.evaluation import fetch_again
from pipeline.tracking.mlflow_client import connect
from ppo_core.errors import DataError, JudgeError, ModelError
from tests.flows.evaluation.test_baselines import more_w1
from tests.helpers.inputs.pipeline_inputs import write_model, write_rows
from tests.helpers.models.tiny import make_tokenizer
from tests.helpers.runs.candidates import (
    ALWAYS_FIRST,
    FIT,
    World,
    artifact_root,
    judge_says,
    make_world,
    write_policy,
)
from tests.helpers.servers.fault_proxy import Fault, fault_proxy, fork, start_process
from tests.helpers.servers.fault_server import fault_server
from tests.helpers.servers.mlflow_store import tracking_to
from tests.helpers.servers.servers import MlflowServer, shared_server
from tests.helpers.slow_cases import slow


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[MlflowServer]:
    monkeypatch.setattr("pipeline.registry.sync_aliases.TIMEOUT", 0.3)
    with tracking_to(shared_server().url):
        yield shared_server()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A registered model of the test's own."""
    return str(request.node.name)[:200]


def decide(
    world: World,
    name: str,
    version: int,
    evaluation: EvaluatedPolicy,
    folder: Path,
    *,
    validation: ValidatedReward = FIT,
    **changes: Any,
) -> tuple[Decision, EvaluatedPolicy]:
    """What the step `register` does once there is a version."""
    return apply_promotion_gate(
        world.named(name, **changes),
        version,
        evaluation,
        validation,
        kl=1.0,
        by=f"run RLHF/{version}",
        folder=folder,
    )


def crown(world: World, name: str, policy: str) -> int:
    """A version that is champion because a person said so."""
    version = world.add_version(name, policy)
    change_champion.promote_by_hand(name, version, reason="First.", by="person ada")
    return version


def told(name: str) -> list[tuple[str, int, int | None]]:
    history = change_champion.read_champions(name).decisions
    return [(decision.action, decision.version, decision.champion) for decision in history]


def champion_answers(evaluation: EvaluatedPolicy) -> list[str]:
    return [row["champion"] for row in read_jsonl(evaluation.samples)]


def words_w1(texts: list[str]) -> int:
    return sum(text.split().count("w1") for text in texts)


def test_without_a_champion_there_is_nothing_to_fetch(world: World, name: str):
    assert find_champion(world.named(name)) is None


def test_the_first_candidate_is_compared_with_sft_and_promoted(world, name, tmp_path: Path):
    evaluation = world.evaluate(world.named(name), "weak", tmp_path)
    version = world.add_version(name, "weak")
    made, judged = decide(world, name, version, evaluation, tmp_path)
    assert (made.action, made.version, made.champion) == ("promoted", version, version)
    assert made.reasons[0].partition("%")[2].startswith(" of 16 pairs against SFT, ")
    assert judged == evaluation
    assert read_aliases(name) == {"champion": version}


def test_a_candidate_that_beats_the_champion_replaces_it(world: World, name: str, tmp_path: Path):
    old = crown(world, name, "weak")
    champion = find_champion(world.named(name))
    evaluation = world.evaluate(world.named(name), "good", tmp_path, champion)
    version = world.add_version(name, "good")
    asked = world.judged_pairs()
    made, judged = decide(world, name, version, evaluation, tmp_path)
    assert (made.action, made.champion) == ("promoted", version)
    assert f"against the champion, version {old}" in made.reasons[0]
    assert (judged, world.judged_pairs()) == (evaluation, asked)
    assert read_aliases(name) == {"champion": version, "previous-champion": old}


def test_a_candidate_that_is_no_better_is_refused_with_its_figures(world, name, tmp_path: Path):
    old = crown(world, name, "good")
    champion = find_champion(world.named(name))
    evaluation = world.evaluate(world.named(name), "weak", tmp_path, champion)
    made, _ = decide(world, name, world.add_version(name, "weak"), evaluation, tmp_path)
    assert (made.action, made.champion) == ("refused", old)
    (reason,) = made.reasons
    assert "that this rate exceeds min_win_rate=0.5 is 0." in reason
    assert read_aliases(name) == {"champion": old}


GUARD = """
def few_w1(prompts, responses):
    return [1 - response.split().count("w1") / 6 for response in responses]
"""


def test_a_policy_that_wins_and_breaks_a_guard_is_refused_by_its_name(
    world: World, name: str, tmp_path: Path
):
    (tmp_path / "guards.py").write_text(GUARD)
    guards = GuardsConfig(functions={"own": f"python:{tmp_path / 'guards.py'}:few_w1"})
    promotion = replace(world.settings.promotion, guards=guards)
    settings = world.named(name, promotion=promotion)
    evaluation = world.evaluate(settings, "best", tmp_path)
    assert evaluation.report().win_rate["ppo_vs_sft"].test.decided == "better"
    version = world.add_version(name, "best")
    made, _ = decide(world, name, version, evaluation, tmp_path, promotion=promotion)
    assert made.action == "refused"
    (reason,) = made.reasons
    assert reason.startswith("Guard own: its mean score is 0.0%, and the mean score of SFT is ")
    scores = [row["scores"]["own"] for row in read_jsonl(evaluation.guard_scores)]
    assert [each["ppo"] for each in scores] == [0.0] * 16
    assert all(each["sft"] > 0.5 for each in scores)


@pytest.mark.parametrize(("rate", "action"), [(0.5, "promoted"), (1e-4, "refused")])
def test_alpha_follows_from_the_history(world, name, tmp_path: Path, rate: float, action: str):
    evaluation = world.evaluate(world.named(name), "good", tmp_path)
    version = world.add_version(name, "good")
    limits = replace(world.settings.promotion, alpha=ALPHA, false_promotion_rate=rate)
    made, _ = decide(world, name, version, evaluation, tmp_path, promotion=limits)
    assert made.action == action
    if action == "refused":
        assert "alpha=9.61538e-07 needs 1,040,000 to 1. Either the policy" in made.reasons[0]


def test_a_candidate_is_judged_further_if_alpha_fell(world: World, name: str, tmp_path: Path):
    rows = [{"prompt": f"w{n} w2", "reference": "w2 w3"} for n in range(2, 50)]
    rows += [{"prompt": f"w{n} w3", "reference": "w2 w3"} for n in range(2, 50)]
    prompts = {"eval_prompts": write_rows(tmp_path / "eval.jsonl", rows)}
    crown(world, name, "weak")
    settings = world.named(name, **prompts)
    evaluation = world.evaluate(settings, "best", tmp_path, find_champion(settings))
    version = world.add_version(name, "best")
    # 32 wins are evidence of at most 1.8^32 / 6 = 2.5e7 to 1, but this rate needs 1.04e9 to 1.
    limits = replace(settings.promotion, alpha=ALPHA, false_promotion_rate=1e-7)
    made, judged = decide(world, name, version, evaluation, tmp_path, promotion=limits, **prompts)
    assert made.action == "promoted"
    tests = [one.report().win_rate["ppo_vs_champion"].test for one in (evaluation, judged)]
    assert [(test.decided, test.asked) for test in tests] == [("better", 32), ("better", 64)]
    # The judge went on: the pairs of the first evaluation are among those of the second.
    assert read_jsonl(judged.samples) == read_jsonl(evaluation.samples)
    assert judged.report().kl == evaluation.report().kl
    first, second = (
        [row for row in read_jsonl(one.judgements) if row["contest"] == "ppo_vs_champion"]
        for one in (evaluation, judged)
    )
    assert all(row in second for row in first)
    asked = world.judged_pairs()
    assert decide(world, name, version, evaluation, tmp_path, promotion=limits, **prompts) == (
        made,
        judged,
    )
    assert world.judged_pairs() == asked


def test_a_champion_that_came_meanwhile_is_judged_against(world: World, name: str, tmp_path: Path):
    crown(world, name, "weak")
    first = find_champion(world.named(name))
    evaluation = world.evaluate(world.named(name), "good", tmp_path, first)
    before = read_jsonl(evaluation.samples)
    newer = crown(world, name, "best")
    version = world.add_version(name, "good")
    made, judged = decide(world, name, version, evaluation, tmp_path)
    assert (made.action, made.champion) == ("refused", newer)
    assert f"against the champion, version {newer}" in made.reasons[0]
    assert judged.champion == newer
    assert judged.report().win_rate["ppo_vs_champion"].high < 0.5
    assert evaluation.report().win_rate["ppo_vs_champion"].low > 0.5
    # 16 answers of 6 words: the new champion says nothing else.
    assert words_w1(champion_answers(judged)) == 96
    rows = read_jsonl(judged.judgements)
    opponents = [row["opponent"] for row in rows if row["contest"] == "ppo_vs_champion"]
    assert opponents == champion_answers(judged)
    assert judged.report().length["champion"] == 6
    # The guards compare with the new champion, also by what the answers' texts do not tell.
    guards = judged.report().guards
    assert list(guards) == ["stops", "has_text", "answers", "refuses", "language"]
    assert guards["stops"].policy == evaluation.report().guards["stops"].policy < 1
    assert guards["stops"].rival != evaluation.report().guards["stops"].rival
    # The candidate's answers are the same, and so is what was said of the first champion.
    assert [row["ppo"] for row in read_jsonl(judged.samples)] == [row["ppo"] for row in before]
    assert judged.report().kl == evaluation.report().kl
    assert read_jsonl(evaluation.samples) == before


def test_a_champion_where_there_was_none_is_judged_against(world: World, name: str, tmp_path: Path):
    evaluation = world.evaluate(world.named(name), "best", tmp_path)
    newer = crown(world, name, "weak")
    version = world.add_version(name, "best")
    made, judged = decide(world, name, version, evaluation, tmp_path)
    assert (made.action, made.champion) == ("promoted", version)
    assert judged.champion == newer
    assert "ppo_vs_champion" not in evaluation.report().win_rate
    assert f"against the champion, version {newer}" in made.reasons[0]


@pytest.mark.parametrize("low", [0.51, *slow(0.5)])
def test_a_trained_judge_judges_again_without_references(world, name, low: float, tmp_path: Path):
    bare = {"eval_prompts": "", "judge": ""}
    path = write_model(tmp_path / "judge", labels=1)
    judge = TrainedJudge(path=path, accuracy=0.6, low=low, high=0.7, n=90)
    sft, good = (world.policies[who] for who in ("sft", "good"))
    evaluation = evaluate_policies(
        world.named(name, **bare), sft, good, None, tmp_path, judge=judge
    )
    champion = crown(world, name, "weak")
    version = world.add_version(name, "good")
    validation = replace(FIT, judge=judge)
    _, judged = decide(world, name, version, evaluation, tmp_path, validation=validation, **bare)
    for found, contests in (
        (evaluation, {"ppo_vs_sft"}),
        (judged, {"ppo_vs_sft", "ppo_vs_champion"}),
    ):
        report = found.report()
        assert report.judge.name == f"reward-model:{path}"
        assert set(report.win_rate) == contests
        assert report.improvement is None
        assert report.trained_judge.low == low
        assert "weaker evidence" in report.notes[0]
        assert report.notes[-1] == WITHOUT_REFERENCES
        doubted = any("no better than a tossed coin" in reason for reason in report.reasons)
        assert doubted == (low == 0.5) and (doubted <= (not report.conclusive))
    assert judged.champion == champion
    # The last three of 32 prompts.
    assert [row["prompt"] for row in read_jsonl(judged.samples)] == [
        row["prompt"] for row in read_jsonl(Path(world.settings.prompts))[-3:]
    ]


@pytest.mark.parametrize("how", ["alias", *slow("version")])
def test_a_candidate_is_compared_with_sft_once_the_champion_is_deleted(
    world, name, how: str, tmp_path: Path
):
    old = crown(world, name, "best")
    champion = find_champion(world.named(name))
    evaluation = world.evaluate(world.named(name), "good", tmp_path, champion)
    version = world.add_version(name, "good")
    if how == "version":
        connect().delete_model_version(name, str(old))
    else:
        connect().delete_registered_model_alias(name, "champion")
    made, judged = decide(world, name, version, evaluation, tmp_path)
    assert (made.action, made.champion) == ("promoted", version)
    assert "against SFT" in made.reasons[0]
    assert judged.champion is None
    assert "ppo_vs_champion" not in judged.report().win_rate
    assert set(read_jsonl(judged.samples)[0]) == {"prompt", "reference", "sft", "ppo"}


@pytest.mark.slow
def test_a_champion_that_came_and_went_is_no_reason_to_judge_again(world, name, tmp_path: Path):
    crown(world, name, "weak")
    champion = find_champion(world.named(name))
    evaluation = world.evaluate(world.named(name), "good", tmp_path, champion)
    crown(world, name, "best")
    change_champion.roll_back(name, reason="It swears.", by="person ada")
    asked = world.judged_pairs()
    made, judged = decide(world, name, world.add_version(name, "good"), evaluation, tmp_path)
    assert made.action == "promoted"
    assert (judged, world.judged_pairs()) == (evaluation, asked)


def test_a_champion_that_changes_while_it_is_judged_against_is_followed(
    world: World, name: str, server: MlflowServer, tmp_path: Path
):
    crown(world, name, "weak")
    first = find_champion(world.named(name))
    evaluation = world.evaluate(world.named(name), "good", tmp_path, first)
    version = world.add_version(name, "good")

    def meanwhile() -> None:
        def other() -> None:
            change_champion.promote_by_hand(
                name, world.add_version(name, "best"), reason="Now.", by="person ada"
            )

        process = start_process(other, server.url)
        process.join(60)

    # It has judged, and is about to write its decision down.
    with fault_proxy(server.url) as proxy, tracking_to(proxy.url):
        fault = proxy.add(Fault("log-parameter", f"RLHF/{version}", before=meanwhile))
        made, judged = decide(world, name, version, evaluation, tmp_path)
    assert fault.happened.is_set()
    assert (made.action, made.champion) == ("refused", version + 1)
    assert judged.champion == version + 1
    assert words_w1(champion_answers(judged)) == 96
    assert [action for action, *_ in told(name)] == ["promoted", "promoted", "refused"]


def test_the_cost_has_the_calls_of_every_evaluation(
    world: World, name: str, server: MlflowServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with fault_server(more_w1) as asked, fault_proxy(server.url) as proxy:
        paid = {"judge": "openai:j", "judging": JudgingConfig(base_url=asked.url)}
        evaluation = world.evaluate(world.named(name, **paid), "good", tmp_path)
        crown(world, name, "weak")
        version = world.add_version(name, "good")
        # The candidate is judged against the version `weak`, and then against the version `best`.
        fault = proxy.add(
            Fault(
                "log-parameter",
                f"RLHF/{version}",
                before=lambda: start_process(lambda: crown(world, name, "best"), server.url).join(
                    60
                ),
            )
        )
        with tracking_to(proxy.url):
            _, judged = decide(world, name, version, evaluation, tmp_path, **paid)
        assert fault.happened.is_set()
        assert judged.champion == version + 1
        assert judged.report().spent["openai:j"].calls == len(asked.requests)


def test_the_limit_of_calls_covers_all_attempts_of_an_evaluation(
    world: World, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    policies = world.policies["sft"], world.policies["good"]
    with fault_server(more_w1) as asked:
        judging = JudgingConfig(base_url=asked.url, max_calls=20)
        settings = world.named(name, judge="openai:limited", judging=judging)
        for _ in range(3):
            with pytest.raises(JudgeError, match="max_calls=20"):
                evaluate_policies(settings, *policies, None, tmp_path, calls=tmp_path / "calls")
        assert 0 < len(asked.requests) <= 20


def test_a_step_without_the_key_of_the_judge_says_that_the_champion_changed(
    world: World, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    evaluation = world.evaluate(world.named(name), "good", tmp_path)
    newer = crown(world, name, "weak")
    version = world.add_version(name, "good")
    monkeypatch.setenv(JUDGED_ELSEWHERE, "1")
    with pytest.raises(ModelError, match=r"from none to version 1\. .*no key of the judge"):
        decide(world, name, version, evaluation, tmp_path, judge="openai:j")
    assert told(name) == [("promoted", newer, newer)]


def test_finding_the_champion_changes_nothing_in_the_registry(world: World, name: str):
    crown(world, name, "weak")
    moved = world.add_version(name, "good")
    connect().set_registered_model_alias(name, "champion", str(moved))
    before = told(name)
    assert find_champion(world.named(name)).version == moved
    assert told(name) == before


def test_of_two_that_finish_together_the_second_is_judged_against_the_first(
    world: World, name: str, tmp_path: Path
):
    old = crown(world, name, "weak")
    champion = find_champion(world.named(name))
    runs = {world.add_version(name, policy): policy for policy in ("good", "best")}
    evaluations = {
        version: world.evaluate(world.named(name), policy, tmp_path / policy, champion)
        for version, policy in runs.items()
    }
    results: dict[int, tuple[Decision, EvaluatedPolicy]] = {}
    together = threading.Barrier(2)

    def finish(version: int, policy: str) -> None:
        together.wait()
        results[version] = decide(world, name, version, evaluations[version], tmp_path / policy)

    threads = [threading.Thread(target=finish, args=run) for run in runs.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    require_one_after_the_other(name, old, results)


def require_one_after_the_other(
    name: str, old: int, results: dict[int, tuple[Decision, EvaluatedPolicy]]
) -> None:
    """Each was judged against the champion that its decision replaced or kept; the newest wins."""
    decisions = change_champion.read_champions(name).decisions[1:]
    assert [decision.number for decision in decisions] == [2, 3]
    before = old
    for decision in decisions:
        made, judged = results[decision.version]
        assert made == decision
        assert judged.champion == before
        before = decision.champion
    assert before == max(results)
    assert read_aliases(name)["champion"] == max(results)


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(3))
def test_of_four_processes_that_finish_together_none_loses_a_decision(
    world: World, name: str, server: MlflowServer, tmp_path: Path, attempt: int
):
    old = crown(world, name, "weak")
    champion = find_champion(world.named(name))
    policies = ["good", "best", "good", "best"]
    runs = {world.add_version(name, policy): policy for policy in policies}
    together = fork.Barrier(len(runs))

    def finish(version: int, policy: str) -> None:
        folder = tmp_path / str(version)
        evaluation = world.evaluate(world.named(name), policy, folder, champion)
        together.wait()
        made, judged = decide(world, name, version, evaluation, folder)
        (folder / "result.json").write_text(json.dumps([made.number, judged.champion]))

    processes = [
        start_process(lambda version=version, policy=policy: finish(version, policy), server.url)
        for version, policy in runs.items()
    ]
    for process in processes:
        process.join(200)
        assert process.exitcode == 0
    decisions = change_champion.read_champions(name).decisions[1:]
    assert sorted(decision.version for decision in decisions) == sorted(runs)
    before = old
    for decision in decisions:
        result = json.loads((tmp_path / str(decision.version) / "result.json").read_text())
        assert result == [decision.number, before]
        assert decision.champion >= before
        before = decision.champion
    assert read_aliases(name)["champion"] == before


@pytest.mark.slow
def test_an_older_candidate_that_is_late_does_not_replace_a_newer_champion(
    world: World, name: str, tmp_path: Path
):
    evaluation = world.evaluate(world.named(name), "best", tmp_path)
    late = world.add_version(name, "best")
    newer = crown(world, name, "weak")
    made, judged = decide(world, name, late, evaluation, tmp_path)
    assert (made.action, made.champion) == ("refused", newer)
    assert judged.champion == newer
    assert judged.report().win_rate["ppo_vs_champion"].low > 0.5
    assert f"newer than this version {late}" in made.reasons[0]


def test_a_step_retried_after_its_decision_judges_nothing_and_gives_the_same(
    world: World, name: str, tmp_path: Path
):
    crown(world, name, "weak")
    first = find_champion(world.named(name))
    evaluation = world.evaluate(world.named(name), "good", tmp_path, first)
    crown(world, name, "best")
    version = world.add_version(name, "good")
    before = decide(world, name, version, evaluation, tmp_path)
    crown(world, name, "weak")
    asked, history = world.judged_pairs(), told(name)
    assert decide(world, name, version, evaluation, tmp_path) == before
    assert (world.judged_pairs(), told(name)) == (asked, history)


@pytest.mark.slow
def test_a_step_killed_after_it_was_judged_again_keeps_that_judgement(
    world: World, name: str, server: MlflowServer, tmp_path: Path
):
    crown(world, name, "weak")
    first = find_champion(world.named(name))
    evaluation = world.evaluate(world.named(name), "good", tmp_path, first)
    newer = crown(world, name, "best")
    version = world.add_version(name, "good")
    with fault_proxy(server.url) as proxy:
        pid: list[int] = []
        proxy.add(
            Fault(
                "log-parameter",
                f"RLHF/{version}",
                before=lambda: os.kill(pid[0], signal.SIGKILL),
                # It is dead before the server sees its decision; the server sees it all the same.
            )
        )
        process = start_process(
            lambda: decide(world, name, version, evaluation, tmp_path), proxy.url
        )
        pid.append(process.pid)
        process.join(60)
    assert process.exitcode == -signal.SIGKILL
    asked = world.judged_pairs()
    made, judged = decide(world, name, version, evaluation, tmp_path)
    assert world.judged_pairs() == asked
    assert judged.champion == newer
    assert words_w1(champion_answers(judged)) == 96
    assert told(name)[2:] == [("refused", version, newer)]
    assert made.champion == newer


def test_a_candidate_that_a_person_made_champion_meanwhile_is_not_refused(
    world: World, name: str, tmp_path: Path
):
    crown(world, name, "best")
    champion = find_champion(world.named(name))
    evaluation = world.evaluate(world.named(name), "weak", tmp_path, champion)
    version = world.add_version(name, "weak")
    by_hand = change_champion.promote_by_hand(name, version, reason="It is kind.", by="person ada")
    made, judged = decide(world, name, version, evaluation, tmp_path)
    assert made == by_hand
    assert judged == evaluation
    assert read_version(name, version).tags["promotion"] == "promoted"
    assert read_version(name, version).tags["promotion_by"] == "person ada"
    assert [action for action, *_ in told(name)] == ["promoted", "promoted"]


def test_a_reward_model_accepted_by_hand_keeps_a_winner_from_promotion(
    world: World, name: str, tmp_path: Path
):
    evaluation = world.evaluate(world.named(name), "best", tmp_path)
    validation = replace(FIT, fit=False, accepted_by_hand=True, reasons=["It guesses."])
    version = world.add_version(name, "best")
    made, _ = decide(world, name, version, evaluation, tmp_path, validation=validation)
    assert (made.action, made.champion) == ("refused", None)
    assert len(made.reasons) == 1
    assert made.reasons[0].startswith("Its reward model failed validation")
    assert read_aliases(name) == {}


def test_a_judge_that_is_inconclusive_promotes_nothing(world: World, name: str, tmp_path: Path):
    with judge_says(world, ALWAYS_FIRST):
        evaluation = world.evaluate(world.named(name), "best", tmp_path)
    made, _ = decide(world, name, world.add_version(name, "best"), evaluation, tmp_path)
    assert made.action == "refused"
    assert any(reason.startswith("The evaluation is inconclusive") for reason in made.reasons)


def test_a_judge_that_is_inconclusive_about_the_new_champion_promotes_nothing(
    world: World, name: str, tmp_path: Path
):
    evaluation = world.evaluate(world.named(name), "best", tmp_path)
    assert evaluation.report().conclusive
    crown(world, name, "weak")
    with judge_says(world, ALWAYS_FIRST):
        made, judged = decide(world, name, world.add_version(name, "best"), evaluation, tmp_path)
    assert made.action == "refused"
    assert not judged.report().conclusive
    assert any(reason.startswith("The evaluation is inconclusive") for reason in made.reasons)


def test_a_champion_that_something_else_registered_is_refused(
    world: World, name: str, tmp_path: Path
):
    model = AutoModelForCausalLM.from_pretrained(world.policies["weak"])
    tokenizer = AutoTokenizer.from_pretrained(world.policies["weak"])
    logged = mlflow.transformers.log_model(
        transformers.pipeline("text-generation", model=model, tokenizer=tokenizer),
        name="model",
        pip_requirements=["transformers"],
        registered_model_name=name,
    )
    mlflow.end_run()
    old = logged.registered_model_version
    connect().set_registered_model_alias(name, "champion", str(old))
    with pytest.raises(ModelError, match=f"Version {old} of '{name}' is refused: it has no tag"):
        find_champion(world.named(name, output_dir=str(tmp_path)))


def test_a_champion_with_a_changed_byte_is_refused_by_name(world: World, name: str, tmp_path: Path):
    greedy = Decoding(response_length=5, temperature=0)
    version = world.add_version(name, "good", greedy)
    change_champion.promote_by_hand(name, version, reason="First.", by="person ada")
    weights = artifact_root(connect(), name, version) / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    settings = world.named(name, output_dir=str(tmp_path))
    with pytest.raises(ModelError, match=r"'model/model.safetensors' was changed") as caught:
        find_champion(settings)
    assert f"Version {version} of '{name}' is refused" in str(caught.value)


def test_a_champion_whose_files_are_gone_is_fetched_again(world: World, name: str, tmp_path: Path):
    settings = world.named(name, output_dir=str(tmp_path))
    assert fetch_again(settings, None) is None
    crown(world, name, "weak")
    found = find_champion(settings)
    assert fetch_again(settings, found) == found
    shutil.rmtree(tmp_path / "cache")
    assert fetch_again(settings, found) == found
    assert Path(found.model).is_dir()
    newer = crown(world, name, "good")
    shutil.rmtree(tmp_path / "cache")
    assert fetch_again(settings, found).version == newer


def test_a_champion_that_cannot_read_the_prompts_is_refused_before_training(
    world: World, name: str, tmp_path: Path
):
    crown(world, name, "weak")
    # The champion reads 64 tokens, of which the answer would have 61; prompts have 4. The policy of
    # the run reads more.
    settings = world.named(name)
    policy = tmp_path / "policy"
    shutil.copytree(settings.policy, policy)
    config = json.loads((policy / "config.json").read_text())
    (policy / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 128}))
    ppo = type(settings.ppo)(**{**vars(settings.ppo), "response_length": 61})
    longer = world.named(name, policy=str(policy), ppo=ppo)
    with pytest.raises(DataError, match="the champion, version 1"):
        find_champion(longer)


@pytest.mark.parametrize("stop", ["w5", *slow("eos", None)])
def test_the_champion_ends_its_answers_by_its_own_token(
    world: World, name: str, tmp_path: Path, stop: str | None
):
    tokenizer = make_tokenizer()
    ends = {"w5": tokenizer.convert_tokens_to_ids("w5"), "eos": tokenizer.eos_token_id}
    # It says w1 as often as what would end its answer by that token, and hardly anything else.
    place = write_policy(tmp_path / "champion", 9.0, stop=ends.get(stop, tokenizer.eos_token_id))
    decoding = Decoding(
        response_length=6, temperature=0.7, stop_token=None, stop_token_id=ends.get(stop)
    )
    own = World(world.folder, world.settings, {**world.policies, "odd": place})
    change_champion.promote_by_hand(
        name, own.add_version(name, "odd", decoding), reason="Odd.", by="person ada"
    )
    champion = find_champion(world.named(name))
    judged = world.evaluate(world.named(name), "weak", tmp_path / "run", champion)
    answers = champion_answers(judged)
    if stop is None:
        # The end of text, no word itself, ends none of them: half of 6 tokens are w1.
        assert 2 < judged.report().length["champion"] < 4
        assert words_w1(answers[-1:]) > 0
    else:
        # Half of the answers end with their first token: 1 w1 on average.
        assert words_w1(answers) / 16 == pytest.approx(1, abs=0.7)
        assert not any("w5" in text.split()[:-1] for text in answers)


def test_the_champion_reads_and_writes_with_its_own_tokenizer(world, name, tmp_path: Path):
    # w1 is another token in this vocabulary, which has no word of the prompts but w1.
    tokenizer = make_tokenizer(words=57, prefix="v")
    tokenizer.add_tokens(["w1"])
    place = Path(write_policy(tmp_path / "champion", 9.0, word="v9", prefix="v"))
    model = AutoModelForCausalLM.from_pretrained(place)
    model.transformer.wte.weight.data[:, 0] = 0
    model.transformer.wte.weight.data[tokenizer.convert_tokens_to_ids("w1"), 0] = 9
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    own = World(world.folder, world.settings, {**world.policies, "odd": str(place)})
    version = own.add_version(name, "odd")
    change_champion.promote_by_hand(name, version, reason="Odd.", by="person ada")
    evaluation = world.evaluate(world.named(name), "weak", tmp_path / "run")
    _, judged = decide(world, name, world.add_version(name, "weak"), evaluation, tmp_path / "run")
    assert judged.champion == version
    assert words_w1(champion_answers(judged)) > 90


@pytest.fixture
def broken(server: MlflowServer) -> Iterator[None]:
    """A registry that closes every connection."""
    with fault_proxy(server.url) as proxy, tracking_to(proxy.url, retries=0):
        proxy.add(Fault(lose=True, times=10**6))
        yield


def test_a_registry_that_is_away_is_an_error_in_words(
    world: World, name: str, broken: None, tmp_path: Path
):
    with pytest.raises(ModelError, match="MLflow at http"):
        find_champion(world.named(name))
    with pytest.raises(ModelError, match="MLflow at http"):
        decide(
            world, name, 1, EvaluatedPolicy(champion=None, kl=1.0, folder=str(tmp_path)), tmp_path
        )
