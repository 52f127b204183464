"""A year of weekly retraining that no person touches: `make year`, 70 minutes on two cores.

    PYTHONPATH=.:flows python -m tests.benchmarks.year --weeks 52 --seed 1

Each week the champion answers users, who like or dislike the answers; some pairs of its answers are
labeled; the flow trains and decides. Two weeks are poisoned, and MLflow is killed in one. The truth
is known, because the users are simulated (`tests.helpers.inputs.drifting_topics`).
"""

import argparse
import io
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import tomli_w

import feedback
import registry
from human_feedback.labeling import label_row
from pipeline.inputs.human_labels_to_pairs import Vote
from pipeline.registry.aliases import read_aliases
from ppo_core.training.answer_job import AnswerJob, run_answer_job
from serving.answer_traces import record_opinion
from serving.champion import fetch_champion
from tests.benchmarks.year_results import Week, draw_year, print_year
from tests.benchmarks.year_thumbs import Users, print_withdrawals
from tests.helpers.inputs.drifting_topics import (
    ANSWER_WORDS,
    OPPOSITE,
    TOPICS,
    WORDS,
    draw_prompts,
    label,
    likes,
    random_answer,
    traffic,
    true_label,
    true_win_rate,
    value,
)
from tests.helpers.inputs.pipeline_inputs import write_rows
from tests.helpers.models.tiny import make_policy, make_tokenizer
from tests.helpers.runs.flow_runs import run_flow
from tests.helpers.runs.served_answers import serve_answers
from tests.helpers.servers.mlflow_store import tracking_to
from tests.helpers.servers.servers import MlflowServer, mlflow_server

NAME = "assistant"

USERS, THUMBS, LABELS = 1_500, 200, 100
"""Number of users, and of answers that they judge and pairs that are labeled in a week."""

EVENTS = {17: "poisoned labels", 26: "outage", 35: "poisoned votes"}
"""Week -> what happens only in this week: reversed labels or judgments, or MLflow is killed."""

GIVEN = 2_000
"""Number of labeled pairs before the first week."""

POISON = 3_000
"""Number of reversed labels, or reversed judgments, in a poisoned week."""

MEASURED = 1_000
"""Prompts of each topic on which the truth about a champion is measured."""


@dataclass(frozen=True)
class Truth:
    """What a policy is worth by the hidden rule, for each topic."""

    won: list[float]
    """Win rate against SFT."""

    liked: list[float]
    """Share of the answers that users like, their mistakes included."""


