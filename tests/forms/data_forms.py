"""Rows in every form that people have, and the containers that they come in."""

import csv
import gzip
import json
from collections.abc import Callable
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict

Row = dict[str, Any]
Make = Callable[[int], Row]
"""The row of a number; rows of different numbers have different prompts."""


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def share_gpt(*texts: str) -> list[dict[str, str]]:
    speakers = ("human", "gpt")
    return [{"from": speakers[n % 2], "value": text} for n, text in enumerate(texts)]


def in_parts(message: dict[str, str]) -> Row:
    parts = [{"type": "text", "text": part} for part in message["content"].partition(" ")]
    return {"role": message["role"], "content": parts}


def asked(n: int) -> str:
    return f"w{n % 40} w{3 + n // 40} w{n % 7}"


def good(n: int) -> str:
    return f"w1 w1 w{n % 30}"


def bad(n: int) -> str:
    return f"w{10 + n % 30} w2"


def hh(n: int) -> str:
    return f"\n\nHuman: {asked(n)}\n\nAssistant:"


def post(n: int) -> Row:
    return {"subreddit": "cats", "title": "w8", "post": asked(n), "id": str(n)}


PROMPTS: dict[str, Make] = {
    "prompt": lambda n: {"prompt": asked(n)},
    "prompt of messages": lambda n: {"prompt": [user(asked(n))]},
    "query": lambda n: {"query": asked(n)},
    "question": lambda n: {"question": asked(n), "id": n},
    "instruction, input": lambda n: {"instruction": asked(n), "input": "w9" if n % 2 else ""},
    "messages": lambda n: {"messages": [user(asked(n)), assistant(good(n))]},
    "ShareGPT": lambda n: {"conversations": share_gpt(asked(n))},
    "content parts": lambda n: {"prompt": [in_parts(user(asked(n)))]},
    "info": lambda n: {"info": post(n)},
    "prompt of HH": lambda n: {"prompt": hh(n)},
    "chosen, rejected of HH": lambda n: {
        "chosen": f"{hh(n)} {good(n)}",
        "rejected": f"{hh(n)} {bad(n)}",
    },
    "renamed": lambda n: {"post": asked(n)},
}

DEMONSTRATIONS: dict[str, Make] = {
    "prompt, completion": lambda n: {"prompt": asked(n), "completion": good(n)},
    "prompt, completion of messages": lambda n: {
        "prompt": [user(asked(n))],
        "completion": [assistant(good(n))],
    },
    "messages": PROMPTS["messages"],
    "ShareGPT": lambda n: {"conversations": share_gpt(asked(n), good(n))},
    "content parts": lambda n: {
        "messages": [in_parts(user(asked(n))), in_parts(assistant(good(n)))]
    },
    "instruction, input, output": lambda n: {
        **PROMPTS["instruction, input"](n),
        "output": good(n),
    },
    "question, answer": lambda n: {"question": asked(n), "answer": good(n)},
    "query, reference_response": lambda n: {"query": asked(n), "reference_response": good(n)},
    "prompt, response": lambda n: {"prompt": asked(n), "response": good(n)},
    "text": lambda n: {"text": f"{asked(n)} {good(n)}"},
    "renamed": lambda n: {"post": asked(n), "summary": good(n)},
}

