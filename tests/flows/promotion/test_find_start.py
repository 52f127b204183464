"""A run starts from the champion's reward model and critic, or says by name why it does not."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.inputs.run_data import RunData
from pipeline.promotion.find_start import find_start
from pipeline.registry import start_models
from pipeline.registry.start_models import START, START_TAG, publish_start
from pipeline.settings.make_settings import make_settings
from pipeline.settings.settings import Settings
from pipeline.tracking.mlflow_client import connect
from ppo_core.errors import ConfigError, DataError, ModelError
from ppo_core.models.files.rollout_files import kept_tensors, write_rollouts
from tests.helpers.inputs.pipeline_inputs import tiny_table, write_model, write_rows
from tests.helpers.models.rollouts import make_rollout
from tests.helpers.models.tiny import VOCABULARY, make_tokenizer
from tests.helpers.runs.start_models import add_start, write_start


@pytest.fixture
def settings(tmp_path: Path, mlflow_client) -> Settings:
    return make_settings(tiny_table(tmp_path) | {"start_from": "champion"}, {})


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return write_start(tmp_path / "start")


def artifacts(version: int, settings: Settings) -> Path:
    """The folder of the artifacts on the disk of the store."""
    client = connect()
    run = client.get_model_version(settings.registered_model, str(version)).run_id
    return Path(client.get_run(run).info.artifact_uri.removeprefix("file://")) / START


def test_both_models_of_the_champion_are_found_and_verified(settings, models):
    version = add_start(settings, models)
    found = find_start(settings, version)
    assert found.start is not None and found.start.version == version
    assert found.tags == {"start/version": "1", "start/manifest": found.start.digest}
    for file in ("reward-model/model.safetensors", "critic/model.safetensors"):
        assert (models / file).read_bytes() == Path(found.start.path, file).read_bytes()
    # The same pairs: all 58 have trained the reward model.
    told = "start_from: reward model and critic of version 1 of 'rlhf-policy'"
    assert found.text.startswith(told)
    assert f"Of {len(RunData(settings).training_pairs())} pairs, 0 are new; 25% of" in found.text


def test_pairs_that_were_added_are_new(settings, models, tmp_path):
    # The pairs that are held out now are the last of the longer file.
    first = Path(settings.preferences).read_text().splitlines(keepends=True)
    (tmp_path / "earlier.jsonl").write_text("".join(first[:40]))
    version = add_start(replace(settings, preferences=str(tmp_path / "earlier.jsonl")), models)
    text = find_start(settings, version).text
    assert "Of 58 pairs, 22 are new" in text


def test_a_first_week_starts_from_nothing_and_says_so(settings):
    found = find_start(settings, None)
    assert (found.start, found.tags) == (None, {"start/version": "none"})
    assert (
        "start_from has no effect, because 'rlhf-policy' has no champion yet. Later" in found.text
    )


def test_a_champion_without_registered_models_is_named(settings, models):
    version = add_start(settings, models, tags={})
    found = find_start(settings, version)
    assert found.start is None
    assert "version 1 of 'rlhf-policy' was registered without reward model and critic" in found.text


def test_without_the_setting_nothing_is_fetched_or_said(settings, models):
    version = add_start(settings, models)
    found = find_start(replace(settings, start_from=""), version)
    assert (found.start, found.text, found.tags) == (None, "", {})
    assert not (Path(settings.output_dir) / "cache").exists()


def test_erased_rows_that_the_champion_has_seen_are_not_carried_on(settings, models, tmp_path):
    version = add_start(settings, models)
    row = json.loads(Path(settings.preferences).read_text().splitlines()[0])
    erasing = replace(settings, erase=write_rows(tmp_path / "erase.jsonl", [row]))
    found = find_start(erasing, version)
    assert found.start is None
    assert "was trained on rows that the setting `erase` lists" in found.text
    other = replace(settings, erase=write_rows(tmp_path / "other.jsonl", [{"prompt": "w9 w8 w7"}]))
    assert find_start(other, version).start is not None


# --- What does not fit ---------------------------------------------------------------


def test_a_policy_of_another_architecture_is_refused(settings, models, tmp_path):
    version = add_start(settings, models)
    config = Path(write_model(tmp_path / "other")) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_attention_heads": 2}))
    with pytest.raises(ConfigError, match=r"reward-model .* num_attention_heads is 4 and not 2"):
        find_start(replace(settings, policy=str(config.parent)), version)


def test_a_critic_of_another_backbone_size_is_refused(settings, models):
    config = models / "critic" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"intermediate_size": 128}))
    with pytest.raises(ConfigError, match=r"the critic of version 1 .* intermediate_size is 128"):
        find_start(settings, add_start(settings, models))


def test_a_critic_whose_head_has_another_size_is_refused(settings, models):
    file = models / "critic" / "value_head.safetensors"
    save_file(load_file(file) | {"v_head.summary.weight": torch.ones(1, 16)}, file)
    with pytest.raises(ModelError, match=r"value head .*\(1, 16\).* Remove start_from"):
        find_start(settings, add_start(settings, models))


def test_kept_rollouts_of_another_vocabulary_are_refused(settings, models):
    rollout = make_rollout()
    write_rollouts([kept_tensors(rollout, [[3]] * 3)], models / "critic")
    assert find_start(settings, add_start(settings, models)).start is not None
    beyond = replace(rollout, response_ids=rollout.response_ids + VOCABULARY)
    write_rollouts([kept_tensors(beyond, [[3]] * 3)], models / "critic")
    with pytest.raises(ModelError, match=r"is not a file of rollouts .* Remove start_from"):
        find_start(settings, add_start(settings, models))


def test_a_policy_with_another_tokenizer_is_refused(settings, models):
    make_tokenizer(prefix="v").save_pretrained(models / "reward-model")
    with pytest.raises(ConfigError, match=r"another tokenizer .* the vocabulary differs"):
        find_start(settings, add_start(settings, models))


def test_a_policy_with_another_chat_template_is_refused(settings, models):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(models / "reward-model")
    with pytest.raises(ConfigError, match="the chat template differs"):
        find_start(settings, add_start(settings, models))


def test_another_number_of_members_is_refused(settings, models):
    version = add_start(settings, models)
    section = replace(settings.reward_model_training, members=2)
    with pytest.raises(ConfigError, match=r"has 1 members, and reward_model_training.members=2"):
        find_start(replace(settings, reward_model_training=section), version)


def test_members_are_found_one_by_one(settings, models):
    whole = models / "reward-model"
    for member in ("member-1", "member-2"):
        shutil.copytree(whole, models / "several" / member)
    shutil.rmtree(whole)
    (models / "several").rename(whole)
    version = add_start(settings, models)
    section = replace(settings.reward_model_training, members=2)
    assert find_start(replace(settings, reward_model_training=section), version).start is not None


def test_validation_pairs_that_trained_the_champions_reward_model_are_refused(
    settings, models, tmp_path
):
    version = add_start(settings, models)
    lines = Path(settings.preferences).read_text().splitlines(keepends=True)
    (tmp_path / "reversed.jsonl").write_text("".join(reversed(lines)))
    shuffled = replace(settings, preferences=str(tmp_path / "reversed.jsonl"))
    with pytest.raises(DataError, match="was trained on 6 of 6 rows of preferences-test: its"):
        find_start(shuffled, version)


def test_pairs_of_the_judge_that_trained_the_champions_reward_model_are_refused(settings, models):
    version = add_start(settings, models)
    with pytest.raises(DataError, match="was trained on 19 of 19 rows of judge-preferences: the"):
        find_start(replace(settings, judge=""), version)


# --- What is damaged or hostile ------------------------------------------------------


def spoil(folder: Path) -> None:
    file = folder / "critic" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"abcd")


DAMAGED: dict[str, Callable[[Path], None]] = {
    "'critic/model.safetensors' was changed": spoil,
    "'critic/config.json' is in its manifest.json but missing": lambda folder: (
        folder / "critic" / "config.json"
    ).unlink(),
    "'reward-model/more.json' is not in its manifest.json": lambda folder: (
        folder / "reward-model" / "more.json"
    ).write_text("{}"),
    "it has no manifest.json|holds? no manifest.json": lambda folder: (
        folder / "manifest.json"
    ).unlink(),
    "pickle": lambda folder: (folder / "critic" / "pytorch_model.bin").write_bytes(b"x"),
}


@pytest.mark.parametrize("reason", DAMAGED)
def test_a_damaged_start_is_refused_before_anything_is_trained(settings, models, reason: str):
    version = add_start(settings, models)
    DAMAGED[reason](artifacts(version, settings))
    with pytest.raises(ModelError, match=f"(?s){reason}.*Remove start_from"):
        find_start(settings, version)


@pytest.mark.parametrize("tag", ["../../etc", "a" * 63])
def test_a_tag_that_is_no_digest_is_refused(settings, models, tag: str):
    version = add_start(settings, models, tags={START_TAG: tag})
    with pytest.raises(ModelError, match="is not a SHA-256"):
        find_start(settings, version)


def test_weights_that_are_not_finite_are_refused(settings, models):
    file = models / "critic" / "model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values())).fill_(torch.nan)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="not finite"):
        find_start(settings, add_start(settings, models))


def test_a_configuration_that_asks_for_remote_code_is_not_registered(settings, models):
    config = models / "critic" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"auto_map": {"AutoModel": "x"}}))
    with pytest.raises(ModelError, match="auto_map"):
        add_start(settings, models)


def test_a_complete_upload_is_not_repeated(settings, models, monkeypatch):
    version = add_start(settings, models)
    run = connect().get_model_version(settings.registered_model, str(version)).run_id
    monkeypatch.setattr(start_models, "write_manifest", None)  # a second upload would call it
    again = publish_start(run, models / "reward-model", models / "critic", models / "rows", models)
    assert again == connect().get_run(run).data.tags[START_TAG]
