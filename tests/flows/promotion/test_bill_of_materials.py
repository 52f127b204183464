"""The bill of materials is a valid CycloneDX document with models, data and packages."""

import json
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import OutputFormat, SchemaVersion
from cyclonedx.validation import make_schemabased_validator

from pipeline.inputs.flow_run import FlowRun
from pipeline.inputs.lineage import DataSet, installed_packages
from pipeline.promotion.bill_of_materials import bill_of_materials
from pipeline.promotion.version_card import NamedModel
from pipeline.storage.workspace import Workspace

COMMIT = "0" * 39 + "1"
STARTED = datetime(2026, 11, 25, 9, 30, tzinfo=UTC)
RUN = FlowRun(
    id="RLHF/7",
    workspace=Workspace("outputs"),
    tracking={"parent": "ab" * 16},
    origin={"git_commit": "c0ffee", "seed": "1"},
    data=[DataSet(name="prompts", source="/home/ada/prompts.jsonl", digest="da" * 8, rows=32)],
)
MODELS = {
    "base": NamedModel(name="org/base@v1", digest=f"org/base@{COMMIT}"),
    "sft": NamedModel(name="/home/ada/sft", digest="5f" * 8),
    "reward_model": NamedModel(name="/home/ada/reward", digest="5e" * 8),
    "policy": NamedModel(name="/home/ada/policy", digest="50" * 8),
}


def text_of_bill() -> str:
    return bill_of_materials("assistant", MODELS, RUN, STARTED)


def document() -> dict[str, Any]:
    made: dict[str, Any] = json.loads(text_of_bill())
    return made


def properties(component: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["value"] for one in component["properties"]}


def require_valid(text: str) -> None:
    error = make_schemabased_validator(OutputFormat.JSON, SchemaVersion.V1_6).validate_str(text)
    assert error is None, error


def test_the_document_is_valid_and_the_check_notices_an_error():
    text = text_of_bill()
    require_valid(text)
    with pytest.raises(AssertionError):
        require_valid(text.replace('"machine-learning-model"', '"model"'))


def test_the_policy_descends_from_sft_and_base():
    made = document()
    policy = made["metadata"]["component"]
    assert (policy["type"], policy["name"]) == ("machine-learning-model", "assistant")
    assert policy["version"] == "RLHF/7"
    assert properties(policy) == {
        "rlhf-flow:digest": "50" * 8,
        "rlhf-flow:git_commit": "c0ffee",
        "rlhf-flow:seed": "1",
    }
    (sft,) = policy["pedigree"]["ancestors"]
    assert (sft["name"], properties(sft)["rlhf-flow:digest"]) == ("sft", "5f" * 8)
    (base,) = sft["pedigree"]["ancestors"]
    assert base["purl"] == f"pkg:huggingface/org/base@{COMMIT}"
    assert made["metadata"]["timestamp"] == "2026-11-25T09:30:00+00:00"
    assert "/home/ada" not in json.dumps(made)


def test_reward_model_data_and_all_packages_are_parts():
    made = document()
    parts = {one["bom-ref"]: one for one in made["components"]}
    reward_model = parts["model:reward_model"]
    assert reward_model["type"] == "machine-learning-model"
    assert properties(reward_model)["rlhf-flow:digest"] == "5e" * 8
    prompts = parts["data:prompts"]
    assert (prompts["type"], prompts["name"]) == ("data", "prompts.jsonl")
    assert properties(prompts)["rlhf-flow:rows"] == "32"
    libraries = [one for one in made["components"] if one["type"] == "library"]
    listed = sorted(f"{one['name']}=={one['version']}".lower() for one in libraries)
    assert listed == sorted(installed_packages().lower().split())
    assert parts["package:numpy"]["purl"] == f"pkg:pypi/numpy@{version('numpy')}"
    (graph,) = [one for one in made["dependencies"] if one["ref"] == "model:policy"]
    assert set(graph["dependsOn"]) == parts.keys()


def install(folder: Path, name: str, metadata: str, origin: dict[str, Any] | None = None) -> None:
    """The record of an installed package, as pip leaves it."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\n{metadata}")
    if origin is not None:
        (info / "direct_url.json").write_text(json.dumps(origin))


@pytest.mark.parametrize(
    ("metadata", "licenses"),
    [
        ("License-Expression: MIT OR Apache-2.0\n", [{"expression": "MIT OR Apache-2.0"}]),
        ("License: mit\n", [{"license": {"id": "MIT"}}]),
        ("License: Our own terms\n", [{"license": {"name": "Our own terms"}}]),
        (
            f"License: {'word ' * 30}\nClassifier: License :: OSI Approved :: ISC License (ISCL)\n",
            [{"license": {"name": "ISC License (ISCL)"}}],
        ),
        ("Classifier: License :: OSI Approved\n", None),
    ],
)
def test_a_package_has_the_license_that_it_declares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metadata: str, licenses: list[Any] | None
):
    install(tmp_path, "made-up", metadata)
    monkeypatch.syspath_prepend(tmp_path)
    text = text_of_bill()
    require_valid(text)
    (found,) = [one for one in json.loads(text)["components"] if one["name"] == "made-up"]
    assert found.get("licenses") == licenses


def test_a_package_from_an_archive_has_its_hash_and_no_address_of_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    url = "https://internal.example/made-up.whl"
    archive = {"url": url, "archive_info": {"hashes": {"sha256": "ab" * 32}}}
    install(tmp_path, "made-up", "", archive)
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = [one for one in document()["components"] if one["name"] == "made-up"]
    assert found["hashes"] == [{"alg": "SHA-256", "content": "ab" * 32}]
    assert "purl" not in found


@pytest.mark.slow
def test_the_same_run_writes_the_same_bytes_in_every_process():
    code = "import sys; from tests.flows.promotion import test_bill_of_materials as test; " + (
        "sys.stdout.write(test.text_of_bill())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": ".:flows"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == text_of_bill()
