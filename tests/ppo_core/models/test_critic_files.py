"""A trained critic is written and read whole, and only as safetensors."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import OPTConfig, OPTModel

from ppo_core.errors import ConfigError, ModelError
from ppo_core.models.backbones import DecoderBackbone
from ppo_core.models.critic import Critic
from ppo_core.models.files.critic_files import (
    check_critic,
    load_critic,
    require_whole_critic,
    write_critic,
)
from ppo_core.models.files.value_head_files import HEAD_FILE
from ppo_core.models.policy import LanguageModel
from ppo_core.models.reward_model import RewardModel
from tests.helpers.models.tiny import CONFIGS, make_classifier, make_policy, make_tokenizer

IDS = torch.arange(2, 12).view(2, 5)


def trained_critic(family: str = "llama") -> Critic:
    """The copy of a reward model with the scale 2 * (score - 0.3), and so with a bias."""
    model = RewardModel(make_classifier(family), make_tokenizer(), bias=0.3, gain=2.0)
    return Critic.from_reward_model(model)


def values(critic: Critic) -> torch.Tensor:
    return critic.values(critic.backbone.hidden_states(IDS).flatten(0, 1))


def write(critic: Critic, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    write_critic(critic, critic.model.state_dict(), critic.head.state_dict(), folder)
    return folder


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return write(trained_critic(), tmp_path / "critic")


@pytest.mark.parametrize("family", CONFIGS)
def test_a_critic_that_is_read_gives_the_same_values(family: str, tmp_path: Path):
    critic = trained_critic(family)
    require_whole_critic(critic, LanguageModel(make_policy(family)))
    folder = write(critic, tmp_path)
    check_critic(folder)
    assert torch.equal(values(load_critic(folder)), values(critic))
    assert {file.name for file in folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        HEAD_FILE,
    }


def test_the_head_fits_states_that_the_backbone_projects_to_another_size(tmp_path: Path):
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 16, "num_attention_heads": 2}
    backbone = OPTModel(OPTConfig(vocab_size=9, ffn_dim=32, num_hidden_layers=1, **sizes))
    critic = Critic(DecoderBackbone(backbone), nn.Linear(16, 1))
    folder = write(critic, tmp_path)
    check_critic(folder)
    assert torch.equal(load_critic(folder).head.weight, critic.head.weight)


def test_a_critic_without_a_backbone_of_its_own_is_not_saved():
    policy = LanguageModel(make_policy())
    for critic in (None, Critic.on_policy(policy)):
        with pytest.raises(ConfigError, match="so no critic can be saved"):
            require_whole_critic(critic, policy)


def test_a_backbone_that_cannot_be_loaded_alone_is_not_saved():
    class Own(nn.Module):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return input_ids

    critic = trained_critic()
    critic.model = Own()
    with pytest.raises(ModelError, match="of the critic, a Own, cannot be loaded alone"):
        require_whole_critic(critic, LanguageModel(make_policy()))


def test_a_head_of_another_size_is_refused(saved: Path):
    head = {"v_head.summary.weight": torch.ones(1, 16), "v_head.summary.bias": torch.ones(1)}
    save_file(head, saved / HEAD_FILE)
    for read in (check_critic, load_critic):
        with pytest.raises(ModelError, match=r"shapes .*\(1, 16\).* needs .*\(1, 32\)"):
            read(saved)


def test_a_model_without_a_head_is_no_critic(saved: Path):
    (saved / HEAD_FILE).unlink()
    make_policy().save_pretrained(saved / "policy")
    for read in (check_critic, load_critic):
        for folder in (saved, saved / "policy"):
            with pytest.raises(ModelError, match="has no value head, so it is not a critic"):
                read(folder)


def test_weights_that_do_not_fit_their_configuration_are_refused(saved: Path):
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(ModelError, match="left over"):
        load_critic(saved)


def test_pickled_weights_are_refused(saved: Path):
    torch.save(load_file(saved / "model.safetensors"), saved / "pytorch_model.bin")
    (saved / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="pickled"):
        load_critic(saved)
