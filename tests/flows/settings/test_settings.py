import sys
from math import inf
from typing import Any

import pytest
from peft import LoraConfig

from pipeline.launch.job import ppo_config
from pipeline.settings.make_settings import make_settings, read_preset
from pipeline.settings.settings import Settings
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.errors import ConfigError
from ppo_core.models.adapters import add_adapter, lora_config
from ppo_core.reporting.health import HealthMonitor
from tests.helpers.models.tiny import make_policy

OWN = {
    "policy": "p",
    "preferences": "pairs.jsonl",
    "prompts": "train.jsonl",
    "eval_prompts": "test.jsonl",
    "judge": "python:judge.py:judge",
}


def settings(table: dict[str, Any], **command_line: Any) -> Settings:
    return make_settings({**OWN, **table}, command_line)


def test_without_any_input_the_built_in_task_runs():
    made = make_settings({}, {"policy": None, "seed": 3, "total_episodes": 64})
    assert made.task == "tldr"
    assert made.seed == 3
    assert made.ppo.total_episodes == 64
    assert made.ppo.batch_size == read_preset("tldr")["ppo"]["batch_size"]


def test_both_presets_can_be_read():
    assert make_settings(read_preset("tldr"), {}).judge == "rule"
    assert make_settings(read_preset("stories"), {}).policy.endswith("tinystories-656k")


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults():
    made = settings({"seed": 2, "ppo": {"kl_coef": 0.1, "total_episodes": 512}}, total_episodes=8)
    assert (made.seed, made.ppo.kl_coef, made.ppo.total_episodes) == (2, 0.1, 8)
    assert made.ppo.gamma == 1.0
    assert settings({"seed": 2}, seed=5).seed == 5


def test_one_seed_is_the_seed_of_every_section():
    made = settings({"seed": 7})
    assert {made.sft.seed, made.reward_model_training.seed, made.ppo.seed} == {7}


def test_a_section_may_keep_a_seed_of_its_own():
    made = settings({"seed": 7, "reward_model_training": {"seed": 1}}, seed=9)
    assert (made.sft.seed, made.reward_model_training.seed, made.ppo.seed) == (9, 1, 9)


def test_a_whole_number_is_taken_where_a_fraction_is_due():
    assert settings({"ppo": {"learning_rate": 1}}).ppo.learning_rate == 1.0


def test_what_is_handed_in_is_not_changed():
    section = {"kl_coef": 0.1}
    settings({"ppo": section}, total_episodes=8)
    assert section == {"kl_coef": 0.1}


