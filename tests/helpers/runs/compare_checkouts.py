"""Compare what two checkouts compute and write, byte for byte.

    python -m tests.helpers.runs.compare_checkouts OLD NEW

Run the same seeded trainings and flow with the code of both folders, and print each file that
differs. Moves and rewrites of the code must change no weight, figure, file format or text. The
inputs are made once, and only commands are used, so the modules may move.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import tomli_w

from tests.helpers.inputs.pipeline_inputs import tiny_table, write_ppo_inputs

PYTHON = sys.executable

CLASSIC = """
import json, torch
from transformers import AutoTokenizer
from ppo_core.classic import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

config = PPOConfig(batch_size=4, mini_batch_size=2, learning_rate=1e-3)
torch.manual_seed(1)
model = AutoModelForCausalLMWithValueHead.from_pretrained("policy")
tokenizer = AutoTokenizer.from_pretrained("policy")
trainer = PPOTrainer(config, model, None, tokenizer)
queries = [torch.tensor([5, 6, 7 + i]) for i in range(4)]
responses = [torch.tensor([8, 9 + i, 10]) for i in range(4)]
scores = [torch.tensor(float(i)) for i in range(4)]
stats = [trainer.step(queries, responses, scores) for _ in range(3)]
with open("classic/stats.json", "w") as file:
    json.dump([{k: v for k, v in each.items() if isinstance(v, float)} for each in stats], file)
trainer.save_pretrained("classic")
"""

_PPO = (
    "--model_name_or_path policy --reward_model_path reward --dataset_name prompts.jsonl "
    "--total_episodes 48 --batch_size 8 --response_length 6 --learning_rate 1e-3 --save_steps 2 "
    "--save_total_limit 9 --num_ppo_epochs 2 --output_dir"
)
_SUPERVISED = (
    "--batch_size 16 --max_length 32 --learning_rate 1e-3 --num_epochs 2 --save_steps 2 "
    "--model_name_or_path policy --output_dir"
)

JOBS = {
    "ppo": f"-m ppo_core {_PPO} ppo",
    "ppo-resumed": f"-m ppo_core {_PPO} ppo-resumed --resume_from_checkpoint ppo/checkpoint-4",
    "ppo-options": f"-m ppo_core {_PPO} ppo-options --shared_critic --num_mini_batches 2 "
    "--whiten_rewards --kl_estimator k3 --top_k 20 --ema_decay 0.9 --missing_eos_penalty 1 "
    "--target_kl 1 --gradient_checkpointing",
    "ppo-lora": f"-m ppo_core {_PPO} ppo-lora --use_peft --lora_r 4 --bf16",
    "ppo-two": f"-m torch.distributed.run --standalone --nproc_per_node 2 -m ppo_core {_PPO} "
    "ppo-two",
    "ppo-fsdp2": "-m torch.distributed.run --standalone --nproc_per_node 2 -m ppo_core "
    f"{_PPO} ppo-fsdp2 --sharding fsdp2",
    "ppo-zero2": "-m torch.distributed.run --standalone --nproc_per_node 2 -m ppo_core "
    f"{_PPO} ppo-zero2 --sharding zero2",
    "sft": f"-m ppo_core.supervised sft {_SUPERVISED} sft --dataset_name sft.jsonl",
    "reward-model": f"-m ppo_core.supervised reward {_SUPERVISED} reward-model "
    "--dataset_name pairs.jsonl",
    "reward-lora": f"-m ppo_core.supervised reward {_SUPERVISED} reward-lora "
    "--dataset_name pairs.jsonl --use_peft --lora_r 4",
    "classic": "classic.py",
    "flow": "{checkout}/flows/rlhf.py --config settings tiny.toml run",
    "second-flow": "{checkout}/flows/rlhf.py --config settings second.toml run",
}
"""Arguments of Python by the name of a job; the files of a job lie in a folder of its name."""

_NOT_COMPARED = re.compile(
    r"/(\.metaflow|RLHF|usage|\.git|__pycache__|\.cache)(/|$)|\.lock$|/stacks-\d|/lease\.json$"
    r"|/mlflow\.db|/journal\.(sending|sent)$|/launcher-\d+\.json$|/progress|\.log$|sbom\.json$"
)
"""Files that hold times, processes or packages alone."""

_VOLATILE_KEYS = re.compile(
    r"^(time/.*|eps|seconds|time|pid|host|started|episodes_per_second|peak_rss_bytes|code"
    r"|.*_seconds|.*(bytes|sha256)|timings|cost|at|cost/.*|system/.*|manifest|MLmodel|README\.md"
    r"|sbom\.json)$"
)
"""Keys of JSON whose values differ between two runs."""

_VOLATILE_TEXTS = (
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?(\.\d+)?(\+00:00|Z)?", "TIME"),
    (r"\b[0-9a-f]{32}\b|\bm-[0-9a-f]{32}\b", "ID"),
    (r"\b1[78]\d{11,14}\b", "RUN"),
    (r"\b(sft|reward-model|policy|judge)-[0-9a-f]{16}\b", r"\1-KEY"),
    (r"\d[\d,.]* ?(s|seconds|min|minutes|h|hours|GiB|MiB|CPU hours|episodes/s)\b", "FIGURE"),
    (r"\| (time/\S+|eps) \| [\d.]+", r"| \1 | FIGURE"),
    (r"\| (\S*(load|validate|train|evaluate|register|start|end)\S*)( \| \d+){3}", r"| \1 FIGURES"),
    (r"(?i)(cpu|gpu)[ -](seconds|hours)\W+[\d.]+", "FIGURE"),
)


def main() -> int:
    """Compare two checkouts; return 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_all_inputs(folder / "inputs")
        old, new = (
            results_of(checkout.resolve(), arguments.jobs, folder)
            for checkout in (arguments.old, arguments.new)
        )
    differing = sorted(path for path in old.keys() | new.keys() if old.get(path) != new.get(path))
    for path in differing:
        print(f"DIFFERS  {path}: {describe_difference(old.get(path), new.get(path))}")
    print(f"{len(old)} files, {len(differing)} differ")
    return int(bool(differing))


