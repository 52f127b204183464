"""Write the folder of an MLflow model from the folder of a policy, before the upload."""

import shutil
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlflow.transformers
import transformers
from mlflow.models import Model, ModelSignature
from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema
from transformers import GenerationConfig, PreTrainedTokenizerBase, TextGenerationPipeline

from pipeline.inputs.row_digests import ROWS_FILE
from pipeline.settings.decoding import Decoding
from ppo_core.data.chat_template import Messages
from ppo_core.errors import ModelError
from ppo_core.models.loading import load_policy, load_tokenizer
from ppo_core.rollout.token_sampling import NO_STOP_TOKEN, stop_token
from serving.manifest import CARD, write_manifest

REQUIREMENTS = ("torch", "transformers", "accelerate")
"""Packages that are needed to load a version; they are pinned to the installed versions."""

SETTINGS = "settings.toml"
"""Optional file with the settings that reproduce the run."""

SBOM = "sbom.json"
"""Optional file with the bill of materials, in the format of CycloneDX."""

ADAPTER = "adapter"
"""Optional folder with the adapter that was merged into the policy."""

IDLE_SAMPLING = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
"""Sampling arguments in the signature of a greedy policy: the defaults of transformers."""


@dataclass(frozen=True, kw_only=True)
class VersionContents:
    """Contents of a version in addition to its weights."""

    name: str
    """Name of the registered model."""

    decoding: Decoding
    """Decoding settings with which the policy was judged."""

    example: str | Messages
    """Example prompt; messages are allowed only for a chat model."""

    card: str
    """Text of the model card."""

    settings: Path | None = None
    """TOML file with the settings that reproduce the run."""

    sbom: str | None = None
    """Text of the bill of materials."""

    rows: Path | None = None
    """File with the digests of the rows that the run read, see `row_digests`."""


def write_artifact(
    policy: Path, folder: Path, contents: VersionContents, *, run_id: str, model_id: str
) -> str:
    """Write all files of a version into a new folder and return the digest of its manifest.

    A policy whose tokenizer has a chat template becomes a model of the task llm/v1/chat, which
    takes {"messages": [...]}. Any other policy becomes a model that takes a list of prompts. Models
    of both types return only the answers.

    Args:
        policy: folder of the model, its tokenizer and optionally its merged adapter. The weights
            keep their precision.
        folder: output folder, which must be missing or empty.
        contents: contents of the version in addition to the policy.
        run_id: id of the version's MLflow run.
        model_id: id of the logged model to which the files are uploaded.

    Returns:
        SHA-256 of the manifest's bytes, in hexadecimal.

    Raises:
        ModelError: the folder of the policy contains no model, or the example consists of messages
            and the model has no chat template.
    """
    pipeline, tokenizer = _load(policy, contents.name)
    pipeline.model.generation_config = _generation_config(contents.decoding, tokenizer)
    mlflow_model = Model(run_id=run_id, model_id=model_id, model_uuid=model_id)
    mlflow.transformers.save_model(
        pipeline,
        path=str(folder),
        mlflow_model=mlflow_model,
        pip_requirements=[_requirement(package) for package in REQUIREMENTS],
        **_interface(tokenizer, contents.decoding, contents.example),
    )
    # MLflow looks up the license on the hub and writes this file, but the policy is not on the hub.
    (folder / "LICENSE.txt").unlink()
    if (policy / ADAPTER).is_dir():
        # Leave out the empty card template that PEFT writes.
        shutil.copytree(policy / ADAPTER, folder / ADAPTER, ignore=shutil.ignore_patterns(CARD))
    if contents.settings is not None:
        shutil.copyfile(contents.settings, folder / SETTINGS)
    if contents.sbom is not None:
        (folder / SBOM).write_text(contents.sbom, encoding="utf-8")
    if contents.rows is not None:
        shutil.copyfile(contents.rows, folder / ROWS_FILE)
    (folder / CARD).write_text(contents.card, encoding="utf-8")
    return write_manifest(folder)


def _load(policy: Path, name: str) -> tuple[TextGenerationPipeline, PreTrainedTokenizerBase]:
    folder = policy.resolve()
    try:
        model: Any = load_policy(folder, dtype="auto")
        tokenizer: Any = load_tokenizer(folder)
    except ModelError as error:
        raise ModelError(f"The policy cannot be registered. {error} Train it again.") from error
    # Keep local paths out of the version. The colon prevents MLflow from reading the name as a hub
    # id and from searching the hub for a model card.
    model.name_or_path = tokenizer.name_or_path = f"models:/{name}"
    pipeline = transformers.pipeline(
        "text-generation",
        model=model,
        tokenizer=tokenizer,
        device="cpu",
        trust_remote_code=False,
    )
    return pipeline, tokenizer


def _generation_config(decoding: Decoding, tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    """Return the default decoding of the version.

    The configuration of the base model is dropped: its penalties and extra stop tokens were not
    in use when the policy was trained and judged.
    """
    stop = stop_token(tokenizer, decoding.stop_token, decoding.stop_token_id)
    stops = None if stop == NO_STOP_TOKEN else stop
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, stops)
    return GenerationConfig(
        **decoding.arguments(),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=stops,
        pad_token_id=next((token for token in candidates if token is not None), None),
    )


def _interface(
    tokenizer: PreTrainedTokenizerBase, decoding: Decoding, example: str | Messages
) -> dict[str, Any]:
    """Return the task, signature, input example and fixed arguments of MLflow's pyfunc model."""
    if tokenizer.chat_template is not None:
        turns = [{"role": "user", "content": example}] if isinstance(example, str) else example
        return {
            "task": "llm/v1/chat",
            "input_example": {"messages": [dict(turn) for turn in turns]},
            # No special tokens, because the chat template writes the start token. MLflow needs
            # max_new_tokens here to report finish_reason "length".
            "model_config": {"add_special_tokens": False, **decoding.arguments()},
        }
    if not isinstance(example, str):
        raise ModelError(
            f"The example consists of messages, {example!r:.80}, but the policy's tokenizer has no "
            "chat template. Give an example prompt as text."
        )
    return {
        "task": "text-generation",
        "signature": ModelSignature(
            inputs=Schema([ColSpec(DataType.string)]),
            outputs=Schema([ColSpec(DataType.string)]),
            params=_parameters(decoding),
        ),
        "input_example": [example],
        "model_config": {"return_full_text": False},
    }


def _parameters(decoding: Decoding) -> ParamSchema:
    """Return the arguments that a caller may set, with the evaluation's values as defaults."""
    values = IDLE_SAMPLING | decoding.arguments()
    types = {
        "max_new_tokens": DataType.long,
        "do_sample": DataType.boolean,
        "temperature": DataType.double,
        "top_k": DataType.long,
        "top_p": DataType.double,
    }
    return ParamSchema([ParamSpec(name, kind, values[name]) for name, kind in types.items()])


def _requirement(package: str) -> str:
    """Pin the installed version without a local part such as +cpu, which package indexes lack."""
    return f"{package}=={version(package).partition('+')[0]}"
