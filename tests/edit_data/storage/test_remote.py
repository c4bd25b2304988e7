"""Pictures on an S3 server: read right, asked again when that may help, refused by name when not."""

from __future__ import annotations

import io
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends
from PIL import Image

from qwen_edit_zero.edit_data.pictures.decode import MAX_BYTES, load_picture, picture_size
from qwen_edit_zero.edit_data.storage.options import StorageOptions
from qwen_edit_zero.edit_data.storage.place import open_file, open_place
from qwen_edit_zero.edit_data.storage.remote import RemoteFile
from qwen_edit_zero.edit_data.storage.store import Listed, store_of
from qwen_edit_zero.errors import DataError, QwenEditError, SettingsError, StorageError
from tests.edit_data.builders import quadrants
from tests.edit_data.storage.conftest import PATIENCE
from tests.edit_data.storage.server import SECRET, Fault, S3Server


def png(size: tuple[int, int] = (48, 32)) -> bytes:
    file = io.BytesIO()
    quadrants(*size).save(file, "PNG")
    return file.getvalue()


def noise_png() -> bytes:
    """Over 3 MB, which does not fit into a first range."""
    pixels = np.random.default_rng(0).integers(0, 256, (1024, 1024, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=0)
    return file.getvalue()


def message_of(file: RemoteFile, kind: type[QwenEditError]) -> str:
    with pytest.raises(kind) as error:
        file.read(MAX_BYTES)
    assert SECRET not in str(error.value)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_picture_on_a_store_is_the_picture_on_disk(s3: S3Server, tmp_path: Path) -> None:
    s3.put("one", **{"a/x y.png": png()})
    (tmp_path / "x.png").write_bytes(png())
    file = open_place("s3://one/a", PATIENCE).file("x y.png")
    assert file.name == file.location == "s3://one/a/x y.png"
    assert load_picture(file).tobytes() == load_picture(tmp_path / "x.png").tobytes()
    assert picture_size(file) == (48, 32)


@pytest.mark.parametrize("name", ["50%2B.png", "a+b?c=d&e.png", "雪 山.png", "[x]*.png", "a#b.png", "versionId=3.png"])
def test_names_are_taken_literally(s3: S3Server, name: str) -> None:
    s3.put("literal", **{f"p/{name}": png()})
    assert open_place("s3://literal/p", PATIENCE).file(name).read(MAX_BYTES) == png()


def test_the_size_of_a_large_picture_takes_its_first_bytes_only(s3: S3Server) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (1024, 1024, 3), dtype=np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "JPEG", quality=95)
    assert len(content.getvalue()) > 500_000
    s3.put("big", **{"a.jpg": content.getvalue()})
    assert picture_size(open_place("s3://big", PATIENCE).file("a.jpg")) == (1024, 1024)
    assert s3.ranges("/big/a.jpg") == ["bytes=0-65535"]


def test_ranges_grow_as_reading_goes_on(s3: S3Server) -> None:
    content = noise_png()
    s3.put("big", **{"a.png": content})
    with open_file("s3://big/a.png", PATIENCE).open() as stream:
        assert stream.read() == content
        stream.seek(-4, io.SEEK_END)
        assert stream.read() == content[-4:]
        stream.seek(0)
        assert stream.read(10) == content[:10]
    assert len(s3.ranges("/big/a.png")) <= 8


def test_a_stamp_changes_with_the_content_and_is_settled(s3: S3Server) -> None:
    s3.put("stamps", **{"a.png": png()})
    file = open_place("s3://stamps", PATIENCE).file("a.png")
    first = file.stamp()
    assert (first.size, first.is_settled()) == (len(png()), True)
    assert file.stamp() == first
    s3.put("stamps", **{"a.png": png((64, 32))})
    assert file.stamp() != first
    assert file.read(MAX_BYTES) == png((64, 32))


