"""Adapters on one base: which adapter a forward pass uses, and which parameters are trained."""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen2Config

from ppo_core.errors import ModelError
from ppo_core.models.adapters import (
    add_adapter,
    add_critic_adapter,
    check_adapter,
    checkpoint_activations,
    is_peft,
    plain_model,
    using_adapter,
)
from ppo_core.models.critic import Critic
from ppo_core.models.files.adapter_weights import save_adapter
from ppo_core.models.files.merge_adapter import merged_copy
from ppo_core.models.loading import load_policy
from ppo_core.models.model_with_value_head import AutoModelForCausalLMWithValueHead
from ppo_core.models.policy import LanguageModel
from ppo_core.models.reward_adapter import AdapterClassifier, load_reward_adapter
from ppo_core.models.reward_model import RewardModel
from ppo_core.rollout.sample_responses import sample_responses
from ppo_core.rollout.token_sampling import SamplingSettings
from tests.helpers.models.model_hub import model_hub
from tests.helpers.models.tiny import CONFIGS, EOS, make_policy, make_prompts, make_tokenizer
from tests.helpers.paths import ROOT

peft = pytest.importorskip("peft")


IDS = torch.tensor([[5, 9, 3, 17, 44], [8, 8, 21, 2, 30]])
LORA = {"r": 3, "target_modules": ["q_proj", "v_proj", "down_proj"]}
METHODS = {
    "lora": peft.LoraConfig(**LORA),
    "lora with whole embeddings": peft.LoraConfig(**LORA, modules_to_save=["embed_tokens"]),
    "lora with new tokens": peft.LoraConfig(**LORA, trainable_token_indices=[3, 9]),
    "dora": peft.LoraConfig(**LORA, use_dora=True),
    "loha": peft.LoHaConfig(**LORA),
    "lokr": peft.LoKrConfig(**LORA),
    "ia3": peft.IA3Config(target_modules=LORA["target_modules"], feedforward_modules=["down_proj"]),
    "oft": peft.OFTConfig(target_modules=["q_proj"], oft_block_size=4),
}


