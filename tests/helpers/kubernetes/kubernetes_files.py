"""The objects in infra/kubernetes."""

from functools import cache
from typing import Any

import yaml

from tests.helpers.paths import ROOT

FOLDER = ROOT / "infra" / "kubernetes"


def kustomization() -> Any:
    return yaml.safe_load((FOLDER / "kustomization.yaml").read_text())


def objects(kind: str = "") -> list[Any]:
    """Return the objects that `kubectl apply --kustomize` creates; those of one kind, if given."""
    return [each for each in _all_objects() if kind in ("", each["kind"])]


@cache
def _all_objects() -> list[Any]:
    texts = [(FOLDER / name).read_text() for name in kustomization()["resources"]]
    return [each for text in texts for each in yaml.safe_load_all(text)]


def argo_defaults() -> Any:
    """Return the settings of Argo's controller, with the YAML in their values read."""
    patch = yaml.safe_load((FOLDER / "argo-defaults.yaml").read_text())
    return {key: yaml.safe_load(text) for key, text in patch["data"].items()}
