"""A trained policy becomes one version with its decision on it, wherever its step was killed."""

import json
import os
import signal
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from pipeline import stages
from pipeline.inputs.flow_run import FlowRun
from pipeline.inputs.json_lines import read_jsonl
from pipeline.inputs.lineage import EVALUATION_ROWS, is_input
from pipeline.inputs.row_digests import ROWS_FILE, write_digests
from pipeline.inputs.run_data import RunData
from pipeline.promotion import register_and_decide as register_module
from pipeline.promotion.fetch_champion import find_champion
from pipeline.registry import change_champion
from pipeline.registry.aliases import read_version
from pipeline.registry.alpha_spending import limits_now
from pipeline.registry.decisions import Decision
from pipeline.registry.start_models import fetch_start
from pipeline.results.step_records import (
    EvaluatedPolicy,
    FetchedChampion,
    PreparedModel,
    RegisteredPolicy,
    ValidatedReward,
)
from pipeline.settings.gate_configs import ALPHA
from pipeline.settings.make_settings import make_settings, settings_text
from pipeline.settings.settings import Settings
from pipeline.stages.registration import decision_tags
from pipeline.storage.workspace import Workspace
from pipeline.tracking.decided_runs import MISSING_VERDICTS
from pipeline.tracking.mlflow_client import connect
from ppo_core.io.folder_cache import digest_of_folder
from serving.champion import load_champion
from tests.helpers.inputs.pipeline_inputs import write_rows
from tests.helpers.runs.candidates import FIT, World, artifact_root, make_world
from tests.helpers.runs.start_models import write_start
from tests.helpers.servers.fault_proxy import Fault, fault_proxy, start_process
from tests.helpers.servers.mlflow_store import tracking_to
from tests.helpers.servers.servers import MlflowServer, shared_server

ACCEPTED = replace(FIT, fit=False, accepted_by_hand=True, reasons=["It guesses."])


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[MlflowServer]:
    with pytest.MonkeyPatch.context() as patch, tracking_to(shared_server().url):
        patch.setattr("pipeline.registry.sync_aliases.TIMEOUT", 0.3)
        yield shared_server()


@dataclass(frozen=True)
class Ran:
    """A run of the flow from its evaluation on."""

    settings: Settings
    run: FlowRun
    evaluation: EvaluatedPolicy
    registered: RegisteredPolicy
    policy: PreparedModel
    sft: PreparedModel

    @property
    def version(self) -> int:
        return int(self.registered.model["version"])


def start(world: World, number: str, name: str) -> tuple[Settings, FlowRun, FetchedChampion | None]:
    """What the steps before the evaluation leave behind, with nothing trained."""
    settings = world.named(name)
    run = stages.start.start_run(settings, settings, "RLHF", number, ["register"])
    return settings, run, stages.start.find_champion(settings)


def register(
    world: World,
    settings: Settings,
    run: FlowRun,
    policy: str,
    evaluation: EvaluatedPolicy,
    validation: ValidatedReward = FIT,
) -> RegisteredPolicy:
    return stages.registration.register_policy(
        world.candidate(settings, policy, run, evaluation, validation)
    )


def ran(
    world: World,
    settings: Settings,
    run: FlowRun,
    policy: str,
    evaluation: EvaluatedPolicy,
    validation: ValidatedReward = FIT,
) -> Ran:
    registered = register(world, settings, run, policy, evaluation, validation)
    models = world.model(policy), world.model("sft")
    return Ran(settings, run, evaluation, registered, *models)


@dataclass(frozen=True)
class Story:
    """The first run, which wins; one whose champion changed; one that is refused."""

    first: Ran
    second: Ran
    champion_meanwhile: int
    repeated: RegisteredPolicy
    asked_by_the_repetition: int
    refused: Ran


@pytest.fixture(scope="module")
def story(world: World) -> Story:
    settings, run, champion = start(world, "1", "story")
    assert champion is None
    evaluation = world.evaluate(settings, "weak", run.folder, champion)
    first = ran(world, settings, run, "weak", evaluation)

    settings, run, champion = start(world, "2", "story")
    assert champion.version == first.version
    evaluation = world.evaluate(settings, "best", run.folder, champion)
    meanwhile = world.add_version("story", "good")
    change_champion.promote_by_hand("story", meanwhile, reason="Now.", by="person ada")
    second = ran(world, settings, run, "best", evaluation)
    asked = world.judged_pairs()
    repeated = register(world, settings, run, "best", evaluation)
    asked = world.judged_pairs() - asked

    settings, run, champion = start(world, "3", "story")
    evaluation = world.evaluate(settings, "weak", run.folder, champion)
    refused = ran(world, settings, run, "weak", evaluation, ACCEPTED)
    return Story(first, second, meanwhile, repeated, asked, refused)


