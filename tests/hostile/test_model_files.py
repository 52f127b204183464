"""Model folders that would run code, lead out of their folder, or hold a broken model."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.inputs.model_digests import require_unchanged
from pipeline.registry.fetch_policy import find_policy
from ppo_core.data import chat_template
from ppo_core.data.chat_template import render_chat
from ppo_core.errors import DataError, ModelError
from ppo_core.io.folder_cache import make_once
from ppo_core.models.files.value_head_files import load_with_head
from ppo_core.models.loading import (
    check_vocabulary,
    load_config,
    load_policy,
    load_reward_model,
    load_tokenizer,
)
from tests.helpers.inputs.pipeline_inputs import write_model
from tests.helpers.models.chat import make_chat_tokenizer
from tests.helpers.models.tiny import make_tokenizer

CANARY = "canary"
"""File that the code in a hostile folder would write."""

CODE = "from pathlib import Path\nPath(__file__).parent.joinpath('{canary}').touch()\n"

Spoil = Callable[[Path], None]


# --- Ways to spoil a folder --------------------------------------------------------


def change(file: str, **entries: object) -> Spoil:
    """Set keys of a JSON file."""

    def spoil(folder: Path) -> None:
        path = folder / file
        path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))

    return spoil


def write(file: str, content: str | bytes) -> Spoil:
    def spoil(folder: Path) -> None:
        data = content.encode() if isinstance(content, str) else content
        (folder / file).write_bytes(data)

    return spoil


def remote_code(file: str, key: str, **entries: object) -> Spoil:
    """Name a class in a Python file of the folder, which writes the canary when it is imported."""

    def spoil(folder: Path) -> None:
        change(file, auto_map={key: "evil.Evil"}, **entries)(folder)
        code = CODE.format(canary=folder / CANARY).replace("__file__", f"{str(folder)!r}")
        (folder / "evil.py").write_text(code + "class Evil: ...\n")

    return spoil


def link(file: str, target: str) -> Spoil:
    """Move a file out of the folder, and link to it."""

    def spoil(folder: Path) -> None:
        outside = folder.parent / target
        if (folder / file).is_file():
            (folder / file).rename(outside)
        (folder / file).symlink_to(outside)

    return spoil


def index(shard: str) -> Spoil:
    """Replace the weights by an index that names one file for all tensors."""

    def spoil(folder: Path) -> None:
        weights = folder / "model.safetensors"
        names = load_file(weights)
        weights.rename(folder.parent / "outside.safetensors")
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, shard)})
        )

    return spoil


def tensors(edit: Callable[[dict[str, torch.Tensor]], object]) -> Spoil:
    """Change the tensors of the weights file."""

    def spoil(folder: Path) -> None:
        named = load_file(folder / "model.safetensors")
        edit(named)
        save_file(named, folder / "model.safetensors", metadata={"format": "pt"})

    return spoil


def cut(share: float) -> Spoil:
    def spoil(folder: Path) -> None:
        content = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(content[: int(len(content) * share)])

    return spoil


def pickled(name: str) -> Spoil:
    def spoil(folder: Path) -> None:
        torch.save(load_file(folder / "model.safetensors"), folder / name)
        (folder / "model.safetensors").unlink()

    return spoil


def without(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda named: [named.pop(key) for key in list(named) if name in key]


DEEP = "[" * 100_000 + "]" * 100_000

POLICY_CASES: dict[str, tuple[Spoil, str]] = {
    # Code of the folder or of the hub.
    "code of an unknown type": (remote_code("config.json", "AutoConfig", model_type="evil"), ""),
    "code of an unknown model": (
        remote_code("config.json", "AutoModelForCausalLM", model_type="evil"),
        "",
    ),
    "code in another repository": (
        change("config.json", model_type="evil", auto_map={"AutoConfig": "evil/repo--evil.Evil"}),
        "",
    ),
    "a kernel for attention": (change("config.json", attn_implementation="evil/kernel"), "config"),
    "a kernel for attention, private key": (
        change("config.json", _attn_implementation="evil/kernel:forward"),
        "config",
    ),
    "a kernel for a part": (
        change("config.json", attn_implementation={"": "eager", "text": "evil/kernel"}),
        "config",
    ),
    "a kernel of a nested config": (
        change("config.json", text_config={"attn_implementation": "evil/kernel"}),
        "config",
    ),
    "a kernel for experts": (
        change("config.json", experts_implementation="evil/kernel"),
        "config",
    ),
    **{
        f"quantized by {method}": (
            change("config.json", quantization_config={"quant_method": method}),
            "config",
        )
        for method in ("fp8", "mxfp4", "gptq", "evil", "evil/kernel", ["fp8"])
    },
    "quantized by text": (change("config.json", quantization_config="fp8"), "config"),
    # Pickles.
    "a pickle": (pickled("pytorch_model.bin"), "pytorch_model.bin"),
    "a pickle named as safetensors": (
        lambda folder: write("model.safetensors", pickle.dumps({}))(folder),
        "model.safetensors",
    ),
    "a zip named as safetensors": (
        write("model.safetensors", b"PK\x03\x04" + b"\0" * 100),
        "model.safetensors",
    ),
    # Links and other places.
    **{
        f"a link to {name}": (link(name, "outside"), name)
        for name in ("config.json", "model.safetensors", "tokenizer.json", "generation_config.json")
    },
    "a link to nothing": (
        lambda folder: (folder / "config.json").unlink() or link("config.json", "none")(folder),
        "config.json",
    ),
    "a link to itself": (
        lambda folder: (folder / "loop.json").symlink_to(folder / "loop.json"),
        "loop.json",
    ),
    "a pipe": (
        lambda folder: (
            (folder / "tokenizer_config.json").unlink()
            or os.mkfifo(folder / "tokenizer_config.json")
        ),
        "tokenizer_config.json",
    ),
    "an index to a parent": (index("../outside.safetensors"), "index.json"),
    "an index to a root": (index("/etc/outside.safetensors"), "index.json"),
    "an index to a pickle": (index("shard.bin"), "index.json"),
    "an index to nothing": (index("shard.safetensors"), "index.json"),
    "an index without a map": (
        lambda folder: (
            (folder / "model.safetensors").rename(folder / "model.safetensors.index.json")
            and write("model.safetensors.index.json", '{"weight_map": []}')(folder)
        ),
        "index.json",
    ),
    "a base elsewhere": (
        write("adapter_config.json", '{"base_model_name_or_path": "evil/base"}'),
        "PEFT",
    ),
    # Broken files.
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), ""),
    "empty weights": (write("model.safetensors", b""), "model.safetensors"),
    "half of the weights": (cut(0.5), "model.safetensors"),
    "weights without a byte": (cut(0.99999), "model.safetensors"),
    "a header without an end": (write("model.safetensors", b"\xff" * 200), "model.safetensors"),
    "a header of other JSON": (
        write("model.safetensors", (10).to_bytes(8, "little") + b'["a", "b"]'),
        "model.safetensors",
    ),
    "no configuration": (lambda folder: (folder / "config.json").unlink(), ""),
    "a configuration that is not JSON": (write("config.json", "{"), "config.json"),
    "a configuration that is a list": (write("config.json", "[1]"), "config.json"),
    "a configuration that is not UTF-8": (write("config.json", b"{\xff}"), "config.json"),
    "a deep configuration": (write("config.json", DEEP), "config.json"),
    "an unknown type": (change("config.json", model_type="evil"), ""),
    "a type that is a list": (change("config.json", model_type=["llama"]), ""),
    "a width that is text": (change("config.json", hidden_size="wide"), ""),
    "a width that is null": (change("config.json", hidden_size=None), ""),
    "no layers": (change("config.json", num_hidden_layers=0), ""),
    "fewer layers": (change("config.json", num_hidden_layers=1), ""),
    "more layers": (change("config.json", num_hidden_layers=3), ""),
    "negative layers": (change("config.json", num_hidden_layers=-1), ""),
    "a negative vocabulary": (change("config.json", vocab_size=-61), ""),
    "a smaller vocabulary": (change("config.json", vocab_size=60), ""),
    "another width": (change("config.json", hidden_size=16), ""),
    "a layer without tensors": (tensors(without("layers.1")), "missing"),
    "no head": (tensors(without("lm_head")), "missing"),
    "tensors left over": (tensors(lambda named: named.update(extra=torch.zeros(2))), "left over"),
    "a tensor of another shape": (
        tensors(lambda named: named.update({"lm_head.weight": torch.zeros(61, 31)})),
        "",
    ),
    "a generation configuration that is a list": (
        write("generation_config.json", "[]"),
        "generation_config.json",
    ),
}

TOKENIZER_CASES: dict[str, tuple[Spoil, str]] = {
    "code of a tokenizer": (
        remote_code("tokenizer_config.json", "AutoTokenizer", tokenizer_class="Evil"),
        "",
    ),
    "a tokenizer that is not JSON": (write("tokenizer.json", "{"), ""),
    "a tokenizer of another form": (write("tokenizer.json", "[]"), ""),
    "no tokenizer": (
        lambda folder: [path.unlink() for path in folder.glob("tokenizer*")],
        "",
    ),
    "a tokenizer's configuration that is a list": (
        write("tokenizer_config.json", "[]"),
        "tokenizer_config.json",
    ),
    "a link to a tokenizer": (link("tokenizer.json", "outside"), "tokenizer.json"),
}

REWARD_CASES: dict[str, tuple[Spoil, str]] = {
    "no head": (tensors(without("score")), "missing"),
    "a head of two labels": (
        tensors(lambda named: named.update({"score.weight": torch.zeros(2, 32)})),
        "",
    ),
    "a layer without tensors": (tensors(without("layers.0")), "missing"),
    "tensors left over": (
        tensors(lambda named: named.update({"model.layers.2.x": torch.zeros(2)})),
        "left over",
    ),
    "a pickle": (pickled("pytorch_model.bin"), "pytorch_model.bin"),
    "half of the weights": (cut(0.5), "model.safetensors"),
    "a kernel": (change("config.json", attn_implementation="evil/kernel"), "config.json"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("models")
    write_model(folder / "policy")
    write_model(folder / "reward", labels=1)
    return folder


@pytest.fixture(autouse=True)
def no_questions(monkeypatch):
    """Fail if a library asks whether to run code."""

    def ask(*words: object) -> str:
        raise AssertionError(f"A question was asked: {words}")

    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def spoilt(models: Path, kind: str, spoil: Spoil, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(models / kind, folder)
    spoil(folder)
    return folder


def load_served(folder: Path) -> None:
    """Load what a run loads of a policy."""
    load_policy(folder)
    load_tokenizer(folder)


def refused(load: Callable[[Path], object], folder: Path, named: str) -> str:
    with pytest.raises(ModelError) as caught:
        load(folder)
    message = str(caught.value)
    assert str(folder) in message, message
    assert named in message, message
    assert not (folder / CANARY).exists()
    return message


@pytest.mark.parametrize("case", POLICY_CASES)
def test_a_policy_is_refused_by_name(case, models, tmp_path):
    spoil, named = POLICY_CASES[case]
    refused(load_served, spoilt(models, "policy", spoil, tmp_path), named)


@pytest.mark.parametrize("case", TOKENIZER_CASES)
def test_a_tokenizer_is_refused_by_name(case, models, tmp_path):
    spoil, named = TOKENIZER_CASES[case]
    refused(load_tokenizer, spoilt(models, "policy", spoil, tmp_path), named)


@pytest.mark.parametrize("case", REWARD_CASES)
def test_a_reward_model_is_refused_by_name(case, models, tmp_path):
    spoil, named = REWARD_CASES[case]
    refused(load_reward_model, spoilt(models, "reward", spoil, tmp_path), named)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_beside_a_known_type_is_not_run(file, models, tmp_path):
    folder = spoilt(models, "policy", remote_code(file, "AutoConfig"), tmp_path)
    load_served(folder)
    assert not (folder / CANARY).exists()


def test_a_head_s_loader_refuses_the_same(models, tmp_path):
    from transformers import AutoModelForCausalLM

    def load(folder: Path) -> None:
        load_with_head(AutoModelForCausalLM, folder, {}, is_trainable=False)

    for number, case in enumerate(["a layer without tensors", "a pickle", "a kernel for experts"]):
        spoil, named = POLICY_CASES[case]
        refused(load, spoilt(models, "policy", spoil, tmp_path / str(number)), named)


def test_an_adapter_in_a_pickle_is_refused(models, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "adapter"
    folder.mkdir()
    entries = {"peft_type": "LORA", "base_model_name_or_path": str(models / "policy")}
    (folder / "adapter_config.json").write_text(json.dumps(entries))
    torch.save({}, folder / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"has no adapter_model\.safetensors"):
        load_with_head(AutoModelForCausalLM, folder, {}, is_trainable=False)


def test_links_inside_a_folder_and_of_the_hub_s_cache_are_followed(models, tmp_path):
    snapshot = tmp_path / "models--org--name" / "snapshots" / "main"
    blobs = tmp_path / "models--org--name" / "blobs"
    blobs.mkdir(parents=True)
    shutil.copytree(models / "policy", snapshot)
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(blobs / str(number))
    load_served(snapshot)
    (snapshot / "copy.json").symlink_to(snapshot / "config.json")
    load_served(snapshot)


def test_a_tokenizer_with_more_words_than_the_model_is_refused(models):
    config = load_config(models / "policy")
    check_vocabulary(config, make_tokenizer(), models / "policy")
    with pytest.raises(ModelError, match=r"ids up to 61, .* below 61 \(vocab_size\)"):
        check_vocabulary(config, make_tokenizer(words=59), models / "policy")


# --- Templates ---------------------------------------------------------------------

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"

TEMPLATES = {
    "a loop": LOOP,
    "a loop of strings": LOOP.replace("{% endfor %}", "x{% endfor %}", 1),
    "a recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a large power": "{{ 9 ** 9 ** 9 }}",
    "a long text": "{{ 'x' * 10 ** 15 }}",
    "a way to object": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a way to globals": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "a change of the messages": "{{ messages.clear() }}",
    "a file": "{% include '/etc/passwd' %}",
    "no syntax": "{% for %}",
    "a division by zero": "{{ 1 / 0 }}",
    "an undefined call": "{{ nothing() }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_is_refused_in_time(name, monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_RENDER_SECONDS", 0.5)
    tokenizer = make_chat_tokenizer(TEMPLATES[name])
    with pytest.raises(DataError, match="chat template"):
        render_chat(tokenizer, [{"role": "user", "content": "w1"}], answer_follows=True)


# --- What is judged is what is served ----------------------------------------------


def fill(folder: Path) -> dict[str, float]:
    (folder / "model.safetensors").write_bytes(b"weights")
    return {"loss": 1.0}


@pytest.mark.parametrize(
    "spoil",
    [
        write("model.safetensors", b"weightz"),
        write("added.json", "{}"),
        lambda folder: (folder / "model.safetensors").unlink(),
        write("made.json", '{"loss": 1.0}'),
        write("made.json", "[]"),
        write("made.json", "{"),
        lambda folder: (folder / "made.json").unlink(),
    ],
    ids=["changed", "added", "removed", "old form", "list", "no JSON", "no record"],
)
def test_a_changed_folder_of_the_cache_is_made_again(spoil, tmp_path):
    made = make_once(tmp_path, "sft", {}, fill)
    assert make_once(tmp_path, "sft", {}, fill).reused
    spoil(made.path)
    again = make_once(tmp_path, "sft", {}, fill)
    assert not again.reused
    assert again.values == {"loss": 1.0}
    assert (made.path / "model.safetensors").read_bytes() == b"weights"
    assert make_once(tmp_path, "sft", {}, fill).reused


def test_a_policy_that_was_changed_after_training_is_refused(tmp_path):
    with pytest.raises(ModelError, match="was changed after it was written"):
        require_unchanged(str(tmp_path), "0" * 16, "The trained policy")


@pytest.mark.parametrize(
    "address",
    ["runs:/1/model", "models:/", "models:/name", "models:/name/one", "s3://bucket/model", "a://b"],
)
def test_other_addresses_than_those_of_versions_are_refused(address, tmp_path):
    with pytest.raises(ModelError, match="is not the address of a model"):
        find_policy(address, tmp_path)