@dataclass
class Year:
    """The folder of the simulated team, and what is known about its policies."""

    folder: Path
    weeks: int
    seed: int
    server: MlflowServer
    events: Mapping[int, str]
    """See `EVENTS`."""

    truths: dict[str, Truth] = field(default_factory=dict)
    sft_answers: list[list[str]] = field(default_factory=list)
    """SFT's answers to the prompts of each topic."""

    def run_week(self, number: int) -> Week:
        """Let a week pass, and return what it left behind."""
        began, event = time.monotonic(), self.events.get(number, "")
        shares = traffic((number - 1) / max(self.weeks - 1, 1))
        lots = Random(f"{self.seed} {number}")
        for file, count in (("prompts", 256), ("eval", 1_024)):
            rows = [{"prompt": prompt} for prompt in draw_prompts(lots, shares, count)]
            write_rows(self.folder / f"{file}.jsonl", rows)
        withdrawn = ""
        if "champion" in read_aliases(NAME):
            self.serve(lots, shares)
            self.label_pairs(number)
            self.collect(lots, shares, is_poisoned=event == "poisoned votes")
            withdrawn = self.watch()
        poison = self.folder / "pairs" / "poison.jsonl"
        if event == "poisoned labels":
            write_rows(poison, reversed_labels(lots, shares))
        outcome = self.train(number, is_cut=event == "outage")
        poison.unlink(missing_ok=True)
        champion = str(read_aliases(NAME).get("champion", ""))
        truth = self.truth(champion)
        return Week(
            number=number,
            event=event,
            outcome=f"{withdrawn}{outcome}",
            champion=champion,
            won=float(np.dot(shares, truth.won)),
            liked=float(np.dot(shares, truth.liked)),
            shares=tuple(shares),
            labels=self.count_labels(),
            judged=self.count_judged(),
            seconds=time.monotonic() - began,
        )

    def serve(self, lots: Random, shares: Sequence[float]) -> None:
        """Answer a week's prompts, and record what users think of the answers."""
        fetched = fetch_champion(NAME, cache=self.folder / "served")
        prompts = draw_prompts(lots, shares, THUMBS)
        answers = sample(fetched.folder, prompts, lots.randrange(2**31))
        write_rows(self.folder / "asked.jsonl", [{"prompt": prompt} for prompt in prompts])
        ids = serve_answers(NAME, fetched.version, dict(zip(prompts, answers, strict=True)))
        users = lots.sample(range(USERS), len(prompts))
        for number, prompt, answer in zip(users, prompts, answers, strict=True):
            user = f"user {number}"
            liked = likes(user, prompt, answer)
            record_opinion(NAME, ids[prompt], user=user, liked=liked, correction=None)

    def label_pairs(self, number: int) -> None:
        """Choose pairs of answers of the champion and of SFT, and label them."""
        last = max((self.folder / "outputs" / "runs").glob("*/settings.toml"))
        asked, chosen = (self.folder / name for name in ("asked.jsonl", f"chosen-{number}.jsonl"))
        # PPO begins at SFT, so the reward model must be right on answers of both.
        policies = (f"models:/{NAME}@champion", self.sft)
        run_here(
            *(feedback.main, "choose", last.parent),
            *(word for policy in policies for word in ("--policy", policy)),
            *("--prompts", asked, "--labels", LABELS, "--seed", number, "--output", chosen),
        )
        pairs = [json.loads(line) for line in chosen.read_text().splitlines()]
        triples = [(row["prompt"], row["first"], row["second"]) for row in pairs]
        rows = [labeled(*triple, label("people", *triple)) for triple in triples]
        write_rows(self.folder / "pairs" / f"week-{number:02}.jsonl", rows)

    def collect(self, lots: Random, shares: Sequence[float], *, is_poisoned: bool) -> None:
        """Make training data of all that users said."""
        votes = []
        if is_poisoned:
            file = write_rows(self.folder / "votes.jsonl", reversed_votes(lots, shares))
            votes = ["--votes", file]
        run_here(feedback.main, "collect", NAME, "--output-dir", self.folder / "feedback", *votes)

    def watch(self) -> str:
        """Withdraw a champion that users like less; return a text if it was withdrawn."""
        said = run_here(registry.main, "watch", NAME, "--withdraw")
        return "withdrawn; " if "is champion again" in said else ""

    def train(self, number: int, *, is_cut: bool) -> str:
        """Run the flow, and return how it ended; `is_cut` kills MLflow while PPO trains."""
        summary = self.folder / f"week-{number:02}.json"
        table = settings(self.folder) | {"seed": 1_000 * self.seed + number}
        collected = self.folder / "feedback" / "feedback.jsonl"
        if collected.exists():
            table["feedback"] = str(collected)
        (self.folder / "week.toml").write_text(tomli_w.dumps(table))
        words = ("--config", "settings", "week.toml", "run", "--summary-json", str(summary))
        variables = {name: value for name, value in os.environ.items() if "MLFLOW" in name}
        with outage(self.server, self.folder) if is_cut else nullcontext():
            ran = run_flow(self.folder, *words, variables=variables)
        (self.folder / f"week-{number:02}.log").write_text(ran.log)
        if ran.code == 0:
            made = json.loads(summary.read_text())
            return f"{made['promotion']['action']} {made['model']['version']}"
        if "The reward model is not fit to train against" in ran.log:
            return "reward model refused"
        return "failed"

    def truth(self, version: str) -> Truth:
        """Measure a version, or SFT if there is no champion; each is measured once."""
        if version not in self.truths:
            policy = self.sft
            if not self.sft_answers:
                # Equal random numbers would make the answers of both alike.
                prompts = prompts_of_topics()
                self.sft_answers = [
                    sample(policy, each, TOPICS + n) for n, each in enumerate(prompts)
                ]
            if version:
                cache = self.folder / "served"
                policy = fetch_champion(NAME, version=version, cache=cache).folder
            self.truths[version] = measure(policy, self.sft_answers)
        return self.truths[version]

    @property
    def sft(self) -> Path:
        """Folder of the fine-tuned policy, with which PPO begins each week."""
        (folder,) = (self.folder / "outputs" / "cache").glob("sft-*")
        return folder

    def count_labels(self) -> int:
        files = (self.folder / "pairs").glob("*.jsonl")
        return sum(len(file.read_text().splitlines()) for file in files)

    def count_judged(self) -> int:
        return sum(map(int, (self.folder / "judged.txt").read_text().split()))


