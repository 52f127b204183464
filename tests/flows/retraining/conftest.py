"""Inputs of a run in S3 by moto, with MLflow in a database of each test's own."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import boto3
import pytest

from pipeline.storage.s3_client import s3_client
from tests.helpers.inputs.pipeline_inputs import tiny_table
from tests.helpers.servers.servers import BUCKET, s3


@dataclass
class Bucket:
    """A prefix of the bucket, as a user fills it."""

    client: Any
    prefix: str = field(default_factory=lambda: str(uuid4()))

    def address(self, name: str) -> str:
        return f"s3://{BUCKET}/{self.prefix}/{name}"

    def write(self, name: str, rows: list[dict[str, str]]) -> str:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        self.client.put_object(Bucket=BUCKET, Key=f"{self.prefix}/{name}", Body=lines.encode())
        return self.address(name)


@pytest.fixture(scope="package")
def store() -> Iterator[dict[str, str]]:
    with s3() as environment:
        yield environment


@pytest.fixture
def bucket(store: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    for name, value in store.items():
        monkeypatch.setenv(name, value)
    s3_client.cache_clear()
    yield Bucket(boto3.client("s3"))
    s3_client.cache_clear()


@pytest.fixture(scope="package")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of a run that takes seconds, with inputs on this disk."""
    return tiny_table(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def table(inputs: dict[str, Any], bucket: Bucket, tmp_path: Path) -> dict[str, Any]:
    """The same settings, with the preferences as files below a prefix of S3."""
    rows = [json.loads(line) for line in Path(inputs["preferences"]).read_text().splitlines()]
    bucket.write("pairs/first.jsonl", rows)
    return inputs | {
        "preferences": bucket.address("pairs"),
        "output_dir": str(tmp_path / "outputs"),
        "store": bucket.address("store"),
    }
