"""S3 by moto, with a proxy in front of it that spoils replies on demand."""

from collections.abc import Iterator

import pytest

from pipeline.storage import s3_client
from tests.helpers.servers.s3_faults import S3Faults, faulty_s3
from tests.helpers.servers.servers import s3


@pytest.fixture(scope="package")
def store() -> Iterator[dict[str, str]]:
    with s3() as environment:
        yield environment


@pytest.fixture
def faults(store: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Faults]:
    """Let the client of this process go through the proxy, which passes on everything at first."""
    for name, value in store.items():
        monkeypatch.setenv(name, value)
    with faulty_s3(store["AWS_ENDPOINT_URL_S3"]) as (planted, address):
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", address)
        # The proxy answers at once, so long waits would only make the tests slow.
        monkeypatch.setattr(s3_client, "FIRST_WAIT_SECONDS", 0.01)
        monkeypatch.setattr(s3_client, "LONGEST_WAIT_SECONDS", 0.1)
        s3_client.s3_client.cache_clear()
        yield planted
    s3_client.s3_client.cache_clear()
