"""Models of a type that nobody vouched for are refused before their weights are read."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

from pipeline.preflight.check_inputs import check_inputs
from pipeline.preflight.check_models import check_model_types
from pipeline.settings.make_settings import make_settings, settings_text
from pipeline.settings.settings import Settings
from ppo_core.errors import ModelError
from tests.architectures.zoo import small_model
from tests.helpers.inputs.pipeline_inputs import tiny_table, write_model
from tests.helpers.models.tiny import VOCABULARY, make_tokenizer


def given(folder: Path, **changes: Any) -> Settings:
    return make_settings(tiny_table(folder) | changes, {})


def write_rwkv(folder: Path) -> str:
    """A model of a type that transformers has, and that the project found wrong."""
    small_model("rwkv").save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def write_unread(folder: Path) -> str:
    """A model of the type rwkv whose weights would end the test if anything read them."""
    write_rwkv(folder)
    (folder / "model.safetensors").write_bytes(b"not read")
    return str(folder)


def write_deberta(folder: Path) -> str:
    config = DebertaV2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=1,
    )
    DebertaV2ForSequenceClassification(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("policy", "{}"),
        ("reward_model", "{}"),
        ("judge", "reward-model:{}"),
        ("judge", "transformers:{}"),
        ("fresh_pairs.labeller", "transformers:{}"),
    ],
)
def test_an_unknown_type_is_refused_wherever_it_is_named(tmp_path: Path, setting: str, value: str):
    path = write_unread(tmp_path / "odd")
    section, _, name = setting.rpartition(".")
    changes = {name: value.format(path)}
    settings = given(tmp_path, **({section: {"count": 20, **changes}} if section else changes))
    with pytest.raises(ModelError) as refusal:
        check_inputs(settings)
    message = str(refusal.value)
    assert message.startswith(f"{setting}=")
    assert f"'{path}' has the model type 'rwkv'" in message
    assert "the run could train on wrong values" in message
    assert 'model_types = ["llama", "rwkv"]' in message


@pytest.mark.parametrize("model_types", [[], ["llama"], ["llama", "reformer"]])
def test_a_type_that_cannot_be_trained_is_refused_with_its_reason(tmp_path: Path, model_types):
    settings = given(tmp_path, model_types=model_types)
    config = tmp_path / "policy" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "reformer"}))
    expected = r"'reformer', which cannot be trained: .* evaluation.* loaded\. Use another model\.$"
    with pytest.raises(ModelError, match=expected):
        check_model_types(settings)


def test_the_setting_allows_a_further_type_and_forbids_all_others(tmp_path: Path):
    path = write_rwkv(tmp_path / "odd")
    check_model_types(given(tmp_path, policy=path, model_types=["rwkv"]))
    with pytest.raises(ModelError, match=r"'llama', which is not in model_types=\['rwkv'\]"):
        check_model_types(given(tmp_path, model_types=["rwkv"]))


def test_an_encoder_may_score_and_may_not_write(tmp_path: Path):
    path = write_deberta(tmp_path / "deberta")
    check_model_types(given(tmp_path, reward_model=path, judge=f"reward-model:{path}"))
    for changes in ({"policy": path}, {"judge": f"transformers:{path}"}):
        with pytest.raises(ModelError, match="'deberta-v2'"):
            check_model_types(given(tmp_path, **changes))


def test_the_setting_survives_the_file_of_a_run(tmp_path: Path):
    settings = given(tmp_path, model_types=["llama", "deberta-v2"])
    assert make_settings(tomllib.loads(settings_text(settings)), {}) == settings


def test_a_folder_with_pickled_weights_is_refused_by_the_flow(tmp_path: Path):
    settings = given(tmp_path, reward_model=write_model(tmp_path / "reward", labels=1))
    for name in ("policy", "reward"):
        weights = tmp_path / name / "model.safetensors"
        torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
        kept = weights.read_bytes()
        weights.unlink()
        with pytest.raises(ModelError, match=rf"{name}' has pytorch_model.bin, whose weights are"):
            check_inputs(settings)
        weights.write_bytes(kept)
