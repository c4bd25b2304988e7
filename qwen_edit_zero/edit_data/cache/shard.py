"""Shards: many entries, a tensor each, in one safetensors file, written entry by entry.

A shard that is being written is two files: `ID.partial` has room for the safetensors header and then the tensors one
after another, `ID.journal` a record for each that is whole. Sealing writes the header into the room and renames both to
`ID.safetensors` and `ID.index`. What a killed process left is sealed by the next one up to the last whole tensor.

The checksums (XXH3-128 of a tensor's bytes) are in the journal, and in the header's metadata, from which the journal
can be made again.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from qwen_edit_zero.edit_data.cache.locks import create_locked, is_abandoned
from qwen_edit_zero.errors import ModelFolderError
from qwen_edit_zero.safetensors_file import build_header, read_header

SHARD_BYTES = 256 * 1024**2
HEADER_ROOM = 256 * 1024
MOST_ENTRIES = HEADER_ROOM // 200  # an entry takes under 170 bytes of header
SUFFIX, PARTIAL, JOURNAL, INDEX, BAD = ".safetensors", ".partial", ".journal", ".index", ".bad"

# Names as in safetensors; an entry's dtype is the position here.
DTYPES = (("F32", torch.float32), ("BF16", torch.bfloat16), ("F16", torch.float16), ("U8", torch.uint8))
_CODE = {dtype: code for code, (_, dtype) in enumerate(DTYPES)}
_CODE_OF_NAME = {name: code for code, (name, _) in enumerate(DTYPES)}

RECORD = np.dtype(
    [
        ("key", np.uint8, 16),
        ("sum", np.uint8, 16),
        ("offset", "<u8"),  # in the file
        ("size", "<u8"),  # bytes
        ("shape", "<u4", 3),
        ("dims", "u1"),
        ("dtype", "u1"),
        ("unused", "u1", 2),
    ]
)
Records = npt.NDArray[np.void]


def checksum(data: memoryview | bytes) -> bytes:
    """XXH3-128 of the bytes of a tensor, 16 bytes."""
    return xxhash.xxh3_128_digest(data)


class ShardWriter:
    """Appends entries to a shard of its own, and begins another whenever one is full. A context manager.

    Entries may be read by others once their shard is sealed: when it is full, or by `close`.

    Args:
        folder: of the shards; made if missing.

    Attributes:
        written: entries so far.
    """

    def __init__(self, folder: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
        self.written = 0
        self._folder, self._shard_bytes = folder, shard_bytes
        self._files: _OpenShard | None = None

    def put(self, key: bytes, tensor: torch.Tensor) -> None:
        """Append an entry. Raises OSError; what was appended before stays whole."""
        if self._files is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._files = _OpenShard(self._folder)
        self._files.append(key, tensor)
        self.written += 1
        if self._files.is_full(self._shard_bytes):
            self.seal()

    def seal(self) -> None:
        """Finish the shard that is being written, if there is one. Raises OSError."""
        if self._files is not None:
            files, self._files = self._files, None
            try:
                seal(files.path, files.fd, np.frombuffer(files.records, RECORD))
            finally:
                files.close()

    def close(self) -> None:
        """Seal what there is; on OSError the partial shard stays for the next process."""
        self.seal()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(OSError):  # what went wrong first is what is told
            self.close()


class _OpenShard:
    """The two files of a shard being written; locked, so that nobody takes it for abandoned."""

    def __init__(self, folder: Path) -> None:
        self.path, self.fd = create_locked(folder, PARTIAL)
        self._journal = os.open(
            self.path.with_suffix(JOURNAL), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666
        )
        self.records = bytearray()
        self._end = HEADER_ROOM

    def append(self, key: bytes, tensor: torch.Tensor) -> None:
        plain = tensor.detach().to("cpu").contiguous()
        data = plain.reshape(-1).view(torch.uint8).numpy().data
        record = np.zeros(1, RECORD)
        record["key"], record["sum"] = np.frombuffer(key, np.uint8), np.frombuffer(checksum(data), np.uint8)
        record["offset"], record["size"] = self._end, len(data)
        record["shape"][0, : plain.ndim], record["dims"] = plain.shape, plain.ndim
        record["dtype"] = _CODE[plain.dtype]
        _write_all(self.fd, data, self._end)
        _append_all(self._journal, record.tobytes())
        self.records += record.tobytes()
        self._end += len(data)

    def is_full(self, most: int) -> bool:
        return self._end - HEADER_ROOM >= most or len(self.records) >= MOST_ENTRIES * RECORD.itemsize

    def close(self) -> None:
        for fd in (self.fd, self._journal):
            os.close(fd)


def seal(path: Path, fd: int, records: Records) -> Path:
    """Turn a partial shard with these whole entries, in order and without gaps, into a safetensors file.

    Returns its path. With no entries the files are deleted. Raises OSError.
    """
    journal = path.with_suffix(JOURNAL)
    if not len(records):
        path.unlink(missing_ok=True)
        journal.unlink(missing_ok=True)
        return path
    header = build_header(
        [(r["key"].tobytes().hex(), DTYPES[int(r["dtype"])][0], shape_of(r)) for r in records],
        {"format": "qwen-edit-zero cache", "xxh3_128": records["sum"].tobytes().hex()},
    )
    text = header[8:] + b" " * (HEADER_ROOM - len(header))
    assert len(text) == HEADER_ROOM - 8, "more entries than the header has room for"
    os.ftruncate(fd, int(records[-1]["offset"] + records[-1]["size"]))
    _write_all(fd, len(text).to_bytes(8, "little") + text, 0)
    os.fsync(fd)
    index = path.with_suffix(INDEX)
    temporary = path.with_suffix(".index.new")
    temporary.write_bytes(records.tobytes())
    os.replace(temporary, index)
    sealed = path.with_suffix(SUFFIX)
    os.rename(path, sealed)
    journal.unlink(missing_ok=True)
    return sealed


def adopt(path: Path) -> int:
    """Seal what another process left of a partial shard, if none is writing it; returns how many entries it saved.

    Every tensor is read and compared; the first that is not whole ends what can be saved. Raises OSError.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    try:
        if not is_abandoned(fd, path):
            return 0
        try:
            journal = path.with_suffix(JOURNAL).read_bytes()
        except FileNotFoundError:
            journal = b""
        records = np.frombuffer(journal[: len(journal) // RECORD.itemsize * RECORD.itemsize], RECORD)
        whole, end = 0, HEADER_ROOM
        for record in records:
            if int(record["offset"]) != end or not is_whole(fd, record):
                break
            end += int(record["size"])
            whole += 1
        seal(path, fd, records[:whole])
        return whole
    finally:
        os.close(fd)


def is_whole(fd: int, record: np.void) -> bool:
    """Whether the bytes of an entry in an open shard are those that were written."""
    if int(record["dims"]) > 3 or int(record["dtype"]) >= len(DTYPES):
        return False
    data = os.pread(fd, int(record["size"]), int(record["offset"]))
    return len(data) == int(record["size"]) and checksum(data) == record["sum"].tobytes()


def shape_of(record: np.void) -> tuple[int, ...]:
    """Shape of an entry's tensor."""
    return tuple(int(n) for n in record["shape"][: int(record["dims"])])


def read_records(path: Path) -> Records:
    """The entries of a sealed shard, from its index file, or from its header if that is missing or damaged.

    Entries that lie behind the end of the file, or are struck from it (`strike`), are left out.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no shard, or its header is damaged.
    """
    size = path.stat().st_size
    try:
        data = path.with_suffix(INDEX).read_bytes()
    except FileNotFoundError:
        data = b""
    is_whole_file = bool(data) and len(data) % RECORD.itemsize == 0
    records: Records = np.frombuffer(data, RECORD) if is_whole_file else _records_from_header(path)
    records = records[records["offset"] + records["size"] <= size]
    struck = struck_keys(path)
    return records[[r["key"].tobytes() not in struck for r in records]] if struck else records


def strike(shard: Path, key: bytes) -> None:
    """Note that an entry of a shard is damaged: indexes made from now on leave it out. Raises OSError."""
    fd = os.open(shard.with_suffix(BAD), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        _append_all(fd, key)
    finally:
        os.close(fd)


def struck_keys(shard: Path) -> set[bytes]:
    """Keys noted as damaged."""
    try:
        data = shard.with_suffix(BAD).read_bytes()
    except FileNotFoundError:
        return set()
    return {data[i : i + 16] for i in range(0, len(data), 16)}


def delete_shard(shard: Path) -> None:
    """Delete a shard and what belongs to it. Raises OSError."""
    for suffix in (SUFFIX, INDEX, BAD):
        shard.with_suffix(suffix).unlink(missing_ok=True)


def _records_from_header(path: Path) -> Records:
    try:
        tensors = read_header(path)
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            sums = bytes.fromhex(json.loads(file.read(length))["__metadata__"]["xxh3_128"])
    except ModelFolderError as error:
        raise ValueError(str(error)) from error
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is no shard of this cache ({error})") from error
    if len(sums) != 16 * len(tensors):
        raise ValueError(f"{path}: its header has {len(tensors)} entries and {len(sums) // 16} checksums")
    records = np.zeros(len(tensors), RECORD)
    for i, (name, tensor) in enumerate(tensors.items()):
        r = records[i]
        r["key"] = np.frombuffer(bytes.fromhex(name), np.uint8)
        r["sum"] = np.frombuffer(sums[16 * i : 16 * i + 16], np.uint8)
        r["offset"], r["size"], r["dims"] = tensor.offset, tensor.nbytes, len(tensor.shape)
        r["shape"][: len(tensor.shape)], r["dtype"] = tensor.shape, _CODE_OF_NAME[tensor.dtype]
    return records


def _write_all(fd: int, data: memoryview | bytes, offset: int) -> None:
    view = memoryview(data)
    while len(view):
        done = os.pwrite(fd, view[: 1 << 30], offset)
        view, offset = view[done:], offset + done


def _append_all(fd: int, data: bytes) -> None:
    done = os.write(fd, data)
    if done != len(data):
        raise OSError(28, f"only {done} of {len(data)} bytes could be written")
