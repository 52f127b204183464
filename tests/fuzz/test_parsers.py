"""Every parser of what others wrote: a valid result or an error of the project, in bounded time.

The suite tries a few examples of each property, always the same. `make soak` tries others for
`SOAK_SECONDS` each.
"""

import gzip
import hashlib
import io
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import win_rate
from flow_parts import RunStoppedError, parse_toml
from pipeline.inputs.json_lines import read_jsonl
from pipeline.inputs.labeled_pairs import label_pairs
from pipeline.judges.function_judge import FunctionJudge
from pipeline.judges.judge_prompt import pose
from pipeline.judges.openai_client import _read as read_body
from pipeline.judges.reply_cache import ReplyCache, reply_key
from pipeline.judges.verdict import WINNERS, read_verdict, swapped
from pipeline.registry.champion_history import stack_of
from pipeline.registry.decisions import as_markdown, decode, encode
from pipeline.settings.evaluation_config import EvaluationConfig
from pipeline.settings.judge_config import JudgingConfig
from pipeline.settings.make_settings import make_settings, settings_text
from pipeline.settings.settings import Settings
from pipeline.tracking.journal import Journal
from pipeline.tracking.send_to_mlflow import in_calls
from ppo_core.checkpointing.folders import MANIFEST as CHECKPOINT_MANIFEST
from ppo_core.checkpointing.folders import STATE
from ppo_core.checkpointing.lease import LEASE, Lease
from ppo_core.checkpointing.read_checkpoint import read_checkpoint, read_newest
from ppo_core.config.argument_parser import DocumentedParser, field_docs, parse_arguments
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.config.script_arguments import ModelArguments, ScriptArguments
from ppo_core.data.rows.read_rows import read_rows
from ppo_core.data.sources.source import open_source
from ppo_core.errors import PPOError
from ppo_core.ppo.rewards import make_rewards
from ppo_core.reporting.metrics_file import METRICS_FILE, MetricsFile, read_metrics
from serving.manifest import MANIFEST, check_folder, write_manifest
from tests.fuzz.strategies import (
    as_json,
    damaged,
    json_files,
    texts,
    values,
    with_other_values,
)
from tests.helpers.models.rollouts import make_rollout
from tests.helpers.models.tiny import make_tokenizer

EXAMPLES = 10
"""Examples of each property in the suite."""

SOAK_SECONDS = float(os.environ.get("FUZZ_SECONDS", "30"))
"""Duration of each property in `make soak`, about 25 minutes for all."""

SLOWEST = 5.0
"""Maximum processor time of one example, in seconds."""

KINDS = [PPOConfig, ScriptArguments, ModelArguments]
WIN_RATE_KINDS = [win_rate.WinRateArguments, EvaluationConfig, JudgingConfig]

Check = Callable[[Any, Path], object]

# The method "thread" ends the process. The other method raises an error, which hypothesis takes for
# a failing example: it goes on with further examples, which then have no time limit.
pytestmark = pytest.mark.timeout(2 * SOAK_SECONDS + 300, method="thread")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)


# --- Data sets ---------------------------------------------------------------------

ROWS = [
    {"prompt": "w1 w2", "chosen": "w3", "rejected": "", "margin": 1.5, "annotator": 7},
    {"prompt": "é🎲", "chosen": "w3", "rejected": "w4", "tie": True, "more": {"a": [1, None]}},
]
TURNS = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]
SHARE_GPT = [{"from": "human", "value": "w1"}, {"from": "gpt", "value": "w2"}]
OTHER_FORMS = [
    [{"chosen": TURNS, "rejected": TURNS, "prompt": "w1", "messages": TURNS}],
    [{"chosen": "\n\nHuman: w1\n\nAssistant: w2", "rejected": "\n\nHuman: w1\n\nAssistant:"}],
    [{"info": {"post": "w1"}, "summaries": [{"text": "w2"}, {"text": "w3"}], "choice": 1}],
    [{"instruction": "w1", "input": "w2", "output": TURNS[1:]}],
    [{"conversations": SHARE_GPT, "chosen": SHARE_GPT[1], "rejected": SHARE_GPT[1:]}],
    [{"messages": [{"role": "user", "content": [{"type": "text", "text": "w1"}]}]}],
    [{"prompt": "w1", "completion": f"w{n}", "label": n == 2} for n in (2, 3)],
    [{"prompt": "w1", "responses": ["w2", TURNS[1:], "w3"], "ranks": [1, 2, 2.5]}],
    [{"instruction": "w1", "completions": [{"response": "w2", "overall_score": 1.5}] * 2}],
    [{"question": TURNS[:1], "first": "w1", "second": "w2", "label": "tie"}],
]
"""One row in each of the forms of published data sets."""

