"""Fetch a registered policy from MLflow: the folders of its model and its tokenizer."""

import re
from pathlib import Path

from pipeline.tracking.mlflow_client import connect
from ppo_core.errors import ModelError
from serving.champion import fetch_champion

VERSION_ADDRESS = re.compile(r"models:/([^/@]+)(?:/(\d+)|@([^/@]+))")
"""Address of a registered version: name, then version number or alias."""


def find_policy(address: str, cache: Path) -> tuple[Path | str, Path | str]:
    """Return the paths or hub ids of a policy's model and tokenizer.

    Args:
        address: a folder, a hub id, or a registered version: models:/NAME/VERSION or
            models:/NAME@ALIAS. The files of a version are verified.
        cache: folder for downloaded versions.

    Raises:
        ModelError: the address names no version, the registry has no such version, or a file of
            the version is refused.
    """
    if "://" not in address and not address.startswith(("models:/", "runs:/")):
        return address, address
    found = VERSION_ADDRESS.fullmatch(address)
    if found is None:
        raise ModelError(
            f"{address!r} is not the address of a model. Give a folder, a hub id, "
            "models:/NAME/VERSION or models:/NAME@ALIAS."
        )
    connect()
    name, version, alias = found.groups()
    folder = fetch_champion(name, version=version, alias=alias or "", cache=cache).folder
    return policy_folders(folder)


def policy_folders(version: Path) -> tuple[Path, Path]:
    """Return the folders of the model and of the tokenizer in the folder of a version.

    Raises:
        ModelError: a folder is missing.
    """
    model, tokenizer = version / "model", version / "components" / "tokenizer"
    if not (model.is_dir() and tokenizer.is_dir()):
        raise ModelError(
            f"{version} holds no model and tokenizer of transformers as mlflow.transformers writes "
            "them. Name another version, or the folder of a model."
        )
    return model, tokenizer