def card_of(name: str, version: int) -> str:
    return (artifact_root(connect(), name, version) / "README.md").read_text(encoding="utf-8")


def section(card: str, title: str) -> str:
    return card.partition(f"## {title}\n\n")[2].partition("\n## ")[0]


def run_of(ran: Ran, step: str) -> Any:
    return connect().get_run(ran.run.tracking[step])


def test_the_first_run_is_registered_and_promoted(story: Story):
    decision = story.first.registered.promotion
    assert (decision.action, decision.version, decision.champion) == ("promoted", 1, 1)
    assert decision.by == "run RLHF/1"
    assert story.first.registered.evaluation == story.first.evaluation
    parent = run_of(story.first, "parent")
    assert (parent.data.tags["version"], parent.data.tags["promotion"]) == ("1", "promoted")
    assert run_of(story.first, "register").info.status == "FINISHED"


def test_earlier_decisions_of_runs_on_equal_evaluation_data_are_counted(story: Story):
    runs = (story.first, story.second, story.refused)
    assert [ran.registered.earlier_decisions for ran in runs] == [0, 1, 2]


def test_decisions_on_one_evaluation_file_count_with_any_copies_in_the_training_data(
    world: World, tmp_path: Path
):
    copied = " ".join(f"w{number}" for number in range(8))
    trained, asked = (
        [json.loads(line) for line in Path(file).read_text().splitlines()]
        for file in (world.settings.prompts, world.settings.eval_prompts)
    )
    evaluation = write_rows(tmp_path / "e.jsonl", [*asked, asked[0] | {"prompt": copied}])
    found, kept = [], []
    for number, more in (("71", []), ("72", [{"prompt": copied}]), ("73", [{"prompt": copied}])):
        if number == "73":
            # Versions of older code have only the digest of the prompts that are no copies.
            for version in ("1", "2"):
                connect().delete_model_version_tag("copies", version, EVALUATION_ROWS)
        prompts = write_rows(tmp_path / f"{number}.jsonl", [*trained, *more])
        settings = world.named("copies", eval_prompts=evaluation, prompts=prompts)
        run = stages.start.start_run(settings, settings, "RLHF", number, ["register"])
        kept.append(run.origin[register_module.EVALUATION_DATA])
        champion = stages.start.find_champion(settings)
        judged = world.evaluate(settings, "weak", run.folder, champion)
        found.append(ran(world, settings, run, "weak", judged).registered.earlier_decisions)
    assert kept[0] != kept[1] == kept[2]
    assert found == [0, 1, 1]


def test_a_candidate_whose_champion_changed_is_on_record_against_the_new_one(story: Story):
    registered, meanwhile = story.second.registered, story.champion_meanwhile
    assert (registered.promotion.action, story.second.version) == ("promoted", meanwhile + 1)
    rate = registered.evaluation.report().win_rate["ppo_vs_champion"]
    assert rate != story.second.evaluation.report().win_rate["ppo_vs_champion"]
    assert registered.evaluation.champion == meanwhile
    assert f"against the champion, version {meanwhile}" in registered.promotion.reasons[0]
    card = card_of("story", story.second.version)
    assert f"{rate.rate:.1%}" in section(card, "Win rates")
    answers = [row["champion"] for row in read_jsonl(registered.evaluation.samples)]
    for answer in answers[:5]:
        assert answer.strip() in section(card, "Samples")
    parent = run_of(story.second, "parent").data
    assert parent.metrics["win_rate/ppo_vs_champion/rate"] == rate.rate
    kept = connect().list_artifacts(story.second.run.tracking["register"])
    assert {file.path for file in kept} == {
        "evaluation",
        "guards.jsonl",
        "judgements.jsonl",
    }