CSV = b'prompt,chosen,rejected,margin,tie\nw1,"w\n2",w3,1.5,true\n'
LINES = b"".join(as_json(row) + b"\n" for row in ROWS)


def lines_of(rows: Any) -> bytes:
    return b"".join(as_json(row) + b"\n" for row in (rows if isinstance(rows, list) else [rows]))


def tables() -> tuple[bytes, ...]:
    def written(**options: Any) -> bytes:
        file = io.BytesIO()
        plain = [{key: row[key] for key in ("prompt", "chosen", "rejected")} for row in ROWS]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(plain), file, **options)
        return file.getvalue()

    return written(), written(compression="none", use_dictionary=False)


def read_everywhere(content: bytes, path: Path) -> None:
    path.write_bytes(content)
    for is_chat in (False, True):
        with suppress(PPOError):
            label_pairs(read_rows(str(path), "pairs", is_chat=is_chat))
        for kind in ("prompts", "demonstrations", "votes"):
            with suppress(PPOError):
                assert len(list(read_rows(str(path), kind, is_chat=is_chat))) > 0
    if path.suffix == ".jsonl":
        with suppress(PPOError):
            read_jsonl(path)


# --- Settings ----------------------------------------------------------------------

OWN = {"policy": "p", "preferences": "a", "prompts": "b", "eval_prompts": "c", "judge": "rule"}
TABLE = json.loads(json.dumps(asdict(make_settings(OWN, {}))))
SETTINGS_TOML = settings_text(make_settings(OWN, {})).encode()
PPO_TOML = b'learning_rate = 1e-6\nbf16 = true\nseed = 4\nlora_target_modules = ["a", "b"]\n'
PPO_JSON = {"learning_rate": 1e-6, "seed": 4, "stop_token": None, "reward_weights": [1.0, 2]}


def read_flow_settings(content: bytes, folder: Path) -> None:
    with suppress(UnicodeDecodeError, RunStoppedError, PPOError):
        check_settings(parse_toml(content.decode()), folder)


def check_settings(table: Any, folder: Path) -> None:
    if isinstance(table, dict):
        with suppress(PPOError):
            made = make_settings(table, {"total_episodes": 8})
            assert isinstance(made, Settings)
            assert make_settings(parse_toml(settings_text(made)), {}) == made


def read_settings_file(content: bytes, path: Path) -> None:
    path.write_bytes(content)
    with suppress(PPOError):
        parse_arguments(KINDS, [str(path)])


names = st.sampled_from(sorted(name for kind in KINDS for name in field_docs(kind)))
flags = st.lists(
    texts | names.map("--{}".format) | st.builds("--{}={}".format, names | texts, texts), max_size=4
).map(lambda words: [word for word in words if not word.startswith(("-h", "--h"))])


def parse_flags(words: list[str], folder: Path) -> None:
    with suppress(PPOError):
        parse_arguments(KINDS, words)
    parser = DocumentedParser(WIN_RATE_KINDS, prog="win_rate", usage="")
    with suppress(PPOError):
        parser.parse(["--model", "m", "--judge", "rule", *words])


# --- Files of a run ----------------------------------------------------------------

ENTRIES: list[Any] = [
    {"time": 1, "kind": "metrics", "run": "r", "step": 1, "values": {"loss": 0.5}},
    {"time": 1, "kind": "metrics", "run": "r", "step": None, "values": {"loss": 0.5}},
    {"time": 2, "kind": "tag", "run": "r", "key": "mlflow.loggedArtifacts", "value": "[]"},
    {"time": 3, "kind": "file", "run": "r", "path": "/gone", "folder": ""},
    {"time": 4, "kind": "status", "run": "r", "status": "FINISHED"},
]


