from collections.abc import Iterator

import pytest

from pipeline.storage.s3_client import s3_client
from tests.helpers.servers.mlflow_store import tracking_to
from tests.helpers.servers.servers import BUCKET, MlflowServer, mlflow_server, s3


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    folder = tmp_path_factory.mktemp("mlflow")
    with mlflow_server(folder, str(folder / "artifacts")) as running, tracking_to(running.url):
        yield running


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with s3() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        s3_client.cache_clear()
        yield f"s3://{BUCKET}"
    s3_client.cache_clear()
