"""Fetch every input that a user names: a path, a hub id, or an address.

| name | meaning |
|---|---|
| `s3://BUCKET/KEY` | a file or folder in S3 |
| `models:/NAME@ALIAS`, `models:/NAME/VERSION` | the policy of a registered version |
| anything else | a path of this machine, or a hub id |

If the steps share no disk, models and data sets of the hub are read at one commit and copied to
S3.
"""

import dataclasses
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

from huggingface_hub import snapshot_download

from pipeline.inputs.flow_run import FlowRun
from pipeline.judges.judge_names import read_judges
from pipeline.promotion.fetch_champion import CHAMPIONS
from pipeline.registry.fetch_policy import find_policy
from pipeline.settings.settings import INPUTS, Settings
from pipeline.storage.addresses import is_in_s3
from pipeline.storage.workspace import MODELS, REGISTRY, Workspace, workspace_of
from ppo_core.config.hub_ids import split_revision
from ppo_core.config.reward_names import read_rewards
from ppo_core.data.sources.data_addresses import is_data_address
from ppo_core.data.sources.hub_data import HubData
from ppo_core.data.sources.source import SUFFIXES, find_hub_data, split_of_name
from ppo_core.errors import DataError, ModelError, library_errors
from ppo_core.io.atomic_files import explained_writes
from ppo_core.io.folder_cache import link_or_copy, publish_folder
from ppo_core.models.loading import commit_of

DATA = tuple(name for name in INPUTS if name not in MODELS)
MODEL_JUDGES = ("reward-model", "transformers")

_SPLIT_IN_S3 = re.compile(r"(?P<place>s3://.+):([^:/\[\]]+/)?[^:/\[\]]+(\[.*)?")
"""Address of a folder with a split at its end. A key may contain a colon, so the split follows the
last colon before the slice."""

MODEL_FILES = ("*.json", "*.jinja", "*.model", "*.safetensors", "*.txt")
"""Patterns of the files that are downloaded for a model on the hub."""


def fetch_inputs(given: Settings) -> Settings:
    """Return the settings with every address replaced by a path on this machine.

    Hub ids remain. If the steps share no disk, each hub id of a data set gets its present commit.

    Raises:
        ConfigError: an address is invalid, or S3 refuses the access.
        DataError: nothing is stored at an address, or the hub lacks a data set.
        ModelError: the registry lacks a version.
        StorageError: a file could not be transferred.
    """
    workspace = workspace_of(given)

    def data(name: str) -> str:
        if workspace.store and (on_hub := find_hub_data(name)):
            # The commit in the name makes all steps read the rows that this step checks.
            return on_hub.pinned()
        return _keeping_split(name, workspace.fetch)

    return _renamed(given, lambda name: fetch_model(name, workspace), data, workspace.fetch)


def fetch_model(name: str, workspace: Workspace) -> str:
    """Return the path or hub id of a model that may be in S3 or in the registry.

    Raises:
        ConfigError, DataError, ModelError, StorageError: see `fetch_inputs`.
    """
    return _fetch_version(name, workspace) if name.startswith(REGISTRY) else workspace.fetch(name)


def share_inputs(settings: Settings, run: FlowRun) -> Settings:
    """Return the settings of `fetch_inputs`, with inputs that all steps of a run can read.

    If the steps share no disk, every input is uploaded to S3 once, to an address that depends on
    its content, so all steps read the same bytes. This includes models and data sets of the hub, so
    no other step asks the hub.

    Raises:
        ConfigError: S3 refuses the access.
        DataError: the hub lacks a data set.
        ModelError: the hub lacks a model.
        StorageError: a file could not be transferred.
    """
    workspace = run.workspace
    if not workspace.store:
        return settings

    def shared(name: str) -> str:
        return workspace.publish_input(Path(name)) if os.path.exists(name) else name

    def model(name: str) -> str:
        return shared(name if os.path.exists(name) else _download(name))

    def data(name: str) -> str:
        if on_hub := find_hub_data(name):
            return _publish_hub_data(on_hub, workspace)
        return _keeping_split(name, shared)

    return _renamed(settings, model, data, shared)


