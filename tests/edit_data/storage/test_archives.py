"""Members of tar archives and cells of Parquet files, on disk and on a store."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qwen_edit_zero.edit_data.pictures.decode import load_picture, picture_size
from qwen_edit_zero.edit_data.storage import parquet, tar
from qwen_edit_zero.edit_data.storage.files import Place
from qwen_edit_zero.edit_data.storage.local import LocalPlace
from qwen_edit_zero.edit_data.storage.options import StorageOptions
from qwen_edit_zero.edit_data.storage.place import open_place
from qwen_edit_zero.errors import DataError
from tests.edit_data.builders import quadrants
from tests.edit_data.storage.server import S3Server


def png(width: int = 48) -> bytes:
    file = io.BytesIO()
    quadrants(width, 32).save(file, "PNG")
    return file.getvalue()


def make_tar(path: Path, members: dict[str, bytes], **options: int) -> Path:
    with tarfile.open(path, "w", **options) as archive:  # type: ignore[call-overload]
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


MEMBERS = {f"{i:03d}/picture {i}.png": png(40 + i) for i in range(20)} | {"long/" + "x" * 150 + "雪.png": png(99)}


@pytest.fixture(params=["local", "store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A folder with shard.tar and cells.parquet, on disk and on a store."""
    make_tar(tmp_path / "shard.tar", MEMBERS)
    pictures = [{"bytes": png(40 + i), "path": None} for i in range(9)] + [None]
    table = pa.table(
        {
            "image": pa.array(pictures, pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
            "plain": pa.array([png(60 + i) for i in range(10)]),
            "refs": pa.array([[{"bytes": png(80 + i)}, {"bytes": png(90 + i)}] for i in range(10)]),
            "text": pa.array(["x"] * 10),
        }
    )
    pq.write_table(table, tmp_path / "cells.parquet", row_group_size=4)
    if request.param == "local":
        yield LocalPlace(tmp_path)
        return
    s3: S3Server = request.getfixturevalue("s3")
    bucket = f"archives-{abs(hash(tmp_path))}"
    s3.put(bucket, **{name: (tmp_path / name).read_bytes() for name in ("shard.tar", "cells.parquet")})
    yield open_place(f"s3://{bucket}", StorageOptions(retries=1, timeout_seconds=10))


def test_members_of_a_tar_archive(place: Place) -> None:
    for name, content in MEMBERS.items():
        file = place.file(f"shard.tar//{name}")
        assert file.read(10**6) == content
        assert load_picture(file).width == picture_size(file)[0]
        assert file.location.endswith(f"shard.tar//{name}")
    stamps = {place.file(f"shard.tar//{name}").stamp() for name in MEMBERS}
    assert len(stamps) == len(MEMBERS)
    with pytest.raises(DataError, match=r'shard\.tar" holds no "none\.png"'):
        place.file("shard.tar//none.png").read(10**6)
    with pytest.raises(DataError, match=r"archive .*none\.tar"):
        place.file("none.tar//a.png").read(10**6)
    with pytest.raises(DataError, match="the limit is 10"):
        place.file("shard.tar//000/picture 0.png").read(10)


def test_a_damaged_archive_is_read_once_for_all_of_its_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tar(tmp_path / "a.tar", MEMBERS)
    content = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(content[: len(content) // 2 + 700])
    read: list[str] = []
    real = tar.tar_entries
    monkeypatch.setattr(tar, "tar_entries", lambda stream, name: read.append(name) or real(stream, name))
    for name in MEMBERS:
        with pytest.raises(DataError, match=r"archive .*a\.tar"):
            LocalPlace(tmp_path).file(f"a.tar//{name}").stamp()
    assert len(read) == 1


def test_an_archive_that_ends_too_early_or_goes_on_behind_its_end_is_refused(tmp_path: Path) -> None:
    whole = make_tar(tmp_path / "whole.tar", {"a": b"x" * 700, "b": b"y" * 10}).read_bytes()
    starts = {"a": 0, "b": 512 + 1024}
    (tmp_path / "cut.tar").write_bytes(whole[: starts["b"]])  # between two files: no header is damaged
    (tmp_path / "both.tar").write_bytes(whole + make_tar(tmp_path / "c.tar", {"c": b"z"}).read_bytes())
    place = LocalPlace(tmp_path)
    assert place.file("whole.tar//b").read(100) == b"y" * 10
    with pytest.raises(DataError, match="cut short or never closed"):
        place.file("cut.tar//a").read(1000)
    with pytest.raises(DataError, match="more behind its end"):
        place.file("both.tar//a").read(1000)
    (tmp_path / "cut.tar").write_bytes(whole[: starts["b"]] + b"\0" * 1024)
    assert len(place.file("cut.tar//a").read(1000)) == 700


def test_cells_of_a_parquet_file(place: Place) -> None:
    for row in (0, 3, 4, 8):
        assert picture_size(place.file(f"cells.parquet//{row}/image")) == (40 + row, 32)
        assert place.file(f"cells.parquet//{row}/plain").read(10**6) == png(60 + row)
        assert place.file(f"cells.parquet//{row}/refs/1").read(10**6) == png(90 + row)
    assert place.file("cells.parquet//1/image").stamp() != place.file("cells.parquet//2/image").stamp()


@pytest.mark.parametrize(
    ("cell", "told"),
    [
        ("10/image", "has 10 rows"),
        ("9/image", "holds no bytes"),
        ("0/imgae", '"image"'),
        ("0/refs", "a list of 2"),
        ("0/refs/2", "a list of 2"),
        ("0/text", "no picture"),
        ("x/image", "ROW/COLUMN"),
        ("0", "ROW/COLUMN"),
    ],
)
def test_cells_that_are_none(place: Place, cell: str, told: str) -> None:
    with pytest.raises(DataError) as error:
        place.file(f"cells.parquet//{cell}").read(10**6)
    assert told in str(error.value)
    assert f"cells.parquet//{cell}" in str(error.value)


def test_a_remote_member_takes_its_own_bytes_only(s3: S3Server, tmp_path: Path) -> None:
    members = {f"{i}.bin": os.urandom(100_000) for i in range(30)}
    s3.put("ranges", **{"a.tar": make_tar(tmp_path / "a.tar", members).read_bytes()})
    place = open_place("s3://ranges", StorageOptions(index_dir=tmp_path / "indexes"))
    place.file("a.tar//0.bin").stamp()
    s3.requests.clear()
    assert place.file("a.tar//17.bin").read(10**6) == members["17.bin"]
    (asked,) = s3.ranges("/ranges/a.tar")
    start, end = map(int, asked.removeprefix("bytes=").split("-"))
    assert end - start + 1 == 100_000


def test_the_index_is_made_once_and_again_when_the_archive_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    real = tar._made
    monkeypatch.setattr(tar, "_made", lambda archive: made.append(archive.name) or real(archive))
    monkeypatch.setattr("qwen_edit_zero.edit_data.storage.files._TOO_YOUNG_NS", 0)
    path = make_tar(tmp_path / "a.tar", MEMBERS)
    place = LocalPlace(tmp_path, StorageOptions(index_dir=tmp_path / "indexes"))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda name: place.file(f"a.tar//{name}").read(10**6), MEMBERS))
    assert found == list(MEMBERS.values())
    assert len(made) == 1
    monkeypatch.setattr(tar, "_indexes", type(tar._indexes)())  # as in another process
    assert place.file(f"a.tar//{next(iter(MEMBERS))}").read(10**6) == next(iter(MEMBERS.values()))
    assert len(made) == 1
    assert [p.suffix for p in (tmp_path / "indexes").iterdir()] == [".npy"]
    make_tar(path, {"new.png": png(77)})
    assert place.file("a.tar//new.png").read(10**6) == png(77)
    assert len(made) == 2


def test_of_two_members_with_one_name_the_last_counts(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for content in (b"first", b"second!"):
            info = tarfile.TarInfo("a.png")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    assert LocalPlace(tmp_path).file("a.tar//a.png").read(100) == b"second!"


def test_links_in_an_archive_lead_nowhere(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        info = tarfile.TarInfo("a.png")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/hostname"
        archive.addfile(info)
    with pytest.raises(DataError, match="holds no"):
        LocalPlace(tmp_path).file("a.tar//a.png").read(100)


def test_archives_that_are_cut_damaged_or_compressed_are_refused_by_name(tmp_path: Path) -> None:
    whole = make_tar(tmp_path / "whole.tar", {f"{i}.bin": bytes(1000) for i in range(9)}).read_bytes()
    with tarfile.open(fileobj=io.BytesIO(whole)) as archive:
        fifth = archive.getmembers()[5].offset
    cases = {
        "inside-content.tar": (whole[: fifth + 700], "cut short|unexpected end"),
        "inside-header.tar": (whole[: fifth + 100], "cut short"),
        "bad-header.tar": (whole[:fifth] + b"\x01" * 512 + whole[fifth + 512 :], "damaged"),
        "empty.tar": (b"", "no tar archive"),
        "text.tar": (b"not an archive at all " * 100, "no tar archive"),
    }
    for name, (content, told) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=rf'archive ".*{name}": .*({told})'):
            LocalPlace(tmp_path).file(f"{name}//0.bin").read(10**6)
    with tarfile.open(tmp_path / "gz.tar", "w:gz"):
        pass
    with pytest.raises(DataError, match=r"gz\.tar.*compressed \(gzip\)"):
        LocalPlace(tmp_path).file("gz.tar//0.bin").read(10**6)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"bad\.parquet.*no Parquet file"):
        LocalPlace(tmp_path).file("bad.parquet//0/image").read(10**6)


def test_row_groups_are_read_once_and_held_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = [os.urandom(10_000) for _ in range(40)]
    pq.write_table(pa.table({"image": content}), tmp_path / "a.parquet", row_group_size=10)
    reads: list[int] = []
    real = parquet._Table.group
    monkeypatch.setattr(parquet._Table, "group", lambda self, *a: reads.append(a[0]) or real(self, *a))
    monkeypatch.setattr(parquet, "_tables", parquet._Tables())
    monkeypatch.setattr(parquet, "_HELD_BYTES", 250_000)
    place = LocalPlace(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda row: place.file(f"a.parquet//{row}/image").read(10**6), range(20)))
    assert found == content[:20]
    assert sorted(reads) == [0, 1]
    for row in (25, 35, 5):
        assert place.file(f"a.parquet//{row}/image").read(10**6) == content[row]
    assert len(parquet._tables._groups) == 2
    assert reads[2:] == [2, 3, 0]


def test_a_forked_process_reads_archives_too(place: Place) -> None:
    names = ["cells.parquet//5/plain", "shard.tar//003/picture 3.png"]
    expected = [place.file(name).read(10**6) for name in names]
    child = os.fork()
    if child == 0:
        os._exit(0 if [place.file(name).read(10**6) for name in names] == expected else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_why_a_member_is_missing(place: Place) -> None:
    assert "shard.tar" in place.why_missing("sahrd.tar//000/picture 0.png")
    assert 'holds no "nine.png"' in place.why_missing("shard.tar//nine.png")
