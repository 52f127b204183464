from collections.abc import Iterator

import pytest

from tests.helpers.servers.mlflow_store import tracking_to
from tests.helpers.servers.servers import MlflowServer, mlflow_server


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    folder = tmp_path_factory.mktemp("mlflow")
    with mlflow_server(folder, str(folder / "artifacts")) as running, tracking_to(running.url):
        yield running
