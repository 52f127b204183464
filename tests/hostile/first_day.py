"""The folder in which the mistakes of a first day are made, and a run of a mistake."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import mlflow
from datasets import Dataset
from transformers import BertConfig, BertForMaskedLM

from tests.helpers.inputs.pipeline_inputs import JUDGE, write_model, write_rows
from tests.helpers.models.chat import make_chat_tokenizer, say
from tests.helpers.models.tiny import EOS, PAD, VOCABULARY, make_policy, make_tokenizer
from tests.helpers.paths import ROOT
from tests.helpers.servers.mlflow_store import tracking_to, write_database
from tests.hostile.natural_mistakes import Mistake

PAIRS = [
    {"prompt": f"w{n} w{n + 1}", "chosen": f"w1 w{n % 7}", "rejected": f"w2 w{n % 5}"}
    for n in range(40)
]
HH = "\n\nHuman: w3\n\nAssistant: w4\n\nHuman: w5"


def make_inputs(folder: Path) -> None:
    """Fill a folder with good inputs and bad ones, and a registry with one model."""
    write_models(folder)
    write_data(folder)
    (folder / "judge.py").write_text(JUDGE)
    (folder / "my.toml").write_text("[ppo]\ntotal_episodes = 16\n")
    (folder / "flat.toml").write_text('policy = "policy"\nlearning_rate = 3e-6\n')
    uri = write_database(folder / "mlflow.db")
    with tracking_to(uri):
        client = mlflow.MlflowClient(uri)
        client.create_registered_model("summarizer")
        client.create_model_version("summarizer", source=str(folder / "policy"))
        client.set_registered_model_alias("summarizer", "champion", "1")


def write_models(folder: Path) -> None:
    write_model(folder / "policy")
    write_model(folder / "generative")
    write_model(folder / "reward", labels=1)
    write_model(folder / "two-labels", labels=2)
    make_policy().save_pretrained(folder / "chat")
    make_chat_tokenizer().save_pretrained(folder / "chat")
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": "policy", "r": 8})
    )
    (folder / "adapter" / "adapter_model.safetensors").write_bytes(b"")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = BertConfig(vocab_size=VOCABULARY, intermediate_size=32, pad_token_id=PAD, **sizes)
    bert.eos_token_id = EOS
    BertForMaskedLM(bert).save_pretrained(folder / "bert")
    make_tokenizer().save_pretrained(folder / "bert")
    (folder / "model.gguf").write_bytes(b"GGUF" + b"\0" * 64)


def write_data(folder: Path) -> None:
    def rows(name: str, rows: list[dict[str, object]]) -> None:
        write_rows(folder / name, rows)

    rows("pairs.jsonl", PAIRS)
    rows("train.jsonl", [{"prompt": f"w{n} w{n + 2}"} for n in range(40)])
    rows("same.jsonl", [{"prompt": "w1 w2"}] * 40)
    rows("eval.jsonl", [{"prompt": f"w{n} w{n + 3}", "reference": "w1"} for n in range(20)])
    rows("demos.jsonl", [{"prompt": f"w{n}", "completion": "w1"} for n in range(20)])
    rows("equal.jsonl", [{**pair, "rejected": pair["chosen"]} for pair in PAIRS])
    rows("answered.jsonl", [{"prompt": say(f"w{n}", "w1")} for n in range(40)])
    rows(
        "hh.jsonl",
        [{"chosen": f"{HH}\n\nAssistant: w{n}", "rejected": HH} for n in range(40)],
    )
    for row in (accepted := [dict(pair) for pair in PAIRS]):
        row["accepted"] = row.pop("chosen")
    rows("accepted.jsonl", accepted)
    lines = ["prompt;chosen;rejected", *(";".join(pair.values()) for pair in PAIRS)]
    (folder / "semicolons.csv").write_text("\n".join(lines) + "\n")
    vectors = [{"id": n, "embedding": [0.1, 0.2, float(n)]} for n in range(40)]
    Dataset.from_list(vectors).to_parquet(folder / "embeddings.parquet")
    # The first bytes of every .xlsx file, which is a zip file.
    (folder / "demos.xlsx").write_bytes(b"PK\x03\x04\x14\x00\x06\x00" + b"\0" * 64)


def words_of(mistake: Mistake) -> tuple[dict[str, str], list[str]]:
    """The environment variables in front of a command, and the words after `python`."""
    words = shlex.split(mistake.command)
    changes = {}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        changes[name] = value
    if words[0].endswith(".py"):
        words[0] = str(ROOT / words[0])
    return changes, words


def environment_in(folder: Path) -> dict[str, str]:
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("MLFLOW_", "OPENAI"))
    }
    return kept | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
        "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(folder),
    }


def run_command(mistake: Mistake, folder: Path) -> tuple[int, str, set[str]]:
    """Run a mistake as a process of its own: exit code, output, and names of imported modules."""
    changes, words = words_of(mistake)
    profile = {"PYTHONPROFILEIMPORTTIME": "1"} if mistake.is_cheap else {}
    ran = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**environment_in(folder), **profile, **changes},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    lines = (ran.stdout + ran.stderr).splitlines()
    imported = {line.rpartition("|")[2].strip() for line in lines if "import time:" in line}
    told = "\n".join(line for line in lines if "import time:" not in line)
    return ran.returncode, told, imported


def message_of(told: str) -> str:
    """The output as one line, without the time and the step that Metaflow writes before a line."""
    lines = (
        re.sub(r"^[\d-]+ [\d:.]+ (\[\S+ \(pid \d+\)\] |)", "", line) for line in told.split("\n")
    )
    return " ".join(" ".join(lines).split())
