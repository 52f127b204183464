"""Measure memory and start of reward training on a million pairs.

    python tests/benchmarks/measure_million_pairs.py [--pairs 1000000]

It writes pairs and a tiny model into a temporary folder, and starts `python -m ppo_core.supervised
reward` twice, each time until the tenth optimizer step. The first start reads and encodes the rows,
the second takes them from the cache. It prints the seconds until the first step and the tenth step,
and the most memory above that of the imports: all of it, and without the pages of mapped files.
RESULTS.md has figures of a run.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

STEPS = 10


def write_pairs(path: Path, count: int) -> None:
    rng = Random(0)
    words = [f"w{number}" for number in range(50)]
    with path.open("w") as file:
        for _ in range(count):
            prompt, chosen, rejected = (
                " ".join(rng.choices(words, k=length)) for length in (40, 30, 30)
            )
            row = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
            file.write(json.dumps(row) + "\n")


def memory_of(process: int) -> dict[str, int]:
    """Resident bytes of a process, by kind."""
    status = Path(f"/proc/{process}/status").read_text()
    found = re.findall(r"^(VmRSS|RssAnon):\s+(\d+) kB", status, re.MULTILINE)
    return {name: int(value) * 1024 for name, value in found}


def memory_of_imports(environment: dict[str, str]) -> dict[str, int]:
    code = (
        "import deepspeed, os, time, ppo_core.supervised.training; print(os.getpid(), flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code + "; time.sleep(60)"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        # DeepSpeed writes a line of its own first.
        next(line for line in process.stdout if line.strip().isdigit())
        found = memory_of(process.pid)
        process.kill()
    return found


def start(folder: Path, environment: dict[str, str], imports: dict[str, int]) -> None:
    command = [
        *(sys.executable, "-m", "ppo_core.supervised", "reward"),
        *("--model_name_or_path", folder / "model", "--dataset_name", folder / "pairs.jsonl"),
        *("--output_dir", folder / "out", "--batch_size", "32", "--max_length", "128"),
    ]
    began = time.monotonic()
    most = dict.fromkeys(imports, 0)
    times: dict[str, float] = {}
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(
            [*map(str, command)], cwd=folder, env=environment, stdout=log, stderr=log
        )
        try:
            while process.poll() is None and "ten" not in times:
                time.sleep(0.1)
                most = {
                    name: max(most[name], value) for name, value in memory_of(process.pid).items()
                }
                steps = re.findall(
                    r"^reward model:.* (\d+)/\d+ \[", (folder / "log").read_text(), re.MULTILINE
                )
                done = max(map(int, steps), default=0)
                if steps:
                    times.setdefault("training starts", time.monotonic() - began)
                if done >= STEPS:
                    times["ten"] = time.monotonic() - began
        finally:
            process.kill()
            process.wait()
        if "ten" not in times:
            raise SystemExit((folder / "log").read_text())
    above = {name: (most[name] - imports[name]) / 2**30 for name in most}
    print(
        f"training starts after {times['training starts']:.1f} s, step {STEPS} after "
        f"{times['ten']:.1f} s; above the imports {above['VmRSS']:.2f} GiB, without mapped files "
        f"{above['RssAnon']:.2f} GiB",
        flush=True,
    )


def main() -> None:
    from tests.helpers.inputs.pipeline_inputs import write_model

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=1_000_000)
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_pairs(folder / "pairs.jsonl", parser.parse_args().pairs)
        write_model(folder / "model")
        config = json.loads((folder / "model" / "config.json").read_text())
        config["max_position_embeddings"] = 256
        (folder / "model" / "config.json").write_text(json.dumps(config))
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HF_DATASETS_CACHE": str(folder / "cache"),
        }
        imports = memory_of_imports(environment)
        print(f"imports: {imports['VmRSS'] / 2**30:.2f} GiB", flush=True)
        for _ in range(2):
            start(folder, environment, imports)


if __name__ == "__main__":
    main()
