"""Files through S3, while the proxy in front of it spoils replies and processes are killed."""

import fcntl
import os
import random
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from pipeline.storage import download, objects, upload
from pipeline.storage import s3_client as s3_client_module
from pipeline.storage.addresses import S3Address
from pipeline.storage.download import fetch
from pipeline.storage.local_cache import LocalCache
from pipeline.storage.objects import list_objects, write_object
from pipeline.storage.s3_client import CONNECTIONS, s3_client
from pipeline.storage.transfer_manager import PART_BYTES
from pipeline.storage.upload import find, publish, remove_unneeded, replace
from ppo_core.errors import ConfigError, DataError, PPOError, StorageError
from tests.helpers.paths import ROOT
from tests.helpers.servers.s3_faults import ERRORS, SPOILT, S3Faults
from tests.helpers.slow_cases import slow

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
    monkeypatch.setattr(objects, "GRACE_SECONDS", 0.2)


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


@pytest.mark.slow
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


def finished(word: str, address: S3Address, cache: Path) -> dict[str, int]:
    """The sizes of the files that a killed transfer has finished and verified, by name."""
    if word == "publish":
        return {each["Key"].rpartition("/")[2]: each["Size"] for each in list_objects(address)}
    (folder,) = (path for path in cache.glob("*.part") if not path.name.endswith(".part.part"))
    found = {path.name: path.stat().st_size for path in folder.rglob("*.bin")}
    # A file that no manifest describes is finished once its digest is recorded; a kill may come
    # in between.
    for record in cache.glob("*.arrived"):
        lines = record.read_text().splitlines()
        recorded = {line.split('"')[1].rpartition("/")[2] for line in lines if line.endswith("]")}
        found = {name: size for name, size in found.items() if name in recorded}
    return found


@pytest.mark.parametrize(
    ("word", "is_ours"),
    [
        ("fetch", True),
        pytest.param("fetch", False, marks=pytest.mark.slow),
        pytest.param("publish", True, marks=pytest.mark.slow),
    ],
)
def test_finished_files_are_not_transferred_again(
    word: str, is_ours: bool, faults: S3Faults, tmp_path: Path
):
    """Killed halfway; afterwards the other files alone are transferred, each once."""
    sizes = [2_000_000] * 20 + [PART_BYTES + 1]
    source, cache = write_folder(tmp_path / "source", sizes), tmp_path / "cache"
    address = at(f"killed/{word}-{is_ours}")
    if word == "fetch" and is_ours:
        address = publish(source, address)
    elif word == "fetch":
        for name, content in contents(source).items():
            write_object(address.below(name), content)
    faults.sent = faults.received = 0
    words = [sys.executable, "-m", "tests.helpers.jobs.transfer_job", word, str(address)]
    words.append(str(cache if word == "fetch" else source))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'flows'}"}
    job = subprocess.Popen(words, cwd=ROOT, env=environment)
    while faults.sent + faults.received < sum(sizes) / 2 and job.poll() is None:
        time.sleep(0.002)
    job.kill()
    job.wait()
    # Requests in flight end without the client, and would count as those of the second try.
    while faults.at_once:
        time.sleep(0.05)
    left = sum(sizes) - sum(finished(word, address, cache).values())
    assert 0 < left < sum(sizes)
    faults.sent = faults.received = 0
    subprocess.run(words, cwd=ROOT, env=environment, check=True)
    moved = faults.sent if word == "fetch" else faults.received
    print(f"{word}: {left / sum(sizes):.0%} of the files were left")
    assert left <= moved < left + 50_000
    if word == "fetch":
        assert not [*cache.glob("*.part")]
        (folder,) = (path for path in cache.iterdir() if path.is_dir())
        assert contents(folder) == contents(source)
    else:
        fetched = fetch(find(address) or address, LocalCache(tmp_path / "other"))
        assert contents(fetched) == contents(source)


@pytest.mark.slow
def test_few_requests_go_at_a_time(faults: S3Faults, tmp_path: Path):
    source = write_folder(tmp_path / "source", [50_000] * 40 + [4 * PART_BYTES])
    for transfer in (
        lambda: publish(source, at("at-once")),
        lambda: fetch(at("at-once"), LocalCache(tmp_path / "cache")),
    ):
        faults.most_at_once = 0
        transfer()
        assert 4 <= faults.most_at_once <= CONNECTIONS