def test_a_step_retried_after_everything_was_done_changes_nothing(story: Story):
    assert story.repeated == story.second.registered
    assert story.asked_by_the_repetition == 0
    made = [
        each
        for each in change_champion.read_champions("story").decisions
        if each.by == "run RLHF/2"
    ]
    assert len(made) == 1
    parent = story.second.run.tracking["parent"]
    assert len(connect().search_model_versions(f"run_id = '{parent}'")) == 1


def test_a_refused_version_says_so_wherever_it_is_looked_at(story: Story):
    decision = story.refused.registered.promotion
    assert decision.action == "refused"
    assert decision.champion == story.second.version
    found = connect().get_model_version("story", str(story.refused.version))
    assert found.tags["promotion"] == "refused"
    card = card_of("story", story.refused.version)
    for text in (section(card, "Promotion"), found.description):
        assert "**Refused** by run RLHF/3 at " in text
        assert "Its reward model failed validation" in text
        assert "min\\_win\\_rate=0.5" in text
    assert run_of(story.refused, "parent").data.tags["promotion"] == "refused"


def test_a_promoted_version_says_so_wherever_it_is_looked_at(story: Story):
    found = connect().get_model_version("story", str(story.second.version))
    assert found.tags["promotion"] == "promoted"
    for text in (section(card_of("story", story.second.version), "Promotion"), found.description):
        assert "**Promoted** by run RLHF/2 at " in text
        assert "It wins " in text
    assert f"models:/story/{story.second.version}" in found.description


def test_the_tags_of_a_version_say_where_it_comes_from(story: Story):
    own = connect().get_model_version("story", str(story.second.version)).tags
    assert len(own) == 11
    tags = read_version("story", story.second.version).tags
    inputs = {name: one for name, one in story.second.run.origin.items() if is_input(name)}
    assert inputs.items() <= tags.items()
    assert {"git_commit", "git_changes", "python", "settings_digest", "seed"} <= set(inputs)
    assert {"data/preferences", "data/prompts", "data/eval-prompts"} <= set(inputs)
    assert tags["flow_run"] == "RLHF/2"
    assert tags["parent_champion"] == str(story.first.version)
    assert tags["judge"].startswith("python:")
    assert tags["model/base"] != tags["model/policy"] == story.second.policy.digest
    first = connect().get_model_version("story", str(story.first.version)).tags
    assert first["parent_champion"] == "none"


def tags_of(component: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["value"] for one in component["properties"]}


def test_the_bill_of_materials_of_a_version_has_the_digests_of_its_models(story: Story):
    client, run = connect(), story.second.run
    root = artifact_root(client, "story", story.second.version)
    assert "sbom.json" in json.loads((root / "manifest.json").read_text())["files"]
    made = json.loads((root / "sbom.json").read_text())
    policy = made["metadata"]["component"]
    (sft,) = policy["pedigree"]["ancestors"]
    (reward_model,) = (one for one in made["components"] if one["bom-ref"] == "model:reward_model")
    assert story.second.policy.digest == tags_of(policy)["rlhf-flow:digest"]
    for model in (sft, reward_model):
        assert story.second.sft.digest == tags_of(model)["rlhf-flow:digest"]
    started = datetime.fromisoformat(made["metadata"]["timestamp"]).timestamp()
    assert round(started * 1000) == client.get_run(run.tracking["parent"]).info.start_time


def test_the_rows_of_a_version_are_known_and_a_run_that_erases_one_names_the_version(
    story: Story, world: World, tmp_path: Path, capsys
):
    root = artifact_root(connect(), "story", story.first.version)
    assert "rows.parquet" in json.loads((root / "manifest.json").read_text())["files"]
    row = Path(world.settings.prompts).read_text().splitlines()[0]
    erase = tmp_path / "erase.jsonl"
    erase.write_text(row + "\n")
    stages.start.prepare_inputs(world.named("story", erase=str(erase)))
    told = capsys.readouterr().out
    assert "prompts.jsonl, less 1 erased: 31 rows" in told
    versions = (story.first.version, story.second.version, story.refused.version)
    marks = ("", " (champion)", "")
    for version, mark in zip(versions, marks, strict=True):
        assert f"erase: version {version}{mark} saw 1 of 1 rows: prompts 1\n" in told
    # A version that no run made has no digests.
    unknown = "erase: versions without row digests, which may also have seen some of the rows"
    assert f"{unknown}: {versions[1] - 1}\n" in told


