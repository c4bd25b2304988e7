"""The node's cache of objects: bounded, shared, never wrong."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from qwen_edit_zero.edit_data.storage.files import Stamp
from qwen_edit_zero.edit_data.storage.object_cache import ObjectCache
from qwen_edit_zero.edit_data.storage.options import StorageOptions
from qwen_edit_zero.edit_data.storage.place import open_place
from qwen_edit_zero.errors import SettingsError, StorageError
from tests.edit_data.storage.server import S3Server

ONE = Stamp(1000, "etag-1")


def content(number: int) -> bytes:
    return bytes([number % 256]) * 1000


def bytes_in(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.glob("??/*"))


def in_children(work: Callable[[int], None], count: int) -> None:
    children = []
    for number in range(count):
        child = os.fork()
        if child == 0:
            try:
                work(number)
            except BaseException:
                os._exit(1)
            os._exit(0)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * count


def test_an_object_is_found_under_its_stamp_only(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, 10**6)
    cache.put("s3://b/a.png", ONE, content(1))
    assert cache.get("s3://b/a.png", ONE) == content(1)
    assert cache.get("s3://b/a.png", Stamp(1000, "etag-2")) is None
    assert cache.get("s3://b/b.png", ONE) is None
    assert ObjectCache(tmp_path, 10**6).get("s3://b/a.png", ONE) == content(1)


def test_it_stays_within_its_limit_and_the_last_used_stay(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, 10_000)
    cache.put("kept", ONE, content(0))
    for number in range(40):
        cache.put(str(number), ONE, content(number))
        assert bytes_in(tmp_path) <= 10_000
        time.sleep(0.002)
        assert cache.get("kept", ONE) == content(0)
    assert cache.get("39", ONE) == content(39)
    assert cache.get("0", ONE) is None
    cache.put("large", Stamp(5000, ""), b"x" * 5000)
    assert cache.get("large", Stamp(5000, "")) is None, "it would have driven out half of the others"


def test_damage_is_found_and_the_entry_dropped(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, 10**6)
    for damage in (lambda data: data[:500], lambda data: data[:10] + b"!" + data[11:], lambda data: b""):
        cache.put("a", ONE, content(1))
        (path,) = tmp_path.glob("??/*")
        path.write_bytes(damage(path.read_bytes()))
        assert cache.get("a", ONE) is None
        assert not path.exists()


def test_threads_and_processes_share_it(tmp_path: Path) -> None:
    def work(number: int) -> None:
        cache = ObjectCache(tmp_path, 20_000)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda i: cache.put(str(i % 30), ONE, content(i % 30)), range(60)))
        for i in range(30):
            assert cache.get(str(i), ONE) in (None, content(i))

    in_children(work, 3)
    assert bytes_in(tmp_path) <= 20_000
    assert int((tmp_path / "used").read_text()) == bytes_in(tmp_path)
    assert list((tmp_path / "unfinished").iterdir()) == []


def test_what_dead_writers_left_is_swept_and_counting_starts_anew(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, 10_000)
    cache.put("a", ONE, content(1))
    (tmp_path / "used").write_text("half a num")
    old, young = tmp_path / "unfinished" / "old", tmp_path / "unfinished" / "young"
    for path in (old, young):
        path.write_bytes(b"x")
    os.utime(old, (1, 1))
    cache = ObjectCache(tmp_path, 10_000)
    assert [p.name for p in (tmp_path / "unfinished").iterdir()] == ["young"]
    cache.put("b", ONE, content(2))
    assert int((tmp_path / "used").read_text()) == bytes_in(tmp_path)


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SettingsError, match=r"data\.storage\.cache_dir .*file/cache"):
        ObjectCache(tmp_path / "file" / "cache", 1000)


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ObjectCache(tmp_path, 10**6)

    def full(path: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(StorageError, match=r"No space left.*data\.storage\.cache_gb"):
        cache.put("a", ONE, content(1))


def test_an_object_is_fetched_once_by_all_processes_of_a_node(s3: S3Server, tmp_path: Path) -> None:
    s3.put("cached", **{"a.png": content(1), "b.png": content(2)})
    options = StorageOptions(retries=0, cache_dir=tmp_path)

    def work(number: int) -> None:
        place = open_place("s3://cached", options)
        assert place.file("a.png").read(10_000) == content(1)
        assert place.file("a.png").open().read() == content(1)

    work(0)
    in_children(work, 2)
    assert len(s3.ranges("/cached/a.png")) == 1
    s3.put("cached", **{"a.png": content(3)})
    file = open_place("s3://cached", options).file("a.png")
    file.stamp()
    assert file.read(10_000) == content(3)
