"""Write the model card of a trained policy, and upload the policy to the hub."""

import json
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path, PurePosixPath, PureWindowsPath

from huggingface_hub import HfApi, ModelCardData
from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from ppo_core.checkpointing.folders import POLICIES
from ppo_core.checkpointing.lease import LEASE, LOCK
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.errors import ConfigError, TrainingError
from ppo_core.errors.control_characters import remove_controls
from ppo_core.errors.redaction import redact
from ppo_core.io.atomic_files import explained_writes, write_atomically
from ppo_core.io.progress_bar import PROGRESS_FILE
from ppo_core.reporting.escaping import as_markdown, as_table
from ppo_core.reporting.metrics import Metrics
from ppo_core.reporting.metrics_file import COMPLETIONS, NEWEST_SAMPLES_FILE
from ppo_core.reporting.sample_table import Completions

SAMPLES = 3
_NOT_UPLOADED = (
    "checkpoint-*",
    ".checkpoint-*",
    f"{POLICIES}/*",
    f"{COMPLETIONS}/*",
    NEWEST_SAMPLES_FILE,
    PROGRESS_FILE,
    LEASE,
    LOCK,
)
"""Patterns of files in `output_dir` that are not uploaded: checkpoints, earlier policies, and
samples, which contain evaluation prompts."""

_PACKAGES = ("torch", "transformers", "accelerate", "datasets")


def write_model_card(
    folder: str | Path,
    *,
    config: PPOConfig,
    base_model: str | None,
    metrics: Metrics,
    dataset_name: str | None = None,
    model_name: str | None = None,
    tags: str | Sequence[str] | None = None,
    samples: Completions | None = None,
) -> Path:
    """Write README.md into the folder of a saved policy; return its path.

    All settings except the hub token are written, without the passwords in URLs. `base_model` and
    `dataset_name` are hub ids or paths. If a path is absolute or begins with `~`, only its last
    part is written. If `model_name` is None, the name is hub_model_id or, without hub_model_id, the
    folder's name. `metrics` are the metrics of the last update. The first three `samples` are
    written.
    """
    folder = Path(folder)
    name = without_folders(model_name or config.hub_model_id or folder.resolve().name)
    sections = [
        f"---\n{_front_matter(name, base_model, dataset_name, tags)}\n---",
        f"# {as_markdown(name)}",
        _purpose(config, base_model, dataset_name),
        _usage(config.hub_model_id or name, _model_class(folder)),
        "## Metrics of the last update\n\n" + _table("metric", metrics),
        _samples(samples) if samples else "",
        "## Settings\n\n" + _table("setting", _public_settings(config)),
        "## Versions\n\n" + _table("package", _versions()),
    ]
    path = folder / "README.md"
    text = "\n\n".join(section for section in sections if section) + "\n"
    with explained_writes(path):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text, durable=False)
    return path


def push_folder(
    folder: str | Path,
    *,
    repo_id: str,
    token: str | None,
    private: bool | None,
    commit_message: str,
) -> str:
    """Upload a folder without `_NOT_UPLOADED`; create the repository if necessary.

    Return the URL of the commit.

    Raises:
        ConfigError: `repo_id` is not a valid name of a repository.
        TrainingError: the hub cannot be reached, or refuses the upload.
    """
    api = HfApi(token=token)
    try:
        repository = api.create_repo(repo_id, private=private, exist_ok=True)
        commit = api.upload_folder(
            folder_path=folder,
            repo_id=repository.repo_id,
            commit_message=commit_message,
            ignore_patterns=[*_NOT_UPLOADED],
        )
    except HFValidationError as error:
        raise ConfigError(
            f"hub_model_id={repo_id!r} is not a valid repository name: {error}"
        ) from error
    except (HTTPError, OSError) as error:
        raise TrainingError(
            f"{folder} was not uploaded to {repo_id!r} at {api.endpoint}: {error}\n"
            f"The files are still in {folder}. Check network, token and access rights, and push "
            "again."
        ) from error
    return commit.commit_url


def without_folders(name: str) -> str:
    """Return the last part of a path that is absolute or starts with ~; keep any other name."""
    for path in (PurePosixPath(name), PureWindowsPath(name)):
        if path.is_absolute() or name.startswith("~"):
            return path.name
    return name


def _front_matter(
    name: str, base_model: str | None, dataset_name: str | None, tags: str | Sequence[str] | None
) -> str:
    more = [tags] if isinstance(tags, str) else list(tags or ())
    data = ModelCardData(
        library_name="transformers",
        model_name=name,
        base_model=base_model if _on_hub(base_model) else None,
        datasets=[dataset_name] if dataset_name and _on_hub(dataset_name) else None,
        tags=["ppo", "rlhf", *more],
    )
    return data.to_yaml()


def _purpose(config: PPOConfig, base_model: str | None, dataset_name: str | None) -> str:
    base = as_markdown(without_folders(base_model)) if base_model else "A language model"
    text = (
        f"{base}, trained with proximal policy optimization (PPO, "
        "[arXiv:1707.06347](https://arxiv.org/abs/1707.06347)) to write responses that a reward "
        "model scores higher."
    )
    if config.kl_coef > 0:
        text += " A KL term kept it near its initial model."
    # If a script passes its own reward model, reward_model_path still has its default value, which
    # would name the wrong model.
    if config.reward_model_path not in (None, type(config).reward_model_path):
        text += f" The reward model: {as_markdown(without_folders(config.reward_model_path))}."
    if dataset_name:
        text += f" The prompts: {as_markdown(without_folders(dataset_name))}."
    return text


def _usage(name: str, model_class: str) -> str:
    load = json.dumps(name)
    return (
        "## Use\n\n```python\n"
        f"from transformers import {model_class}, AutoTokenizer\n\n"
        f"tokenizer = AutoTokenizer.from_pretrained({load})\n"
        f"model = {model_class}.from_pretrained({load})\n```"
    )


def _model_class(folder: Path) -> str:
    config = folder / "config.json"
    encoder_decoder = config.exists() and json.loads(config.read_text()).get("is_encoder_decoder")
    return "AutoModelForSeq2SeqLM" if encoder_decoder else "AutoModelForCausalLM"


def _samples(samples: Completions) -> str:
    blocks = ["## Samples"]
    for query, response, score in list(samples)[:SAMPLES]:
        blocks += [f"Score {score:z.4g}. Query and response:", _fenced(query), _fenced(response)]
    return "\n\n".join(blocks)


def _fenced(text: str) -> str:
    """Return the text in a code block whose fence is longer than all backtick runs in the text."""
    runs = [len(run) for run in re.findall("`+", text)]
    fence = "`" * max(3, *(length + 1 for length in [0, *runs]))
    return f"{fence}text\n{remove_controls(text)}\n{fence}"


def _table(what: str, rows: Mapping[str, object]) -> str:
    return as_table((what, "value"), rows.items(), _shown)


def _shown(value: object) -> str:
    return f"{value:z.6g}" if isinstance(value, float) else str(value)


def _public_settings(config: PPOConfig) -> dict[str, object]:
    settings = {name: value for name, value in asdict(config).items() if name != "hub_token"}
    return {
        name: without_folders(redact(value)) if isinstance(value, str) else value
        for name, value in settings.items()
    }


def _versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {name: version(name) for name in _PACKAGES}


def _on_hub(name: str | None) -> bool:
    """Return whether a name can be a hub repository: a valid id that is not a local path."""
    if name is None or Path(name).exists():
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True