def test_an_object_replaced_between_asking_and_reading_is_read_whole(s3: S3Server) -> None:
    s3.put("changing", **{"a.png": png((400, 400))})
    file = open_place("s3://changing", PATIENCE).file("a.png")
    file.stamp()
    s3.put("changing", **{"a.png": png((40, 40))})
    assert file.read(MAX_BYTES) == png((40, 40))


@pytest.mark.parametrize(
    "faults",
    [
        [Fault(2, status=503, code="SlowDown")],
        [Fault(1, status=500, code="InternalError"), Fault(1, status=503)],
        [Fault(2, cut=True, method="GET")],
        [Fault(1, status=429, method="HEAD")],
    ],
)
def test_what_may_pass_is_asked_again(s3: S3Server, faults: list[Fault]) -> None:
    s3.put("shaky", **{"a.png": noise_png()})
    s3.fail("/shaky/a.png", *faults)
    assert open_place("s3://shaky", PATIENCE).file("a.png").read(MAX_BYTES) == noise_png()
    assert all(fault.times == 0 for fault in faults)


def test_a_store_that_goes_on_failing_ends_the_run_and_refuses_no_row(s3: S3Server) -> None:
    s3.put("down", **{"a.png": png()})
    s3.fail("/down/a.png", Fault(99, status=503, code="SlowDown"))
    s3.requests.clear()
    text = message_of(RemoteFile("s3://down", "a.png", PATIENCE), StorageError)
    assert "s3://down/a.png" in text
    assert "4 tries" in text
    assert "503" in text
    assert "data.storage.retries (3)" in text
    assert [method for method, _, _ in s3.requests].count("HEAD") == 4


def test_a_slow_answer_counts_as_none(s3: S3Server) -> None:
    s3.put("slow", **{"a.png": png()})
    s3.fail("/slow/a.png", Fault(1, seconds=1.5))
    hasty = StorageOptions(retries=1, timeout_seconds=0.5)
    assert RemoteFile("s3://slow", "a.png", hasty).read(MAX_BYTES) == png()
    s3.fail("/slow/a.png", Fault(9, seconds=1.5, method="GET"))
    text = message_of(RemoteFile("s3://slow", "a.png", hasty), StorageError)
    assert "2 tries" in text
    assert "data.storage.timeout_seconds (0.5)" in text


