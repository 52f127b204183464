"""The scripts of docs/examples, small, on tiny models of the architectures that they are for."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    PreTrainedModel,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from tests.helpers.models.families import make_model
from tests.helpers.models.tiny import (
    EOS,
    PAD,
    VOCABULARY,
    make_classifier,
    make_policy,
    make_tokenizer,
)
from tests.helpers.paths import ROOT
from tests.helpers.runs.forked_python import run_python

EXAMPLES = ROOT / "docs" / "examples"
SHORT = "--batch_size 8 --mini_batch_size 4 --learning_rate 1e-3 --steps 16".split()

pytestmark = pytest.mark.timeout(600)


def save(model: PreTrainedModel, folder: Path) -> None:
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def save_classifier(model: PreTrainedModel, folder: Path) -> None:
    """Save a classifier whose tokenizer begins every text with a token, as those of BERT do."""
    tokenizer = make_tokenizer()
    begin = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", EOS)])
    tokenizer.backend_tokenizer.post_processor = begin
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def labeled(kind: type, config: object, labels: tuple[str, str]) -> PreTrainedModel:
    """A classifier that was taught to give texts of w0 to w28 the first label."""
    torch.manual_seed(3)
    model = kind(config)
    model.config.id2label = dict(enumerate(labels))
    model.config.label2id = {label: number for number, label in enumerate(labels)}
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    middle = (3 + VOCABULARY) / 2
    for _ in range(60):
        ids = torch.randint(3, VOCABULARY, (64, 12))
        ids[:, 0] = EOS
        label = (ids[:, 1:].float().mean(1) > middle).long()
        model(input_ids=ids, labels=label).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, classifiers and 64 prompts in a folder."""
    folder: Path = tmp_path_factory.mktemp("examples")
    tokens = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "eos_token_id": EOS}
    neo = GPTNeoConfig(
        hidden_size=32,
        num_layers=2,
        attention_types=[[["global", "local"], 1]],
        num_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
        bos_token_id=None,
        **tokens,
    )
    torch.manual_seed(0)
    save(GPTNeoForCausalLM(neo).bfloat16(), folder / "gpt_neo")
    save(make_policy("gpt2"), folder / "gpt2")
    save(make_policy("llama"), folder / "llama")
    save(make_model("t5"), folder / "t5")
    save(make_classifier("llama"), folder / "reward")
    mood = DistilBertConfig(dim=32, hidden_dim=64, n_layers=2, n_heads=4, **tokens)
    moods = ("NEGATIVE", "POSITIVE")
    save_classifier(labeled(DistilBertForSequenceClassification, mood, moods), folder / "mood")
    hate = RobertaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, **tokens
    )
    save_classifier(
        labeled(RobertaForSequenceClassification, hate, ("nothate", "hate")), folder / "hate"
    )
    chance = Random(0)
    rows = [" ".join(f"w{chance.randrange(58)}" for _ in range(4)) for _ in range(2048)]
    for name, column, count in (("queries", "query", 64), ("many", "query", 2048)):
        write(folder / f"{name}.jsonl", [{column: text} for text in rows[:count]])
    write(folder / "prompts.jsonl", [{"prompt": text} for text in rows[:64]])
    return folder


def write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("\n".join(map(json.dumps, rows)))


