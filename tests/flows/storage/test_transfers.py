"""Files through S3, while the proxy in front of it spoils replies and processes are killed."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from pipeline.storage import download
from pipeline.storage.addresses import S3Address
from pipeline.storage.download import fetch
from pipeline.storage.local_cache import LocalCache
from pipeline.storage.manifest import BLOCK_BYTES
from pipeline.storage.multipart import BLOCKS, PART_BYTES, parts_of
from pipeline.storage.objects import write_object
from pipeline.storage.s3_client import s3_client
from pipeline.storage.upload import find, publish, replace
from ppo_core.errors import ConfigError, DataError, PPOError, StorageError
from tests.helpers.paths import ROOT
from tests.helpers.s3_faults import ERRORS, SPOILT, S3Faults

BUCKET = "s3://artifacts"

TEMPORARY = ["500", "503", *SPOILT]


def at(name: str) -> S3Address:
    return S3Address.parse(f"{BUCKET}/{name}")


def write_folder(folder: Path, sizes: list[int], seed: int = 0) -> Path:
    """Write files of these sizes, the last in a subfolder."""
    draw = np.random.default_rng(seed)
    for number, size in enumerate(sizes):
        place = folder / "sub" if number == len(sizes) - 1 else folder
        place.mkdir(parents=True, exist_ok=True)
        (place / f"file-{number}.bin").write_bytes(draw.bytes(size))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def quick_to_give_up_on_slow(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(download, "GRACE_SECONDS", 0.2)


def test_a_folder_arrives_with_all_its_files(faults: S3Faults, tmp_path: Path):
    source = write_folder(tmp_path / "source", [0, 1, PART_BYTES, 2 * PART_BYTES + 7])
    published = publish(source, at("round/trip"))
    assert str(published).startswith("s3://artifacts/round/trip#sha256=")
    fetched = fetch(published, LocalCache(tmp_path / "cache"))
    assert contents(fetched) == contents(source)


def test_a_file_arrives_under_its_name(faults: S3Faults, tmp_path: Path):
    (tmp_path / "pairs.jsonl").write_text("{}\n")
    fetched = fetch(publish(tmp_path / "pairs.jsonl", at("one")), LocalCache(tmp_path / "cache"))
    assert (fetched.name, fetched.read_text()) == ("pairs.jsonl", "{}\n")


def test_what_is_here_or_there_is_not_transferred_again(faults: S3Faults, tmp_path: Path):
    source = write_folder(tmp_path / "source", [100_000, 20_000_000])
    cache = LocalCache(tmp_path / "cache")
    fetch(publish(source, at("twice")), cache)
    faults.sent = faults.received = 0
    fetch(publish(source, at("twice")), cache)
    assert faults.sent + faults.received < 10_000


@pytest.mark.parametrize("kind", TEMPORARY)
def test_a_temporary_fault_is_repeated(
    kind: str, faults: S3Faults, tmp_path: Path, quick_to_give_up_on_slow: None
):
    source = write_folder(tmp_path / "source", [10, 40_000, PART_BYTES + 5])
    faults.kinds, faults.share = [kind], 0.3
    published = publish(source, at(f"faults/{kind}"))
    fetched = fetch(published, LocalCache(tmp_path / "cache"))
    assert contents(fetched) == contents(source)
    assert faults.counts[kind]


@pytest.mark.parametrize(("kind", "advice"), [("403", "role"), ("skew", "clock")])
def test_a_refusal_midway_names_the_object(
    kind: str, advice: str, faults: S3Faults, tmp_path: Path
):
    source = write_folder(tmp_path / "source", [100, 3 * PART_BYTES])
    published = publish(source, at(f"refused/{kind}"))
    faults.kinds, faults.share, faults.skip = [kind], 1.0, next(faults.number) + 3
    with pytest.raises(ConfigError, match=f"s3://artifacts/refused/{kind}/.*{advice}"):
        fetch(published, LocalCache(tmp_path / "cache"))
    assert not [*(tmp_path / "cache").glob("*[0-9a-f]/")]
    faults.kinds = []
    assert contents(fetch(published, LocalCache(tmp_path / "cache"))) == contents(source)


def test_a_server_that_stays_away_ends_the_transfer(faults: S3Faults, tmp_path: Path):
    published = publish(write_folder(tmp_path / "source", [1000]), at("away"))
    faults.kinds, faults.share, faults.skip = ["503"], 1.0, next(faults.number) + 2
    with pytest.raises(StorageError, match=r"s3://artifacts/away/.*in 10 attempts: .*SlowDown"):
        fetch(published, LocalCache(tmp_path / "cache"))


def many_transfers(faults: S3Faults, folder: Path, sizes: list[int]) -> tuple[int, int]:
    """Publish and fetch a file of each size under all faults; return how many ended right, failed.

    Every hundredth request meets a refusal, and every tenth a temporary fault.
    """
    right = failed = 0
    for number, size in enumerate(sizes):
        source = folder / "source" / f"{number}.bin"
        source.parent.mkdir(exist_ok=True)
        source.write_bytes(np.random.default_rng(number).bytes(size))
        faults.kinds, faults.share = [*TEMPORARY * 3, *ERRORS], 0.15
        address = at(f"many/{folder.name}/{number}")
        try:
            fetched = fetch(publish(source, address), LocalCache(folder / "cache", limit_bytes=0))
        except PPOError as error:
            failed += 1
            assert str(address) in str(error)
        else:
            right += 1
            assert fetched.read_bytes() == source.read_bytes()
        source.unlink()
    return right, failed


def test_many_transfers_end_right_or_name_the_object(
    faults: S3Faults, tmp_path: Path, quick_to_give_up_on_slow: None
):
    sizes = [1, 15, *(random.Random(1).randrange(1, 100_000) for _ in range(30)), 20_000_000]
    right, failed = many_transfers(faults, tmp_path, sizes)
    assert right > failed > 0
    assert len(faults.counts) >= 6


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_transfers_of_up_to_300_mb(
    faults: S3Faults, tmp_path: Path, quick_to_give_up_on_slow: None
):
    draw = random.Random(2)
    sizes = [1, 300_000_000, *(int(10 ** draw.uniform(0, 7.7)) for _ in range(198))]
    right, failed = many_transfers(faults, tmp_path, sizes)
    print(f"{right} right, {failed} failed with the object's name; faults {dict(faults.counts)}")
    assert right > failed
    assert set(faults.counts) == {*TEMPORARY, *ERRORS}


@pytest.mark.parametrize(
    ("word", "is_ours"),
    [
        ("fetch", True),
        pytest.param("fetch", False, marks=pytest.mark.slow),
        pytest.param("publish", True, marks=pytest.mark.slow),
    ],
)
def test_a_killed_transfer_continues(word: str, is_ours: bool, faults: S3Faults, tmp_path: Path):
    """Killed halfway; what was transferred before and after is at most 110 % of the files."""
    size = 300_000_000
    source = write_folder(tmp_path / "source", [1000, size])
    address = at(f"killed/{word}-{is_ours}")
    if word == "fetch" and is_ours:
        address = publish(source, address)
    elif word == "fetch":
        for path in source.rglob("*.bin"):
            name = path.relative_to(source).as_posix()
            s3_client().upload_file(str(path), address.bucket, address.below(name).key)
    faults.sent = faults.received = 0
    folder = tmp_path / "cache" if word == "fetch" else source
    words = [sys.executable, "-m", "tests.helpers.transfer_job", word, str(address), str(folder)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'flows'}"}
    job = subprocess.Popen(words, cwd=ROOT, env=environment)
    while faults.sent + faults.received < size / 2 and job.poll() is None:
        time.sleep(0.002)
    job.kill()
    job.wait()
    # Requests in flight end without the client.
    time.sleep(1)
    subprocess.run(words, cwd=ROOT, env=environment, check=True)
    moved = faults.sent if word == "fetch" else faults.received
    print(f"{word}: {moved / size:.1%} of the files were transferred")
    assert size < moved <= 1.1 * size
    published = find(address) or address
    assert contents(fetch(published, LocalCache(tmp_path / "cache"))) == contents(source)


@pytest.mark.parametrize(
    ("megabytes", "expected"),
    # 10 % are 14, 23, 47, 66 and 476 blocks of 2 MiB; S3 takes no part of two blocks.
    [(300, (3, 4)), (500, (3, 7)), (1000, (5, 8)), (1400, (8, 8)), (10_000, (8, 8))],
)
def test_parts_in_flight_are_a_tenth_of_a_file(megabytes: int, expected: tuple[int, int]):
    size = megabytes * 10**6
    blocks, at_once = parts_of(size)
    assert (blocks, at_once) == expected
    assert 5 << 20 <= blocks * BLOCK_BYTES <= PART_BYTES
    assert blocks * at_once * BLOCK_BYTES <= 0.1 * size


def test_small_files_keep_four_connections():
    assert parts_of(PART_BYTES + 1) == (3, 4)
    assert parts_of(10**13)[0] == BLOCKS


def test_the_first_of_two_publishers_wins(faults: S3Faults, tmp_path: Path):
    first = publish(write_folder(tmp_path / "a", [10], seed=1), at("race"))
    second = publish(write_folder(tmp_path / "b", [10], seed=2), at("race"))
    assert first == second
    assert contents(fetch(first, LocalCache(tmp_path / "cache"))) == contents(tmp_path / "a")


def test_a_writer_that_was_overtaken_stops(faults: S3Faults, tmp_path: Path):
    file = tmp_path / "journal"
    file.write_text("one")
    _, version = replace({"journal": file}, at("state"), "")
    file.write_text("two")
    _, newer = replace({"journal": file}, at("state"), version)
    file.write_text("three")
    with pytest.raises(StorageError, match="published by another process"):
        replace({"journal": file}, at("state"), version)
    with pytest.raises(StorageError, match="published by another process"):
        replace({"journal": file}, at("state"), "")
    assert newer != version
    fetched = fetch(at("state"), LocalCache(tmp_path / "cache"))
    assert (fetched / "journal").read_text() == "two"
    # The file of the writer that stopped goes with the next change.
    replace({"journal": file}, at("state"), newer)
    kept = s3_client().list_objects_v2(Bucket="artifacts", Prefix="state/")["Contents"]
    assert len(kept) == 2


def test_other_content_than_that_of_the_address_is_refused(faults: S3Faults, tmp_path: Path):
    published = publish(write_folder(tmp_path / "a", [10]), at("pinned"))
    manifest = at("pinned").below("manifest.json")
    write_object(manifest, b'{"files": {}, "is_file": false}')
    with pytest.raises(DataError, match="was changed after it was published"):
        fetch(published, LocalCache(tmp_path / "cache"))
    s3_client().delete_object(Bucket="artifacts", Key=manifest.key)
    with pytest.raises(DataError, match="is not published any more"):
        fetch(published, LocalCache(tmp_path / "cache"))


def test_a_damaged_file_of_the_cache_is_repaired(faults: S3Faults, tmp_path: Path):
    source = write_folder(tmp_path / "source", [100, 2 * PART_BYTES])
    published, cache = publish(source, at("repair")), LocalCache(tmp_path / "cache")
    damaged = fetch(published, cache) / "sub" / "file-1.bin"
    with damaged.open("r+b") as file:
        file.seek(BLOCK_BYTES + 5)
        file.write(b"damage")
    faults.sent = 0
    assert contents(fetch(published, cache)) == contents(source)
    assert faults.sent < BLOCK_BYTES + 10_000


def test_objects_of_another_program(faults: S3Faults, tmp_path: Path):
    source = write_folder(tmp_path / "source", [100, PART_BYTES + 1])
    for name, content in contents(source).items():
        write_object(at("foreign").below(name), content)
    # Consoles write such an object for a folder.
    s3_client().put_object(Bucket="artifacts", Key="foreign/sub/", Body=b"")
    cache = LocalCache(tmp_path / "cache")
    assert contents(fetch(at("foreign"), cache)) == contents(source)
    faults.sent = 0
    assert contents(fetch(at("foreign/"), cache)) == contents(source)
    assert faults.sent < 10_000
    single = fetch(at("foreign/file-0.bin"), cache)
    assert single.read_bytes() == (source / "file-0.bin").read_bytes()


def test_an_object_that_changes_meanwhile_is_refused(
    faults: S3Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    address = at("changing/file")
    write_object(address, b"old")
    listed = download.list_objects

    def changed_after(*words: object, **options: object):
        found = listed(*words, **options)
        write_object(address, b"new")
        return found

    monkeypatch.setattr(download, "list_objects", changed_after)
    with pytest.raises(DataError, match="changing/file' was removed or replaced"):
        fetch(at("changing"), LocalCache(tmp_path / "cache"))


def test_an_address_without_objects_is_refused(faults: S3Faults, tmp_path: Path):
    with pytest.raises(DataError, match="There is nothing at 's3://artifacts/nothing'"):
        fetch(at("nothing"), LocalCache(tmp_path / "cache"))
    with pytest.raises(ConfigError, match=r"s3://no-such-bucket/x.*Create the bucket"):
        fetch(S3Address.parse("s3://no-such-bucket/x"), LocalCache(tmp_path / "cache"))


@pytest.mark.parametrize("name", ["../out", "/etc/passwd", "a/../../b", "a//b"])
def test_an_object_whose_name_leads_out_of_the_folder_is_refused(
    name: str, faults: S3Faults, tmp_path: Path
):
    key = f"hostile-{abs(hash(name))}"
    s3_client().put_object(Bucket="artifacts", Key=f"{key}/{name}", Body=b"x")
    with pytest.raises(DataError, match="Rename the object"):
        fetch(at(key), LocalCache(tmp_path / "cache"))


def test_the_cache_keeps_to_its_limit(faults: S3Faults, tmp_path: Path):
    addresses = [
        publish(write_folder(tmp_path / str(n), [1000], seed=n), at(f"limit/{n}")) for n in range(3)
    ]
    words = (sys.executable, "-m", "tests.helpers.transfer_job", "fetch")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'flows'}"}
    for address in addresses[:2]:
        # By another process, because what this process uses is not removed.
        command = [*words, str(address), str(tmp_path / "cache")]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
    fetch(addresses[2], LocalCache(tmp_path / "cache", limit_bytes=2500))
    left = {path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()}
    assert left == {addresses[1].digest, addresses[2].digest}
