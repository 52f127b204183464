"""S3 by moto, for runs on machines that share no disk."""

from collections.abc import Iterator

import pytest

from pipeline.storage.s3_client import s3_client
from tests.helpers.servers.servers import BUCKET, s3


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with s3() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        s3_client.cache_clear()
        yield f"s3://{BUCKET}"
    s3_client.cache_clear()
