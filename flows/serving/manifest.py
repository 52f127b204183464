"""Write and verify the manifest of a model: the digest of each file, and no file that runs code.

The flow writes the manifest when it registers a model, and a consumer verifies the files against
it before loading them.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from ppo_core.errors import ModelError

MANIFEST = "manifest.json"
"""File with the digest of every other file of a version except the card."""

MANIFEST_TAG = "manifest"
"""Tag of a version in MLflow: SHA-256 of its manifest."""

CARD = "README.md"
"""The model card. It is rewritten after a decision, so it is not in the manifest or downloaded."""

UNVOUCHED = frozenset({MANIFEST, CARD, "registered_model_meta"})
"""Files without a digest; MLflow writes the last one into a store on the same machine."""

PICKLES = frozenset(".bin .pt .pth .pkl .pickle .ckpt .joblib .npy .npz".split())
CODE = frozenset(".py .pyc .pyd .so".split())
REMOTE_CODE = frozenset({"auto_map", "custom_pipelines", "trust_remote_code"})
"""Configuration keys that make transformers run code that it does not contain."""

PICKLE_OR_ZIP = re.compile(rb"\x80[\x02-\x05]|PK\x03\x04")
"""First bytes of a pickle, and of the zip file that torch.save writes."""

MAX_SAFETENSORS_HEADER = 100_000_000
"""Bytes; the limit of the safetensors format."""


def write_manifest(folder: Path) -> str:
    """Write the manifest of a folder and return its SHA-256.

    Raises:
        ModelError: a consumer would refuse one of the files.
    """
    files = {}
    for path in sorted(_files_of(folder, str(folder)) - UNVOUCHED):
        check_path(path, str(folder))
        check_name(path, str(folder))
        _check_content(folder, path, str(folder))
        files[path] = _sha256(folder / path)
    content = json.dumps({"files": files}, indent=1, sort_keys=True) + "\n"
    (folder / MANIFEST).write_text(content, encoding="utf-8")
    return _sha256(folder / MANIFEST)


def check_folder(folder: Path, manifest_digest: str) -> None:
    """Verify the manifest of a folder against its digest, and the files against the manifest.

    Raises:
        ModelError: a file was changed, added, is missing, or could run code.
    """
    what = str(folder)
    files = read_manifest(folder, manifest_digest, what)
    check_list(_files_of(folder, what), files, what)
    for path, digest in files.items():
        check_file(folder, path, digest, what)


def refusal(what: str, reason: str) -> ModelError:
    """Return the error that says that `what` is not loaded, and why."""
    return ModelError(
        f"{what} is refused: {reason}. Nothing of it was loaded. Point the alias at another "
        "version, or register the policy again."
    )


def read_manifest(folder: Path, digest: str, what: str) -> dict[str, str]:
    """Verify the manifest and return the digests of the files by path.

    Args:
        folder: where the manifest is.
        digest: SHA-256 that the manifest must have.
        what: the version, in the words of an error.

    Raises:
        ModelError: the manifest is missing, changed, or names a file that is refused.
    """
    manifest = folder / MANIFEST
    if manifest.is_symlink() or not manifest.is_file():
        raise refusal(what, f"it has no {MANIFEST}")
    if (actual := _sha256(manifest)) != digest:
        raise refusal(
            what,
            f"its {MANIFEST} has the digest {actual}, and the version was registered with {digest}",
        )
    document = _read_json(manifest, MANIFEST, what)
    files = document.get("files") if isinstance(document, dict) else None
    if not isinstance(files, dict) or not all(map(is_digest, files.values())):
        raise refusal(what, f"its {MANIFEST} is no list of files with their SHA-256")
    for path in files:
        check_path(path, what)
        check_name(path, what)
    return files


def check_list(listed: Iterable[str], files: Mapping[str, str], what: str) -> None:
    """Raise unless a list of paths is that of the manifest, apart from UNVOUCHED.

    Raises:
        ModelError: a path is missing or is not in the manifest.
    """
    listed = set(listed) - UNVOUCHED
    if strange := sorted(listed - files.keys()):
        raise refusal(what, f"{strange[0]!r} is not in its {MANIFEST}")
    if missing := sorted(files.keys() - listed):
        raise refusal(what, f"{missing[0]!r} is in its {MANIFEST} and missing")


def check_file(folder: Path, path: str, digest: str, what: str) -> None:
    """Raise if a file was changed or could run code.

    Raises:
        ModelError: the digest differs, or the first bytes or keys are those of code.
    """
    if (actual := _sha256(folder / path)) != digest:
        raise refusal(
            what, f"{path!r} was changed: its digest is {actual}, and {digest} in the {MANIFEST}"
        )
    _check_content(folder, path, what)


def check_path(path: str, what: str) -> None:
    """Raise if a path could lead out of its folder, on any operating system.

    Raises:
        ModelError: the path could.
    """
    if set("\\:") & set(path) or any(part in ("", ".", "..") for part in path.split("/")):
        raise refusal(what, f"the path {path!r} could lead out of its folder")


def check_name(path: str, what: str) -> None:
    """Raise if the name of a file is that of a pickle or of code.

    Raises:
        ModelError: the suffix is.
    """
    suffix = PurePosixPath(path).suffix.lower()
    if suffix in PICKLES:
        raise refusal(what, f"{path!r} is a pickle, which can run code when it is loaded")
    if suffix in CODE:
        raise refusal(what, f"{path!r} is code, and a policy needs none of its own")


def _check_content(folder: Path, path: str, what: str) -> None:
    """Raise if the first bytes, or the keys of a configuration, are those of code."""
    if path.endswith(".json"):
        if key := _remote_code_key(_read_json(folder / path, path, what)):
            raise refusal(what, f"{path!r} has the key '{key}', by which code would be run")
        return
    with (folder / path).open("rb") as file:
        start = file.read(9)
    if path.endswith(".safetensors"):
        length = int.from_bytes(start[:8], "little")
        if length > MAX_SAFETENSORS_HEADER or start[8:] != b"{":
            raise refusal(what, f"{path!r} is no file of safetensors")
    elif PICKLE_OR_ZIP.match(start):
        raise refusal(what, f"{path!r} begins as a pickle, which can run code when it is loaded")


def _remote_code_key(document: Any) -> str:
    """Return the first forbidden key at any depth; a vocabulary may map such a word to an id."""
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
        raise refusal(what, f"{path!r} is no JSON that can be read ({error})") from error


def _files_of(folder: Path, what: str) -> set[str]:
    """Return the relative paths of all files; raise for a link."""
    files = set()
    for found in folder.rglob("*"):
        path = found.relative_to(folder).as_posix()
        check_plain(folder, path, what)
        if found.is_file():
            files.add(path)
    return files


def check_plain(root: Path, path: str, what: str) -> None:
    """Raise unless a path is a plain file or folder.

    A link could point to any file of the machine, and reading a pipe would never end.

    Raises:
        ModelError: it is a link, a pipe or a device.
    """
    found = root / path
    if found.is_symlink() or not (found.is_file() or found.is_dir()):
        raise refusal(what, f"{path!r} is a link or no plain file")


def is_digest(value: object) -> bool:
    """Return whether a value is a SHA-256 in hexadecimal."""
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
