"""Language models with a value head, for all families."""

import copy
import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, GPT2Model
from transformers.utils import hub

from ppo_core.errors import ConfigError, ModelError
from ppo_core.models.model_with_value_head import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
)
from tests.helpers.models.families import (
    DECODERS,
    ENCODER_DECODERS,
    FAMILIES,
    make_inputs,
    make_model,
)

LORA = {"r": 2, "task_type": "CAUSAL_LM", "init_lora_weights": False}


def class_of(family: str):
    if family in ENCODER_DECODERS:
        return AutoModelForSeq2SeqLMWithValueHead
    return AutoModelForCausalLMWithValueHead


def with_head(family: str, **settings):
    return class_of(family).from_pretrained(make_model(family), **settings).eval()


@torch.no_grad()
def values_of(model, family: str = "gpt2"):
    return model(**make_inputs(family))[2]


@torch.no_grad()
def assert_same(model, other, family: str = "gpt2") -> None:
    for ours, theirs in zip(
        model(**make_inputs(family)), other(**make_inputs(family)), strict=True
    ):
        assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_are_the_plain_model_s_and_values_read_what_its_head_reads(family: str):
    plain, inputs = make_model(family), make_inputs(family)
    model = with_head(family)
    output = plain(**inputs, output_hidden_states=True)
    hidden = output.decoder_hidden_states if family in ENCODER_DECODERS else output.hidden_states
    # T5 with tied embeddings shrinks its states by sqrt(32) before its head.
    states = hidden[-1] * (32**-0.5 if family == "t5" else 1)
    summary = model.v_head.summary

    logits, loss, values = model(**inputs)

    assert_close(logits, output.logits, rtol=0, atol=0)
    assert loss is None
    assert_close(values, states @ summary.weight[0] + summary.bias)
    assert values.shape == logits.shape[:2]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_what_is_saved_loads_plainly_and_again_with_its_head(family: str, tmp_path: Path):
    model, inputs = with_head(family), make_inputs(family)
    logits, _, values = model(**inputs)
    model.save_pretrained(tmp_path)

    auto_class = AutoModelForSeq2SeqLM if family in ENCODER_DECODERS else AutoModelForCausalLM
    plain, found = auto_class.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    again = class_of(family).from_pretrained(tmp_path).eval()

    assert not any(found.values()), found
    assert_close(plain.eval()(**inputs).logits, logits, rtol=0, atol=0)
    assert_close(again(**inputs)[0], logits, rtol=0, atol=0)
    assert_close(again(**inputs)[2], values, rtol=0, atol=0)


@pytest.mark.parametrize("family", ["gpt2", "qwen2", "t5"])
def test_shards_change_nothing(family: str, tmp_path: Path):
    model = with_head(family)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    again = class_of(family).from_pretrained(tmp_path).eval()
    assert_same(again, model, family)


def save_as_trl(model, folder: Path, **how) -> None:
    """Save one state dict with the tensors of policy and head, as TRL does."""
    head = {f"v_head.{name}": tensor for name, tensor in model.v_head.state_dict().items()}
    model.pretrained_model.save_pretrained(
        folder, state_dict=model.pretrained_model.state_dict() | head, **how
    )


@pytest.mark.parametrize("how", [{}, {"max_shard_size": "20KB"}], ids=["one file", "shards"])
def test_the_head_of_a_checkpoint_of_trl_is_found(how: dict, tmp_path: Path):
    model = with_head("gpt2")
    save_as_trl(model, tmp_path, **how)
    assert bool(how) != (tmp_path / "model.safetensors").exists()
    again = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path).eval()
    assert_close(values_of(again), values_of(model), rtol=0, atol=0)


