"""What users may write as a place: folders, URLs of stores, and what is refused."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from qwen_edit_zero.edit_data.storage.files import HeldFile, as_file
from qwen_edit_zero.edit_data.storage.local import LocalFile, LocalPlace
from qwen_edit_zero.edit_data.storage.options import StorageOptions
from qwen_edit_zero.edit_data.storage.place import open_file, open_place
from qwen_edit_zero.edit_data.storage.ranged import RangedStream
from qwen_edit_zero.errors import DataError, SettingsError
from qwen_edit_zero.settings.models import StorageSettings


def test_a_file_url_is_a_local_folder(tmp_path: Path) -> None:
    (tmp_path / "a b%20.png").write_bytes(b"content")
    place = open_place(f"file://{tmp_path}")
    assert place == LocalPlace(tmp_path)
    assert place.file("a b%20.png").read(100) == b"content"
    assert open_file(f"file://{tmp_path}/a b%20.png").open().read() == b"content"


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("https://example.org/pictures", "nothing is fetched from https://"),
        ("hf://datasets/x/y", "nothing is fetched from hf://"),
        ("simplecache::s3://bucket/x", "chain"),
        ("osss://bucket/x", "did you mean oss://"),
        ("qwertyuiop://bucket/x", "no kind of store"),
        ("s3:///x", "names no bucket"),
        ("file://elsewhere/x", "names the machine elsewhere"),
    ],
)
def test_urls_of_no_store_are_refused(url: str, told: str) -> None:
    with pytest.raises(SettingsError) as error:
        open_place(url)
    assert told in str(error.value)


def test_credentials_in_a_url_are_refused_and_not_repeated() -> None:
    with pytest.raises(SettingsError, match="environment") as error:
        open_place("s3://someone:verysecret@bucket/x")
    assert "verysecret" not in str(error.value)


def test_a_store_whose_package_is_missing_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ossfs", None)
    monkeypatch.setitem(__import__("sys").modules, "ossfs.async_oss", None)
    with pytest.raises(SettingsError, match=r"pip install -c constraints\.txt ossfs"):
        open_place("oss://bucket/x").file("a.png").read(100)


def test_any_other_store_of_fsspec_can_be_read() -> None:
    import fsspec

    fsspec.filesystem("memory").pipe_file("/bucket/a.png", b"content")
    file = open_place("memory://bucket").file("a.png")
    assert file.read(100) == b"content"
    assert file.stamp() == file.stamp()
    with pytest.raises(DataError, match=r"memory://bucket/b\.png.*no such object"):
        open_place("memory://bucket").file("b.png").read(100)


def test_names_that_the_rules_let_out_of_the_root_are_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a.png").write_bytes(b"content")
    place = LocalPlace(tmp_path / "inside")
    assert place.file(f"{outside}/a.png").read(100) == b"content"
    assert place.file(f"file://{outside}/a.png").read(100) == b"content"
    assert open_place("s3://bucket/x").file(f"{outside}/a.png").read(100) == b"content"
    assert open_place("s3://bucket/x").file("s3://other/a.png").name == "s3://other/a.png"


def test_symbolic_links_under_the_root_are_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"content")
    (tmp_path / "root").mkdir()
    (tmp_path / "root/link.png").symlink_to(tmp_path / "elsewhere")
    assert LocalPlace(tmp_path / "root").file("link.png").read(100) == b"content"


def test_pipes_and_folders_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    for name, told in (("pipe.png", "not a regular file"), ("folder.png", "it is a folder")):
        for use in (LocalFile.open, LocalFile.stamp, lambda file: file.read(100)):
            with pytest.raises(DataError, match=told):
                use(LocalFile(tmp_path / name))


def test_a_young_file_is_not_settled_and_a_changed_one_has_another_stamp(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"one")
    first = LocalFile(path).stamp()
    assert not first.is_settled()
    times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    path.write_bytes(b"two")
    os.utime(path, ns=times)
    assert LocalFile(path).stamp() != first


def test_one_file_has_one_location(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert LocalFile(Path("a.png")).location == LocalFile(tmp_path / "a.png").location == str(tmp_path / "a.png")
    assert as_file(Path("a.png")).name == "a.png"


def test_content_in_memory_is_a_file() -> None:
    file = HeldFile("upload", b"content")
    assert (file.read(7), file.open().read(), file.read_range(3, 2)) == (b"content", b"content", b"te")
    assert not file.stamp().is_settled()
    with pytest.raises(DataError, match="the limit is 6"):
        file.read(6)


@pytest.mark.parametrize("size", [0, 1, 65_536, 65_537, 1_000_000])
def test_a_ranged_stream_reads_as_a_file_does(size: int) -> None:
    content = os.urandom(size)
    asked: list[tuple[int, int]] = []

    def fetch(start: int, stop: int) -> bytes:
        asked.append((start, stop))
        assert 0 <= start < stop <= size
        return content[start:stop]

    stream, plain = io.BufferedReader(RangedStream(size, fetch), 4096), io.BytesIO(content)
    for position, count in ((0, 10), (size // 2, 100), (5, 70_000), (size, 10), (max(0, size - 3), 10), (0, -1)):
        stream.seek(position)
        plain.seek(position)
        assert stream.read(count) == plain.read(count)


def test_settings_become_options(tmp_path: Path) -> None:
    settings = StorageSettings(retries=2, timeout_seconds=7, cache_dir=tmp_path, cache_gb=1.5)
    options = StorageOptions.of(settings, index_dir=tmp_path / "i")
    assert options == StorageOptions(2, 7, tmp_path, 1_500_000_000, tmp_path / "i")
