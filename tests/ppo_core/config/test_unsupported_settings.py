"""Settings of other trainers: supported, accepted because nothing differs, or refused by name."""

import subprocess
import sys
from dataclasses import FrozenInstanceError, asdict, fields, replace

import pytest
from transformers import TrainingArguments

from ppo_core import ConfigError, PPOConfig
from ppo_core.config.ppo_config import PPOConfig as PlainConfig
from ppo_core.config.unsupported_settings import INSTEAD, NO_EFFECT, refuse_unsupported
from tests.helpers.paths import ROOT

OURS = [field.name for field in fields(PPOConfig)]
MIGRATING = ROOT / "docs" / "migrating-from-trl.md"

TRL_1_12 = (
    "learning_rate dataset_num_proc num_mini_batches total_episodes "
    "local_rollout_forward_batch_size num_sample_generations response_length stop_token "
    "stop_token_id temperature missing_eos_penalty sft_model_path world_size num_total_batches "
    "micro_batch_size local_batch_size batch_size local_mini_batch_size mini_batch_size "
    "push_to_hub reward_model_path model_adapter_name ref_adapter_name num_ppo_epochs "
    "whiten_rewards kl_coef kl_estimator cliprange vf_coef cliprange_value gamma lam "
    "ds3_gather_for_generation logging_steps gradient_checkpointing bf16 lr_scheduler_kwargs "
    "use_liger_kernel torch_empty_cache_steps"
).split()
"""Fields that TRL 1.12's experimental PPOConfig adds to TrainingArguments, or changes there."""

TRL_0_11 = (
    "exp_name seed log_with task_name model_name query_dataset reward_model "
    "remove_unused_columns tracker_kwargs accelerator_kwargs project_kwargs tracker_project_name "
    "push_to_hub_if_best_kwargs steps learning_rate adap_kl_ctrl init_kl_coef kl_penalty target "
    "horizon gamma lam cliprange cliprange_value vf_coef batch_size forward_batch_size "
    "mini_batch_size gradient_accumulation_steps world_size ppo_epochs max_grad_norm "
    "optimize_cuda_cache optimize_device_cache early_stopping target_kl compare_steps "
    "ratio_threshold use_score_scaling use_score_norm score_clip whiten_rewards "
    "gradient_checkpointing is_encoder_decoder is_peft_model backward_batch_size "
    "global_backward_batch_size global_batch_size dataset_num_proc"
).split()
"""Fields of TRL 0.11's classic PPOConfig."""


def test_every_training_argument_is_supported_or_known_by_name():
    assert {field.name for field in fields(TrainingArguments)} <= {*OURS, *INSTEAD}


def test_every_setting_of_trl_is_supported_or_known_by_name():
    assert {*TRL_1_12, *TRL_0_11} <= {*OURS, *INSTEAD}


def test_the_page_on_migrating_has_every_setting():
    page = MIGRATING.read_text()
    named = {*TRL_1_12, *TRL_0_11, *OURS, *INSTEAD}
    assert not [name for name in sorted(named) if f"`{name}`" not in page]


def test_no_setting_is_both_supported_and_refused():
    assert not set(OURS) & set(INSTEAD)


@pytest.mark.parametrize("name", sorted(INSTEAD.keys() - NO_EFFECT))
def test_what_happens_anyway_is_accepted_and_anything_else_is_refused(name: str):
    accepted, instead = INSTEAD[name]
    for value in accepted:
        assert PPOConfig(**{name: value}) == PPOConfig()
    if name == "remove_unused_columns":  # both values are what happens
        return
    with pytest.raises(ConfigError) as refused:
        PPOConfig(**{name: "something else"})
    assert name in str(refused.value)
    assert "something else" in str(refused.value)
    assert instead in str(refused.value)


@pytest.mark.parametrize("name", sorted(NO_EFFECT))
def test_a_setting_that_changes_no_result_is_accepted_with_one_log_line(name: str, caplog):
    accepted, instead = INSTEAD[name]
    for value in accepted:
        PPOConfig(**{name: value})
    assert caplog.records == []
    assert PPOConfig(**{name: "something else"}) == PPOConfig()
    assert [record.getMessage() for record in caplog.records] == [
        f"{name}='something else' has no effect here: {instead}."
    ]


def test_the_settings_of_the_core_are_a_plain_frozen_dataclass():
    config = PlainConfig()
    with pytest.raises(FrozenInstanceError):
        config.kl_coef = 0.2
    with pytest.raises(TypeError, match="fp16"):
        PlainConfig(fp16=False)
    assert not hasattr(PlainConfig.__init__, "__wrapped__")
    assert PlainConfig().settings_of_result() == PPOConfig().settings_of_result()


def test_fp16_is_refused_with_what_to_use():
    with pytest.raises(ConfigError, match=r"fp16=True is not supported: set bf16=True"):
        PPOConfig(fp16=True)


def test_an_unknown_name_is_refused_with_the_nearest_known_one():
    with pytest.raises(ConfigError, match=r"setting eval_stratgy.*mean eval_strategy"):
        PPOConfig(eval_stratgy="no")


def test_an_unknown_name_near_to_none_is_refused():
    with pytest.raises(ConfigError, match=r"no setting zzz, so 3 would change nothing\. Remove"):
        PPOConfig(zzz=3)


def test_accepted_names_leave_no_trace():
    config = PPOConfig(fp16=False, tf32=None, seed=7)
    assert asdict(config) == asdict(PPOConfig(seed=7))


def test_a_copy_with_changes_is_checked_alike():
    assert replace(PPOConfig(seed=7), temperature=0.5, fp16=False).seed == 7
    with pytest.raises(ConfigError, match="fp16=True"):
        replace(PPOConfig(), fp16=True)


def test_supported_settings_are_given_back_and_the_rest_left_out():
    given = {"seed": 3, "fp16": False, "temperature": 0.5}
    assert refuse_unsupported(given, OURS) == {"seed": 3, "temperature": 0.5}


def test_settings_are_made_without_torch():
    code = (
        "import sys; from ppo_core import PPOConfig; PPOConfig(fp16=False); "
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