@torch.no_grad()
def test_the_head_that_trl_put_on_a_t5_gives_the_values_that_it_gave_there(tmp_path: Path):
    model = with_head("t5")
    save_as_trl(model, tmp_path)
    inputs = make_inputs("t5")
    states = make_model("t5")(**inputs, output_hidden_states=True).decoder_hidden_states[-1]
    again = AutoModelForSeq2SeqLMWithValueHead.from_pretrained(tmp_path).eval()
    assert_close(again(**inputs)[2], model.v_head(states)[..., 0])


def test_a_shard_that_is_missing_is_named(tmp_path: Path):
    save_as_trl(with_head("gpt2"), tmp_path, max_shard_size="20KB")
    places = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    shard = places["v_head.summary.weight"]
    (tmp_path / shard).unlink()
    with pytest.raises(ModelError, match=shard):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)


def test_a_pickle_is_refused_and_the_way_to_convert_it_works(tmp_path: Path):
    model = with_head("gpt2")
    save_as_trl(model, tmp_path)
    whole = load_file(tmp_path / "model.safetensors") | model.pretrained_model.state_dict()
    torch.save(whole, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()

    with pytest.raises(ModelError, match=r"pytorch_model\.bin") as refused:
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    recipe = str(refused.value).partition("beside it:\n")[2]
    lines = "\n".join(line.removeprefix("    ") for line in recipe.splitlines())
    for name in ("pytorch_model.bin", "model.safetensors"):
        lines = lines.replace(f"'{name}'", f"'{tmp_path / name}'")
    exec(lines, {"torch": torch, "safetensors": safetensors})
    again = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path).eval()
    assert_close(values_of(again), values_of(model), rtol=0, atol=0)


def test_the_pickled_head_beside_an_adapter_of_trl_is_refused_not_lost(tmp_path: Path):
    model = lora_model(tmp_path / "base")
    model.pretrained_model.save_pretrained(tmp_path / "adapter")
    torch.save(model.v_head.state_dict(), tmp_path / "adapter" / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin"):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "adapter")


def test_a_pickled_policy_is_not_read_where_its_head_is_no_pickle(tmp_path: Path):
    model = with_head("gpt2")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.pretrained_model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="safetensors"):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)


def test_a_head_of_its_own_file_goes_before_one_among_the_weights(tmp_path: Path):
    older, newer = with_head("gpt2"), with_head("gpt2")
    newer.save_pretrained(tmp_path)
    save_as_trl(older, tmp_path)
    assert_same(AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path).eval(), newer)


def test_a_plain_checkpoint_gets_a_new_head(tmp_path: Path):
    make_model("gpt2").save_pretrained(tmp_path)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(str(tmp_path))
    assert model.v_head.summary.weight.shape == (1, 32)
    assert model.v_head.dropout.p == 0.1


def test_a_head_of_another_width_is_refused(tmp_path: Path):
    with_head("gpt2").save_pretrained(tmp_path)
    file = tmp_path / "value_head.safetensors"
    save_file(
        {"v_head.summary.weight": torch.zeros(1, 7), "v_head.summary.bias": torch.zeros(1)}, file
    )
    with pytest.raises(ModelError, match=r"\(1, 7\).*\(1, 32\)"):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)


def test_dropout_acts_in_training_alone():
    model = with_head("gpt2", summary_dropout_prob=0.5)
    assert_close(values_of(model), values_of(model), rtol=0, atol=0)
    model.v_head.train()
    assert not torch.equal(values_of(model), values_of(model))


def test_dropout_is_the_argument_s_else_the_configuration_s():
    plain = make_model("gpt2")
    plain.config.summary_dropout_prob = 0.3
    assert AutoModelForCausalLMWithValueHead(plain).v_head.dropout.p == 0.3
    model = AutoModelForCausalLMWithValueHead(plain, summary_dropout_prob=0.0)
    assert model.v_head.dropout.p == 0.0


