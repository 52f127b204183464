"""Settings that a script assigns, before and after it makes a trainer."""

import pickle
from copy import copy, deepcopy
from dataclasses import replace

import pytest

from ppo_core import ConfigError, PPOConfig
from ppo_core.trl.script_settings import protect_copy


def test_a_script_may_assign_settings_but_not_those_of_a_trainer(caplog):
    config = PPOConfig()
    config.kl_coef = 0.2
    config.fp16 = False
    assert config == PPOConfig(kl_coef=0.2)
    for name, value in (("fp16", True), ("kl_ceof", 0.1)):
        with pytest.raises(ConfigError, match=name):
            setattr(config, name, value)
    own = protect_copy(replace(config, seed=3), config)
    assert own == PPOConfig(kl_coef=0.2, seed=3)
    with pytest.raises(ConfigError, match=r"kl_coef=0\.3 was set after the trainer was created"):
        own.kl_coef = 0.3
    config.kl_coef = 0.3
    assert "kl_coef=0.3 does not change the existing trainer" in caplog.text
    changed = replace(config, kl_coef=0.3)
    changed.kl_coef = -1.0
    with pytest.raises(ConfigError, match=r"kl_coef=-1\.0 must be at least 0"):
        replace(changed)


@pytest.mark.parametrize("copied", [copy, deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_script_may_assign_to_its_own_copy_of_the_settings_of_a_trainer(copied, caplog):
    config = PPOConfig(kl_coef=0.2)
    own = protect_copy(replace(config), config)
    for one in (copied(config), copied(own)):
        assert one == config
        one.kl_coef = 0.3
        assert one.kl_coef == 0.3
    assert caplog.records == []
