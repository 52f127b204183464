"""The choice of a policy of PPO, or on the line through its start and its end."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.evaluation.policy_selection import BELOW_LIMIT, FURTHEST, NEAR, nearest_within
from pipeline.inputs.run_data import RunData
from pipeline.results.step_records import EarlierPolicies, EvaluatedPolicy, TrainedPolicy
from pipeline.settings.evaluation_config import MOST_TRIES, SelectionConfig
from pipeline.settings.make_settings import make_settings
from pipeline.settings.settings import Settings
from pipeline.stages.evaluation import evaluate_win_rate, with_judgment
from pipeline.stages.start import start_run
from ppo_core.errors import ConfigError, DataError, JudgeError, ModelError
from ppo_core.io.folder_cache import digest_of_folder
from ppo_core.models.loading import load_policy
from tests.helpers.inputs.pipeline_inputs import tiny_table, write_rows
from tests.helpers.inputs.sample_reports import changed, evaluation_result
from tests.helpers.runs.candidates import World, make_world, write_policy


@pytest.mark.parametrize(
    "divergence",
    [
        lambda w: 30 * w**2,
        lambda w: 30 * w,
        lambda w: 30 * w**4,
        lambda w: 30 * (math.exp(3 * w) - 1) / (math.exp(3) - 1),
    ],
)
def test_a_policy_lands_below_the_limit_and_near_it(divergence: Callable[[float], float]):
    tried = nearest_within(divergence, 10.0, 1.0)
    assert len(tried) <= MOST_TRIES
    assert NEAR * 10 <= tried[-1].kl <= 10


@pytest.mark.parametrize("exponent", [1, 2, 4])
@pytest.mark.parametrize("end", [7.5, 8.4, 9.0, 10.0, 30.0])
def test_a_policy_lands_near_the_limit_from_both_sides(end: float, exponent: int):
    tried = nearest_within(lambda w: end * w**exponent, 10.0, FURTHEST)
    assert len(tried) <= MOST_TRIES
    assert NEAR * 10 <= tried[-1].kl <= 10
    assert (tried[-1].weight > 1) == (end < NEAR * 10)


def test_the_furthest_policy_ends_the_search_even_if_it_is_far_below_the_limit():
    tried = nearest_within(lambda w: 3 * w**2, 10.0, FURTHEST)
    assert [each.weight for each in tried] == [1.0, FURTHEST]
    unchanged = nearest_within(lambda w: 0.0, 10.0, FURTHEST)
    assert [each.weight for each in unchanged] == [1.0, FURTHEST]


def test_a_divergence_that_jumps_beyond_the_end_stays_within_the_limit():
    tried = nearest_within(lambda w: 5.0 if w < 1.1 else 30.0, 10.0, FURTHEST)
    assert len(tried) == MOST_TRIES
    assert tried[1].kl == 30.0
    assert max(each.weight for each in tried if each.kl <= 10) > 1


def test_a_divergence_that_jumps_over_the_limit_ends_below_it():
    tried = nearest_within(lambda w: 8.0 if w < 0.9 else 30.0, 10.0, 1.0)
    assert len(tried) == MOST_TRIES
    assert [each.kl for each in tried[:2]] == [30.0, 8.0]
    assert tried[-1].weight > tried[1].weight


def test_the_end_stays_if_it_is_within_the_limit():
    assert [each.weight for each in nearest_within(lambda w: 3 * w, 10.0, 1.0)] == [1.0]


def test_a_divergence_that_is_always_above_the_limit_ends_the_search():
    tried = nearest_within(lambda w: 50.0, 10.0, 1.0)
    assert len(tried) == MOST_TRIES
    assert [each.weight for each in tried] == sorted({each.weight for each in tried}, reverse=True)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def in_world(world: World, folder: Path, **changes: Any) -> Settings:
    """Settings with 64 prompts to evaluate on, and outputs of their own."""
    rows = [{"prompt": f"w{2 + n % 50} w{2 + n // 50} w5"} for n in range(64)]
    limits = {"max_kl": changes.pop("max_kl", 1000.0), "max_repetition": 1.0}
    evaluation = replace(world.settings.evaluation, num_examples=64)
    return replace(
        world.settings,
        output_dir=str(folder / "outputs"),
        eval_prompts=write_rows(folder / "eval.jsonl", rows),
        evaluation=evaluation,
        promotion=replace(world.settings.promotion, **limits),
        ppo=replace(world.settings.ppo, warn_kl=limits["max_kl"] / 2),
        **changes,
    )


@pytest.fixture
def evaluated(world: World, mlflow_client) -> Callable[..., tuple[TrainedPolicy, EvaluatedPolicy]]:
    """Evaluate the policy that likes w1 most."""

    def evaluate(
        settings: Settings, number: str = "1", earlier: EarlierPolicies | None = None
    ) -> tuple[TrainedPolicy, EvaluatedPolicy]:
        run = start_run(settings, settings, "RLHF", number, ["evaluate_win_rate"])
        trained = replace(world.trained("best"), earlier=earlier)
        sft = world.model("sft")
        return evaluate_win_rate(settings, sft, trained, None, None, run)

    return evaluate


def test_no_other_policy_is_judged_than_the_one_from_which_ppo_started(
    world: World, tmp_path: Path, mlflow_client
):
    settings = in_world(world, tmp_path)
    run = start_run(settings, settings, "RLHF", "1", ["evaluate_win_rate"])
    sft = replace(world.model("sft"), digest="another")
    with pytest.raises(ModelError, match=r"The policy before PPO '.*' was changed after this run"):
        evaluate_win_rate(settings, sft, world.trained("best"), None, None, run)


def test_a_judge_who_contradicts_the_reward_is_a_warning(world: World):
    trained = replace(world.trained("best"), warnings=["Loss spike: it is 9."])
    evaluation = evaluation_result()
    assert with_judgment(trained, evaluation) == trained
    lost = {"win_rate.ppo_vs_sft.rate": 0.3, "win_rate.ppo_vs_sft.low": 0.2}
    worse = changed(evaluation, lost | {"win_rate.ppo_vs_sft.high": 0.4})
    assert with_judgment(trained, worse).warnings[0] == "Loss spike: it is 9."
    assert with_judgment(trained, worse).warnings[1].startswith("Reward up, judge down: objective/")


def liking_of(path: str) -> float:
    """By how much the logit of w1 is above the others."""
    return load_policy(path).transformer.wte.weight[4, 0].item()


@pytest.mark.slow
def test_a_policy_beyond_the_limit_is_drawn_back_to_it(world: World, tmp_path: Path, evaluated):
    settings = in_world(world, tmp_path, max_kl=8.0, selection=SelectionConfig(method="kl"))
    policy, evaluation = evaluated(settings)
    selection = evaluation.selection
    assert selection.candidates[0].weight == 1 and selection.candidates[0].kl > 8
    assert selection.limit == pytest.approx(BELOW_LIMIT * 8)
    assert 0 < selection.weight < 1
    assert liking_of(policy.path) == pytest.approx(9 * selection.weight, abs=1e-5)
    assert policy.digest == digest_of_folder(Path(policy.path))
    # On other prompts than those of the choice.
    assert 0.75 * 8 < evaluation.kl < 8
    assert str(selection) in evaluation.report().notes
    assert evaluation.report().win_rate["ppo_vs_sft"].rate > 0.8


@pytest.mark.slow
def test_a_policy_below_its_target_is_moved_away_from_sft(world: World, tmp_path: Path, evaluated):
    settings = in_world(world, tmp_path, selection=SelectionConfig(method="kl"))
    settings = replace(settings, ppo=replace(settings.ppo, kl_target=500.0))
    policy, evaluation = evaluated(settings)
    tried = evaluation.selection.candidates
    assert [each.weight for each in tried] == [1.0, FURTHEST]
    assert tried[0].kl < tried[1].kl < evaluation.selection.limit
    assert evaluation.selection.weight == FURTHEST
    assert liking_of(policy.path) == pytest.approx(9 * FURTHEST, abs=1e-5)


def test_a_policy_within_the_limit_stays(world: World, tmp_path: Path, evaluated):
    settings = in_world(world, tmp_path, selection=SelectionConfig(method="kl"))
    policy, evaluation = evaluated(settings)
    assert policy == world.trained("best")
    assert [each.weight for each in evaluation.selection.candidates] == [1.0]


FEW = """
from pathlib import Path