def run(home: Path, example: str, *words: object) -> str:
    done = run_python(EXAMPLES / example, *words, folder=home, variables={"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def classic(home: Path, example: str, *words: str, model: str, reward: str) -> list[float]:
    """Run an example of the classic loop; return the mean reward of each step."""
    flags = {
        "model_name": f"./{model}",
        "reward_model": f"./{reward}",
        "output_dir": f"out-{model}",
    }
    given = [word for name, value in flags.items() for word in (f"--{name}", value)]
    said = run(home, example, *given, *words)
    return [float(found) for found in re.findall(r"^reward (-?[\d.]+), KL", said, re.MULTILINE)]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_has_at_most_60_lines(path: Path):
    assert len(path.read_text().splitlines()) <= 60


@pytest.mark.parametrize("model", ["gpt2", pytest.param("t5", marks=pytest.mark.slow)])
def test_the_sentiment_script_runs_and_its_model_is_served_again(home: Path, model: str):
    rewards = classic(
        home, "sentiment.py", "--query_dataset", "queries.jsonl", *SHORT, model=model, reward="mood"
    )
    assert len(rewards) == 8
    if model == "gpt2":
        said = run(home, "value_head_again.py", f"./out-{model}", "w1 w2 w3").splitlines()
        assert [line.split(":")[0] for line in said[-4:-1]] == ["w1", "w2", "w3"]
        assert said[-1].startswith("w1 w2 w3")


def test_one_seed_gives_one_result(home: Path):
    found = []
    for folder in ("first", "second"):
        words = f"--query_dataset queries.jsonl --output_dir {folder} {' '.join(SHORT)}"
        script = [str(EXAMPLES / "sentiment.py"), "--model_name", "./gpt2"]
        # Every process begins with other random numbers.
        code = "import runpy, sys, torch; torch.seed(); sys.argv = sys.argv[1:]; "
        code += "runpy.run_path(sys.argv[0], run_name='__main__')"
        flags = [*script, "--reward_model", "./mood", *words.split()]
        done = run_python("-c", code, *flags, folder=home, variables={"HF_HUB_OFFLINE": "1"})
        assert done.returncode == 0, done.stderr[-4000:]
        found.append((home / folder / "model.safetensors").read_bytes())
    assert found[0] == found[1]


def test_the_steered_script_rewards_each_mood(home: Path):
    words = ("--query_dataset", "queries.jsonl", *SHORT)
    flags = ("--model_name", "./gpt2", "--reward_model", "./mood", "--output_dir", "steered")
    said = run(home, "steered_sentiment.py", *flags, *words).strip().splitlines()
    steps = [line for line in said if line.startswith("[negative]")]
    assert len(steps) == 8
    assert all("[neutral]" in line and "[positive]" in line for line in steps)
    assert (home / "steered" / "model.safetensors").exists()


def test_adapters_learn_from_a_reward_adapter(home: Path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, task_type="SEQ_CLS")
    reward = peft.get_peft_model(make_classifier("llama"), config)
    reward.save_pretrained(home / "reward_adapter")
    rewards = classic(
        home,
        "adapters_only.py",
        *("--query_dataset", "queries.jsonl"),
        *SHORT,
        model="llama",
        reward="reward_adapter",
    )
    assert len(rewards) == 8 and len(set(rewards)) > 1
    assert (home / "out-llama" / "adapter_model.safetensors").exists()


def test_several_rewards_are_told_apart(home: Path):
    words = ("./llama", "./reward", "prompts.jsonl", "several", "64")
    said = run(home, "several_rewards.py", *words)
    assert "rewards/brevity" in said
    assert said.count("rewards/") >= 2
    assert (home / "several" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["zero2", "zero3"])
def test_the_tldr_settings_train_under_accelerate_launch(home: Path, sharding: str):
    save(make_policy("gpt_neox"), home / "sft")
    save(make_classifier("gpt_neox"), home / "rm")
    small = {
        "dataset_name": home / "prompts.jsonl",
        "model_name_or_path": home / "sft",
        "sft_model_path": home / "sft",
        "reward_model_path": home / "rm",
        "output_dir": home / sharding,
        "total_episodes": 16,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "response_length": 8,
    }
    launch = ["-m", "accelerate.commands.launch", "--num_processes", "2", "--main_process_port=0"]
    launch += ["--config_file", str(ROOT / "infra" / "accelerate" / f"{sharding}.yaml")]
    launch += ["-m", "ppo_core", str(EXAMPLES / "tldr.toml")]
    ran = subprocess.run(
        [sys.executable, *launch, *(f"--{name}={value}" for name, value in small.items())],
        cwd=home,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert (home / sharding / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "model", "reward", "flags"),
    [
        ("sentiment.py", "gpt2", "mood", "--learning_rate 3e-3"),
        # Half of the layers are frozen, so the other half needs larger steps.
        ("detoxification.py", "gpt_neo", "hate", "--learning_rate 1e-2 --init_kl_coef 0.05"),
    ],
)
def test_an_example_learns(home: Path, example: str, model: str, reward: str, flags: str):
    rewards = classic(
        home,
        example,
        *("--query_dataset", "many.jsonl", "--batch_size", "64", "--mini_batch_size", "16"),
        *flags.split(),
        model=model,
        reward=reward,
    )
    first, last = torch.tensor(rewards[:6]), torch.tensor(rewards[-6:])
    assert last.mean() - first.mean() > max(first.std(), last.std())