def write_all_inputs(folder: Path) -> None:
    """Write models, data, settings and scripts that all jobs read."""
    folder.mkdir()
    table = tiny_table(folder) | {
        "registered_model": "compared",
        "accept_reward_model": True,
        "summary_json": "flow/summary.json",
        "output_dir": "flow",
    }
    table["ppo"] |= {"total_episodes": 48, "save_steps": 2}
    write_ppo_inputs(folder)
    texts = {
        "tiny.toml": tomli_w.dumps(table),
        # The second run compares its policy with the champion of the first.
        "second.toml": tomli_w.dumps(table | {"summary_json": "second-flow/summary.json"}),
        "classic.py": CLASSIC,
    }
    for name, text in texts.items():
        (folder / name).write_text(text.replace(f"{folder}/", ""))


def results_of(checkout: Path, jobs: list[str], folder: Path) -> dict[str, str]:
    """Run the jobs with the code of a checkout; return their files, see `comparable`."""
    work = folder / "work"  # The same path for both, which some files name.
    shutil.copytree(folder / "inputs", work)
    variables = {key: value for key, value in os.environ.items() if "MLFLOW" not in key} | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(checkout),
        "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(work),
    }
    for job in jobs:
        (work / job).mkdir(exist_ok=True)
        words = JOBS[job].format(checkout=checkout).split()
        done = subprocess.run(
            [PYTHON, *words], cwd=work, env=variables, capture_output=True, text=True
        )
        print(f"{checkout.name}: {job}: exit code {done.returncode}", flush=True)
        if done.returncode:
            raise SystemExit((done.stdout + done.stderr)[-4000:])
    results: dict[str, str] = {}
    # Files of two runs have the same name after their ids are taken out.
    for name, text in comparable(work):
        results[name] = results.get(name, "") + text
    if (work / "mlflow.db").exists():
        results["registry"] = plain_text(json.dumps(registry(work / "mlflow.db"), indent=0))
    shutil.rmtree(work)
    return results


def comparable(work: Path) -> Iterator[tuple[str, str]]:
    """Yield each file by its path: a digest of binary content, texts without what changes."""
    files = (path for path in work.rglob("*") if path.is_file())
    for path in sorted(files, key=lambda path: path.stat().st_mtime):
        name = str(path.relative_to(work))
        if _NOT_COMPARED.search(f"/{name}"):
            continue
        content = path.read_bytes()
        try:
            text = content.decode()
        except UnicodeDecodeError:
            yield plain_text(name), hashlib.sha256(content).hexdigest()
            continue
        if path.suffix in (".json", ".jsonl"):
            text = "\n".join(
                json.dumps(_without_volatile(json.loads(line)), indent=0)
                for line in ([text] if path.suffix == ".json" else text.splitlines())
            )
        yield plain_text(name), plain_text(text)


def registry(database: Path) -> dict[str, Any]:
    """Return the versions of the registry, and the parameters and tags of the runs."""
    queries = {
        "versions": "select name, version, description, status from model_versions order by 1, 2",
        "tags of versions": "select name, version, key, value from model_version_tags order by 1, "
        "2, 3",
        "tags of models": "select name, key, value from registered_model_tags order by 1, 2",
        "aliases": "select name, alias, version from registered_model_aliases order by 1, 2",
        "parameters": "select distinct key, value from params order by 1, 2",
        "tags": "select distinct key, value from tags where key not like 'mlflow.%' order by 1, 2",
    }
    with sqlite3.connect(database) as connection:
        return {name: connection.execute(query).fetchall() for name, query in queries.items()}


def plain_text(text: str) -> str:
    """Return a text without times, ids and figures of speed."""
    for pattern, replacement in _VOLATILE_TEXTS:
        text = re.sub(pattern, replacement, text)
    return text


def _without_volatile(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key: None if _VOLATILE_KEYS.match(key) else _without_volatile(each)
            for key, each in value.items()
        }
    return [_without_volatile(each) for each in value] if isinstance(value, list) else value


def describe_difference(old: str | None, new: str | None) -> str:
    """Return the first line that differs, with the line of the other text."""
    if old is None or new is None:
        return "only in NEW" if old is None else "only in OLD"
    lines = [text.splitlines() for text in (old, new)]
    for number, (one, other) in enumerate(zip(*lines, strict=False), start=1):
        if one != other:
            pairs = zip(one, other, strict=False)
            start = max(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) - 100, 0)
            shown = (line[start : start + 300] for line in (one, other))
            return "\n    ".join([f"line {number}:", *shown])
    return f"{len(lines[0])} and {len(lines[1])} lines"


if __name__ == "__main__":
    sys.exit(main())
