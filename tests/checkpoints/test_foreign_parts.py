"""The pieces that read other programs' files: hostile pickles, strided and sharded tensors, checksums of stretches."""

from __future__ import annotations

import argparse
import io
import itertools
import os
import pickle
import random
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qwen_edit_zero.checkpoints.foreign.blocks import Block, cover_fault, row_major
from qwen_edit_zero.checkpoints.foreign.crc import combine
from qwen_edit_zero.checkpoints.foreign.pickles import PickledTensor, Record, load_pickle
from qwen_edit_zero.checkpoints.foreign.reading import BlockReader
from qwen_edit_zero.checkpoints.foreign.torch_files import StoredBytes, is_contiguous, read_torch_file
from qwen_edit_zero.errors import CheckpointError


class _Hostile:
    def __init__(self, call: Any, *arguments: Any) -> None:
        self._made = (call, arguments)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._made


@pytest.mark.parametrize("call", [os.system, eval, exec, os.putenv, __import__])
def test_calls_that_only_an_attack_makes_are_refused(call: Any, tmp_path: Path) -> None:
    torch.save({"step": 1, "hook": _Hostile(call, f"touch {tmp_path}/touched")}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"x\.pt: it asks for .* which no checkpoint needs but an attack would"):
        read_torch_file(tmp_path / "x.pt")
    assert [p.name for p in tmp_path.iterdir()] == ["x.pt"]


def _touch(path: str) -> None:
    Path(path).touch()


def test_unknown_functions_are_kept_as_records_and_not_called(tmp_path: Path) -> None:
    torch.save({"hook": _Hostile(_touch, str(tmp_path / "touched"))}, tmp_path / "x.pt")
    hook = read_torch_file(tmp_path / "x.pt").value["hook"]
    assert isinstance(hook, Record)
    assert hook.kind.endswith("._touch")
    assert not (tmp_path / "touched").exists()


def test_objects_of_other_classes_keep_their_attributes(tmp_path: Path) -> None:
    arguments = argparse.Namespace(lr=0.1, names=["a"])
    torch.save({"args": arguments, "order": OrderedDict(a=torch.Size([2]))}, tmp_path / "x.pt")
    value = read_torch_file(tmp_path / "x.pt").value
    assert value["args"].kind == "argparse.Namespace"
    assert value["args"].get("names") == ["a"]
    assert value["order"] == {"a": (2,)}


@pytest.mark.parametrize("content", [b"", b"\x80\x02", b"\x80\x02}q\x00(X\x01", b"no pickle", b"\x80\x04\x8c\x02os"])
def test_damaged_pickles_are_errors(content: bytes) -> None:
    with pytest.raises(CheckpointError, match="its pickle is damaged"):
        load_pickle(content)


def test_files_in_the_old_format_and_others_are_refused_by_name(tmp_path: Path) -> None:
    torch.save([torch.ones(2)], tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"old\.pt is in torch's old file format"):
        read_torch_file(tmp_path / "old.pt")
    (tmp_path / "text.pt").write_text("no checkpoint at all")
    with pytest.raises(CheckpointError, match=r"text\.pt is no file written by torch\.save"):
        read_torch_file(tmp_path / "text.pt")


def test_tensors_are_places_in_the_file(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(2, 3, 4)
    saved = {
        "whole": whole, "turned": whole.permute(2, 0, 1), "part": whole[1, 1:], "zero": torch.tensor(7),
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16), "parameter": torch.nn.Parameter(torch.ones(2)),
        "none": torch.empty(0, 5), "flag": torch.tensor([True]),
    }  # fmt: skip
    torch.save(saved, tmp_path / "x.pt")
    file, reader = read_torch_file(tmp_path / "x.pt"), BlockReader()
    for name, expected in saved.items():
        tensor = file.value[name]
        assert isinstance(tensor, PickledTensor)
        assert tensor.shape == tuple(expected.shape)
        assert is_contiguous(tensor) == expected.is_contiguous()
        item = expected.element_size()
        block = Block(
            file.storage_of(tensor, name), tensor.first, (0,) * len(tensor.shape), tensor.shape, tensor.strides
        )
        target = np.empty(expected.numel() * item, dtype=np.uint8)
        reader.read_into([block], tensor.shape, 0, item, target)
        assert target.tobytes() == expected.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes(), name
    reader.finish()
    reader.close()