@pytest.mark.parametrize("kind", [kind for kind in TEMPORARY if kind != "bytes"])
def test_a_temporary_fault_in_objects_of_another_program(
    kind: str, faults: S3Faults, tmp_path: Path, quick_to_give_up_on_slow: None
):
    """Wrong bytes could be told from right ones by a digest alone, which these objects lack."""
    source = write_folder(tmp_path / "source", [10, 40_000, PART_BYTES + 5])
    for name, content in contents(source).items():
        write_object(at(f"others/{kind}").below(name), content)
    faults.kinds, faults.share = [kind], 0.3
    fetched = fetch(at(f"others/{kind}"), LocalCache(tmp_path / "cache"))
    assert contents(fetched) == contents(source)
    assert faults.counts[kind]


@pytest.mark.parametrize("size", [40_000, PART_BYTES + 5])
def test_a_slow_download_ends_and_says_so(
    size: int,
    faults: S3Faults,
    tmp_path: Path,
    quick_to_give_up_on_slow: None,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(objects, "CHUNK_BYTES", 256)
    published = publish(write_folder(tmp_path / "source", [size]), at(f"slow/{size}"))
    faults.kinds, faults.share, faults.skip = ["drip"], 1.0, next(faults.number) + 2
    with pytest.raises(
        StorageError, match=r"slow/.*in 10 attempts: .*too slow: \d+ bytes in \d+ seconds"
    ):
        fetch(published, LocalCache(tmp_path / "cache"))


@pytest.mark.parametrize("size", [PART_BYTES - 1, 2 * PART_BYTES])
def test_a_slow_upload_ends_and_says_so(
    size: int, faults: S3Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(s3_client_module, "ATTEMPTS", 2)
    monkeypatch.setattr(objects, "GRACE_SECONDS", 0.2)
    # The system's buffers take some megabytes at once.
    monkeypatch.setattr(objects, "LEAST_BYTES_PER_SECOND", 20_000_000)
    source = write_folder(tmp_path / "source", [size])
    faults.kinds, faults.share, faults.skip = ["sip"], 1.0, next(faults.number) + 3
    with pytest.raises(StorageError, match=r"sip/.*in 2 attempts: .*too slow: "):
        publish(source, at(f"sip/{size}"))


@pytest.mark.parametrize("size", [100, 2 * PART_BYTES])
@pytest.mark.parametrize("change", ["replace", "append", "cut"])
def test_a_file_that_changes_meanwhile_is_not_published(
    size: int, change: str, faults: S3Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source, described = write_folder(tmp_path / "source", [size]), upload.manifest_of

    def changed_after(*words: Any, **options: Any):
        found = described(*words, **options)
        with (source / "sub" / "file-0.bin").open("r+b") as file:
            if change == "replace":
                file.write(b"other")
            elif change == "append":
                file.seek(size)
                file.write(b"other")
            else:
                file.truncate(50)
        return found

    monkeypatch.setattr(upload, "manifest_of", changed_after)
    address = at(f"changed/{change}-{size}")
    with pytest.raises(StorageError, match=r"file-0.bin' was changed while it was published"):
        publish(source, address)
    # An object would be taken for that with the digest in its key.
    assert not list_objects(address)


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
    with pytest.raises(StorageError, match="has already published newer files"):
        replace({"journal": file}, at("state"), version)
    with pytest.raises(StorageError, match="has already published newer files"):
        replace({"journal": file}, at("state"), "")
    assert newer != version
    fetched = fetch(at("state"), LocalCache(tmp_path / "cache"))
    assert (fetched / "journal").read_text() == "two"
    # The file of the writer that stopped goes with the next change.
    manifest, _ = replace({"journal": file}, at("state"), newer)
    remove_unneeded(manifest, at("state"))
    kept = s3_client().list_objects_v2(Bucket="artifacts", Prefix="state/")["Contents"]
    assert len(kept) == 2


def test_old_files_that_cannot_be_removed_stop_no_writer(
    faults: S3Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "journal"
    file.write_text("one")
    _, version = replace({"journal": file}, at("outage"), "")

    def stay_away(*_: Any) -> None:
        raise StorageError("S3 does not answer.")

    file.write_text("two")
    with monkeypatch.context() as outage:
        outage.setattr(upload, "remove_objects", stay_away)
        manifest, version = replace({"journal": file}, at("outage"), version)
        remove_unneeded(manifest, at("outage"))
    file.write_text("three")
    manifest, _ = replace({"journal": file}, at("outage"), version)
    remove_unneeded(manifest, at("outage"))
    assert len(list_objects(at("outage"))) == 2


def test_other_content_than_that_of_the_address_is_refused(faults: S3Faults, tmp_path: Path):
    published = publish(write_folder(tmp_path / "a", [10]), at("pinned"))
    manifest = at("pinned").below("manifest.json")
    write_object(manifest, b'{"files": {}, "is_file": false}')
    with pytest.raises(DataError, match="was changed after it was published"):
        fetch(published, LocalCache(tmp_path / "cache"))
    s3_client().delete_object(Bucket="artifacts", Key=manifest.key)
    with pytest.raises(DataError, match="is not published any more"):
        fetch(published, LocalCache(tmp_path / "cache"))


@pytest.mark.parametrize("is_ours", [True, *slow(False)])
def test_a_damaged_file_of_the_cache_is_repaired(is_ours: bool, faults: S3Faults, tmp_path: Path):
    source = write_folder(tmp_path / "source", [100, PART_BYTES, 3 * PART_BYTES])
    address, cache = at(f"repair/{is_ours}"), LocalCache(tmp_path / "cache")
    if is_ours:
        publish(source, address)
    else:
        for name, content in contents(source).items():
            write_object(address.below(name), content)
    damaged = fetch(address, cache) / "file-1.bin"
    with damaged.open("r+b") as file:
        file.seek(5)
        file.write(b"damage")
    faults.sent = 0
    assert contents(fetch(address, cache)) == contents(source)
    assert PART_BYTES <= faults.sent < PART_BYTES + 10_000


def test_an_object_that_stays_damaged_is_fetched_twice_at_most(faults: S3Faults, tmp_path: Path):
    source = write_folder(tmp_path / "source", [2 * PART_BYTES])
    published = publish(source, at("damaged"))
    (key,) = [each["Key"] for each in list_objects(published) if each["Key"].endswith(".bin")]
    write_object(S3Address(bucket="artifacts", key=key), bytes(2 * PART_BYTES))
    faults.sent = 0
    with pytest.raises(StorageError, match=r"file-0.bin' do not match its digest"):
        fetch(published, LocalCache(tmp_path / "cache"))
    assert faults.sent < 4 * PART_BYTES + 10_000
    assert not [*(tmp_path / "cache").rglob("*.bin")]


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


def test_the_cache_is_measured_while_another_process_fills_it(tmp_path: Path):
    cache, over = LocalCache(tmp_path, limit_bytes=0), Event()

    def fill() -> None:
        while not over.is_set():
            part = tmp_path / "other.part.part"
            (part / "inner").mkdir(parents=True)
            (part / "inner" / "0").write_bytes(b"bytes")
            shutil.rmtree(part)

    with ThreadPoolExecutor(1) as pool, (tmp_path / "other.used").open("wb") as used:
        fcntl.flock(used, fcntl.LOCK_SH)
        filling = pool.submit(fill)
        try:
            for _ in range(300):
                with cache.filling("own") as folder:
                    (folder / "file").write_bytes(b"bytes")
        finally:
            over.set()
        filling.result()
    # This process uses the content, so even a limit of 0 bytes removes nothing of it.
    assert cache.path("own").is_dir()


def test_the_cache_keeps_to_its_limit(faults: S3Faults, tmp_path: Path):
    addresses = [
        publish(write_folder(tmp_path / str(n), [1000], seed=n), at(f"limit/{n}")) for n in range(3)
    ]
    words = (sys.executable, "-m", "tests.helpers.jobs.transfer_job", "fetch")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'flows'}"}
    for address in addresses[:2]:
        # By another process, because what this process uses is not removed.
        command = [*words, str(address), str(tmp_path / "cache")]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
    fetch(addresses[2], LocalCache(tmp_path / "cache", limit_bytes=2500))
    left = {path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()}
    assert left == {addresses[1].digest, addresses[2].digest}
