"""A policy folder as the folder of an MLflow model, complete before any of it is uploaded."""

import shutil
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlflow.transformers
import transformers
from mlflow.models import Model, ModelSignature
from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    TextGenerationPipeline,
)

from pipeline.settings.decoding import Decoding
from ppo_core.data.chat_template import Messages
from ppo_core.errors import ModelError
from ppo_core.rollout.sampler import NO_STOP_TOKEN, stop_token
from serving.manifest import CARD, write_manifest

REQUIREMENTS = ("torch", "transformers", "accelerate")
"""What a consumer of the registered policy installs, at the versions it was made with."""

SETTINGS = "settings.toml"
"""Settings that repeat the run, if they are given."""

ADAPTER = "adapter"
"""Folder of the adapter that is merged into the policy, if there is one."""

IDLE_SAMPLING = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
"""Transformers' own arguments of sampling, which it lets stand where nothing is sampled."""


@dataclass(frozen=True, kw_only=True)
class VersionContents:
    """What a version holds beside its weights."""

    name: str
    """The registered model, by which the version calls itself."""

    decoding: Decoding
    """How the policy was judged."""

    example: str | Messages
    """A prompt to show; messages only for a chat model."""

    card: str
    """The model card."""

    settings: Path | None = None
    """TOML file that repeats the run."""


def write_artifact(
    policy: Path, folder: Path, contents: VersionContents, *, run_id: str, model_id: str
) -> str:
    """Fill a new folder with everything a version consists of; returns its manifest's digest.

    A policy whose tokenizer has a chat template becomes a model of the task llm/v1/chat, which
    takes {"messages": [...]}; any other takes a list of prompts. Both return the answers alone.

    Args:
        policy: folder of the model and its tokenizer, in the precision that is kept, and perhaps
            of the adapter that is merged into it.
        folder: where to write; it must not be there, or be empty.
        contents: what is written beside the policy.
        run_id: the MLflow run it comes from.
        model_id: the logged model that it is uploaded as.

    Returns:
        SHA-256 of the manifest's bytes, in hexadecimal.

    Raises:
        ModelError: the policy's folder holds no model, or messages are given as the example of a
            model without a chat template.
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
    # It says that a licence was looked for on the hub, where this policy has never been.
    (folder / "LICENSE.txt").unlink()
    if (policy / ADAPTER).is_dir():
        # Without the card that PEFT writes, a form that nobody has filled in.
        shutil.copytree(policy / ADAPTER, folder / ADAPTER, ignore=shutil.ignore_patterns(CARD))
    if contents.settings is not None:
        shutil.copyfile(contents.settings, folder / SETTINGS)
    (folder / CARD).write_text(contents.card, encoding="utf-8")
    return write_manifest(folder)


def _load(policy: Path, name: str) -> tuple[TextGenerationPipeline, PreTrainedTokenizerBase]:
    folder = policy.resolve()
    try:
        model = AutoModelForCausalLM.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(
            f"The policy in {policy} cannot be loaded, so it cannot be registered: {error}. Train "
            "it again."
        ) from error
    # No path of this machine goes into the version; with a colon it is no id of the hub either,
    # where MLflow would look for a model card.
    model.name_or_path = tokenizer.name_or_path = f"models:/{name}"
    pipeline = transformers.pipeline(
        "text-generation", model=model, tokenizer=tokenizer, device="cpu"
    )
    return pipeline, tokenizer


def _generation_config(decoding: Decoding, tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    """What transformers decodes by unless it is told otherwise.

    A new one: penalties and further stop tokens that the base model had were not in use when the
    policy was trained and judged.
    """
    stop = stop_token(tokenizer, decoding.stop_token, decoding.stop_token_id)
    stops = None if stop == NO_STOP_TOKEN else stop
    fillers = (tokenizer.pad_token_id, tokenizer.eos_token_id, stops)
    return GenerationConfig(
        **decoding.arguments(),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=stops,
        pad_token_id=next((token for token in fillers if token is not None), None),
    )


def _interface(
    tokenizer: PreTrainedTokenizerBase, decoding: Decoding, example: str | Messages
) -> dict[str, Any]:
    """What MLflow's pyfunc takes and gives: task, signature, example and fixed arguments."""
    if tokenizer.chat_template is not None:
        turns = [{"role": "user", "content": example}] if isinstance(example, str) else example
        return {
            "task": "llm/v1/chat",
            "input_example": {"messages": [dict(turn) for turn in turns]},
            # The template writes the start token itself. MLflow says finish_reason "length" by
            # the limit that is named here.
            "model_config": {"add_special_tokens": False, **decoding.arguments()},
        }
    if not isinstance(example, str):
        raise ModelError(
            f"The example is messages, {example!r:.80}, and the policy's tokenizer has no chat "
            "template to read them by. Give a prompt as text."
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
    """What a caller may set, by default as the policy was judged."""
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
    """The version in use, without a local part such as +cpu, which no index may have."""
    return f"{package}=={version(package).partition('+')[0]}"
