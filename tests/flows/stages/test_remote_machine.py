"""What is refused before anything starts on a machine of a scheduler."""

import re
import tomllib

import pytest

from pipeline.preflight import remote_machine
from pipeline.preflight.remote_machine import check_machine, refuse_proxied_artifacts
from ppo_core.errors import ConfigError
from tests.helpers.inputs.pipeline_inputs import write_model
from tests.helpers.paths import ROOT

MODULES = {
    "scikit-learn": "sklearn",
    "tomli-w": "tomli_w",
    "cyclonedx-python-lib": "cyclonedx",
    "pyyaml": "yaml",
}
"""Modules that have another name than their package."""

NOT_IN_STEPS = {"metaflow", "ninja"}
"""Metaflow is in the code package, and ninja compiles only."""


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("METAFLOW_RUNTIME_ENVIRONMENT", "kubernetes")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    monkeypatch.delenv("MLFLOW_REGISTRY_URI", raising=False)
    return monkeypatch


def test_a_machine_with_all_packages_and_a_server_passes(remote):
    check_machine()


def test_all_packages_of_the_project_are_looked_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["evaluation"]]
    names = {re.split(r"[<>=;\[ ]", one)[0] for one in needed} - NOT_IN_STEPS
    assert {*remote_machine.PACKAGES} == {MODULES.get(name, name) for name in names}


def test_an_image_without_a_package_is_refused(remote):
    remote.setattr(remote_machine, "PACKAGES", ("torch", "no_such_package"))
    with pytest.raises(ConfigError, match="has no package no_such_package, so a later step"):
        check_machine()


@pytest.mark.parametrize(
    "uri", ["", "sqlite:///mlflow.db", "file:///mlruns", "/mlruns", "./m", "mlruns", "a/b:c"]
)
def test_an_mlflow_of_one_machine_is_refused(uri: str, remote):
    remote.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(ConfigError, match=f"MLFLOW_TRACKING_URI='{uri}' would give each step"):
        check_machine()
    remote.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    remote.setenv("MLFLOW_REGISTRY_URI", uri or "sqlite:///x.db")
    with pytest.raises(ConfigError, match="MLFLOW_REGISTRY_URI="):
        check_machine()


@pytest.mark.parametrize(
    "uri", ["postgresql://mlflow:5432/db", "databricks", "databricks://team", "arn:aws:sagemaker:x"]
)
def test_every_kind_of_server_passes(uri: str, remote):
    remote.setenv("MLFLOW_TRACKING_URI", uri)
    check_machine()


def test_on_this_machine_a_file_is_enough(remote):
    remote.setenv("METAFLOW_RUNTIME_ENVIRONMENT", "local")
    remote.delenv("MLFLOW_TRACKING_URI")
    check_machine()


def test_a_large_policy_does_not_pass_through_the_server(tmp_path, monkeypatch):
    policy = write_model(tmp_path / "policy")
    refuse_proxied_artifacts("mlflow-artifacts:/1", policy)
    monkeypatch.setattr(remote_machine, "MOST_PROXIED_BYTES", 40_000)
    refuse_proxied_artifacts("s3://bucket/1", policy)
    with pytest.raises(ConfigError, match=r"through the MLflow server \(mlflow-artifacts:/1\)"):
        refuse_proxied_artifacts("mlflow-artifacts:/1", policy)