def test_the_card_of_a_later_decision_leaves_the_version_loadable(story: Story, tmp_path: Path):
    champion = load_champion("story", cache=tmp_path)
    assert champion.version == str(story.second.version)
    inputs = champion.tokenizer("w1 w2", return_tensors="pt")
    answer = champion.model.generate(**inputs)[0, 2:]
    assert "w1" in champion.tokenizer.decode(answer, skip_special_tokens=True)


def test_the_settings_of_a_run_and_of_its_version_repeat_it(story: Story, tmp_path: Path):
    client, first = connect(), story.first
    run = client.download_artifacts(first.run.tracking["parent"], "settings.toml", str(tmp_path))
    version = artifact_root(client, "story", first.version) / "settings.toml"
    for file in (Path(run), version):
        assert make_settings(tomllib.loads(file.read_text()), {}) == first.settings


# --- Killed --------------------------------------------------------------------------


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A registered model of the test's own."""
    return str(request.node.name)[:200]


def candidate(world: World, name: str, folder: Path) -> register_module.Candidate:
    """The best policy, whose answers were judged while there was no champion."""
    settings, client = world.named(name), connect()
    experiment = client.get_experiment_by_name("killed")
    number = experiment.experiment_id if experiment else client.create_experiment("killed")
    parent = client.create_run(number).info.run_id
    run = FlowRun(
        id=f"RLHF/{parent}",
        workspace=Workspace(str(folder)),
        tracking={"parent": parent},
        origin={"model/base": "0", register_module.EVALUATION_DATA: "0"},
        data=[],
    )
    run.folder.mkdir(parents=True)
    (run.folder / register_module.SETTINGS_FILE).write_text(settings_text(settings))
    write_digests(RunData(settings).digested(), run.folder / ROWS_FILE)
    return world.candidate(settings, "best", run, world.evaluate(settings, "best", run.folder))


KILLED_AT = {
    "the version was made": Fault("model-versions/create"),
    "its number was agreed on": Fault("log-parameter", "model_version/"),
    "it was shown as the challenger": Fault("alias", "challenger"),
    "the decision was written down": Fault("log-parameter", "promoted"),
    "the champion was set": Fault("alias", '"champion"'),
    "the card was written again": Fault("model-versions/update"),
}
QUICK = ("the decision was written down",)


def test_the_models_for_the_next_run_are_beside_the_version_and_no_service_loads_them(
    world: World, name: str, tmp_path: Path
):
    models = write_start(tmp_path / "models")
    reward_model, critic = (
        PreparedModel(path=str(path), digest=digest_of_folder(path), metrics={})
        for path in (models / "reward-model", models / "critic")
    )
    one = candidate(world, name, tmp_path / "outputs")
    trained = replace(one.trained, critic=critic)
    settings = replace(one.settings, start_from="champion")
    one = replace(one, settings=settings, reward_model=reward_model, trained=trained)
    version = int(register_module.register(one).model["version"])
    tags = connect().get_model_version(name, str(version)).tags
    start = fetch_start(name, version, tmp_path / "starts")
    assert start is not None and tags["start_manifest"] == start.digest
    assert {path.name for path in Path(start.path).iterdir()} == {
        "critic",
        "manifest.json",
        "reward-model",
        "rows.parquet",
    }
    loaded = load_champion(name, version=version, cache=tmp_path / "served")
    assert loaded.version == str(version)
    served = {path.name for path in (tmp_path / "served").rglob("*")}
    assert served.isdisjoint({"critic", "reward-model", "value_head.safetensors"})


def test_the_alpha_of_a_decision_counts_a_promotion_after_the_evaluation(
    world: World, name: str, tmp_path: Path
):
    """The promotion was rolled back, so the candidate is not judged again."""
    one = candidate(world, name, tmp_path)
    change_champion.promote_by_hand(
        name, world.add_version(name, "weak"), reason="First.", by="person ada"
    )
    limits = replace(one.settings.promotion, alpha=ALPHA, false_promotion_rate=0.5)
    settings = replace(one.settings, promotion=limits)
    tested = replace(settings, promotion=limits_now(limits, []))
    evaluation = world.evaluate(tested, "best", one.run.folder, find_champion(settings))
    change_champion.record_decision(
        name,
        version=world.add_version(name, "good"),
        promote=True,
        reasons=["It wins."],
        by="run RLHF/0",
        key="run RLHF/0",
        after=change_champion.read_champions(name),
    )
    change_champion.roll_back(name, reason="It swears.", by="person ada")
    registered = register_module.register(replace(one, settings=settings, evaluation=evaluation))
    assert registered.evaluation == evaluation
    test = evaluation.report().win_rate["ppo_vs_champion"].test
    # The share of each of the first decisions is 1/104, and one promotion doubles it.
    assert test is not None and test.alpha == pytest.approx(0.5 / 104)
    assert registered.alpha == pytest.approx(2 * 0.5 / 104)


