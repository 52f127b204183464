"""Write and verify the manifest of a model's file digests, and refuse files that can run code.

The flow writes the manifest when it registers a model. A consumer verifies the files against the
manifest before loading the model.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from ppo_core.errors import ModelError

MANIFEST = "manifest.json"
"""File with the SHA-256 of every file of a version, except the files in WITHOUT_DIGEST."""

MANIFEST_TAG = "manifest"
"""MLflow tag of a version; its value is the SHA-256 of the manifest."""

CARD = "README.md"
"""Model card. The flow rewrites it after the promotion decision, so it has no digest and is not
downloaded."""

WITHOUT_DIGEST = frozenset({MANIFEST, CARD, "registered_model_meta"})
"""Files without a digest; MLflow adds `registered_model_meta` to a store that is a local folder."""

PICKLES = frozenset(".bin .pt .pth .pkl .pickle .ckpt .joblib .npy .npz".split())
CODE = frozenset(".py .pyc .pyd .so".split())
REMOTE_CODE = frozenset({"auto_map", "custom_pipelines", "trust_remote_code"})
"""Configuration keys that make transformers run code from outside its package."""

PICKLE_OR_ZIP = re.compile(rb"\x80[\x02-\x05]|PK\x03\x04")
"""First bytes of a pickle, or of a zip file (the format of torch.save)."""

NOT_LOADED = "No file was loaded. Point the alias at another version, or register the policy again."
"""End of the message to a consumer: what follows from a refusal, and the next move."""

MAX_SAFETENSORS_HEADER = 100_000_000
"""Maximum header size in bytes that the safetensors format allows."""


def write_manifest(folder: Path) -> str:
    """Write the manifest of a folder and return its SHA-256.

    Raises:
        ModelError: a consumer would refuse one of the files.
    """
    files = {}
    try:
        for path in sorted(_files_of(folder, str(folder)) - WITHOUT_DIGEST):
            check_path(path, str(folder))
            check_name(path, str(folder))
            _check_content(folder, path, str(folder))
            files[path] = _sha256(folder / path)
    except ModelError as error:
        raise ModelError(
            f"{str(error).removesuffix(NOT_LOADED)}No version was registered. Remove the cause "
            "from the policy or the reward model that the settings name, and run again."
        ) from error
    content = json.dumps({"files": files}, indent=1, sort_keys=True) + "\n"
    (folder / MANIFEST).write_text(content, encoding="utf-8")
    return _sha256(folder / MANIFEST)


def check_folder(folder: Path, manifest_digest: str) -> None:
    """Verify the manifest of a folder against its digest, and the files against the manifest.

    Raises:
        ModelError: a file was changed or added, is missing or malformed, or could run code.
    """
    what = str(folder)
    files = read_manifest(folder, manifest_digest, what)
    check_list(_files_of(folder, what), files, what)
    for path, digest in files.items():
        check_file(folder, path, digest, what)


def refusal(what: str, reason: str) -> ModelError:
    """Return the error for refusing to load `what`."""
    return ModelError(f"{what} is refused: {reason}. {NOT_LOADED}")


def read_manifest(folder: Path, digest: str, what: str) -> dict[str, str]:
    """Verify the manifest and return the SHA-256 of each file, by path.

    Args:
        folder: folder that contains the manifest.
        digest: SHA-256 that the manifest must have.
        what: name of the version in error messages.

    Raises:
        ModelError: the manifest is missing, malformed or changed, or it names a file that is
            refused.
    """
    manifest = folder / MANIFEST
    if manifest.is_symlink() or not manifest.is_file():
        raise refusal(what, f"it has no {MANIFEST}")
    if (actual := _sha256(manifest)) != digest:
        raise refusal(
            what,
            f"its {MANIFEST} has the digest {actual}, but the version was registered with {digest}",
        )
    document = _read_json(manifest, MANIFEST, what)
    files = document.get("files") if isinstance(document, dict) else None
    if not isinstance(files, dict) or not all(map(is_digest, files.values())):
        raise refusal(what, f"its {MANIFEST} is not a list of files with SHA-256 digests")
    for path in files:
        check_path(path, what)
        check_name(path, what)
    return files


def check_list(listed: Iterable[str], files: Mapping[str, str], what: str) -> None:
    """Check that `listed` and `files` have the same paths; ignore the paths in WITHOUT_DIGEST.

    Raises:
        ModelError: a path of the manifest is missing, or a path is not in the manifest.
    """
    listed = set(listed) - WITHOUT_DIGEST
    if strange := sorted(listed - files.keys()):
        raise refusal(what, f"{strange[0]!r} is not in its {MANIFEST}")
    if missing := sorted(files.keys() - listed):
        raise refusal(what, f"{missing[0]!r} is in its {MANIFEST} but missing")


def check_file(folder: Path, path: str, digest: str, what: str) -> None:
    """Raise if a file was changed, could run code, or is malformed.

    Raises:
        ModelError: the digest differs, or `_check_content` refuses the file.
    """
    if (actual := _sha256(folder / path)) != digest:
        raise refusal(
            what, f"{path!r} was changed: its digest is {actual}, but {digest} in the {MANIFEST}"
        )
    _check_content(folder, path, what)


def check_path(path: str, what: str) -> None:
    """Raise if a path could lead out of its folder, on any operating system.

    Raises:
        ModelError: the path is unsafe.
    """
    if set("\\:") & set(path) or any(part in ("", ".", "..") for part in path.split("/")):
        raise refusal(what, f"the path {path!r} could lead out of its folder")


def check_name(path: str, what: str) -> None:
    """Raise if a file name has the suffix of a pickle or of code.

    Raises:
        ModelError: the suffix is refused.
    """
    suffix = PurePosixPath(path).suffix.lower()
    if suffix in PICKLES:
        raise refusal(what, f"{path!r} is a pickle, which can run code when it is loaded")
    if suffix in CODE:
        raise refusal(what, f"{path!r} is code, which a policy must not contain")


def _check_content(folder: Path, path: str, what: str) -> None:
    """Raise if a file could run code, or is malformed.

    A JSON file must be readable, and must have no key in REMOTE_CODE. A safetensors file must begin
    with the length of its header and a JSON object. Any other file must not begin like a pickle or
    a zip file.
    """
    if path.endswith(".json"):
        if key := _remote_code_key(_read_json(folder / path, path, what)):
            raise refusal(what, f"{path!r} has the key '{key}', which would run code")
        return
    with (folder / path).open("rb") as file:
        start = file.read(9)
    if path.endswith(".safetensors"):
        length = int.from_bytes(start[:8], "little")
        if length > MAX_SAFETENSORS_HEADER or start[8:] != b"{":
            raise refusal(what, f"{path!r} is not a safetensors file")
    elif PICKLE_OR_ZIP.match(start):
        raise refusal(what, f"{path!r} begins like a pickle, which can run code when it is loaded")


def _remote_code_key(document: Any) -> str:
    """Return a key in REMOTE_CODE at any depth of the document, or '' if there is none.

    A key whose value is a number is ignored, because it is a token of a vocabulary, and the number
    is its id.
    """
    left = [document]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            for key in REMOTE_CODE & value.keys():
                if type(value[key]) not in (int, float):
                    return key
            left.extend(value.values())
        elif isinstance(value, list):
            left.extend(value)
    return ""


def _read_json(file: Path, path: str, what: str) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise refusal(what, f"{path!r} cannot be read as JSON ({error})") from error


def _files_of(folder: Path, what: str) -> set[str]:
    """Return the relative paths of all files; raise for a link, a pipe or a device."""
    files = set()
    for found in folder.rglob("*"):
        path = found.relative_to(folder).as_posix()
        check_plain(folder, path, what)
        if found.is_file():
            files.add(path)
    return files


def check_plain(root: Path, path: str, what: str) -> None:
    """Check that a path is a plain file or folder.

    A link could point to any file on the machine, and a read from a pipe might never end.

    Raises:
        ModelError: the path is a link, a pipe or a device.
    """
    found = root / path
    if found.is_symlink() or not (found.is_file() or found.is_dir()):
        raise refusal(what, f"{path!r} is a link, a pipe or a device")


def is_digest(value: object) -> bool:
    """Return whether a value is a SHA-256 in hexadecimal."""
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