def judge(prompts, pairs):
    with (Path(__file__).parent / "questions").open("a") as file:
        file.writelines(f"{prompt}\\n" for prompt in prompts)
    far = lambda text: abs(text.split().count("w1") - 2)
    return [
        "tie" if far(a) == far(b) else "first" if far(a) < far(b) else "second" for a, b in pairs
    ]
"""
"""Likes w1 twice, so that a policy that always says it is over-optimised."""


@pytest.mark.slow
def test_the_judge_chooses_a_policy_that_beats_the_last_one(
    world: World, tmp_path: Path, evaluated
):
    (tmp_path / "few.py").write_text(FEW)
    judge = f"python:{tmp_path / 'few.py'}:judge"
    last = in_world(world, tmp_path, judge=judge)
    _, of_last = evaluated(last)
    assert of_last.selection is None
    (tmp_path / "questions").unlink()
    choice = SelectionConfig(method="judge", weights=[1.0, 0.6, 0.3, 0.1])
    settings = in_world(world, tmp_path, judge=judge, selection=choice)
    policy, evaluation = evaluated(settings, "2")
    assert evaluation.selection.weight < 1
    rates = [each.report().win_rate["ppo_vs_sft"].rate for each in (of_last, evaluation)]
    assert rates[1] > rates[0] + 0.1
    assert liking_of(policy.path) == pytest.approx(9 * evaluation.selection.weight, abs=1e-5)

    # No prompt of the choice is one of the evaluation.
    data = RunData(settings)
    chosen_on, judged_on = data.selection_prompts(), [row["prompt"] for row in data.examples()]
    assert len(chosen_on) == len(judged_on) == 32
    assert not {*chosen_on} & {*judged_on}
    asked = (tmp_path / "questions").read_text().splitlines()
    assert sum(prompt in {*chosen_on} for prompt in asked) == 2 * 32 * len(choice.weights)

    # A step that is tried again chooses the same policy, and asks about none of these prompts.
    (tmp_path / "questions").unlink()
    again, repeated = evaluated(settings, "2")
    assert (again.path, repeated.selection) == (policy.path, evaluation.selection)
    asked = (tmp_path / "questions").read_text().splitlines()
    assert not any(prompt in {*chosen_on} for prompt in asked)


def earlier_policies(folder: Path, likings: dict[int, float]) -> EarlierPolicies:
    """Policies of PPO by update, by how much they like w1; each has an adapter beside it."""
    for update, liking in likings.items():
        write_policy(folder / str(update), liking)
        (folder / str(update) / "adapter").mkdir()
        (folder / str(update) / "adapter" / "adapter_config.json").write_text(f"{update}")
    return EarlierPolicies(path=str(folder), digest=digest_of_folder(folder))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("likings", "weights", "expected"),
    [
        # Liking 3 says w1 twice in an answer, as the judge likes it.
        ({10: 3.0, 20: 9.0}, [1.0], (1.0, 10)),
        ({5: 0.0, 10: 3.0}, [1.0, 0.9], (1.0, 10)),
        # The end, or a policy on the way to it, is chosen where it is better.
        ({10: 0.0}, [1.0, 0.3], (0.3, None)),
    ],
)
def test_the_judge_may_choose_an_earlier_policy_of_ppo(
    likings: dict[int, float],
    weights: list[float],
    expected: tuple[float, int | None],
    world: World,
    tmp_path: Path,
    evaluated,
):
    (tmp_path / "few.py").write_text(FEW)
    settings = in_world(
        world,
        tmp_path,
        judge=f"python:{tmp_path / 'few.py'}:judge",
        selection=SelectionConfig(method="judge", weights=weights),
    )
    earlier = earlier_policies(tmp_path / "earlier", likings)
    policy, evaluation = evaluated(settings, earlier=earlier)
    selection, (weight, update) = evaluation.selection, expected
    places = [(each.weight, each.update) for each in selection.candidates]
    assert places == [
        *((each, None) for each in weights),
        *((1.0, each) for each in sorted(likings, reverse=True)),
    ]
    assert (selection.weight, selection.update) == (weight, update)
    best = max(each.points for each in selection.candidates)
    assert [each.points for each in selection.candidates][places.index(expected)] == best
    liking = 9 * weight if update is None else likings[update]
    assert liking_of(policy.path) == pytest.approx(liking, abs=1e-5)
    assert policy.digest == digest_of_folder(Path(policy.path))
    assert policy.earlier is None
    adapter = Path(policy.path) / "adapter" / "adapter_config.json"
    assert adapter.is_file() == (update is not None)
    if update is not None:
        assert f"The policy after update {update} of PPO is chosen: the judge" in str(selection)
        assert adapter.read_text() == str(update)
    # Equal inputs choose once, and other earlier policies choose again.
    again, repeated = evaluated(settings, "2", earlier)
    assert (again, repeated.selection) == (policy, replace(selection, spent={}))
    other, _ = evaluated(settings, "3", earlier_policies(tmp_path / "other", {10: 8.5}))
    assert other.path != policy.path


@pytest.mark.slow
def test_an_earlier_policy_beyond_the_limit_is_not_asked_about(
    world: World, tmp_path: Path, evaluated
):
    choice = SelectionConfig(method="judge", weights=[1.0])
    settings = in_world(world, tmp_path, max_kl=12.0, selection=choice)
    earlier = earlier_policies(tmp_path / "earlier", {10: 2.0, 20: 8.0})
    _, evaluation = evaluated(settings, earlier=earlier)
    tried = evaluation.selection.candidates
    assert [each.points is None for each in tried] == [True, True, False]
    assert evaluation.selection.update == 10


def test_earlier_policies_that_were_changed_are_refused(world: World, tmp_path: Path, evaluated):
    choice = SelectionConfig(method="judge", weights=[1.0])
    settings = in_world(world, tmp_path, selection=choice)
    earlier = earlier_policies(tmp_path / "earlier", {10: 2.0})
    write_policy(tmp_path / "earlier" / "10", 7.0)
    with pytest.raises(ModelError, match=r"The folder of the earlier policies in .* was changed"):
        evaluated(settings, earlier=earlier)


def test_a_prompt_that_occurs_twice_is_chosen_on_or_judged_on_and_not_both(
    world: World, tmp_path: Path
):
    settings = in_world(world, tmp_path, selection=SelectionConfig(method="judge"))
    rows = [{"prompt": f"w{2 + n % 40} w5"} for n in range(120)]
    data = RunData(replace(settings, eval_prompts=write_rows(tmp_path / "one.jsonl", rows[:1])))
    with pytest.raises(DataError, match="has one row, so none can be held out"):
        data.selection_prompts()
    data = RunData(replace(settings, eval_prompts=write_rows(tmp_path / "twice.jsonl", rows)))
    with pytest.raises(DataError, match=r"has only 0 different prompts .* selection.method='kl'"):
        data.selection_prompts()
    rows += [{"prompt": f"w{2 + n} w6"} for n in range(50)]
    data = RunData(replace(settings, eval_prompts=write_rows(tmp_path / "more.jsonl", rows[::-1])))
    judged_on = {row["prompt"] for row in data.evaluation_rows()}
    assert len(data.selection_prompts()) >= 16
    assert not {*data.selection_prompts()} & judged_on


UNSURE = """
def judge(prompts, pairs):
    return ["first" if n % %d else "invalid" for n, _ in enumerate(pairs)]
