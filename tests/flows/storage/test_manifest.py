"""The manifest of what is published: the form that is written, and the older one that is read."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.storage.addresses import S3Address
from pipeline.storage.download import fetch, published_version, read_file
from pipeline.storage.local_cache import LocalCache
from pipeline.storage.manifest import BLOCK_BYTES, Manifest, manifest_of
from pipeline.storage.objects import write_object
from pipeline.storage.upload import find, publish, replace
from ppo_core.errors import DataError, StorageError
from tests.helpers.servers.s3_faults import S3Faults

SHA256 = hashlib.sha256(b"text").hexdigest()

CONTENTS = {"empty": b"", "small.json": b"{}", "sub/model.bin": bytes(range(256)) * 10_000}


def at(name: str) -> S3Address:
    return S3Address.parse(f"s3://artifacts/manifests/{name}")


def publish_as_version_0_1(address: S3Address) -> S3Address:
    """Publish CONTENTS with the digests of blocks of 2 MiB, and of these digests in the keys."""
    files = {}
    for name, content in CONTENTS.items():
        starts = range(0, len(content), BLOCK_BYTES)
        blocks = [hashlib.sha256(content[at : at + BLOCK_BYTES]).hexdigest() for at in starts]
        files[name] = {"size": len(content), "blocks": blocks}
        digest = hashlib.sha256(bytes.fromhex("".join(blocks))).hexdigest()
        write_object(address.below(f"{digest[:16]}/{name}"), content)
    manifest = json.dumps({"files": files, "is_file": False}, sort_keys=True).encode()
    write_object(address.below("manifest.json"), manifest)
    return address.pinned(hashlib.sha256(manifest).hexdigest())


def test_a_file_has_its_size_and_one_digest(tmp_path: Path):
    (tmp_path / "text").write_bytes(b"text")
    manifest = manifest_of({"text": tmp_path / "text"}, is_file=True)
    expected = {"files": {"text": {"bytes": 4, "sha256": SHA256}}, "is_file": True}
    assert json.loads(manifest.encoded()) == expected
    assert Manifest.decoded(manifest.encoded()) == manifest


def test_a_folder_of_version_0_1_is_fetched(faults: S3Faults, tmp_path: Path):
    published = publish_as_version_0_1(at("old"))
    assert find(at("old")) == published
    cache = LocalCache(tmp_path / "cache")
    folder = fetch(published, cache)
    found = {name: (folder / name).read_bytes() for name in CONTENTS}
    assert found == CONTENTS
    assert read_file(published, "small.json") == b"{}"
    # What is published stays, and damage is noticed.
    assert publish(folder, at("old")) == published
    (folder / "sub/model.bin").write_bytes(bytes(2_560_000))
    faults.sent = 0
    assert (fetch(published, cache) / "sub/model.bin").read_bytes() == CONTENTS["sub/model.bin"]
    assert 2_560_000 < faults.sent < 2_600_000


def test_other_bytes_in_a_folder_of_version_0_1_are_refused(faults: S3Faults, tmp_path: Path):
    published = publish_as_version_0_1(at("damaged"))
    manifest = published_version(published)
    assert manifest is not None
    key = f"{manifest[0].files['small.json'].digest[:16]}/small.json"
    write_object(published.below(key), b"[]")
    with pytest.raises(StorageError, match=r"small.json' do not match its digest"):
        fetch(published, LocalCache(tmp_path / "cache"))
    with pytest.raises(DataError, match=r"has no file 'small.json' whose content"):
        read_file(published, "small.json")


def test_files_of_version_0_1_stay_beside_new_ones(faults: S3Faults, tmp_path: Path):
    publish_as_version_0_1(at("kept"))
    found = published_version(at("kept"))
    assert found is not None
    kept = {"sub/model.bin": found[0].files["sub/model.bin"]}
    (tmp_path / "new").write_text("text")
    replace({"new": tmp_path / "new"}, at("kept"), found[1], kept=kept)
    folder = fetch(at("kept"), LocalCache(tmp_path / "cache"))
    assert (folder / "sub/model.bin").read_bytes() == CONTENTS["sub/model.bin"]
    assert (folder / "new").read_text() == "text"


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ({"bytes": 4}, "name.sha256 is missing"),
        ({"sha256": SHA256}, "name.bytes is missing"),
        ({"bytes": -1, "sha256": SHA256}, "name.bytes=-1 must be at least 0"),
        ({"bytes": True, "sha256": SHA256}, "name.bytes=True must be a whole number"),
        ({"bytes": 4, "sha256": SHA256.upper()}, "name.sha256=.* must match"),
        ({"bytes": 4, "sha256": SHA256[:-1]}, "name.sha256=.* must match"),
        ({"bytes": 4, "sha256": [SHA256]}, "name.sha256=.* must be a text"),
        ({"size": 4, "blocks": []}, "4 bytes in 0 blocks"),
        ({"size": BLOCK_BYTES, "blocks": [SHA256] * 2}, "in 2 blocks"),
        ({"size": 4, "blocks": SHA256}, "name.blocks=.* must be a list"),
        ({"size": 4, "blocks": ["../" + SHA256[3:]]}, "name.blocks.0=.* must match"),
        (SHA256, "name=.* must be an object"),
        (None, "name=None must be an object"),
    ],
)
def test_a_damaged_entry_is_refused(file: Any, reason: str):
    content = json.dumps({"files": {"name": file}, "is_file": False}).encode()
    with pytest.raises(ValueError, match=reason):
        Manifest.decoded(content)
