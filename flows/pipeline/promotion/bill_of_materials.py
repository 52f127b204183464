"""The software bill of materials (SBOM) of a registered version, as a CycloneDX document.

    policy (the document's subject)
      pedigree: SFT policy, and its pedigree: base model
      depends on: reward model, data sets, installed packages

The document depends only on the run and the environment, so a retried step writes the same bytes.
The digests of models and data sets are also in the model card. Here they are properties, because
CycloneDX's `hashes` are hashes of single files.
"""

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from importlib.metadata import Distribution
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType, Pedigree
from cyclonedx.model.license import License
from cyclonedx.model.tool import ToolRepository
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL

import ppo_core
from pipeline.inputs.flow_run import FlowRun
from pipeline.inputs.lineage import DataSet, installed_distributions
from pipeline.promotion.version_card import NamedModel
from ppo_core.training.model_card import without_folders

PROPERTY = "rlhf-flow:"
"""Prefix of the names of properties that CycloneDX does not define."""

LONGEST_LICENSE = 100
"""Longest name of a license, in characters; some packages give the full text instead of a name."""


def bill_of_materials(
    name: str, models: Mapping[str, NamedModel], run: FlowRun, started: datetime
) -> str:
    """Return the bill of materials of a run's policy as JSON.

    Args:
        name: name of the registered model.
        models: models of the run: base, sft, reward_model and policy.
        run: the run, with its data sets; its lineage becomes properties of the policy.
        started: time of the run, with its timezone.
    """
    base = _model("base", models["base"])
    policy = Component(
        type=ComponentType.MACHINE_LEARNING_MODEL,
        bom_ref="model:policy",
        name=name,
        version=run.id,
        properties=_properties({"digest": models["policy"].digest, **run.origin}),
        pedigree=Pedigree(ancestors=[_model("sft", models["sft"], ancestor=base)]),
    )
    parts = [
        _model("reward_model", models["reward_model"]),
        *map(_data_set, run.data),
        *map(_package, installed_distributions()),
    ]
    tool = Component(
        type=ComponentType.APPLICATION,
        bom_ref="tool",
        name="rlhf-flow",
        version=ppo_core.__version__,
    )
    bom = Bom(
        serial_number=uuid5(NAMESPACE_URL, f"runs:/{run.tracking['parent']}"),
        metadata=BomMetaData(
            timestamp=started, component=policy, tools=ToolRepository(components=[tool])
        ),
        components=parts,
    )
    bom.register_dependency(policy, parts)
    return make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=1)


def _model(part: str, model: NamedModel, ancestor: Component | None = None) -> Component:
    """Return the component of a model with the role `part` in the run."""
    return Component(
        type=ComponentType.MACHINE_LEARNING_MODEL,
        bom_ref=f"model:{part}",
        name=without_folders(model.name),
        purl=_hub_address(model.digest),
        properties=_properties({"part": part, "digest": model.digest}),
        pedigree=None if ancestor is None else Pedigree(ancestors=[ancestor]),
    )


def _hub_address(digest: str) -> PackageURL | None:
    """Return the address of a hub model, which has the digest ID@COMMIT; None for a folder."""
    repository, at, commit = digest.rpartition("@")
    owner, _, name = repository.rpartition("/")
    return PackageURL("huggingface", owner, name, commit) if at else None


def _data_set(data: DataSet) -> Component:
    return Component(
        type=ComponentType.DATA,
        bom_ref=f"data:{data.name}",
        name=without_folders(data.source),
        properties=_properties({"use": data.name, "digest": data.digest, "rows": data.rows}),
    )


def _package(package: Distribution) -> Component:
    """Return the component of a package, with a hash if an archive was installed directly."""
    name, version = package.metadata["Name"], package.version
    # pip writes this file (PEP 610) for every package that did not come from an index.
    origin = json.loads(package.read_text("direct_url.json") or "null")
    archive = {} if origin is None else origin.get("archive_info", {}).get("hashes", {})
    return Component(
        type=ComponentType.LIBRARY,
        bom_ref=f"package:{name.lower()}",
        name=name,
        version=version,
        purl=PackageURL("pypi", name=name, version=version) if origin is None else None,
        licenses=_licenses(package),
        hashes=[
            HashType(alg=HashAlgorithm.SHA_256, content=content)
            for kind, content in archive.items()
            if kind == "sha256"
        ],
    )


def _licenses(package: Distribution) -> Iterable[License]:
    """Return the licenses that a package declares: as an SPDX expression, a text or classifiers."""
    metadata, make = package.metadata, LicenseFactory().make_from_string
    for field in ("License-Expression", "License"):
        text = metadata[field].strip() if field in metadata else ""
        if text and "\n" not in text and len(text) <= LONGEST_LICENSE and text != "UNKNOWN":
            return [make(text)]
    classifiers = metadata.get_all("Classifier") or []
    names = [one.split(" :: ")[-1] for one in classifiers if one.startswith("License :: ")]
    return [make(name) for name in names if name != "OSI Approved"]


def _properties(values: Mapping[str, Any]) -> list[Property]:
    return [Property(name=PROPERTY + name, value=str(value)) for name, value in values.items()]