def test_a_normal_start_has_the_spread_asked_for_and_no_bias():
    torch.manual_seed(0)
    heads = [
        with_head("gpt2", v_head_init_strategy="normal", v_head_initializer_range=5.0).v_head
        for _ in range(8)
    ]
    weights = torch.cat([head.summary.weight.detach() for head in heads])
    assert weights.std() == pytest.approx(5, rel=0.15)  # of 256 draws: 3 standard errors
    assert all(head.summary.bias == 0 for head in heads)


@pytest.mark.parametrize(
    "settings", [{"v_head_init_strategy": "zeros"}, {"v_head_initializer_range": 0.1}]
)
def test_a_start_that_would_not_be_followed_is_refused(settings: dict):
    with pytest.raises(ConfigError, match="v_head_init"):
        with_head("gpt2", **settings)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("dtype", torch.bfloat16), ("torch_dtype", torch.bfloat16), ("dtype", torch.float64)],
)
def test_the_policy_has_the_precision_asked_for_and_results_at_least_fp32(
    name: str, dtype: torch.dtype, tmp_path: Path
):
    with_head("gpt2").save_pretrained(tmp_path)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path, **{name: dtype})
    assert model.pretrained_model.dtype == dtype
    logits, loss, values = model(**make_inputs("gpt2"), labels=make_inputs("gpt2")["input_ids"])
    finer = torch.promote_types(dtype, torch.float32)
    assert logits.dtype == values.dtype == model.v_head.summary.weight.dtype == finer
    assert loss > 0


def test_a_model_that_is_moved_to_half_precision_gives_fp32_results():
    logits, _, values = with_head("gpt2").to(torch.bfloat16)(**make_inputs("gpt2"))
    assert logits.dtype == values.dtype == torch.float32


def test_a_checkpoint_in_half_precision_is_trained_in_fp32_unless_said_otherwise(tmp_path: Path):
    make_model("gpt2").to(torch.bfloat16).save_pretrained(tmp_path)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    assert model.pretrained_model.dtype == torch.float32


def test_the_loss_is_the_model_s_own():
    model, inputs = with_head("gpt2"), make_inputs("gpt2")
    labels = inputs["input_ids"]
    expected = make_model("gpt2")(**inputs, labels=labels).loss
    assert_close(model(**inputs, labels=labels)[1], expected, rtol=0, atol=0)


@torch.no_grad()
def test_a_cache_continues_where_it_ended():
    model, ids = with_head("qwen2"), make_inputs("qwen2")["input_ids"]
    logits, _, values = model(ids)
    _, _, _, cache = model(ids[:, :3], use_cache=True, return_past_key_values=True)
    further = model(ids[:, 3:], past_key_values=cache)
    assert_close(further[0], logits[:, 3:])
    assert_close(further[2], values[:, 3:])


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_generation_is_the_policy_s(family: str):
    model = with_head(family)
    ids = make_inputs(family)["input_ids"]
    settings = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = make_model(family).generate(ids, **settings)
    assert torch.equal(model.generate(ids, **settings), expected)


def test_only_the_files_of_the_subfolder_that_is_loaded_are_checked(tmp_path: Path):
    model, load = with_head("gpt2"), AutoModelForCausalLMWithValueHead.from_pretrained
    model.save_pretrained(tmp_path / "sub")
    (tmp_path / "adapter_config.json").write_text("{}")
    assert_same(load(tmp_path, subfolder="sub").eval(), model)
    torn = tmp_path / "sub" / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:1000])
    with pytest.raises(ModelError, match="is refused: it is not a whole"):
        load(tmp_path, subfolder="sub")


def test_a_state_dict_holds_policy_and_head_and_can_be_loaded():
    model, other = with_head("gpt2"), class_of("gpt2")(make_model("gpt2", seed=5)).eval()
    of_policy = model.pretrained_model.state_dict().keys()
    assert model.state_dict().keys() == {*of_policy, "v_head.summary.weight", "v_head.summary.bias"}
    other.load_state_dict(model.state_dict())
    assert_same(other, model)
    copied = copy.deepcopy(model)
    copied.load_state_dict(other.state_dict())
    assert copied.state_dict().keys() == model.state_dict().keys()
    nested = nn.ModuleDict({"x": model}).state_dict()
    assert nested.keys() == {f"x.{name}" for name in model.state_dict()}