def _renamed(
    settings: Settings,
    model: Callable[[str], str],
    data: Callable[[str], str],
    file: Callable[[str], str],
) -> Settings:
    """Return the settings with each name of a model, a data set or a function's file changed."""
    changes: dict[str, Any] = {
        name: model(getattr(settings, name)) for name in MODELS if getattr(settings, name)
    }
    changes |= {name: data(getattr(settings, name)) for name in DATA if getattr(settings, name)}
    if settings.judge:
        changes["judge"] = _renamed_judges(settings.judge, model, file)
    changes["rewards"] = [
        one.moved(_renamed_source(one.kind, one.source, model, file))
        for one in read_rewards(settings.rewards)
    ]
    changes["rewards_rubric"] = settings.rewards_rubric and file(settings.rewards_rubric)
    labels, fresh = settings.evaluation.human_labels, settings.fresh_pairs
    evaluation = dataclasses.replace(settings.evaluation, human_labels=labels and data(labels))
    fresh = dataclasses.replace(fresh, labels=fresh.labels and data(fresh.labels))
    if fresh.judge:
        fresh = dataclasses.replace(fresh, labeller=_renamed_judges(fresh.judge, model, file))
    guards = settings.promotion.guards
    functions = {
        name: f"python:{_renamed_source('python', source.removeprefix('python:'), model, file)}"
        for name, source in guards.functions.items()
    }
    promotion = dataclasses.replace(
        settings.promotion, guards=dataclasses.replace(guards, functions=functions)
    )
    return dataclasses.replace(
        settings, **changes, evaluation=evaluation, fresh_pairs=fresh, promotion=promotion
    )


def _renamed_judges(spec: str, model: Callable[[str], str], file: Callable[[str], str]) -> str:
    renamed = []
    for part in read_judges(spec):
        source = _renamed_source(part.kind, part.source, model, file)
        renamed.append(f"{part.kind}:{source}" if source else part.kind)
    return ",".join(renamed)


def _renamed_source(
    kind: str, source: str, model: Callable[[str], str], file: Callable[[str], str]
) -> str:
    """Return the source of a judge or a reward; rename its model or file if it has one."""
    if source and kind in MODEL_JUDGES:
        return model(source)
    if source and kind == "python":
        place, _, function = source.rpartition(":")
        # A module may have the name of a folder, which is not its place.
        is_file = place.endswith(".py") or is_in_s3(place)
        return f"{file(place)}:{function}" if is_file else source
    return source


def _keeping_split(name: str, change: Callable[[str], str]) -> str:
    """Change the place of a data set, and keep `:SPLIT` or `:CONFIG/SPLIT` at its end."""
    place = _place_of(name)
    split = name.removeprefix(place)
    if is_in_s3(name) and "/" in split:
        # The name of a folder may contain a colon, so `:CONFIG/SPLIT` may be a part of its address.
        with suppress(DataError):
            return change(name)
    return change(place) + split


def _place_of(name: str) -> str:
    """Return the name of a data set without `:SPLIT` or `:CONFIG/SPLIT` at its end."""
    if is_in_s3(name):
        found = _SPLIT_IN_S3.fullmatch(name)
        return name if found is None or name.endswith(SUFFIXES) else found["place"]
    if is_data_address(name) or os.path.lexists(name):
        return name
    return split_of_name(name)[0]


def _fetch_version(address: str, workspace: Workspace) -> str:
    """Return the folder of a registered policy: its weights and its tokenizer, as one model."""
    model, tokenizer = find_policy(address, workspace.cache / CHAMPIONS)
    version = Path(model).parent
    folder = workspace.cache / "versions" / version.relative_to(workspace.cache / CHAMPIONS)
    if not folder.is_dir():
        # Runs on several machines may share the cache, and may have equal process ids.
        unfinished = folder.with_name(f".{folder.name}.{uuid4().hex}")
        try:
            with explained_writes(unfinished):
                for part in (model, tokenizer):
                    shutil.copytree(
                        part, unfinished, dirs_exist_ok=True, copy_function=link_or_copy
                    )
            publish_folder(unfinished, folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return str(folder)


def _download(name: str) -> str:
    """Download a model of the hub at the present commit of its revision; return the folder."""
    repository, _ = split_revision(name)
    with library_errors(
        ModelError, f"'{name}' cannot be downloaded", "Check the name and HF_TOKEN."
    ):
        return snapshot_download(
            str(repository), revision=commit_of(name), allow_patterns=list(MODEL_FILES)
        )


def _publish_hub_data(data: HubData, workspace: Workspace) -> str:
    """Publish a split of a data set of the hub; return its address."""
    with TemporaryDirectory(dir=workspace.root) as place:
        folder = Path(place) / data.repository.replace("/", "--")
        with explained_writes(folder):
            data.save(folder)
        return workspace.publish_input(folder)