def read_journal(content: tuple[bytes, bytes], folder: Path) -> None:
    lines, sent = content
    (folder / "journal.jsonl").write_bytes(lines)
    (folder / "journal.sent").write_bytes(sent)
    with suppress(PPOError):
        journal = Journal(folder)
        journal.log_metrics("r", {"loss": 1.0}, 1)
        journal.set_tag("r", "key", "value")
        assert journal.next_step("r", "loss") >= 0
        calls = list(in_calls(journal.unsent()))
        for entry, position in calls[-1] if calls else []:
            journal.refuse(entry, "no")
            journal.mark_sent(position)


def read_manifest_of(content: bytes, folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    write_manifest(folder)
    with suppress(PPOError):
        (folder / MANIFEST).write_bytes(content)
        check_folder(folder, hashlib.sha256(content).hexdigest())


STATE_FIELDS = {"step": 3, "episodes": 24, "data": {"pass": 1}, "kl_coef": 0.05, "names": ["a"]}
FILES = {"files": {STATE: {"bytes": 2, "sha256": "0" * 64}, "a": {"bytes": 1, "sha256": "1" * 64}}}


def read_damaged_checkpoint(content: tuple[bytes, bytes, bool], folder: Path) -> None:
    state, manifest, fits = content
    checkpoint = folder / "checkpoint-3"
    checkpoint.mkdir(exist_ok=True)
    (checkpoint / STATE).write_bytes(state)
    if fits:
        digest = {"bytes": len(state), "sha256": hashlib.sha256(state).hexdigest()}
        manifest = as_json({"files": {STATE: digest}})
    (checkpoint / CHECKPOINT_MANIFEST).write_bytes(manifest)
    for read in (lambda: read_checkpoint(checkpoint), lambda: read_newest(folder)):
        with suppress(PPOError):
            read()


LEASE_FIELDS = {"token": 3, "host": "machine", "pid": 7, "started": "2026-01-01T00:00:00+00:00"}


def claim_lease(content: bytes, folder: Path) -> None:
    (folder / LEASE).write_bytes(content)
    with suppress(PPOError):
        lease = Lease.claim(folder)
        lease.check()
        assert lease.token > 0


METRICS = [{"update": number, "loss": 0.5, "kl": None} for number in (1, 2, 3)]


def read_metrics_file(content: bytes, folder: Path) -> None:
    (folder / METRICS_FILE).write_bytes(content)
    with suppress(PPOError):
        assert isinstance(read_metrics(folder / METRICS_FILE), list)
    with suppress(PPOError):
        file = MetricsFile(folder)
        file.cut_back(2)
        file.append(3, {"loss": 1.0})


# --- Judges, rewards and the registry ----------------------------------------------

BODY = {
    "choices": [{"message": {"content": "VERDICT: A"}, "finish_reason": "stop"}],
    "usage": {"total_tokens": 7},
}
REPLY = {"text": "VERDICT: A", "tokens": 7}
DECISION = {
    "number": 1,
    "action": "promoted",
    "version": 3,
    "champion": 3,
    "reasons": ["good", "better"],
    "by": "person a",
    "at": "2026-01-01T00:00:00+00:00",
    "key": "k",
}

VERDICT_PIECES = (
    *("VERDICT: A", "VERDICT: B", "verdict:tie", "**VERDICT**: B", "A", "TIE", "\n", " ", "*", "_"),
    *("<think>", "</think>", "VERDICT", ":", "(" * 500, "*_" * 500, "\u2028", "VERDICT: A B", "\0"),
)
replies = st.lists(st.sampled_from(VERDICT_PIECES) | texts, max_size=12).map("".join)


def read_reply(text: str, folder: Path) -> None:
    verdict = read_verdict(text)
    assert verdict.winner in WINNERS
    assert swapped(swapped(verdict)) == verdict
    pose("better", text, text, text, attempt=2)


def read_completion(content: bytes, folder: Path) -> None:
    # The caller turns this error into an unanswered call.
    with suppress(ValidationError):
        read_body(content.decode(errors="replace"))


def read_stored_reply(content: bytes, folder: Path) -> None:
    key = reply_key("model", "wording", "p", "a", "b", 1)
    path = folder / key[:2] / f"{key}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    with suppress(PPOError):
        reply = ReplyCache(folder).get(key)
        assert reply is not None
        ReplyCache(folder).put(key, reply)


def read_decision(content: bytes, folder: Path) -> None:
    with suppress(PPOError):
        decision = decode(1, content.decode(errors="replace"))
        assert decode(1, encode(decision)).key == decision.key
        as_markdown([decision])
        stack_of([decision])


def ask_function(given: Any, folder: Path) -> None:
    with suppress(PPOError):
        judge = FunctionJudge("mine", lambda prompts, pairs: given, "1")
        (verdict,) = judge(["p"], [("a", "b")])
        assert verdict.winner in WINNERS
        assert verdict.probability is None or 0 <= verdict.probability <= 1
        verdict.reason.encode()


def score_function(given: Any, folder: Path) -> None:
    rewards = make_rewards(lambda prompts, responses: given, make_tokenizer(), batch_size=4)
    with suppress(PPOError):
        total, _ = rewards(["w1"] * 3, make_rollout())
        assert total.shape == (3,)


PROPERTIES: dict[str, tuple[st.SearchStrategy[Any], str, Check]] = {
    "jsonl": (
        damaged(LINES)
        | st.one_of(*[with_other_values(rows).map(lines_of) for rows in (ROWS, *OTHER_FORMS)]),
        "rows.jsonl",
        read_everywhere,
    ),
    "json": (json_files(ROWS), "rows.json", read_everywhere),
    "csv": (damaged(CSV), "rows.csv", read_everywhere),
    "gzip": (damaged(gzip.compress(LINES)), "rows.jsonl.gz", read_everywhere),
    "parquet": (damaged(*tables()), "rows.parquet", read_everywhere),
    "name": (texts, "", lambda name, folder: suppressed(lambda: open_source(name))),
    "flow-settings-text": (damaged(SETTINGS_TOML), "", read_flow_settings),
    "flow-settings": (with_other_values(TABLE), "", check_settings),
    "ppo-toml": (damaged(PPO_TOML), "settings.toml", read_settings_file),
    "ppo-json": (json_files(PPO_JSON), "settings.json", read_settings_file),
    "flags": (flags, "", parse_flags),
    "journal": (
        st.tuples(
            with_other_values(ENTRIES).map(lines_of) | damaged(lines_of(ENTRIES)),
            damaged(b"150\n", b"0\n"),
        ),
        "",
        read_journal,
    ),
    "manifest": (
        json_files({"files": {"config.json": hashlib.sha256(b"{}").hexdigest()}}),
        "",
        read_manifest_of,
    ),
    "checkpoint": (
        st.tuples(json_files(STATE_FIELDS), json_files(FILES), st.booleans()),
        "",
        read_damaged_checkpoint,
    ),
    "lease": (json_files(LEASE_FIELDS), "", claim_lease),
    "metrics": (
        with_other_values(METRICS).map(lines_of) | damaged(lines_of(METRICS)),
        "",
        read_metrics_file,
    ),
    "judge-reply": (replies, "", read_reply),
    "judge-body": (json_files(BODY), "", read_completion),
    "stored-reply": (json_files(REPLY), "", read_stored_reply),
    "decision": (json_files(DECISION), "", read_decision),
    "judge-function": (
        values | st.lists(with_other_values({"winner": "tie", "probability": 0.5, "reason": "a"})),
        "",
        ask_function,
    ),
    "reward-function": (values | st.lists(values, min_size=3, max_size=3), "", score_function),
}
"""What is parsed, the file or folder that the check gets, and the check."""


def suppressed(call: Callable[[], object]) -> None:
    with suppress(PPOError):
        call()


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_parser_raises_no_other_error(tmp_path: Path, name: str):
    try_examples(name, tmp_path, examples=EXAMPLES, start=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROPERTIES)
def test_a_parser_raises_no_other_error_for_minutes(tmp_path: Path, name: str):
    start = first = time.time_ns()
    while time.time_ns() - first < SOAK_SECONDS * 1e9:
        start += 1
        try_examples(name, tmp_path, examples=200, start=start)


def try_examples(name: str, folder: Path, *, examples: int, start: int) -> None:
    strategy, place, check = PROPERTIES[name]

    @seed(start)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def run(example: Any) -> None:
        # Processor time, because a busy machine lets a disk wait for seconds.
        began = time.process_time()
        check(example, folder / place)
        assert time.process_time() - began < SLOWEST

    run()
