"""Check the files of a local model folder before transformers reads them.

transformers follows links, opens the files that a weights index names, downloads an adapter's base
model, and runs kernels from the hub if a configuration names them. These checks refuse a folder
that leads transformers to other folders, to downloads or to foreign code. For a hub id, the hub's
client checks the files, and `check_config_keys` checks the configuration.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from safetensors import SafetensorError, safe_open

from ppo_core.config.hub_ids import split_revision
from ppo_core.errors import ModelError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")

_EPSILON = re.compile("(.*_)?eps(ilon)?")

_ROTARY_BASE = re.compile("rope_theta|rope.*base|rotary.*base")
"""Pattern of the keys whose value is the base of rotary positions."""

QUANTIZATION_METHODS = frozenset({"bitsandbytes"})
"""Methods of a configuration's quantization_config that transformers runs without downloading code.
"""


def check_plain_files(path: str | Path) -> None:
    """Raise if a local folder has a file that transformers must not open or cannot parse.

    Such files are links out of the folder, broken links, pipes, devices, and configuration files
    that are not JSON. The files of a hub id are not checked.

    Raises:
        ModelError: a file is refused, or the path is not a folder and cannot be a hub id; the
            message names the file or the path.
    """
    folder = Path(path)
    if not folder.is_dir():
        _require_hub_id(path)
        return
    for file in sorted(folder.iterdir()):
        _check_link(file, folder)
        if not (file.is_file() or file.is_dir()):
            raise _refused(file, "it is a broken link, a pipe or a device")
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            read_object(folder / name)


def check_model_folder(path: str | Path) -> None:
    """Raise if a local folder has an adapter, or weights that are pickled or incomplete.

    The files of a hub id are not checked.

    Raises:
        ModelError: see `check_plain_files`; or the weights are refused.
    """
    folder = Path(path)
    check_plain_files(path)
    if not folder.is_dir():
        return
    refuse_adapter(folder)
    _check_weights_are_safe(folder)
    for file in sorted(folder.glob("*.safetensors")):
        _check_whole(file)


def refuse_adapter(path: str | Path) -> None:
    """Raise if a folder has an adapter: transformers would load its base from another place.

    Raises:
        ModelError: the folder has an adapter's configuration.
    """
    if (Path(path) / ADAPTER_CONFIG).exists():
        raise adapter_refusal(path)


def adapter_refusal(path: str | Path) -> ModelError:
    """Return the error for a PEFT model that is given where a whole model is needed."""
    return ModelError(
        f"'{path}' is a PEFT model, but a whole model is needed. Merge the adapter into its base "
        "with peft.AutoPeftModelForCausalLM.from_pretrained(...).merge_and_unload()"
        ".save_pretrained(FOLDER), and give that folder. For a reward model, the class is "
        "AutoPeftModelForSequenceClassification, with num_labels=1."
    )


def pickled(path: str | Path, name: str) -> ModelError:
    """Return the error for a folder or hub id whose only weights are in the pickle `name`."""
    return ModelError(
        f"'{path}' has {name}, whose weights are pickled, and no {WEIGHTS}. Pickles can run code, "
        "so they are not read. If you trust their author, convert each file once, and save the "
        "result beside it:\n"
        "    tensors = torch.load('pytorch_model.bin', weights_only=True)\n"
        "    tensors = {name: tensor.clone() for name, tensor in tensors.items()}\n"
        "    safetensors.torch.save_file(\n"
        "        tensors, 'model.safetensors', metadata={'format': 'pt'}\n"
        "    )"
    )


def check_config_keys(config: Mapping[str, Any], path: str | Path) -> None:
    """Raise if a model's configuration requires code to be downloaded, or has an invalid number.

    Args:
        config: content of config.json.
        path: folder or hub id of the model, for the message.

    Raises:
        ModelError: a key names a kernel on the hub, or a quantization method whose code would be
            downloaded; or a number is NaN, a base of rotary positions is infinite or at most 0, or
            an epsilon is negative or at least 1.
    """
    for key, value in chain.from_iterable(one.items() for one in objects_in(config)):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and (allowed := _unmet(key, value)):
            raise _refused(
                Path(path) / "config.json",
                f"its key {key!r} is {value}, but must be {allowed}; with this value, all "
                "outputs of the model would be wrong",
            )
        if key.endswith("attn_implementation") or key.endswith("experts_implementation"):
            names = value.values() if isinstance(value, Mapping) else [value]
            if any("/" in str(name) for name in names):
                raise _refused(
                    Path(path) / "config.json",
                    f"its key {key!r} is {value!r:.80}, a kernel that would be downloaded and run",
                )
        elif key == "quantization_config":
            method = value.get("quant_method") if isinstance(value, Mapping) else value
            if method not in (None, *QUANTIZATION_METHODS):
                raise _refused(
                    Path(path) / "config.json",
                    f"its weights are quantized with {method!r:.80}, whose code would be "
                    "downloaded; weights that are not quantized are needed",
                )


def _unmet(key: str, number: float) -> str:
    """Return the requirement that a number of a configuration violates, or ""."""
    if number != number:
        return "a number"
    if _ROTARY_BASE.search(key) and not 0 < number < float("inf"):
        return "above 0 and finite"
    if _EPSILON.fullmatch(key) and not 0 <= number < 1:
        return "at least 0 and below 1"
    return ""


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        ModelError: the file is not UTF-8, not JSON, nested too deeply, or not an object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise _refused(file, f"it cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise _refused(file, f"it holds {type(content).__name__}, not a JSON object")
    return content


def _require_hub_id(path: str | Path) -> None:
    """Raise if `path`, which is not a folder, is a file or cannot be a hub id."""
    if os.path.lexists(path):
        raise ModelError(
            f"'{path}' is not a folder. Give the folder of a model, as save_pretrained writes it."
        )
    try:
        validate_repo_id(str(split_revision(path)[0]))
        is_hub_id = isinstance(path, str) and Path(path).suffix not in WEIGHT_SUFFIXES
    except HFValidationError:
        is_hub_id = False
    if not is_hub_id:
        raise ModelError(f"There is no folder '{Path(path).absolute()!s:.300}'. Check the path.")


def _check_link(file: Path, folder: Path) -> None:
    """Raise if a link leads out of the folder; the hub's cache may link to its own blobs."""
    if not file.is_symlink():
        return
    root = folder.resolve()
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    target = Path(os.path.realpath(file))  # `resolve` raises an error for a loop of links
    if not any(target.is_relative_to(place) for place in allowed):
        raise _refused(file, f"it is a link out of its folder, to '{target}'")