def test_a_state_dict_that_was_gathered_elsewhere_is_what_is_saved(tmp_path: Path):
    model = with_head("gpt2")
    gathered = class_of("gpt2")(make_model("gpt2", seed=5)).eval()
    model.save_pretrained(tmp_path, state_dict=gathered.state_dict())
    assert_same(AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path).eval(), gathered)
    with pytest.raises(ModelError, match="0 of the value head"):
        model.save_pretrained(tmp_path, state_dict=make_model("gpt2").state_dict())


def test_only_the_main_process_writes(tmp_path: Path):
    with_head("gpt2").save_pretrained(tmp_path, is_main_process=False)
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("wish", [{"safe_serialization": False}, {"push_to_hub": True}])
def test_saving_that_would_lose_the_head_or_pickle_it_is_refused(wish: dict, tmp_path: Path):
    with pytest.raises(ConfigError, match=next(iter(wish))):
        with_head("gpt2").save_pretrained(tmp_path, **wish)


def test_checkpointing_is_switched_on_and_off():
    model = with_head("gpt2").train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert model.pretrained_model.is_activation_checkpointing
    model(**make_inputs("gpt2"))[2].sum().backward()
    assert model.pretrained_model.transformer.wte.weight.grad.abs().sum() > 0
    model.gradient_checkpointing_disable()
    assert not model.pretrained_model.is_activation_checkpointing


def test_an_upload_holds_what_is_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    uploaded = {}

    class Hub:
        def create_repo(self, repo_id, **_):
            return type("Repo", (), {"repo_id": repo_id})

        def create_commit(self, repo_id, operations, **_):
            uploaded[repo_id] = {operation.path_in_repo for operation in operations}

    monkeypatch.setattr(hub, "hf_api", Hub)
    monkeypatch.setattr(hub, "create_and_tag_model_card", lambda *_, **__: ModelCard("# Card"))
    with_head("gpt2").push_to_hub("someone/model")
    wanted = {"model.safetensors", "config.json", "value_head.safetensors", "README.md"}
    assert wanted <= uploaded["someone/model"]


def lora_model(base: Path):
    make_model("gpt2").save_pretrained(base)
    return AutoModelForCausalLMWithValueHead.from_pretrained(
        base, peft_config=LoraConfig(**LORA)
    ).eval()


def test_an_adapter_is_saved_with_the_head_and_loads_with_it(tmp_path: Path):
    model = lora_model(tmp_path / "base")
    assert model.is_peft_model
    assert isinstance(model.pretrained_model, PeftModel)
    model.save_pretrained(tmp_path / "adapter")

    again = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "adapter").eval()

    assert again.is_peft_model
    assert_same(again, model)
    assert any(p.requires_grad for n, p in again.named_parameters() if "lora" in n)
    names = {file.name for file in (tmp_path / "adapter").iterdir()}
    assert {"adapter_model.safetensors", "value_head.safetensors"} <= names
    assert "model.safetensors" not in names


def test_an_adapter_with_a_name_of_its_own_is_loaded_too(tmp_path: Path):
    make_model("gpt2").save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted = get_peft_model(base, LoraConfig(**LORA), adapter_name="mine")
    model = AutoModelForCausalLMWithValueHead.from_pretrained(adapted).eval()
    model.save_pretrained(tmp_path / "adapter")
    again = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "adapter").eval()
    assert again.is_peft_model
    assert_same(again, model)


def test_an_adapter_can_be_loaded_frozen(tmp_path: Path):
    lora_model(tmp_path / "base").save_pretrained(tmp_path / "adapter")
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        tmp_path / "adapter", is_trainable=False
    )
    assert not any(p.requires_grad for p in model.pretrained_model.parameters())


