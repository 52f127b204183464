"""Images built and run by buildah, which needs no daemon: as root, without a registry.

Debian's own python stands for the official image of python, which needs a registry.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.helpers.paths import ROOT

PACKAGES_OF_PIP = ("find-links", "index-url")
"""Settings by which pip finds all packages without the index that a Dockerfile names."""


@dataclass(frozen=True)
class Buildah:
    """Images and containers below one folder."""

    folder: Path

    def __call__(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """Run `buildah WORDS`; what runs in a container has the network of this machine."""
        storage = ("--root", self.folder / "images", "--runroot", self.folder / "containers")
        return subprocess.run(
            ["buildah", *storage, "--storage-driver", "overlay", *words],
            text=True,
            capture_output=True,
            check=False,
            env={**os.environ, "BUILDAH_ISOLATION": "chroot"},
        )

    def said(self, *words: str | Path) -> str:
        """Return what a command prints; fail with its messages."""
        ended = self(*words)
        assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
        return ended.stdout.strip()

    def make_debian(self, name: str, release: str, packages: str) -> None:
        """Make an image of a release of Debian with some packages."""
        container = self.said("from", "scratch")
        folder = self.said("mount", container)
        debootstrap = ("debootstrap", "--variant=minbase", f"--include={packages}")
        made = subprocess.run(
            [*debootstrap, release, folder], capture_output=True, text=True, check=False
        )
        assert made.returncode == 0, made.stdout[-3000:]
        self.said("commit", "--quiet", "--rm", container, name)

    def build(self, name: str, dockerfile: Path, arguments: Mapping[str, str]) -> None:
        """Build an image of the project, with the packages that pip finds on this machine."""
        settings = pip_settings()
        own = {} if settings.keys().isdisjoint(PACKAGES_OF_PIP) else {"PIP_EXTRA_INDEX_URL": ""}
        pip_conf = self.folder / "pip.conf"
        lines = [f"{name} = {value}" for name, value in settings.items()]
        pip_conf.write_text("\n".join(["[global]", *lines, ""]))
        paths = [value for value in settings.values() if Path(value).is_absolute()]
        self.said(
            *("bud", "--layers=false", "--tag", name),
            *("--secret", f"id=pip.conf,src={pip_conf}"),
            *(f"--volume={path}:{path}:ro" for path in paths),
            *(f"--build-arg={key}={value}" for key, value in {**arguments, **own}.items()),
            *("--file", dockerfile, ROOT),
        )

    @contextmanager
    def container(self, image: str) -> Iterator["Container"]:
        """Make a container of an image; delete it in the end."""
        container = Container(self, self.said("from", image))
        try:
            yield container
        finally:
            self.said("rm", container.name)


@dataclass(frozen=True)
class Container:
    """A container: what one command leaves there, the next one finds."""

    buildah: Buildah
    name: str

    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command as the image's user in its working directory."""
        environment = [f"--env={name}={value}" for name, value in variables.items()]
        return self.buildah("run", *environment, self.name, "--", *words)

    def said(self, *words: str) -> str:
        """Return what a command prints; fail with its messages."""
        ended = self.run(*words)
        assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
        return ended.stdout.strip()


@contextmanager
def buildah() -> Iterator[Buildah]:
    """Keep images and containers while the context lasts."""
    with TemporaryDirectory(prefix="buildah-") as name:
        builder = Buildah(Path(name))
        try:
            yield builder
        finally:
            builder("rm", "--all")
            builder("rmi", "--all", "--force")


def pip_settings() -> dict[str, str]:
    """Return pip's settings on this machine, without further indexes."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    pairs = [line.split("=", 1) for line in listed.stdout.splitlines()]
    found = {key.rpartition(".")[2]: value.strip("'") for key, value in pairs}
    found.pop("extra-index-url", None)
    return found
