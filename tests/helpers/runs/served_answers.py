"""Answers as the example service records them, and what users say about them."""

from typing import Any

import mlflow

from serving.answer_traces import begin_answer, record_to


def serve_answers(name: str, version: str, answers: dict[str, str]) -> dict[str, str]:
    """Record prompt -> answer; return prompt -> id."""
    record_to(name)
    ids = {}
    for prompt, text in answers.items():
        span = begin_answer(name, version, {"prompt": prompt})
        span.end(outputs={"text": text})
        ids[prompt] = span.trace_id
    mlflow.flush_trace_async_logging()
    return ids


def opinion_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """What matters of a row of feedback.jsonl."""
    return row["prompt"], row["chosen"], row["rejected"], row["annotator"]
