"""Models and tokenizers from folders, and the errors."""

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    Mistral3ForConditionalGeneration,
    MllamaForCausalLM,
    MllamaForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    tokenization_utils_base,
)

from ppo_core.errors import ConfigError, ModelError
from ppo_core.models.loading import (
    check_reward_config,
    count_parameters,
    load_policy,
    load_reward_model,
    load_tokenizer,
)
from tests.architectures.zoo import small_config
from tests.helpers.models.model_hub import model_hub
from tests.helpers.models.tiny import make_classifier, make_policy, make_tokenizer


def test_models_survive_the_way_to_a_folder_and_back(tmp_path):
    policy, classifier, tokenizer = make_policy(), make_classifier(), make_tokenizer()
    policy.save_pretrained(tmp_path / "policy")
    classifier.save_pretrained(tmp_path / "reward")
    for name in ("policy", "reward"):
        tokenizer.save_pretrained(tmp_path / name)
    ids = torch.tensor([[5, 6]])
    assert_close(load_policy(tmp_path / "policy")(ids).logits, policy(ids).logits)
    assert load_tokenizer(tmp_path / "policy").get_vocab() == tokenizer.get_vocab()
    reward_model = load_reward_model(tmp_path / "reward", bias=1.0, gain=2.0)
    assert reward_model.reads_tokens_of(tokenizer)
    expected = 2 * (classifier(ids).logits[0].detach() - 1.0)
    assert_close(reward_model.score_encoded([[5, 6]], 1), expected)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_parameters_are_counted_without_weights_as_with_them(tmp_path, family):
    policy, classifier = make_policy(family), make_classifier(labels=1)
    for model, name in ((policy, "policy"), (classifier, "reward")):
        model.save_pretrained(tmp_path / name)
        (tmp_path / name / "model.safetensors").unlink()
    assert count_parameters(tmp_path / "policy") == policy.num_parameters()
    assert count_parameters(tmp_path / "reward", scores=True) == classifier.num_parameters()


@pytest.mark.parametrize(
    "path", ["./my-modle", "../a/b", "/no/model", "a/b/c", "~/model", "m.gguf"]
)
@pytest.mark.parametrize("load", [load_policy, load_tokenizer, load_reward_model, count_parameters])
def test_a_wrong_path_is_called_a_path_and_the_hub_is_not_asked(path, load):
    with pytest.raises(ModelError, match=r"^There is no folder '/.*'\. Check the path\.$"):
        load(path)


def test_a_file_is_no_model(tmp_path):
    (tmp_path / "model").touch()
    with pytest.raises(ModelError, match=r"model' is not a folder\. Give the folder of a model"):
        load_policy(tmp_path / "model")


def test_a_name_that_may_be_a_folder_or_a_hub_id_is_called_both():
    with pytest.raises(ModelError, match=r"no folder '/.*/gone', so it is read as a hub id"):
        load_tokenizer("gone")


def test_what_cannot_be_a_policy_or_a_reward_model_is_refused_by_name(tmp_path):
    make_classifier(labels=3).save_pretrained(tmp_path / "three")
    make_policy().save_pretrained(tmp_path / "policy")
    T5ForConditionalGeneration(
        T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    ).save_pretrained(tmp_path / "t5")
    scorer = T5Config(is_encoder_decoder=True, num_labels=1)
    scorer.architectures = ["T5ForSequenceClassification"]
    scorer.save_pretrained(tmp_path / "t5-scorer")
    with pytest.raises(ModelError, match="encoder and a decoder"):
        check_reward_config(tmp_path / "t5-scorer")
    with pytest.raises(ModelError, match="has 3 labels"):
        check_reward_config(tmp_path / "three")
    with pytest.raises(ModelError, match=r"not a \.\.\.ForSequenceClassification"):
        load_reward_model(tmp_path / "policy")
    with pytest.raises(ModelError, match="has an encoder"):
        load_policy(tmp_path / "t5")
    with pytest.raises(ModelError, match="a model that scores"):
        load_policy(tmp_path / "three")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    for load in (load_policy, load_reward_model, count_parameters):
        with pytest.raises(ModelError, match=r"adapter' is a PEFT model, .* Merge the adapter"):
            load(tmp_path / "adapter")
    torn = tmp_path / "policy" / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"model\.safetensors' is refused: it is not a whole"):
        load_policy(tmp_path / "policy")
    with pytest.raises(ModelError, match="nowhere"):
        load_policy(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="nowhere"):
        load_tokenizer(tmp_path / "nowhere")