def run_here(command: Callable[[Sequence[str]], int], *words: object) -> str:
    """Run a command of the project in this process, and return what it printed.

    A process of its own would import MLflow and torch anew, three times a week.
    """
    with redirect_stdout(io.StringIO()) as printed:
        code = command([str(word) for word in words])
    assert code == 0, printed.getvalue()
    return printed.getvalue()


def main() -> None:
    """Simulate a year; print its weeks, and draw them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--weeks", type=int, default=52)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="new folder of the team (default: temporary)")
    parser.add_argument("--figure", type=Path, help="PNG file of the figure")
    given = parser.parse_args()
    # So that the server and a running flow end, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    folder = Path(given.folder or tempfile.mkdtemp(prefix="year-")).absolute()
    folder.mkdir(parents=True, exist_ok=not given.folder)
    print(f"The year is in {folder}.")
    weeks = []
    with mlflow_server(folder) as server, tracking_to(server.url):
        year = Year(folder, given.weeks, given.seed, server, EVENTS)
        write_inputs(folder, given.seed)
        for number in range(1, given.weeks + 1):
            weeks.append(year.run_week(number))
            print(weeks[-1], flush=True)
    print_year(weeks)
    liked = {version: truth.liked for version, truth in year.truths.items()}
    print_withdrawals(weeks, Users(USERS, THUMBS, liked))
    if given.figure:
        draw_year(weeks, given.figure)


def write_inputs(folder: Path, seed: int) -> None:
    """Write what the team has before its first week."""
    lots, shares = Random(f"{seed} inputs"), traffic(0.0)
    (folder / "judge.py").write_text(
        "from pathlib import Path\n\n"
        "from tests.helpers.inputs import drifting_topics\n\n\n"
        "def judge(prompts, pairs):\n"
        f"    with Path({str(folder / 'judged.txt')!r}).open('a') as file:\n"
        "        file.write(f'{len(pairs)}\\n')\n"
        "    return drifting_topics.judge(prompts, pairs)\n"
    )
    tokenizer = make_tokenizer(words=WORDS)
    make_policy(vocabulary=len(tokenizer)).save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    equal = [1 / TOPICS] * TOPICS
    texts = [
        {"prompt": prompt, "completion": random_answer(lots)}
        for prompt in draw_prompts(lots, equal, 2_048)
    ]
    write_rows(folder / "sft.jsonl", texts)
    (folder / "pairs").mkdir()
    write_rows(folder / "pairs" / "given.jsonl", given_labels(lots, shares, GIVEN))
    write_rows(folder / "test.jsonl", given_labels(lots, shares, 200))


def settings(folder: Path) -> dict[str, object]:
    """Return the settings of each week."""
    training = {"batch_size": 32, "max_length": 32, "learning_rate": 2e-3, "num_epochs": 2}
    return {
        "policy": str(folder / "policy"),
        "sft_data": str(folder / "sft.jsonl"),
        "preferences": str(folder / "pairs"),
        "preferences_test": str(folder / "test.jsonl"),
        "prompts": str(folder / "prompts.jsonl"),
        "eval_prompts": str(folder / "eval.jsonl"),
        "judge": f"python:{folder / 'judge.py'}:judge",
        "output_dir": str(folder / "outputs"),
        "registered_model": NAME,
        "start_from": "champion",
        # Until the policy has learned that an answer has six words; once for all weeks.
        "sft": training | {"num_epochs": 4, "learning_rate": 5e-3, "seed": 1},
        "reward_model_training": training,
        "ppo": {
            "total_episodes": 4096,
            "batch_size": 64,
            "response_length": ANSWER_WORDS,
            "kl_coef": 0.05,
        },
        # The rule counts good words, so an answer that is given twice is worth twice as much.
        "reward_gate": {"unit_deviation": True, "max_degenerate_preferred": 1.0},
        # The rule counts good words, so the best answers are as long as they may be.
        "promotion": {"guards": {"off": ["stops"]}},
    }


def labeled(prompt: str, first: str, second: str, chosen: str) -> dict[str, Any]:
    """Return a row as the page for labels writes it, whose label is `chosen`."""
    pair = Vote(prompt=prompt, first=first, second=second, label="")
    side = {"first": "left", "second": "right", "tie": "tie"}[chosen]
    return label_row(pair, side, "people", left=first)


def given_labels(lots: Random, shares: Sequence[float], count: int) -> list[dict[str, Any]]:
    """Return labeled pairs of random answers."""
    return [labeled(*pair, label("people", *pair)) for pair in random_pairs(lots, shares, count)]


def reversed_labels(lots: Random, shares: Sequence[float]) -> list[dict[str, Any]]:
    """Return pairs whose labels are all wrong."""
    pairs = random_pairs(lots, shares, POISON)
    return [labeled(*pair, OPPOSITE[true_label(*pair)]) for pair in pairs]


def random_pairs(
    lots: Random, shares: Sequence[float], count: int
) -> Iterator[tuple[str, str, str]]:
    """Yield prompts with two random answers each."""
    for prompt in draw_prompts(lots, shares, count):
        yield prompt, random_answer(lots), random_answer(lots)


def reversed_votes(lots: Random, shares: Sequence[float]) -> list[Mapping[str, object]]:
    """Return judgments of a crowd that likes what is worth least."""
    prompts = draw_prompts(lots, shares, POISON)
    answers = [random_answer(lots) for _ in prompts]
    return [
        {
            "prompt": prompt,
            "completion": answer,
            "label": value(prompt, answer) == 0,
            "annotator": f"crowd {number % 300}",
        }
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]


def prompts_of_topics() -> list[list[str]]:
    """Return the prompts of each topic on which all policies are measured."""
    lots = Random("measured")
    topics = range(TOPICS)
    return [draw_prompts(lots, [float(n == topic) for n in topics], MEASURED) for topic in topics]


def measure(policy: Path, sft_answers: Sequence[Sequence[str]]) -> Truth:
    """Measure a policy on fixed prompts of all topics, against SFT's answers to each topic."""
    won, liked = [], []
    for topic, (prompts, others) in enumerate(zip(prompts_of_topics(), sft_answers, strict=True)):
        answers = sample(policy, prompts, seed=topic)
        won.append(float(true_win_rate(prompts, answers, others).mean()))
        opinions = [likes("", prompt, text) for prompt, text in zip(prompts, answers, strict=True)]
        liked.append(float(np.mean(opinions)))
    return Truth(won, liked)


def sample(folder: Path, prompts: Sequence[str], seed: int) -> list[str]:
    """Return an answer to each prompt, by a version or by the model of a folder."""
    is_version = (folder / "components").is_dir()
    job = AnswerJob(
        policy=str(folder / "model" if is_version else folder),
        tokenizer=str(folder / "components" / "tokenizer" if is_version else folder),
        prompts=list(prompts),
        prompt_format="auto",
        response_length=ANSWER_WORDS,
        temperature=1.0,
        seed=seed,
        batch_size=256,
    )
    return list(run_answer_job(job).texts)


@contextmanager
def outage(server: MlflowServer, folder: Path) -> Iterator[None]:
    """Kill MLflow when PPO begins, and start it again at the end; nothing if PPO does not begin."""
    trainings, ended = folder / ".metaflow" / "RLHF", threading.Event()
    before = set(trainings.glob("*/train_policy"))

    def kill() -> None:
        while not set(trainings.glob("*/train_policy")) - before:
            if ended.wait(0.1):
                return
        server.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield
    finally:
        ended.set()
        killer.join()
        if server.process is None:
            server.start()


if __name__ == "__main__":
    main()
