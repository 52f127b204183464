"""The lock files have everything that pyproject.toml asks for, and nothing that is not hashed."""

import re
import tomllib
from functools import cache

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.helpers.paths import ROOT

LOCKS = ROOT / "infra" / "locks"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

PYTHONS = {"cpu": "3.11", "cuda": "3.12", "build": "3.11"}
"""Python of the image that each lock file is for."""

CUDA_ALONE = ("nvidia-", "cuda-", "triton")
"""Beginnings of the names of packages that the CUDA build of torch needs."""

ENTRY = re.compile(r"([a-z0-9][a-z0-9.-]*)==([^ ;]+)(?: \\\n    --hash=sha256:[0-9a-f]{64})+\n")


@cache
def locked(name: str) -> dict[str, Version]:
    """Versions of a lock file; fails if anything in it is no hashed version of an index."""
    text = (LOCKS / f"{name}.txt").read_text()
    entries = re.sub(r"(?m)^#.*\n", "", text)
    assert not ENTRY.sub("", entries), f"{name}.txt has lines without a version or a hash"
    return {found[1]: Version(found[2]) for found in ENTRY.finditer(entries)}


def requirements() -> list[Requirement]:
    """All requirements of the project, of its extras too."""
    texts = list(PROJECT["project"]["dependencies"])
    for extra in PROJECT["project"]["optional-dependencies"].values():
        texts += extra
    return [Requirement(text) for text in texts]


def missing(name: str, required: list[Requirement]) -> list[str]:
    """Requirements that a lock file does not meet."""
    environment = {"sys_platform": "linux", "python_version": PYTHONS[name]}
    found = locked(name)

    def is_met(one: Requirement) -> bool:
        package = canonicalize_name(one.name)
        return package in found and found[package] in one.specifier

    needed = [one for one in required if one.marker is None or one.marker.evaluate(environment)]
    return [str(one) for one in needed if not is_met(one)]


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_a_lock_meets_every_requirement_and_extra(name: str):
    assert len(requirements()) > 40
    assert not missing(name, requirements()), "Run `make lock`."


def test_a_requirement_outside_of_the_lock_is_noticed():
    required = [Requirement(text) for text in ("torch>=2.14", "no-such-package", "numpy>=2")]
    assert missing("cpu", required) == ["torch>=2.14", "no-such-package"]


def test_the_build_has_what_the_build_backend_needs():
    required = [Requirement(text) for text in PROJECT["build-system"]["requires"]]
    assert not missing("build", required)
    assert locked("build").items() <= locked("cpu").items()
    assert locked("build").items() <= locked("cuda").items()


def test_both_locks_agree_on_everything_but_the_build_of_torch():
    cpu, cuda = dict(locked("cpu")), dict(locked("cuda"))
    builds = cpu.pop("torch"), cuda.pop("torch")
    assert (builds[0].public, builds[0].local) == (str(builds[1]), "cpu")
    shared = {name: one for name, one in cuda.items() if not name.startswith(CUDA_ALONE)}
    assert cpu == shared
    assert len(cuda) > len(shared)


def test_the_locks_are_those_of_the_images():
    for name in ("cpu", "cuda"):
        text = (ROOT / "infra" / f"Dockerfile.{name}").read_text()
        assert f"make install LOCK=infra/locks/{name}.txt" in text
        assert re.search(rf"python(:|3=){re.escape(PYTHONS[name])}[-.]", text)