def test_an_endpoint_where_nobody_listens(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    text = message_of(RemoteFile("s3://nowhere", "a.png", PATIENCE), StorageError)
    assert "127.0.0.1:9" in text
    assert "4 tries" in text


def test_a_missing_object_is_refused_at_once_and_the_nearest_is_named(s3: S3Server) -> None:
    s3.put("there", **{"cats/tabby.png": png()})
    place = open_place("s3://there/cats", PATIENCE)
    s3.requests.clear()
    with pytest.raises(DataError, match=r'"s3://there/cats/taby\.png": there is no such object'):
        place.file("taby.png").read(MAX_BYTES)
    assert len([method for method, path, _ in s3.requests if method == "HEAD"]) == 1
    assert "nearest" in place.why_missing("taby.png")
    assert '"tabby.png"' in place.why_missing("taby.png")
    assert "nothing like it" in place.why_missing("zebra.jpeg")
    assert "there is nothing under" in place.why_missing("dogs/tabby.png")
    with pytest.raises(DataError, match="it is a folder"):
        open_place("s3://there", PATIENCE).file("cats").read(MAX_BYTES)


def test_access_denied_names_the_object_and_is_not_asked_again(s3: S3Server) -> None:
    s3.put("secret", **{"a.png": png()})
    s3.fail("/secret/a.png", Fault(99, status=403, code="AccessDenied"))
    s3.requests.clear()
    text = message_of(RemoteFile("s3://secret", "a.png", PATIENCE), DataError)
    assert "s3://secret/a.png" in text
    assert "access is denied (403 AccessDenied" in text
    assert [method for method, _, _ in s3.requests].count("HEAD") == 1


@pytest.mark.parametrize(
    ("status", "code", "told"),
    [
        (403, "InvalidAccessKeyId", "AWS_ACCESS_KEY_ID"),
        (403, "SignatureDoesNotMatch", "credentials in the environment are not valid"),
        (403, "RequestTimeTooSkewed", "clock"),
        (400, "ExpiredToken", "expired"),
        (404, "NoSuchBucket", "no such bucket"),
        (301, "PermanentRedirect", "region"),
    ],
)
def test_what_the_user_has_to_set_up_is_told(s3: S3Server, status: int, code: str, told: str) -> None:
    s3.put("setup", **{"a.png": png()})
    s3.fail("/setup/a.png", Fault(99, status=status, code=code))
    assert told in message_of(RemoteFile("s3://setup", "a.png", PATIENCE), SettingsError)


def test_a_bucket_that_is_not_there(s3: S3Server) -> None:
    assert "no such bucket" in message_of(RemoteFile("s3://no-such-bucket", "a.png", PATIENCE), SettingsError)


def test_without_credentials_the_variables_are_named(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    s3.put("setup", **{"a.png": png()})
    text = message_of(RemoteFile("s3://setup", "a.png", PATIENCE), SettingsError)
    assert "AWS_SECRET_ACCESS_KEY" in text


def test_a_file_over_the_limit_is_not_fetched(s3: S3Server) -> None:
    s3.put("big", **{"a.png": noise_png()})
    with pytest.raises(DataError, match=r"bytes; the limit is 1,000"):
        open_place("s3://big", PATIENCE).file("a.png").read(1000)
    assert s3.ranges("/big/a.png") == []


def test_threads_and_forked_processes_read_at_once(s3: S3Server) -> None:
    s3.put("many", **{f"{i}.png": png((40 + i, 32)) for i in range(16)})
    place = open_place("s3://many", PATIENCE)

    def widths() -> list[int]:
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(lambda i: picture_size(place.file(f"{i}.png"))[0], range(16)))

    expected = list(range(40, 56))
    assert widths() == expected
    for _ in range(2):  # the event loop of fsspec lives on in no child
        child = os.fork()
        if child == 0:
            os._exit(0 if widths() == expected else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert widths() == expected


def test_a_place_travels_to_other_processes_without_credentials(s3: S3Server) -> None:
    place = open_place("s3://many/x", PATIENCE)
    sent = pickle.dumps(place)
    assert SECRET.encode() not in sent
    assert len(sent) < 500
    assert pickle.loads(sent) == place
    assert hash(pickle.loads(sent)) == hash(place)


def listed_folder(url: str) -> list[Listed]:
    store = store_of(url, PATIENCE)
    return sorted(store.listed(store.target(url, what="folder")), key=lambda entry: entry.name)


def test_a_folder_of_a_store_is_listed(s3: S3Server) -> None:
    s3.put("listed", **{"a/x.png": b"1", "a/y.png": b"22", "a/b/z.png": b"3"})
    found = [(e.name, e.is_folder, e.size) for e in listed_folder("s3://listed/a")]
    assert found == [("b", True, 0), ("x.png", False, 1), ("y.png", False, 2)]
    assert listed_folder("s3://listed/none") == []


def test_a_folder_that_may_not_be_listed_is_told(s3: S3Server) -> None:
    s3.put("unlisted", **{"a/x.png": b"1"})
    s3.fail("/unlisted", Fault(99, status=403, code="AccessDenied", method="GET"))
    with pytest.raises(DataError, match=r'folder "s3://unlisted/a": access is denied'):
        listed_folder("s3://unlisted/a")
    assert "may not be listed" in open_place("s3://unlisted/a", PATIENCE).why_missing("y.png")


def test_a_folder_of_many_is_listed_whole(s3: S3Server) -> None:
    s3.put("crowd")
    for i in range(1100):  # more than a request gives
        s3_backends[DEFAULT_ACCOUNT_ID]["aws"].put_object("crowd", f"a/{i:04d}", b"")
    assert [e.name for e in listed_folder("s3://crowd/a")] == [f"{i:04d}" for i in range(1100)]
