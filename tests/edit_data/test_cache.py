from __future__ import annotations

import errno
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qwen_edit_zero.edit_data.cache.digests import DigestMemo, content_digest
from qwen_edit_zero.edit_data.cache.store import CachedSample, ConditioningCache
from qwen_edit_zero.edit_data.manifests.manifest import Sample
from qwen_edit_zero.edit_data.storage.local import LocalPlace
from qwen_edit_zero.errors import DataError, StorageError
from tests.edit_data.builders import entry, save


def equal(one: CachedSample, two: CachedSample) -> bool:
    a, b = one.tensors(), two.tensors()
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


@pytest.fixture
def cache(tmp_path: Path) -> ConditioningCache:
    return ConditioningCache(tmp_path / "cache", "encoders-1")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("references", [1, 2, 3])
def test_what_is_put_comes_back_bit_for_bit(cache: ConditioningCache, dtype: torch.dtype, references: int) -> None:
    sample = entry(0, references=references, dtype=dtype)
    assert not cache.has("ab" * 16)
    cache.put("ab" * 16, sample)
    assert cache.has("ab" * 16)
    assert cache.has("ab" * 16, verify=True)
    assert equal(cache.get("ab" * 16), sample)
    assert not list((cache.folder / "unfinished").iterdir())


def test_a_view_of_a_larger_tensor_is_stored_alone(cache: ConditioningCache) -> None:
    sample = replace(entry(0), prompt_embeds=torch.randn(1000, 8)[3:6])
    cache.put("ab" * 16, sample)
    assert torch.equal(cache.get("ab" * 16).prompt_embeds, sample.prompt_embeds)
    assert cache.path("ab" * 16).stat().st_size < 10_000


def test_tensors_that_share_memory_are_stored_each(cache: ConditioningCache) -> None:
    latent = torch.randn(16, 4, 4)
    sample = CachedSample(latent, (latent, latent), torch.randn(8, 5).T)
    cache.put("ab" * 16, sample)
    assert equal(cache.get("ab" * 16), sample)


@pytest.mark.parametrize("damage", ["cut", "empty", "flip", "header", "garbage"])
def test_damage_is_found_deleted_and_never_returned(cache: ConditioningCache, damage: str) -> None:
    key = "cd" * 16
    cache.put(key, entry(1))
    path = cache.path(key)
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[-5] ^= 1
    elif damage == "header":
        data[12] ^= 1
    path.write_bytes({"cut": data[:-7], "empty": b"", "garbage": os.urandom(300)}.get(damage, bytes(data)))
    assert cache.has(key) == (damage == "flip"), "all but changed values show in header and size"
    assert not cache.has(key, verify=True)
    with pytest.raises(DataError, match="damaged"):
        cache.get(key)
    with pytest.raises(DataError, match="gone"):
        cache.get(key)


def test_a_full_disk_is_a_storage_error_and_leaves_nothing(
    cache: ConditioningCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(StorageError, match=r"No space left.*data\.cache_dir"):
        cache.put("ab" * 16, entry(0))
    assert [p for p in cache.folder.rglob("*") if p.is_file()] == []


def test_only_old_leftovers_are_swept(cache: ConditioningCache) -> None:
    cache.put("ab" * 16, entry(0))
    for name, age in (("old", 2 * 86400), ("new", 60)):
        path = cache.folder / "unfinished" / name
        path.write_bytes(b"x")
        os.utime(path, (time.time() - age,) * 2)
    cache.sweep()
    assert [p.name for p in (cache.folder / "unfinished").iterdir()] == ["new"]
    assert cache.has("ab" * 16)


def make(folder: Path, *sources: str, instruction: str = "x") -> Sample:
    return Sample("a", LocalPlace(folder), sources, instruction, "t.png", line=1)


def test_the_key_follows_contents_order_instruction_and_fingerprint(tmp_path: Path, cache: ConditioningCache) -> None:
    save(tmp_path / "s1.png", (48, 32))
    save(tmp_path / "s2.png", (64, 32))
    save(tmp_path / "t.png", (32, 32))
    base = make(tmp_path, "s1.png", "s2.png")
    key = cache.key(base)
    others = [
        cache.key(make(tmp_path, "s2.png", "s1.png")),
        cache.key(make(tmp_path, "s1.png")),
        cache.key(make(tmp_path, "s1.png", "s1.png")),
        cache.key(make(tmp_path, "s1.png", "s2.png", instruction="y")),
        ConditioningCache(cache.folder, "encoders-2").key(base),
    ]
    assert len({key, *others}) == 6
    assert cache.key(replace(base, id="b", category="c", weight=2.0, line=9)) == key
    os.rename(tmp_path / "s1.png", tmp_path / "renamed.png")
    assert cache.key(make(tmp_path, "renamed.png", "s2.png")) == key
    save(tmp_path / "t.png", (32, 33))
    assert cache.key(make(tmp_path, "renamed.png", "s2.png")) != key


def age(path: Path) -> None:
    """Wait until the memo trusts the file's time stamps; its change time cannot be set back."""
    while time.time_ns() - path.stat().st_ctime_ns < 2_100_000_000:
        time.sleep(0.05)


def test_an_unchanged_file_is_not_read_again_and_a_changed_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qwen_edit_zero.edit_data.cache import digests

    path = save(tmp_path / "a.png")
    read: list[Path] = []
    real = content_digest
    monkeypatch.setattr(digests, "content_digest", lambda p: read.append(p) or real(p))
    age(path)
    with DigestMemo(tmp_path / "memo", writer="rank-0", wanted=[path]) as memo:
        first = memo.digest(path)
        assert memo.digest(path) == first == content_digest(path)
    assert len(read) == 1
    with (tmp_path / "memo" / "rank-0.jsonl").open("a") as file:
        file.write('["half a li')
    with DigestMemo(tmp_path / "memo", writer="rank-1", wanted=[path]) as memo:
        assert memo.digest(path) == first
    assert len(read) == 1
    times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    path.write_bytes(path.read_bytes()[:-1] + b"!")  # same size, and its modification time is set back
    os.utime(path, ns=times)
    with DigestMemo(tmp_path / "memo", writer="rank-1", wanted=[path]) as memo:
        assert memo.digest(path) == content_digest(path) != first


def test_a_memo_in_a_read_only_place_computes(tmp_path: Path) -> None:
    path = save(tmp_path / "a.png")
    (tmp_path / "file").write_text("in the way")
    with DigestMemo(tmp_path / "file" / "memo", writer="rank-0", wanted=[path]) as memo:
        assert memo.digest(path) == content_digest(path)
        with pytest.raises(DataError, match=r"none\.png"):
            memo.digest(tmp_path / "none.png")
