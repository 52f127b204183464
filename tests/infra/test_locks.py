"""The lock files have everything that pyproject.toml asks for, and nothing that is not hashed."""

import re
import subprocess
import tomllib
from functools import cache
from itertools import chain

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.helpers.paths import ROOT

LOCKS = ROOT / "infra" / "locks"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

PYTHONS = {"dev": "3.11", "cpu": "3.11", "cuda": "3.12", "build": "3.11"}
"""Lock file -> the Python that it is for; cpu and cuda are those of the images."""

CUDA_ALONE = ("nvidia-", "cuda-", "triton")
"""Beginnings of the names of packages that the CUDA build of torch needs."""

ENTRY = re.compile(r"([a-z0-9][a-z0-9.-]*)==([^ ;]+)(?: \\\n    --hash=sha256:[0-9a-f]{64})+\n")


@cache
def locked(name: str) -> dict[str, Version]:
    """Versions of a lock file; fails if anything in it is not a hashed version of an index."""
    text = (LOCKS / f"{name}.txt").read_text()
    entries = re.sub(r"(?m)^#.*\n", "", text)
    assert not ENTRY.sub("", entries), f"{name}.txt has lines without a version or a hash"
    return {found[1]: Version(found[2]) for found in ENTRY.finditer(entries)}


def requirements(name: str) -> list[Requirement]:
    """The requirements of the project and of its extras; the images do without dev and docs.

    No lock has the extra lm-eval, which a user adds.
    """
    extras = dict(PROJECT["project"]["optional-dependencies"])
    del extras["lm-eval"]
    if name != "dev":
        del extras["dev"], extras["docs"]
    texts = [*PROJECT["project"]["dependencies"], *chain(*extras.values())]
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


@pytest.mark.parametrize("name", ["dev", "cpu", "cuda"])
def test_a_lock_meets_every_requirement_and_extra(name: str):
    assert len(requirements(name)) > 30
    assert not missing(name, requirements(name)), "Run `make lock`."


def test_a_requirement_outside_of_the_lock_is_noticed():
    required = [Requirement(text) for text in ("torch>=2.14", "no-such-package", "numpy>=2")]
    assert missing("cpu", required) == ["torch>=2.14", "no-such-package"]


def test_a_package_has_one_version_in_all_locks():
    dev, cpu, cuda, build = map(locked, PYTHONS)
    assert cpu.items() <= dev.items()
    assert build.items() <= cpu.items() & cuda.items()
    shared = {name: one for name, one in cuda.items() if not name.startswith(CUDA_ALONE)}
    assert cpu | {"torch": cuda["torch"]} == shared
    assert (cpu["torch"].public, cpu["torch"].local) == (str(cuda["torch"]), "cpu")
    assert len(cuda) > len(shared)


def test_the_images_do_without_the_tools_of_the_developer():
    for name in ("cpu", "cuda"):
        assert not {"pytest", "moto", "ruff", "uv", "zensical"} & locked(name).keys()


def test_the_build_has_what_the_build_backend_needs():
    required = [Requirement(text) for text in PROJECT["build-system"]["requires"]]
    assert not missing("build", required)


@pytest.mark.parametrize("name", ["cpu", "dev"])
def test_make_takes_only_the_lock_of_developers_for_their_packages(name: str):
    command = ["make", "--dry-run", "install", f"LOCK=infra/locks/{name}.txt"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (stamps,) = (line.split()[1:] for line in told.splitlines() if line.startswith("touch"))
    assert stamps == [".venv/installed", *([".venv/installed-dev"] if name == "dev" else [])]


def test_an_image_installs_the_lock_of_its_python():
    for name in ("cpu", "cuda"):
        text = (ROOT / "infra" / f"Dockerfile.{name}").read_text()
        assert f"LOCK=infra/locks/{name}.txt" in text
        assert re.search(rf"python(:|3=){re.escape(PYTHONS[name])}[-.]", text)