def test_a_tensor_larger_than_its_storage_is_refused(tmp_path: Path) -> None:
    torch.save(torch.ones(4), tmp_path / "x.pt")
    file = read_torch_file(tmp_path / "x.pt")
    wrong = PickledTensor(file.value.storage, "F32", 1, (4,), (1,))
    with pytest.raises(CheckpointError, match=r"x\.pt: w of shape \[4\] does not fit into its record of 16 bytes"):
        file.storage_of(wrong, "w")


def _boxes(shape: tuple[int, ...], draw: random.Random) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """A random cut of a tensor into boxes, along every dimension."""
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for size in shape:
        cuts = sorted({0, size, *(draw.randint(0, size) for _ in range(2))})
        sides = list(itertools.pairwise(cuts))
        boxes = [((*corner, a), (*sizes, b - a)) for corner, sizes in boxes for a, b in sides]
    return boxes


@pytest.mark.parametrize("seed", range(20))
def test_any_range_of_a_tensor_cut_along_any_dimension(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    shape = tuple(draw.randint(1, 9) for _ in range(draw.randint(0, 4)))
    if seed == 0:
        shape = (3, 5000)  # rows that are read one by one instead of gathered
    whole = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
    blocks, path = [], tmp_path / "data"
    with path.open("wb") as file:
        for corner, sizes in _boxes(shape, draw):
            part = whole[tuple(slice(c, c + n) for c, n in zip(corner, sizes, strict=True))]
            axes = draw.sample(range(len(shape)), len(shape))  # stored in some order of the dimensions
            stored = np.array(part.transpose(axes), order="C")
            strides = [0] * len(shape)
            for axis, stride in zip(axes, row_major(stored.shape), strict=True):
                strides[axis] = stride
            record = StoredBytes(path, file.tell(), stored.nbytes, zlib.crc32(stored.tobytes()))
            file.write(stored.tobytes())
            blocks.append(Block(record, 0, corner, sizes, tuple(strides)))
    assert cover_fault(blocks, shape) is None
    reader, flat = BlockReader(), whole.reshape(-1)
    for _ in range(20):
        start = draw.randint(0, flat.size)
        length = draw.randint(0, flat.size - start)
        target = np.full(length * 4, 255, dtype=np.uint8)
        reader.read_into(blocks, shape, start, 4, target)
        assert np.array_equal(target.view(np.float32), flat[start : start + length])
    reader.finish()
    if len(blocks) > 1:
        assert cover_fault(blocks[1:], shape)
        assert cover_fault([*blocks, blocks[0]], shape)


def test_reading_a_part_finds_damage_anywhere_in_its_record(tmp_path: Path) -> None:
    content = np.random.default_rng(1).bytes(10000)
    (tmp_path / "data").write_bytes(content)
    right = StoredBytes(tmp_path / "data", 0, 10000, zlib.crc32(content))
    wrong = StoredBytes(tmp_path / "data", 0, 10000, zlib.crc32(content) ^ 1)
    for stored, is_right in ((right, True), (wrong, False)):
        reader, target = BlockReader(), np.empty(3000, dtype=np.uint8)
        for offset in (5000, 0, 4000, 5000):  # with a hole, an overlap and a repetition
            reader.read_bytes(stored, offset, target)
        if is_right:
            reader.finish()
        else:
            with pytest.raises(CheckpointError, match="do not match their CRC-32"):
                reader.finish()


def test_checksums_of_stretches_are_put_together() -> None:
    draw = random.Random(1)
    for length in (0, 1, 2, 255, 4096, 100003):
        first, second = draw.randbytes(draw.randint(0, 999)), draw.randbytes(length)
        assert combine(zlib.crc32(first), zlib.crc32(second), length) == zlib.crc32(first + second)


def test_pickles_of_any_protocol_are_read() -> None:
    value = {"a": [1, 2.5, None, True, "x", b"y"], "b": {1, 2}, "c": (1,)}
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        buffer = io.BytesIO()
        pickle.dump({k: v for k, v in value.items() if protocol >= 4 or k != "b"}, buffer, protocol)
        read = load_pickle(buffer.getvalue())
        assert read["c"] == (1,)
        assert read["a"][:5] == value["a"][:5]  # type: ignore[index]