def test_a_reward_model_and_pairs_to_validate_it_need_no_pairs_to_train_on():
    given = {**OWN, "reward_model": "r", "preferences_test": "t.jsonl"}
    del given["preferences"]
    assert make_settings(given, {}).preferences == ""


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"registred_model": "x"}, r"Unknown setting registred_model.*registered_model\?"),
        ({"ppo": {"kl_coeff": 0.1}}, r"Unknown setting ppo\.kl_coeff.*ppo\.kl_coef\?"),
        ({"ppo": {"zzz": 1}}, r"Unknown setting ppo\.zzz\. Known here: output_dir"),
        ({"ppo": {"seed": 4.5}}, r"ppo\.seed=4\.5"),
        ({"ppo": {"eval_strategy": "steps"}}, r"ppo\.eval_strategy='steps' would be ignored"),
        ({"ppo": {"eval_steps": 2}}, r"eval_steps=2 would be ignored"),
        ({"ppo": {"hub_model_id": "me/x"}}, r"ppo\.hub_model_id='me/x' would be ignored.*MLflow"),
        ({"ppo": {"hub_private_repo": True}}, r"ppo\.hub_private_repo=True would be ignored"),
        ({"feedback_weight": 2.0}, r"feedback_weight=2 would be ignored.* no feedback"),
        ({"evaluation": {"min_kappa": 0.3}}, r"min_kappa=0\.3 would be ignored"),
        ({"selection": {"num_prompts": 9}}, r"num_prompts=9 would be .* Set method='judge'"),
        ({"selection": {"weights": [0.5]}}, r"weights=\[0\.5\] would be .*method='last'"),
        ({"selection": {"weights": [0.5], "method": "kl"}}, r"weights=.*method='kl'"),
        ({"fresh_pairs": {"enough_agreement": 0.9}}, r"enough_agreement=0\.9 would be ignored"),
        ({"ppo": {"warn_kl_note": "x"}}, r"ppo\.warn_kl_note='x' would be ignored"),
        ({"ppo": {"output_dir": "x"}}, r"ppo\.output_dir='x' would be ignored: set output_dir"),
        ({"ppo": {"batch_size": "many"}}, r"ppo\.batch_size='many' must be a whole number"),
        ({"ppo": {"batch_size": 2.5}}, r"ppo\.batch_size=2\.5"),
        ({"ppo": {"whiten_rewards": 1}}, r"ppo\.whiten_rewards=1 must be True or False"),
        ({"ppo": {"kl_estimator": "k9"}}, r"ppo\.kl_estimator='k9'"),
        ({"ppo": 3}, r"ppo=3 must be a section, \[ppo\]"),
        ({"seed": True}, r"seed=True"),
        ({"seed": -1}, r"seed=-1 must be"),
        ({"seed": 2**32}, r"seed=4294967296 must be"),
        ({"task": "xsum"}, r"task='xsum' must be one of empty, tldr"),
        ({"held_out_share": 1.0}, r"held_out_share=1\.0"),
        ({"ppo": {"batch_size": 10, "num_mini_batches": 4}}, r"2 responses would be dropped"),
        ({"evaluation": {"num_examples": 0}}, r"^\[evaluation\] num_examples=0 must be"),
        ({"evaluation": {"max_invalid": 1.0}}, r"max_invalid=1\.0 must be at least 0"),
        ({"evaluation": {"max_flip_rate": 1.5}}, r"max_flip_rate=1\.5"),
        ({"evaluation": {"min_kappa": 1.5}}, r"min_kappa=1\.5 must be between -1 and 1"),
        ({"evaluation": {"temperature": -0.1}}, r"temperature=-0\.1"),
        ({"evaluation": {"top_k": -1}}, r"top_k=-1"),
        ({"evaluation": {"top_p": 0.0}}, r"top_p=0\.0"),
        ({"judging": {"criterion": " "}}, r"^\[judging\] criterion=' ' must be a sentence"),
        ({"judging": {"attempts": 0}}, r"attempts=0"),
        ({"judging": {"concurrency": 0}}, r"concurrency=0"),
        ({"judging": {"deadline_seconds": 0.0}}, r"deadline_seconds=0\.0"),
        ({"judging": {"retries": -1}}, r"retries=-1"),
        ({"judging": {"max_calls": 0}}, r"max_calls=0"),
        ({"judging": {"max_tokens": -5}}, r"max_tokens=-5"),
        ({"judging": {"sampling": "hot"}}, r"judging\.sampling='hot'"),
        ({"reward_gate": {"min_accuracy": 1.5}}, r"^\[reward_gate\] min_accuracy=1\.5"),
        ({"reward_gate": {"max_calibration_error": -0.1}}, r"max_calibration_error=-0\.1"),
        ({"reward_gate": {"max_length_correlation": 2.0}}, r"max_length_correlation=2\.0"),
        ({"reward_gate": {"min_shorter_accuracy": -1.0}}, r"min_shorter_accuracy=-1\.0"),
        ({"reward_gate": {"min_sample_deviation": -1.0}}, r"min_sample_deviation=-1\.0"),
        ({"reward_gate": {"max_degenerate_preferred": 2.0}}, r"max_degenerate_preferred=2\.0"),
        ({"reward_gate": {"tolerance": 0.0}}, r"tolerance=0\.0"),
        ({"reward_gate": {"num_prompts": 0}}, r"num_prompts=0"),
        ({"reward_gate": {"samples_per_prompt": 4}}, r"samples_per_prompt=4"),
        ({"promotion": {"min_win_rate": 1.0}}, r"^\[promotion\] min_win_rate=1\.0 must be"),
        ({"promotion": {"max_kl": 0.0}}, r"max_kl=0\.0 must be above 0"),
        ({"promotion": {"max_kl": 10**400}}, r"promotion\.max_kl=10+ must be a number"),
        ({"promotion": {"max_length_ratio": 0.5}}, r"max_length_ratio=0\.5 must be at least 1"),
        ({"promotion": {"max_repetition": 30.0}}, r"max_repetition=30\.0 must be between"),
        ({"lora": {"r": -1}}, r"^\[lora\] r=-1 must be at least 0"),
        ({"lora": {"r": 4, "alpha": 0}}, r"alpha=0 must be a whole number"),
        ({"lora": {"r": 4, "target_modules": []}}, r"target_modules=\[\] must be"),
        ({"lora": {"r": 4, "target_modules": "q_proj"}}, r"lora\.target_modules='q_proj'"),
        ({"lora": {"r": 4, "target_modules": ["all-linear", "q"]}}, r"read as a module name"),
        ({"lora": {"alpha": 8}}, r"alpha=8 would be ignored"),
        (
            {"start_from": "champion", "reward_model": "m"},
            r"start_from='champion' cannot be used with reward_model='m'",
        ),
        (
            {"start_from": "champion", "fresh_pairs": {"count": 64, "labeller": "rule"}},
            r"cannot be used with fresh_pairs\.count=64",
        ),
        (
            {"start_from": "champion", "fresh_pairs": {"labels": "labels.jsonl"}},
            r"cannot be used with fresh_pairs\.labels='labels\.jsonl'",
        ),
        (
            {"start_from": "champion", "ppo": {"advantage_estimator": "reinforce"}},
            r"cannot be used with ppo\.advantage_estimator='reinforce': there is no critic",
        ),
        (
            {"start_from": "champion", "ppo": {"shared_critic": True}},
            r"cannot be used with ppo\.shared_critic=true",
        ),
        ({"start_from": "chmpion"}, r"start_from='chmpion'"),
        ({"lora": {"target_modules": ["q"]}}, r"target_modules=\['q'\] would be ignored"),
        ({"lora": {"dropout": 0.1}}, r"Unknown setting lora\.dropout"),
        ({"ppo": {"model_adapter_name": "a"}}, r"ppo\.model_adapter_name='a' would be ignored"),
        (
            {"lora": {"r": 4}, "ppo": {"reference_refresh_updates": 2}},
            r"reference_refresh_updates=2 copies the policy into the reference, but with lora\.r=4",
        ),
        ({"ppo": {"stop_token": "None"}}, r"ppo\.stop_token='None'"),
        ({"task": "tldr"}, r"task='tldr' generates all inputs, so policy, preferences"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(table: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        settings(table)


def test_a_token_is_refused_and_never_printed():
    with pytest.raises(ConfigError, match=r"^ppo\.hub_token holds a secret") as refused:
        settings({"ppo": {"hub_token": "hf_secret"}})
    assert "hf_secret" not in str(refused.value)


def test_no_stop_token_is_written_as_none():
    assert settings({"ppo": {"stop_token": "none"}}).ppo.stop_token is None
    assert settings({}).ppo.stop_token == "eos"


def test_without_a_rank_all_parameters_are_trained():
    assert settings({}).sft.lora_arguments() is None


def lora_of(table: dict[str, Any]) -> LoraConfig:
    section = settings({"sft": {"lora": table}}).sft
    return lora_config(**section.lora_arguments(), task_type="CAUSAL_LM")


def test_adapters_have_a_rate_of_their_own_and_a_section_below_the_training():
    made = settings({"sft": {"lora": {"r": 4, "dropout": 0.0}}})
    plain = settings({})
    assert made.sft.learning_rate == pytest.approx(10 * plain.sft.learning_rate)
    assert made.reward_model_training == plain.reward_model_training
    with pytest.raises(
        ConfigError, match=r"Unknown setting sft\.lora\.rank\. Known here: r, alpha"
    ):
        settings({"sft": {"lora": {"rank": 4}}})


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_with_a_rank_adapters_on_all_linear_layers_are_trained(family: str):
    pytest.importorskip("peft")
    adapted = add_adapter(make_policy(family), lora_of({"r": 4}))
    trained = {name for name, weight in adapted.named_parameters() if weight.requires_grad}
    assert all("lora_" in name for name in trained)
    assert {min(adapted.get_parameter(name).shape) for name in trained} == {4}
    layers = [layer for layer in adapted.modules() if hasattr(layer, "lora_A")]
    assert {layer.scaling["default"] for layer in layers} == {32 / 4}
    # Two blocks of seven linear layers, or four.
    assert len(layers) == {"llama": 14, "gpt2": 8}[family]


def test_adapters_are_put_on_the_named_modules_alone():
    pytest.importorskip("peft")
    lora = lora_of({"r": 2, "alpha": 6, "target_modules": ["q_proj"]})
    adapted = add_adapter(make_policy(), lora)
    layers = [name for name, layer in adapted.named_modules() if hasattr(layer, "lora_A")]
    assert [name.rpartition(".")[2] for name in layers] == ["q_proj", "q_proj"]


def test_adapters_without_peft_are_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"^\[lora\] r=4 needs the package peft.*pip install"):
        settings({"lora": {"r": 4}})
    assert settings({}).lora.r == 0


def test_missing_inputs_are_named():
    with pytest.raises(ConfigError, match=r"^preferences missing: .*needs policy, pref.*--pref"):
        make_settings({}, {"policy": "p", "prompts": "x.jsonl"})
    with pytest.raises(ConfigError, match=r"^policy, prompts missing: "):
        make_settings({}, {"preferences": "x.jsonl", "eval_prompts": "y.jsonl", "judge": "rule"})


def test_a_file_without_inputs_is_for_the_built_in_task_if_it_says_so():
    file = {"ppo": {"learning_rate": 1e-6}}
    with pytest.raises(ConfigError, match=r"or name no input and set task='tldr' to run the"):
        make_settings(file, {})
    assert make_settings(file | {"task": "tldr"}, {}).task == "tldr"


def test_policy_preferences_and_prompts_are_all_that_a_run_needs():
    made = make_settings({}, {"policy": "p", "preferences": "a", "prompts": "b"})
    assert made.eval_prompts == made.judge == made.task == ""


def test_a_given_reward_model_needs_a_judge_or_pairs_to_train_one_on():
    given = {"policy": "p", "prompts": "b", "reward_model": "rm", "preferences_test": "t"}
    with pytest.raises(ConfigError, match=r"^judge missing: .*\(--judge\).*\(--preferences\)"):
        make_settings(given, {})
    assert make_settings({**given, "judge": "rule"}, {}).preferences == ""
    assert make_settings({**given, "preferences": "a"}, {}).judge == ""


def test_the_kl_warning_comes_before_the_limit_of_promotion():
    assert settings({}).ppo.warn_kl == Settings(**OWN).ppo.warn_kl == 15.0
    assert settings({"promotion": {"max_kl": 8}}).ppo.warn_kl == 6.0
    assert settings({"promotion": {"max_kl": inf}}).ppo.warn_kl == 15.0
    assert settings({"ppo": {"warn_kl": 19.9}}).ppo.warn_kl == 19.9
    for late in ({"warn_kl": 20.0}, {"warn_kl": 50.0}):
        with pytest.raises(
            ConfigError, match=r"^ppo\.warn_kl=\d+ must be below .*max_kl=20: .* 0\.75"
        ):
            settings({"ppo": late})


def test_the_kl_warning_of_the_flow_says_what_promotion_will_do():
    ppo = ppo_config(settings({"promotion": {"max_kl": 8.0}}))
    (warning,) = HealthMonitor(ppo).check({"objective/kl": 7.0})
    assert "above 6 (warn_kl)" in str(warning)
    assert str(warning).endswith("Promotion will be refused above promotion.max_kl=8.")
    assert ppo_config(settings({"promotion": {"max_kl": inf}})).warn_kl_note == ""
    (alone,) = HealthMonitor(PPOConfig()).check({"objective/kl": 51.0})
    assert "romotion" not in str(alone)


def test_a_ppo_section_without_sizes_has_those_of_published_runs():
    ppo = make_settings({**OWN, "ppo": {"kl_coef": 0.1}}, {}).ppo
    assert (ppo.batch_size, ppo.total_episodes) == (512, 100_000)
    by_parts = {"gradient_accumulation_steps": 4, "num_train_epochs": 2.0}
    ppo = make_settings({**OWN, "ppo": by_parts}, {}).ppo
    assert (ppo.batch_size, ppo.total_episodes, ppo.num_train_epochs) == (None, None, 2.0)


def test_a_setting_keeps_its_name_of_version_0_1():
    section = {"centre_rewards_coefficient": 0.01}
    settings = make_settings({**OWN, "reward_model_training": section}, {})
    assert settings.reward_model_training.center_rewards_coefficient == 0.01