def test_the_trial_of_a_tokenizer_warns_of_no_long_text(tmp_path, monkeypatch):
    tokenizer = make_tokenizer()
    tokenizer.model_max_length = 16
    tokenizer.save_pretrained(tmp_path)
    warnings: list[str] = []
    monkeypatch.setattr(tokenization_utils_base.logger, "warning", warnings.append)
    assert load_tokenizer(tmp_path).model_max_length == 16
    assert warnings == []


def test_a_hub_id_names_its_revision_wherever_a_model_is_read(tmp_path):
    """The pinned revision has other weights, sizes and words than main."""
    made = {}
    for number, revision in enumerate(("main", "refs/pr/1")):
        folder = tmp_path / str(number)
        for name, model in (("policy", make_policy()), ("reward", make_classifier())):
            model.get_input_embeddings().weight.data.fill_(number)
            model.save_pretrained(folder / name)
            make_tokenizer(prefix=f"w{number}_").save_pretrained(folder / name)
            made[f"org/{name}@{revision}"] = folder / name
    with model_hub(made, tmp_path / "cache") as hub:
        pinned = load_policy("org/policy@refs/pr/1")
        assert (pinned.get_input_embeddings().weight == 1).all()
        assert "w1_0" in load_tokenizer("org/policy@refs/pr/1").get_vocab()
        assert count_parameters("org/policy@refs/pr/1") == pinned.num_parameters()
        reward_model = load_reward_model("org/reward@refs/pr/1")
        assert (reward_model.model.get_input_embeddings().weight == 1).all()
        assert "w1_0" in reward_model.tokenizer.get_vocab()
        assert hub.asked == {"org/policy@refs/pr/1", "org/reward@refs/pr/1"}
        assert (load_policy("org/policy").get_input_embeddings().weight == 0).all()
        with pytest.raises(ModelError, match=r"'org/policy@gone': 404.*Revision Not Found"):
            load_policy("org/policy@gone")


def test_a_folder_with_an_at_sign_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_policy().save_pretrained("org/policy@v1")
    assert load_policy("org/policy@v1").num_parameters() == make_policy().num_parameters()


def test_two_revisions_contradict_each_other():
    with pytest.raises(ConfigError, match=r"'org/policy@v1' .*revision='v2' both name a revision"):
        load_policy("org/policy@v1", revision="v2")


@pytest.mark.parametrize("path", ["org/policy@", "@v1", "org/policy@../../x", "org/policy@v1@v2"])
def test_a_name_that_is_no_hub_id_with_a_revision_is_called_a_path(path):
    with pytest.raises(ModelError, match=r"^There is no folder '/.*'\. Check the path\.$"):
        load_policy(path)


def test_the_text_part_of_a_model_of_text_and_images_is_loaded(tmp_path):
    model = MllamaForConditionalGeneration._from_config(small_config("mllama"))
    model.save_pretrained(tmp_path)
    policy = load_policy(tmp_path)
    assert type(policy) is MllamaForCausalLM
    assert torch.equal(policy.lm_head.weight, model.get_output_embeddings().weight)


def test_a_model_of_text_and_images_without_a_text_class_is_loaded_as_it_is(tmp_path):
    Mistral3ForConditionalGeneration._from_config(small_config("mistral3")).save_pretrained(
        tmp_path
    )
    assert type(load_policy(tmp_path)) is Mistral3ForConditionalGeneration