def _check_weights_are_safe(folder: Path) -> None:
    """Raise if the weights are pickled, or if their index names a file outside the folder."""
    if (folder / INDEX).is_file():
        shards = read_object(folder / INDEX).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise _refused(folder / INDEX, "it has no weight_map")
        for shard in sorted(map(str, shards.values())):
            if Path(shard).name != shard or not shard.endswith(".safetensors"):
                raise _refused(
                    folder / INDEX, f"it names {shard!r:.120}, which is not a file of its folder"
                )
            if not (folder / shard).is_file():
                raise _refused(folder / INDEX, f"it names {shard!r}, which is missing")
    elif not (folder / WEIGHTS).is_file():
        for name in PICKLES:
            if (folder / name).is_file():
                raise pickled(folder, name)


def _check_whole(file: Path) -> None:
    """Raise if a safetensors file is truncated or damaged; only its header is read."""
    try:
        with safe_open(file, "pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise _refused(
            file, f"it is not a whole safetensors file ({error}); copy it again"
        ) from error


def objects_in(document: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the objects in a JSON document, at any depth."""
    left = [document]
    while left:
        value = left.pop()
        if isinstance(value, Mapping):
            yield value
            left.extend(value.values())
        elif isinstance(value, list):
            left.extend(value)


def _refused(file: Path, reason: str) -> ModelError:
    return ModelError(f"'{file}' is refused: {reason}. Nothing was loaded.")
