"""One door for all inputs: paths, addresses in S3, registered versions."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.evaluation.guards.functions import load_guards
from pipeline.inputs.flow_run import FlowRun
from pipeline.inputs.run_data import RunData
from pipeline.inputs.run_rewards import RunRewards
from pipeline.preflight.fetch_inputs import fetch_inputs, share_inputs
from pipeline.registry import change_champion
from pipeline.settings.gate_configs import GuardsConfig
from pipeline.settings.make_settings import make_settings
from pipeline.settings.settings import Settings
from pipeline.storage.addresses import S3Address
from pipeline.storage.objects import write_object
from pipeline.storage.workspace import Workspace
from ppo_core.config.reward_names import read_rewards
from ppo_core.data.rows.read_rows import read_rows
from ppo_core.errors import DataError, ModelError
from ppo_core.io.user_code import load_function
from ppo_core.models.loading import load_policy, load_tokenizer
from tests.helpers.inputs.pipeline_inputs import tiny_table, write_model
from tests.helpers.models.model_hub import commit_of, model_hub
from tests.helpers.runs.candidates import World, make_world
from tests.helpers.servers.mlflow_store import tracking_to
from tests.helpers.servers.servers import shared_server


def upload(path: Path, address: str) -> str:
    for file in [path] if path.is_file() else path.iterdir():
        name = address if path.is_file() else f"{address}/{file.name}"
        write_object(S3Address.parse(name), file.read_bytes())
    return address


def given(folder: Path, **changes: Any) -> Settings:
    return make_settings(tiny_table(folder) | changes, {})


def run_in(settings: Settings) -> FlowRun:
    Path(settings.output_dir).mkdir(exist_ok=True)
    workspace = Workspace(settings.output_dir, settings.store)
    return FlowRun(id="RLHF/1", workspace=workspace, tracking={}, origin={}, data=[])


def test_paths_stay_as_they_are(tmp_path: Path):
    settings = given(tmp_path)
    assert fetch_inputs(settings) == settings


def test_addresses_in_s3_become_paths(tmp_path: Path, store: str):
    plain = given(tmp_path)
    (tmp_path / "split").mkdir()
    (tmp_path / "split" / "train.jsonl").write_text(Path(plain.prompts).read_text())
    judge = upload(tmp_path / "judge.py", f"{store}/judge.py")
    settings = replace(
        plain,
        policy=upload(tmp_path / "policy", f"{store}/policy"),
        preferences=upload(tmp_path / "pairs.jsonl", f"{store}/pairs.jsonl"),
        prompts=upload(tmp_path / "split", f"{store}/split") + ":train",
        judge=f"rule,python:{judge}:judge,reward-model:{store}/policy",
    )
    found = fetch_inputs(settings)
    assert Path(found.preferences).read_text() == Path(plain.preferences).read_text()
    assert Path(found.prompts.removesuffix(":train")).joinpath("train.jsonl").exists()
    assert (Path(found.policy) / "config.json").exists()
    rule, python, model = found.judge.split(",")
    assert rule == "rule"
    assert Path(python.split(":")[1]).read_text() == (tmp_path / "judge.py").read_text()
    assert model == f"reward-model:{found.policy}"
    with pytest.raises(DataError, match=f"There is nothing at '{store}/gone'"):
        fetch_inputs(replace(plain, sft_data=f"{store}/gone"))


def test_a_split_of_a_folder_reaches_machines_that_share_nothing(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
):
    plain = given(tmp_path)
    rows = Path(plain.prompts).read_text().splitlines(True)
    card = "configs:\n- config_name: en\n  data_files: [{split: test, path: en.jsonl}]\n"
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "en.jsonl").write_text("".join(rows))
    (folder / "test.jsonl").write_text("".join(rows[::-1]))
    there = upload(folder, f"{store}/run-12:30/splits")
    (folder / "test.jsonl").unlink()
    (folder / "README.md").write_text(f"---\n{card}---\n")
    named = upload(folder, f"{store}/named")
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "train.jsonl").write_text("".join(rows))
    single = upload(alone, f"{store}/2026-11-26T06:00/prompts")
    monkeypatch.chdir(tmp_path)
    prompts = [json.loads(row)["prompt"] for row in rows]
    for name, expected in {
        f"{there}:test[:5]": prompts[:-6:-1],
        f"{there}/test.jsonl": prompts[::-1],
        f"{named}:en/test": prompts,
        # The folder of this address has a colon, but no split follows.
        f"{single}": prompts,
        "data:en/test[:5]": prompts[:5],
    }.items():
        settings = replace(plain, store=f"{store}/rlhf", prompts=name)
        shared = share_inputs(fetch_inputs(settings), run_in(settings))
        found = Workspace(str(tmp_path / "other"), settings.store).fetch_files(shared)
        assert found.prompts.startswith(str(tmp_path / "other"))
        assert read_rows(found.prompts, "prompts").column("prompt") == expected


def test_a_module_stays_a_module_beside_a_folder_of_its_name(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
):
    settings = given(tmp_path, store=f"{store}/rlhf", judge="python:judge:judge")
    (tmp_path / "judge").mkdir()
    (tmp_path / "judge.py").rename(tmp_path / "judge" / "__init__.py")
    monkeypatch.chdir(tmp_path)
    shared = share_inputs(fetch_inputs(settings), run_in(settings))
    assert shared.judge == "python:judge:judge"


def test_shared_inputs_are_the_same_on_each_machine(tmp_path: Path, store: str):
    settings = given(tmp_path, store=f"{store}/rlhf")
    shared = share_inputs(fetch_inputs(settings), run_in(settings))
    assert str(tmp_path) not in str(replace(shared, output_dir=""))
    found = Workspace(str(tmp_path / "other"), settings.store).fetch_files(shared)
    assert Path(found.preferences).read_text() == Path(settings.preferences).read_text()


def test_files_of_rewards_reach_machines_that_share_nothing(tmp_path: Path, store: str):
    source = "def brevity(prompts, responses):\n    return [-len(text) for text in responses]\n"
    (tmp_path / "rewards.py").write_text(source)
    model = write_model(tmp_path / "other", labels=1)
    file = upload(tmp_path / "rewards.py", f"{store}/rewards.py")
    entries = ["reward-model", f"python:{file}:brevity", f"reward-model:{model}"]
    settings = given(tmp_path, store=f"{store}/rlhf", rewards=entries)
    shared = share_inputs(fetch_inputs(settings), run_in(settings))
    assert str(tmp_path) not in str(shared.rewards)
    there = Workspace(str(tmp_path / "there"), settings.store).fetch_files(shared)
    own, function, other = read_rewards(there.rewards)
    assert [own.name, function.name, other.name] == ["reward-model", "brevity", "other"]
    assert Path(function.source.rpartition(":")[0]).read_text() == source
    assert (Path(other.source) / "model.safetensors").exists()
    here = replace(settings, rewards=["reward-model", f"python:{tmp_path}/rewards.py:brevity"])
    digests = [RunRewards(RunData(each)).digests()["brevity"] for each in (there, here)]
    assert digests[0] == digests[1]


def test_files_of_guards_reach_machines_that_share_nothing(tmp_path: Path, store: str):
    source = "def polite(prompts, responses):\n    return [1.0] * len(responses)\n"
    (tmp_path / "guards.py").write_text(source)
    file = upload(tmp_path / "guards.py", f"{store}/guards.py")
    settings = given(tmp_path, store=f"{store}/rlhf")
    places = {"here": f"{tmp_path}/guards.py", "there": file}
    functions = {name: f"python:{place}:polite" for name, place in places.items()}
    promotion = replace(settings.promotion, guards=GuardsConfig(functions=functions))
    settings = replace(settings, promotion=promotion)
    shared = share_inputs(fetch_inputs(settings), run_in(settings))
    assert str(tmp_path) not in str(shared.promotion)
    there = Workspace(str(tmp_path / "there"), settings.store).fetch_files(shared)
    for name, loaded in load_guards(there.promotion.guards).items():
        fetched = there.promotion.guards.functions[name]
        assert fetched.startswith("python:") and fetched.endswith(":polite")
        assert Path(fetched.split(":")[1]).read_text() == source
        assert loaded.version == load_function(f"{tmp_path}/guards.py:polite", "").version


def test_a_data_set_of_the_hub_is_read_there_once(tmp_path: Path, store: str):
    """Of one commit, by the first step; later steps read the copy, without the hub."""
    rows, data = Path(given(tmp_path).eval_prompts).read_text().splitlines(True), tmp_path / "data"
    data.mkdir()
    (data / "train.jsonl").write_text("".join(rows))
    (data / "test.jsonl").write_text("".join(reversed(rows)))
    names = {"prompts": "org/data", "eval_prompts": "org/data@main:test[:5]"}
    main = "datasets/org/data@main"
    with model_hub({main: data}, tmp_path / "hub") as hub:
        here = given(tmp_path, **names)
        assert fetch_inputs(here) == here
        assert not hub.asked
        settings = given(tmp_path, store=f"{store}/rlhf", **names)
        fetched = fetch_inputs(settings)
        pinned = f"org/data@{commit_of(main)}"
        assert (fetched.prompts, fetched.eval_prompts) == (pinned, f"{pinned}:test[:5]")
        # From now on the branch is another one.
        del hub.names[main]
        shared = share_inputs(fetched, run_in(settings))
        assert share_inputs(fetched, run_in(settings)) == shared
    found = Workspace(str(tmp_path / "other"), settings.store).fetch_files(shared)
    prompts = [json.loads(row)["prompt"] for row in rows]
    assert read_rows(found.prompts, "prompts").column("prompt") == prompts
    assert read_rows(found.eval_prompts, "prompts").column("prompt") == prompts[:-6:-1]
    assert not [*Path(settings.output_dir).glob("tmp*")]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def test_a_registered_version_is_one_model(world: World, tmp_path: Path):
    with tracking_to(shared_server().url):
        version = world.add_version("fetched", "good")
        change_champion.promote_by_hand("fetched", version, reason="First.", by="person ada")
        settings = given(tmp_path, policy="models:/fetched@champion")
        found = fetch_inputs(settings).policy
        assert fetch_inputs(settings).policy == found
        # On a shared disk, a killed container with the same process id left an unfinished folder.
        shutil.rmtree(found)
        left = Path(found).with_name(f".{Path(found).name}.{os.getpid()}")
        left.mkdir()
        assert fetch_inputs(settings).policy == found
        assert {*left.parent.iterdir()} == {left, Path(found)}
        weights = (load_policy(one).state_dict() for one in (found, world.policies["good"]))
        for ours, theirs in zip(*(each.values() for each in weights), strict=True):
            assert torch.equal(ours, theirs)
        assert load_tokenizer(found)("w1").input_ids
        with pytest.raises(ModelError, match="fetched"):
            fetch_inputs(replace(settings, policy="models:/fetched/99"))