def test_a_refusal_only_for_missing_verdicts_is_marked(world: World, name: str, tmp_path: Path):
    report = world.evaluate(world.named(name), "weak", tmp_path).report()
    config = replace(world.settings.evaluation, max_invalid=0.1)
    rate = report.win_rate["ppo_vs_sft"]
    assert rate.n == 16
    refused = Decision(
        number=1,
        action="refused",
        version=2,
        champion=None,
        reasons=("Inconclusive.",),
        by="run RLHF/2",
        at="2026-11-29T15:00:00+00:00",
        key="run RLHF/2",
    )

    def mark(decision: Decision, invalid: int, *doubts: str) -> str | None:
        rates = {**report.win_rate, "ppo_vs_sft": replace(rate, invalid=invalid)}
        evaluation = replace(report, win_rate=rates, reasons=list(doubts))
        return decision_tags(decision, evaluation, config).get(MISSING_VERDICTS)

    assert mark(refused, 2, "no verdict for 2 of 18 pairs") == "ppo_vs_sft"
    assert mark(refused, 1, "a canary") is None
    assert mark(refused, 2, "no verdict for 2 of 18 pairs", "a canary") is None
    assert mark(replace(refused, reasons=("Inconclusive.", "KL.")), 2, "no verdict") is None
    promoted = replace(refused, action="promoted", champion=2)
    assert mark(promoted, 2, "no verdict") is None


@pytest.mark.parametrize(
    "moment",
    [
        moment if moment in QUICK else pytest.param(moment, marks=pytest.mark.slow)
        for moment in KILLED_AT
    ],
)
def test_a_step_killed_in_between_leaves_one_version_and_one_decision(
    world: World, name: str, server: MlflowServer, tmp_path: Path, moment: str
):
    one = candidate(world, name, tmp_path)
    # There was none when it was judged: it has to be judged again.
    old = world.add_version(name, "weak")
    change_champion.promote_by_hand(name, old, reason="First.", by="person ada")
    with fault_proxy(server.url) as proxy:
        pid: list[int] = []
        fault = replace(
            KILLED_AT[moment], after=lambda: os.kill(pid[0], signal.SIGKILL), hits=[], times=1
        )
        proxy.add(fault)
        process = start_process(lambda: register_module.register(one), proxy.url)
        pid.append(process.pid)
        process.join(120)
    assert fault.hits
    assert process.exitcode == -signal.SIGKILL
    registered = register_module.register(one)
    require_one_version_and_one_decision(name, one, registered)
    assert registered.evaluation.champion == old
    assert register_module.register(one) == registered


def require_one_version_and_one_decision(
    name: str, one: register_module.Candidate, registered: RegisteredPolicy
) -> None:
    client, parent = connect(), one.run.tracking["parent"]
    (version,) = client.search_model_versions(f"run_id = '{parent}'")
    number = int(version.version)
    decisions = change_champion.read_champions(name).decisions
    assert [(each.action, each.version, each.by) for each in decisions[1:]] == [
        ("promoted", number, f"run {one.run.id}")
    ]
    assert registered.promotion.number == decisions[1].number
    assert client.get_model_version_by_alias(name, "champion").version == version.version
    rate = registered.evaluation.report().win_rate["ppo_vs_champion"]
    card = card_of(name, number)
    assert f"**Promoted** by run {one.run.id} at " in section(card, "Promotion")
    assert f"**Promoted** by run {one.run.id} at " in version.description
    assert f"{rate.rate:.1%}" in section(card, "Win rates")
    experiment = client.get_run(parent).info.experiment_id
    uploaded = client.search_logged_models([experiment], f"source_run_id = '{parent}'")
    assert len(uploaded) == 1
