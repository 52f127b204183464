"""A consumer in a process of its own: it polls the champion, loads it, and has it answer."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CONSUMER = """
import json, sys, time
from flows.champion import champion_version, load_champion

name, prompt = sys.argv[1:]
now = None
while True:
    try:
        version = champion_version(name)
        if version != now:
            champion = load_champion(name)
            inputs = champion.tokenizer(prompt, return_tensors="pt")
            answer = champion.model.generate(**inputs, do_sample=False)
            now = champion.version
            seen = {"version": str(now), "answer": champion.tokenizer.decode(answer[0])}
            print(json.dumps(seen), flush=True)
    except Exception as error:
        print(json.dumps({"error": repr(error)}), flush=True)
    time.sleep(0.5)
"""


@dataclass(frozen=True)
class Follower:
    """What the consumer has seen: a line for each change of the champion, and for each error."""

    file: Path

    @property
    def seen(self) -> list[dict[str, str]]:
        return [json.loads(line) for line in self.file.read_text().splitlines()]

    def wait_for(self, version: str, seconds: float = 120) -> None:
        """Wait until this version is the last champion that the consumer saw."""
        deadline = time.monotonic() + seconds
        while not (lines := self.seen) or lines[-1].get("version") != version:
            assert time.monotonic() < deadline, lines
            time.sleep(0.2)


@contextmanager
def champion_follower(
    name: str, prompt: str, folder: Path, environment: Mapping[str, str]
) -> Iterator[Follower]:
    """Run a consumer of a registered model while the context lasts."""
    file = folder / "consumer.jsonl"
    with file.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", CONSUMER, name, prompt],
            cwd=folder,
            env=environment,
            stdout=log,
        )
        try:
            yield Follower(file)
        finally:
            process.kill()
            process.wait()