def spread(model, name: str, seed: int) -> None:
    """Add noise to an adapter, which initially has no effect."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if f".{name}." in key or key.endswith(f".{name}"):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def make_adapted(method: str = "lora", *, family: str = "qwen2"):
    """Return a base with a policy adapter and a critic adapter, both random."""
    model = add_adapter(make_policy(family), METHODS[method], "policy")
    add_critic_adapter(model, METHODS[method])
    spread(model, "policy", 1)
    spread(model, "critic", 2)
    return model


def logits(model, name: str | None) -> Tensor:
    with using_adapter(model, name):
        return plain_model(model)(input_ids=IDS, use_cache=False).logits


def loss(model, name: str | None) -> Tensor:
    weights = torch.linspace(-1, 1, CONFIGS["qwen2"].vocab_size)
    return (torch.log_softmax(logits(model, name), dim=-1) * weights).mean()


def gradients(model) -> dict[str, Tensor]:
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def asking(model) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in model.named_parameters()}


# --- What is a PeftModel, and what becomes one ---


def test_finding_out_does_not_import_peft(monkeypatch):
    monkeypatch.delitem(sys.modules, "peft")
    assert not is_peft(make_policy("qwen2"))
    assert "peft" not in sys.modules


def test_a_plain_model_is_itself_and_an_adapted_one_has_it_inside():
    policy = make_policy("qwen2")
    assert not is_peft(policy)
    assert plain_model(policy) is policy
    adapted = add_adapter(policy, METHODS["lora"])
    assert is_peft(adapted)
    assert plain_model(adapted) is policy


def test_without_peft_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModelError, match=r"pip install 'rlhf-flow\[peft\]'"):
        add_adapter(make_policy("qwen2"), METHODS["lora"])


def test_a_second_adapter_on_top_of_one_is_refused():
    adapted = add_adapter(make_policy("qwen2"), METHODS["lora"])
    for model in (adapted, plain_model(adapted)):
        with pytest.raises(ModelError, match="TRL #4713"):
            add_adapter(model, METHODS["lora"])


def test_what_is_no_peft_config_or_no_transformers_model_is_refused():
    with pytest.raises(ModelError, match="peft_config is a dict, and must be a PeftConfig"):
        add_adapter(make_policy("qwen2"), {"r": 8})
    with pytest.raises(ModelError, match="Linear is not a model of transformers"):
        add_adapter(torch.nn.Linear(2, 2), METHODS["lora"])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (peft.PromptTuningConfig(num_virtual_tokens=2), "could be switched"),
        (peft.LNTuningConfig(), "could be switched"),
        (peft.LoraConfig(bias="all"), "so changes the reference"),
        (peft.LoraConfig(init_lora_weights="pissa"), "changes the base"),
        (peft.LoraConfig(init_lora_weights="olora"), "changes the base"),
        (peft.LoraConfig(alora_invocation_tokens=[5]), "invocation token"),
        (peft.LoraConfig(inference_mode=True), "nothing would be trained"),
        (peft.LoraConfig(target_modules=["nowhere"]), "cannot add the adapter 'default'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_adapter_that_would_not_do_what_ppo_needs_is_refused(config, words: str):
    with pytest.raises(ModelError, match=words):
        add_adapter(make_policy("qwen2"), config)


def test_a_loaded_model_whose_adapter_cannot_be_switched_is_refused():
    model = peft.get_peft_model(make_policy("qwen2"), peft.LNTuningConfig())
    with pytest.raises(ModelError, match="could be switched"):
        plain_model(model)


def test_a_merged_adapter_is_refused():
    model = make_adapted()
    model.merge_adapter(["policy"])
    with pytest.raises(ModelError, match=r"model.unmerge_adapter\(\)"):
        plain_model(model)


def test_the_config_handed_in_is_left_as_it_was():
    config = peft.LoraConfig(r=2)
    before = config.to_dict()
    add_adapter(make_policy("qwen2"), config)
    assert config.to_dict() == before


def test_lora_dropout_is_off_in_evaluation_so_tokens_keep_the_probability_they_were_sampled_at():
    config = peft.LoraConfig(**LORA, lora_dropout=0.5)
    model = add_adapter(make_policy("qwen2"), config, "policy")
    add_critic_adapter(model, config)
    spread(model, "policy", 1)
    assert not any(module.training for module in model.modules())
    policy = LanguageModel(plain_model(model), within=partial(using_adapter, model, "policy"))
    rollout = sample_responses(
        policy,
        make_prompts([3, 5]),
        torch.rand(2, 6, generator=torch.Generator().manual_seed(0)),
        SamplingSettings(stop_token_id=EOS, temperature=0.7),
        batch_size=2,
    )
    again, _ = policy(rollout.token_rows(torch.arange(2)), 0.7)
    assert_close(again, rollout.logprobs[rollout.response_mask], atol=1e-5, rtol=0)


def test_a_name_that_no_adapter_has_is_refused_with_those_there_are():
    model = make_adapted()
    check_adapter(model, "critic")
    with pytest.raises(ModelError, match=r"no adapter 'reward'.* 'policy', 'critic'"):
        check_adapter(model, "reward")
    with pytest.raises(ModelError, match="no adapter 'reward'"), using_adapter(model, "reward"):
        pass


# --- Switching ---


@pytest.mark.parametrize("method", METHODS)
def test_each_adapter_gives_what_it_gives_alone_and_none_gives_the_base(method: str):
    model = make_adapted(method)
    expected: dict[str | None, Tensor] = {None: make_policy("qwen2")(input_ids=IDS).logits}
    for name in ("policy", "critic"):
        alone = add_adapter(make_policy("qwen2"), METHODS[method])
        weights = peft.get_peft_model_state_dict(model, adapter_name=name)
        peft.set_peft_model_state_dict(alone, weights)
        expected[name] = alone(input_ids=IDS).logits
    for name in expected:
        assert_close(logits(model, name), expected[name])
        others = [expected[other] for other in expected if other != name]
        assert all((expected[name] - other).abs().max() > 1e-3 for other in others)
    assert_close(model(input_ids=IDS).logits, expected["policy"])


def test_the_choice_nests_and_outlives_exceptions():
    model = make_adapted()
    plain = plain_model(model)
    policy, critic, base = logits(model, "policy"), logits(model, "critic"), logits(model, None)
    with using_adapter(model, "critic"):
        with using_adapter(model, None):
            assert_close(plain(input_ids=IDS).logits, base)
            with using_adapter(model, "policy"):
                assert_close(plain(input_ids=IDS).logits, policy)
            assert_close(plain(input_ids=IDS).logits, base)
        assert_close(plain(input_ids=IDS).logits, critic)
        with pytest.raises(KeyError), using_adapter(model, None):
            raise KeyError
        assert_close(plain(input_ids=IDS).logits, critic)
    assert_close(plain(input_ids=IDS).logits, policy)


def test_an_adapter_switched_off_by_hand_is_off_again_afterwards():
    model = make_adapted()
    with model.disable_adapter():
        critic = logits(model, "critic")
        after = model(input_ids=IDS).logits
    assert_close(after, logits(model, None))
    assert_close(critic, logits(model, "critic"))


@pytest.mark.parametrize("method", METHODS)
def test_switching_changes_no_requires_grad_inside_or_afterwards(method: str):
    model = make_adapted(method)
    before = asking(model)
    for name in ("critic", None, "policy"):
        with using_adapter(model, name):
            assert asking(model) == before
        assert asking(model) == before


@pytest.mark.parametrize("method", METHODS)
def test_one_backward_pass_through_both_adapters_gives_the_gradients_of_each(method: str):
    model = make_adapted(method)
    loss(model, "policy").backward()
    of_policy = gradients(model)
    loss(model, "critic").backward()
    of_critic = gradients(model)
    assert of_policy and of_critic and not of_policy.keys() & of_critic.keys()

    both = loss(model, "policy") + loss(model, "critic")
    loss(model, None)
    both.backward()
    assert_close(gradients(model), of_policy | of_critic, atol=1e-6, rtol=0)


def test_embeddings_saved_whole_answer_for_an_adapter_that_has_none():
    model = add_adapter(make_policy("qwen2"), METHODS["lora with whole embeddings"], "policy")
    add_critic_adapter(model, METHODS["lora"])
    spread(model, "policy", 1)
    embedding = plain_model(model).get_input_embeddings()
    with using_adapter(model, "critic"):
        assert_close(embedding.weight, embedding.original_module.weight)
    with using_adapter(model, "policy"):
        assert_close(embedding.weight, embedding.modules_to_save["policy"].weight)
    assert_close(logits(model, "critic"), logits(model, None))  # LoRA starts by doing nothing


# --- Gradient checkpointing ---


def test_checkpointed_passes_under_several_adapters_have_the_gradients_of_plain_ones():
    model = make_adapted("lora with whole embeddings")
    model.train()
    (loss(model, "policy") + loss(model, "critic")).backward()
    expected = gradients(model)
    checkpoint_activations(model)
    (loss(model, "policy") + loss(model, "critic")).backward()
    assert_close(gradients(model), expected, atol=1e-6, rtol=0)
    assert_close(model(input_ids=IDS).logits, logits(model, "policy"))


def test_plain_checkpointing_would_compute_the_gradients_of_another_model():
    model = make_adapted()
    model.train()
    loss(model, "critic").backward()
    expected = gradients(model)
    plain_model(model).activation_checkpointing_enable()
    loss(model, "critic").backward()
    wrong = gradients(model)
    assert any((wrong[name] - expected[name]).abs().max() > 1e-4 for name in expected)


# --- Critic and reward on the policy's base ---


def test_a_critic_adapter_learns_beside_the_policy_which_stays_active():
    model = make_adapted()
    assert model.active_adapters == ["policy"]
    learning = {name for name, asks in asking(model).items() if asks}
    assert learning == {name for name in asking(model) if ".policy." in name or ".critic." in name}


@pytest.mark.parametrize(
    ("config", "name", "words"),
    [
        (METHODS["lora"], "policy", "already exists"),
        (METHODS["loha"], "critic", "different peft types"),
        (peft.LoraConfig(inference_mode=True), "critic", "nothing would be trained"),
        ("lora", "critic", "peft_config is a str"),
    ],
)
def test_a_critic_adapter_that_cannot_be_added_is_refused(config, name: str, words: str):
    model = add_adapter(make_policy("qwen2"), METHODS["lora"], "policy")
    with pytest.raises(ModelError, match=words):
        add_critic_adapter(model, config, name)
    assert list(model.peft_config) == ["policy"]


def save_classifier(base, folder, *, labels: int = 1, **settings):
    """Save a LoRA classifier on the base, with random adapter and head, by PEFT."""
    base.save_pretrained(folder / "base")
    classifier = AutoModelForSequenceClassification.from_pretrained(
        folder / "base", num_labels=labels
    )
    targets = ["c_attn"] if base.config.model_type == "gpt2" else LORA["target_modules"]
    config = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=targets, **settings)
    adapted = peft.get_peft_model(classifier.eval(), config).eval()
    spread(adapted, "default", 7)
    adapted.save_pretrained(folder / "reward")
    return adapted


@pytest.mark.parametrize("settings", [{}, {"modules_to_save": ["embed_tokens"]}], ids=["", "whole"])
def test_a_reward_adapter_on_the_causal_base_scores_like_the_classifier_it_was(tmp_path, settings):
    base = make_policy("qwen2")
    classifier = save_classifier(base, tmp_path, **settings)
    model = add_adapter(base, METHODS["lora with whole embeddings"], "policy")
    spread(model, "policy", 1)
    policy, before = logits(model, "policy"), asking(model)
    reward = RewardModel(load_reward_adapter(model, tmp_path / "reward"), make_tokenizer())

    ids, lengths = torch.randint(2, 61, (4, 9)), torch.tensor([9, 4, 7, 1])
    rows = [row[:length] for row, length in zip(ids, lengths, strict=True)]
    expected = torch.stack([classifier(input_ids=row[None]).logits[0, 0] for row in rows])
    assert_close(reward.score_rows(ids, lengths), expected, atol=1e-5, rtol=0)
    assert expected.std() > 1e-2
    # The policy is as it was, and nothing of the reward model learns.
    assert_close(logits(model, "policy"), policy)
    assert asking(model) == before | {n: False for n in asking(model) if n not in before}
    assert not any(parameter.requires_grad for parameter in reward.model.parameters())


def test_a_reward_adapter_loads_onto_other_families_too(tmp_path):
    base = make_policy("gpt2")
    classifier = save_classifier(base, tmp_path)
    model = add_adapter(base, peft.LoraConfig(target_modules=["c_attn"]))
    reward = RewardModel(load_reward_adapter(model, tmp_path / "reward"), make_tokenizer())
    expected = classifier(input_ids=IDS).logits[:, 0]
    # The last position is each sequence's last token: no padding, and no pad token in the ids.
    assert_close(reward.score_rows(IDS, torch.tensor([5, 5])), expected, atol=1e-5, rtol=0)


def test_what_happens_to_the_reward_model_does_not_reach_the_shared_base(tmp_path):
    base = make_policy("qwen2")
    save_classifier(base, tmp_path)
    model = add_adapter(base, METHODS["lora"])
    before = asking(model)
    classifier = load_reward_adapter(model, tmp_path / "reward")
    assert isinstance(classifier, AdapterClassifier)
    assert classifier.config.num_labels == 1
    assert (classifier.score.in_features, classifier.score.out_features) == (32, 1)
    classifier.train().to(torch.float64).requires_grad_(True)
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert {name: asks for name, asks in asking(model).items() if name in before} == before
    assert sum(parameter.numel() for parameter in classifier.parameters()) == 32


def test_no_critic_is_copied_from_a_reward_adapter(tmp_path):
    base = make_policy("qwen2")
    save_classifier(base, tmp_path)
    model = add_adapter(base, METHODS["lora"])
    reward = RewardModel(load_reward_adapter(model, tmp_path / "reward"), make_tokenizer())
    with pytest.raises(ModelError, match="add_critic_adapter"):
        Critic.from_reward_model(reward)


def test_a_reward_adapter_with_several_labels_or_no_head_is_refused(tmp_path):
    base = make_policy("qwen2")
    save_classifier(base, tmp_path, labels=3)
    model = add_adapter(base, METHODS["lora"], "policy")
    for _ in range(2):
        with pytest.raises(ModelError, match="a head with 3 labels"):
            load_reward_adapter(model, tmp_path / "reward")
    save_adapter(model, tmp_path / "policy")
    with pytest.raises(ModelError, match="no head 'score'"):
        load_reward_adapter(model, tmp_path / "policy")
    with pytest.raises(ModelError, match="No reward adapter can be loaded"):
        load_reward_adapter(model, tmp_path / "nowhere")
    weights = tmp_path / "policy" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ModelError, match="No reward adapter can be loaded"):
        load_reward_adapter(model, tmp_path / "policy")


def test_a_reward_adapter_of_another_base_is_refused_and_another_can_be_loaded(tmp_path):
    model = add_adapter(make_policy("qwen2"), METHODS["lora"])
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    save_classifier(make_policy("gpt2"), tmp_path / "gpt2")
    with pytest.raises(ModelError, match="cannot add the adapter 'reward'"):
        load_reward_adapter(model, tmp_path / "gpt2" / "reward")
    wider = Qwen2Config(**{**CONFIGS["qwen2"].to_dict(), "intermediate_size": 96})
    save_classifier(AutoModelForCausalLM.from_config(wider), tmp_path / "wider")
    # lora_A of down_proj, in each of two layers: as it should be, and as it is.
    with pytest.raises(ModelError, match="another base than this Qwen2ForCausalLM: 4 tensors"):
        load_reward_adapter(model, tmp_path / "wider" / "reward")
    save_classifier(make_policy("qwen2"), tmp_path / "right")
    load_reward_adapter(model, tmp_path / "right" / "reward")
    assert trained == [name for name, p in model.named_parameters() if p.requires_grad]


# --- Saving ---


@pytest.mark.parametrize("method", METHODS)
def test_a_merged_copy_is_a_plain_model_and_the_adapted_one_is_left_as_it_was(method, tmp_path):
    model = make_adapted(method)
    expected = {name: logits(model, name) for name in ("policy", "critic", None)}
    merged = merged_copy(model)
    assert_close(merged(input_ids=IDS).logits, expected["policy"], atol=1e-5, rtol=0)
    assert_close(merged_copy(model, "critic")(input_ids=IDS).logits, expected["critic"])
    merged.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("adapter*"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_close(loaded(input_ids=IDS).logits, expected["policy"], atol=1e-5, rtol=0)
    for name, before in expected.items():
        assert_close(logits(model, name), before)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_merging_an_adapter_that_is_not_there_names_it(is_sharded: bool):
    model = make_adapted("lora")
    with pytest.raises(ModelError, match="'reward'"):
        merged_copy(model, "reward", weights=model.state_dict() if is_sharded else None)


def test_an_adapter_loads_onto_the_revision_of_the_base_that_it_was_trained_on(tmp_path):
    made = {f"org/policy@{revision}": tmp_path / revision for revision in ("main", "v1")}
    for seed, folder in enumerate(made.values()):
        make_policy(seed=seed).save_pretrained(folder)
    with model_hub(made, tmp_path / "cache"):
        policy = load_policy("org/policy@v1")
        save_adapter(add_adapter(policy, METHODS["lora"]), tmp_path / "adapter")
        loaded = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "adapter")
    weights = (model.get_input_embeddings().weight for model in (policy, loaded.pretrained_model))
    assert torch.equal(*weights)


@pytest.mark.parametrize("name", ["policy", "default"])
def test_a_saved_adapter_loads_again_onto_the_base(tmp_path, name: str):
    model = add_adapter(make_policy("qwen2"), METHODS["lora"], name)
    add_critic_adapter(model, METHODS["lora"])
    spread(model, name, 1)
    spread(model, "critic", 2)
    save_adapter(model, tmp_path / "policy")
    save_adapter(model, tmp_path / "critic", "critic")
    for saved, used in (("policy", name), ("critic", "critic")):
        assert all(file.is_file() for file in (tmp_path / saved).iterdir())
        files = {file.name for file in (tmp_path / saved).iterdir()}
        assert {"adapter_model.safetensors", "adapter_config.json"} <= files
        assert not [file for file in files if file.endswith((".bin", ".pt"))]
        loaded = peft.PeftModel.from_pretrained(make_policy("qwen2"), tmp_path / saved)
        assert list(loaded.peft_config) == ["default"]
        assert_close(loaded(input_ids=IDS).logits, logits(model, used))


@pytest.mark.slow
def test_a_saved_adapter_is_the_same_file_in_every_process(tmp_path):
    # PEFT keeps names in a set, whose order is another one for another hash seed.
    code = (
        "import sys; from peft import LoraConfig; "
        "from tests.helpers.models.tiny import make_policy; "
        "from ppo_core.models.files.adapter_weights import save_adapter; "
        "from ppo_core.models.adapters import add_adapter; "
        "names = ['q_proj', 'k_proj', 'v_proj', 'o_proj', 'up_proj', 'down_proj']; "
        "config = LoraConfig(task_type='CAUSAL_LM', target_modules=names); "
        "save_adapter(add_adapter(make_policy(), config), sys.argv[1])"
    )
    for seed in ("1", "2"):
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / seed)],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            check=True,
        )
    first, second = (tmp_path / seed / "adapter_config.json" for seed in ("1", "2"))
    assert first.read_text() == second.read_text()