PAIRS: dict[str, Make] = {
    "texts": lambda n: {"prompt": asked(n), "chosen": good(n), "rejected": bad(n)},
    "texts, prompt inside": lambda n: {
        "prompt": f"{asked(n)} ",
        "chosen": f"{asked(n)} {good(n)}",
        "rejected": f"{asked(n)} {bad(n)}",
    },
    "texts without a prompt": lambda n: {
        "chosen": f"{asked(n)} {good(n)}",
        "rejected": f"{asked(n)} {bad(n)}",
    },
    "messages and texts": lambda n: {
        "prompt": [user(asked(n))],
        "chosen": good(n),
        "rejected": bad(n),
    },
    "messages, prompt apart": lambda n: {
        "prompt": [user(asked(n))],
        "chosen": [assistant(good(n))],
        "rejected": [assistant(bad(n))],
    },
    "messages, prompt inside": lambda n: {
        "chosen": [user(asked(n)), assistant(good(n))],
        "rejected": [user(asked(n)), assistant(bad(n))],
    },
    "UltraFeedback": lambda n: {
        "prompt": asked(n),
        "prompt_id": str(n),
        "chosen": [user(asked(n)), assistant(good(n))],
        "rejected": [user(asked(n)), assistant(bad(n))],
        "messages": [user(asked(n)), assistant(good(n))],
        "score_chosen": 9.0,
        "score_rejected": 2.0,
    },
    "HH": PROMPTS["chosen, rejected of HH"],
    "ShareGPT": lambda n: {
        "conversations": share_gpt(asked(n)),
        "chosen": {"from": "gpt", "value": good(n)},
        "rejected": {"from": "gpt", "value": bad(n)},
    },
    "content parts": lambda n: {
        "prompt": [in_parts(user(asked(n)))],
        "chosen": [in_parts(assistant(good(n)))],
        "rejected": [in_parts(assistant(bad(n)))],
    },
    "KTO": lambda n: {
        "prompt": asked(n // 2),
        "completion": bad(n) if n % 2 else good(n),
        "label": n % 2 == 0,
    },
    "KTO of messages": lambda n: {
        "prompt": [user(asked(n // 2))],
        "completion": [assistant(bad(n) if n % 2 else good(n))],
        "label": n % 2 == 0,
    },
    "ranks": lambda n: {
        "prompt": asked(n),
        "responses": [bad(n), f"{good(n)} w3", good(n)],
        "ranks": [3, 2, 1],
    },
    "scores": lambda n: {
        "prompt": [user(asked(n))],
        "responses": [bad(n), good(n)],
        "scores": [0.5, 1.5],
    },
    "completions of UltraFeedback": lambda n: {
        "instruction": asked(n),
        "completions": [
            {"response": text, "overall_score": score, "model": "x"}
            for text, score in ((bad(n), 1.5), (good(n), 8.0))
        ],
    },
    "TL;DR": lambda n: {
        "info": post(n),
        "summaries": [{"text": bad(n), "policy": "x"}, {"text": good(n), "policy": "y"}],
        "choice": 1,
        "worker": f"p{n}",
    },
    "renamed": lambda n: {"post": asked(n), "better": good(n), "worse": bad(n)},
}

PAIRS_OF_A_ROW = {"KTO": 0.5, "KTO of messages": 0.5, "ranks": 3}
"""Pairs of a row, where there is not one."""

REFERENCES: dict[str, Make] = {
    "prompt, reference": lambda n: {"prompt": asked(n), "reference": good(n)},
    "info, reference": lambda n: {"info": post(n), "reference": good(n)},
    "renamed": lambda n: {"post": asked(n), "gold": good(n)},
    **{name: make for name, make in DEMONSTRATIONS.items() if name not in ("text", "renamed")},
}

VOTES: dict[str, Make] = {
    "prompt": lambda n: {"prompt": asked(n), **_vote(n)},
    "prompt of messages": lambda n: {"prompt": [user(asked(n))], **_vote(n)},
    "prompt of HH": lambda n: {"prompt": hh(n), **_vote(n)},
    "question": lambda n: {"question": asked(n), **_vote(n)},
    "query": lambda n: {"query": asked(n), **_vote(n)},
    "instruction": lambda n: {"instruction": asked(n), **_vote(n)},
    "renamed": lambda n: {"post": asked(n), "one": good(n), "other": bad(n), "vote": "first"},
}

RENAMED = {
    "prompt": "post",
    "completion": "summary",
    "chosen": "better",
    "rejected": "worse",
    "reference": "gold",
    "first": "one",
    "second": "other",
    "label": "vote",
}
"""Field -> column in the forms called `renamed`."""

CHAT_ALONE = {
    "prompt of messages",
    "messages",
    "prompt, completion of messages",
    "messages and texts",
    "messages, prompt apart",
    "messages, prompt inside",
    "UltraFeedback",
    "ShareGPT",
    "content parts",
    "KTO of messages",
    "scores",
}
"""Forms that only a policy with a chat template reads."""

TEXT_ALONE = {"text", "texts without a prompt"}
"""Forms of texts that have no prompt."""


def _vote(n: int) -> Row:
    return {"first": good(n), "second": bad(n), "label": "tie" if n % 5 == 0 else "first"}


# --- Containers --------------------------------------------------------------------


def json_lines(rows: list[Row]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def comma_separated(rows: list[Row], delimiter: str = ",") -> bytes:
    text = StringIO()
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


FILES: dict[str, Callable[[list[Row]], bytes]] = {
    "jsonl": json_lines,
    "json": lambda rows: json.dumps(rows).encode(),
    "csv": comma_separated,
    "tsv": partial(comma_separated, delimiter="\t"),
}

FOLDERS = ("relative folder", "absolute folder", "shards", "save_to_disk", "save_to_disk:split")

CONTAINERS = (*FILES, *(f"{ending}.gz" for ending in FILES), "parquet", "pq", *FOLDERS)


def write_container(folder: Path, name: str, container: str, rows: list[Row]) -> str:
    """Write rows, and return what a setting calls them, from within the folder."""
    path = folder / name
    if container.partition(".")[0] in FILES:
        ending, _, compressed = container.partition(".")
        data = FILES[ending](rows)
        file = folder / f"{name}.{container}"
        file.write_bytes(gzip.compress(data) if compressed else data)
        return file.name
    if container in ("parquet", "pq"):
        Dataset.from_list(rows).to_parquet(folder / f"{name}.{container}")
        return f"{name}.{container}"
    if container == "save_to_disk":
        Dataset.from_list(rows).save_to_disk(path)
        return str(path)
    if container == "save_to_disk:split":
        DatasetDict(test=Dataset.from_list(rows)).save_to_disk(path)
        return f"{name}:test"
    path.mkdir()
    if container == "shards":
        half = len(rows) // 2
        (path / "train-00000-of-00002.jsonl").write_bytes(json_lines(rows[:half]))
        (path / "train-00001-of-00002.jsonl.gz").write_bytes(gzip.compress(json_lines(rows[half:])))
        return name
    (path / "rows.jsonl").write_bytes(json_lines(rows))
    return str(path) if container == "absolute folder" else name
