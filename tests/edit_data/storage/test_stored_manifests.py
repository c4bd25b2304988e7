"""Manifests on an S3 server, and local ones whose pictures lie there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qwen_edit_zero.edit_data.manifests.convert import convert_manifest
from qwen_edit_zero.edit_data.manifests.opening import open_manifest
from qwen_edit_zero.errors import DataError, SettingsError, StorageError
from tests.edit_data.manifests.test_formats import embedded, parquet, png, sample_members, shard
from tests.edit_data.storage.conftest import PATIENCE
from tests.edit_data.storage.server import Fault, S3Server


def manifest(*rows: dict[str, Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


ROW = {"source": "s/1.png", "target": "t/1.png", "instruction": "x"}


def test_a_manifest_on_a_store_is_read_with_its_pictures_and_once(s3: S3Server, tmp_path: Path) -> None:
    s3.put("set", **{"a/train.jsonl": manifest(ROW), "a/s/1.png": png(1), "a/t/1.png": png(2)})
    table = open_manifest("s3://set/a/train.jsonl", index_folder=tmp_path / "index", storage=PATIENCE)
    assert table[0].target.name == "s3://set/a/t/1.png"
    assert [file.read(1 << 20) for file in (*table[0].sources, table[0].target)] == [png(1), png(2)]
    s3.requests.clear()
    again = open_manifest("s3://set/a/train.jsonl", index_folder=tmp_path / "index", storage=PATIENCE)
    assert list(again) == list(table)
    whole = [asked for asked in s3.ranges("/set/a/train.jsonl") if asked]
    assert len(whole) <= 2, "only its beginning is read, to tell the format"


def test_a_changed_manifest_is_read_again(s3: S3Server, tmp_path: Path) -> None:
    s3.put("set", **{"train.jsonl": manifest(ROW)})
    options = {"index_folder": tmp_path / "index", "storage": PATIENCE}
    assert len(open_manifest("s3://set/train.jsonl", **options)) == 1  # type: ignore[arg-type]
    s3.put("set", **{"train.jsonl": manifest(ROW, {**ROW, "instruction": "y"})})
    assert len(open_manifest("s3://set/train.jsonl", **options)) == 2  # type: ignore[arg-type]


def test_archives_and_folders_on_a_store(s3: S3Server, tmp_path: Path) -> None:
    path = parquet(tmp_path / "p.parquet", source=embedded(1, 2), target=embedded(3, 4), instruction=["x", "y"])
    tar = shard(tmp_path / "s.tar", sample_members("a", 5))
    s3.put(
        "set", **{"p/data/p.parquet": path.read_bytes(), "w/s-0.tar": tar.read_bytes(), "w/s-1.tar": tar.read_bytes()}
    )
    table = open_manifest("s3://set/p", storage=PATIENCE)
    assert table[1].source_names == ("data/p.parquet//1/source",)
    assert table[1].sources[0].read(1 << 20) == png(2)
    for pattern in ("s3://set/w/s-{0..1}.tar", "s3://set/w/*.tar"):
        table = open_manifest(pattern, storage=PATIENCE, on_error="skip")
        assert table[1].target.read(1 << 20) == png(7)
        assert table.where(2) == 'sample 1 of "s-1.tar"'


def test_folders_of_pairs_on_a_store(s3: S3Server) -> None:
    s3.put("set", **{"x/target/a.png": png(1), "x/target/a.txt": b"make it so", "x/control/a.jpg": png(2)})
    for location in ("s3://set/x", "s3://set/x/"):
        table = open_manifest(location, storage=PATIENCE)
        assert (table[0].source_names, table[0].instruction) == (("control/a.jpg",), "make it so")


def test_a_local_manifest_may_name_a_store_that_is_allowed(s3: S3Server, tmp_path: Path) -> None:
    s3.put("pictures", **{"s/1.png": png(1)})
    path = tmp_path / "train.jsonl"
    path.write_bytes(manifest({**ROW, "source": "s3://pictures/s/1.png"}))
    with pytest.raises(DataError, match=r"data\.outside"):
        open_manifest(path)
    table = open_manifest(path, outside=["s3://pictures/s"], storage=PATIENCE)
    assert table[0].sources[0].read(1 << 20) == png(1)


def test_a_file_url_is_a_local_manifest(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(manifest(ROW))
    table = open_manifest(f"file://{tmp_path}/train.jsonl")
    assert table[0].target.name == str(tmp_path / "t/1.png")
    with pytest.raises(SettingsError, match="nothing is fetched from https"):
        open_manifest("https://example.org/train.jsonl")


def test_what_is_wrong_with_a_stored_manifest_is_told(s3: S3Server) -> None:
    s3.put("set", **{"train.jsonl": manifest(ROW)})
    with pytest.raises(DataError, match=r'manifest "s3://set/trian\.jsonl": there is no such object'):
        open_manifest("s3://set/trian.jsonl", storage=PATIENCE)
    s3.fail("/set/train.jsonl", *[Fault(times=50, status=503, code="SlowDown")])
    with pytest.raises(StorageError, match="in 4 tries"):
        open_manifest("s3://set/train.jsonl", storage=PATIENCE)


def test_a_stored_manifest_is_converted_with_its_urls(s3: S3Server, tmp_path: Path) -> None:
    s3.put("set", **{"a/train.jsonl": manifest(ROW)})
    done = convert_manifest("s3://set/a/train.jsonl", tmp_path / "new.jsonl", storage=PATIENCE)
    assert done.outside == ["s3://set/a/s", "s3://set/a/t"]
    table = open_manifest(tmp_path / "new.jsonl", outside=done.outside)
    assert table[0].source_names == ("s3://set/a/s/1.png",)