"""


@pytest.mark.parametrize("one_in", [4, 1])
def test_a_judge_that_says_nothing_usable_chooses_nothing(
    world: World, tmp_path: Path, evaluated, one_in: int
):
    (tmp_path / "unsure.py").write_text(UNSURE.replace("%d", str(one_in)))
    settings = in_world(
        world,
        tmp_path,
        judge=f"python:{tmp_path / 'unsure.py'}:judge",
        selection=SelectionConfig(method="judge"),
    )
    with pytest.raises(
        JudgeError, match=r"no valid verdict on .* of 32 pairs.*selection.method='kl'"
    ):
        evaluated(settings)
    assert not list((tmp_path / "outputs").glob("cache/selected-policy-*"))


def test_policies_beyond_the_limit_are_not_asked_about(world: World, tmp_path: Path, evaluated):
    choice = SelectionConfig(method="judge", weights=[1.0, 0.3])
    settings = in_world(world, tmp_path, max_kl=12.0, selection=choice)
    _, evaluation = evaluated(settings)
    assert [each.points is None for each in evaluation.selection.candidates] == [True, False]
    assert evaluation.selection.weight == 0.3


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"selection": {"method": "kl"}, "evaluation": {"temperature": 0.0}}, "cannot be estimate"),
        ({"selection": {"method": "judge"}, "evaluation": {"top_k": 5}}, "top_k=5"),
        ({"selection": {"method": "kl"}, "promotion": {"max_kl": math.inf}}, "no limit to keep"),
        (
            {"selection": {"method": "kl"}, "ppo": {"kl_target": 8.0, "temperature": 1.0}},
            "Set equal temperatures",
        ),
        ({"selection": {"weights": []}}, "at least one number"),
        ({"selection": {"weights": [0.0]}}, "above 0 and at most 1"),
        ({"selection": {"method": "first"}}, "first"),
        ({"ppo": {"save_policies": 2}}, "save_policies=2 saves policies that nothing uses.*'last'"),
        (
            {"ppo": {"save_policies": 2}, "selection": {"method": "kl"}},
            "save_policies=2 saves policies that nothing uses.*'kl'",
        ),
    ],
)
def test_a_choice_that_cannot_be_made_is_refused(section: dict, words: str, tmp_path: Path):
    table = tiny_table(tmp_path)
    merged = {name: {**table.get(name, {}), **values} for name, values in section.items()}
    with pytest.raises(ConfigError, match=words):
        make_settings(table | merged, {})