def test_an_adapter_that_does_not_name_its_base_is_refused(tmp_path: Path):
    lora_model(tmp_path / "base").save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": None}))
    with pytest.raises(ModelError, match="base_model_name_or_path"):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "adapter")


def test_a_second_adapter_on_top_of_the_first_is_refused(tmp_path: Path):
    # TRL #4713: what such a model saved could not be loaded again.
    adapted = get_peft_model(make_model("gpt2"), LoraConfig(**LORA))
    lora_model(tmp_path / "base").save_pretrained(tmp_path / "adapter")
    for first in (adapted, tmp_path / "adapter"):
        with pytest.raises(ModelError, match="adapter already"):
            AutoModelForCausalLMWithValueHead.from_pretrained(first, peft_config=LoraConfig(**LORA))


def test_a_ready_peft_model_is_taken_and_one_that_lengthens_the_text_refused():
    adapted = get_peft_model(make_model("gpt2"), LoraConfig(**LORA))
    model = AutoModelForCausalLMWithValueHead.from_pretrained(adapted)
    assert model.is_peft_model and values_of(model).shape == (2, 5)
    prompting = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ModelError, match="PROMPT_TUNING"):
        AutoModelForCausalLMWithValueHead(get_peft_model(make_model("gpt2"), prompting))


def test_gradients_reach_the_adapter_under_checkpointing(tmp_path: Path):
    model = lora_model(tmp_path).train()
    model.gradient_checkpointing_enable()
    model(**make_inputs("gpt2"))[2].sum().backward()
    of_lora = [p.grad for n, p in model.named_parameters() if "lora" in n]
    assert of_lora and all(grad is not None for grad in of_lora)
    with pytest.raises(ConfigError, match="reentrant"):
        model.gradient_checkpointing_enable({"use_reentrant": True})


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"trust_remote_code": True}, "run code"),
        ({"use_safetensors": False}, "pickle"),
        ({"dtype": "auto", "torch_dtype": "auto"}, "the same setting"),
        ({"no_such_argument": 1}, "no_such_argument"),
    ],
)
def test_what_cannot_be_followed_in_loading_is_refused(wish: dict, words: str, tmp_path: Path):
    make_model("gpt2").save_pretrained(tmp_path)
    with pytest.raises((ModelError, ConfigError, TypeError), match=words):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path, **wish)


def test_arguments_of_transformers_pass_through(tmp_path: Path):
    make_model("gpt2").save_pretrained(tmp_path)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        tmp_path, attn_implementation="eager", use_safetensors=True, summary_dropout_prob=0.4
    )
    assert model.config._attn_implementation == "eager"
    assert model.v_head.dropout.p == 0.4


def test_arguments_of_loading_are_refused_for_a_model_that_is_loaded():
    with pytest.raises(ConfigError, match="dtype"):
        with_head("gpt2", torch_dtype=torch.bfloat16)


@pytest.mark.parametrize("family", ["t5", "gpt2"])
def test_the_wrong_class_names_the_right_one(family: str):
    wrong = class_of("gpt2" if family == "t5" else "t5")
    with pytest.raises(ModelError, match=class_of(family).__name__):
        wrong.from_pretrained(make_model(family))


def test_what_is_no_language_model_is_refused(tmp_path: Path):
    with pytest.raises(ModelError, match="no language-model head"):
        AutoModelForCausalLMWithValueHead(GPT2Model(DECODERS["gpt2"]))
    with pytest.raises(ModelError, match="not a model of transformers"):
        AutoModelForCausalLMWithValueHead(nn.Linear(2, 2))
    with pytest.raises(ModelError, match=str(tmp_path)):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)


def test_an_offloaded_model_is_refused():
    with pytest.raises(ModelError, match="offloaded"):
        AutoModelForCausalLMWithValueHead(make_model("gpt2").to("meta"))
