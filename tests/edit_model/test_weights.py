"""Stored weights can be read by ranges, and only their bytes are."""

from __future__ import annotations

import json
import os
import resource
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qwen_edit_zero.edit_model.folder import open_model_folder
from qwen_edit_zero.edit_model.weights import TransformerWeights
from qwen_edit_zero.errors import ModelFolderError


def test_ranges_equal_what_safetensors_loads(plus_path: Path) -> None:
    folder = open_model_folder(plus_path)
    assert len(folder.shards["transformer"].files) > 2
    stored = {k: v for file in folder.shards["transformer"].files for k, v in load_file(file).items()}
    with TransformerWeights(folder) as weights:
        assert set(weights.names()) == set(stored)
        for name, tensor in stored.items():
            assert weights.shape(name) == tuple(tensor.shape)
            flat, third = tensor.flatten(), tensor.numel() // 3
            for start, length in ((0, flat.numel()), (third, third + 1), (flat.numel() - 1, 1), (third, 0)):
                read = weights.read(name, start, length)
                assert read.dtype == tensor.dtype
                assert torch.equal(read, flat[start : start + length])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_stored_type_is_kept(plus_path: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    weights = _with_transformer_file(
        plus_path, tmp_path, {"a": torch.arange(10).to(dtype), "b": torch.tensor(3, dtype=dtype)}
    )
    assert weights.read("a", 3, 4).tolist() == [3, 4, 5, 6]
    assert weights.read("a", 3, 4).dtype == dtype
    assert weights.shape("b") == ()
    assert weights.read("b", 0, 1).tolist() == [3]


def test_quantised_weights_are_refused(plus_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"proj_out.weight is stored as I8.*bf16"):
        _with_transformer_file(plus_path, tmp_path, {"proj_out.weight": torch.ones(3, dtype=torch.int8)})


def test_threads_may_share_one_source(plus_path: Path) -> None:
    weights = TransformerWeights(open_model_folder(plus_path))
    names = list(weights.names()) * 4

    def total(name: str) -> float:
        return weights.read(name, 0, torch.Size(weights.shape(name)).numel()).double().sum().item()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(total, names)) == [total(name) for name in names]
    weights.close()


def test_reading_a_range_of_a_huge_tensor_takes_no_memory_for_the_rest(plus_path: Path, tmp_path: Path) -> None:
    elements = 2**31  # 8 GiB in fp32, a sparse file
    header = json.dumps({"huge": {"dtype": "F32", "shape": [elements], "data_offsets": [0, 4 * elements]}}).encode()
    model = _replace_transformer(plus_path, tmp_path)
    with open(model / "transformer" / "diffusion_pytorch_model.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.seek(4 * elements - 4, os.SEEK_CUR)
        file.write(torch.tensor([7.0]).numpy().tobytes())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    weights = TransformerWeights(open_model_folder(model))
    assert weights.read("huge", elements - 1000, 1000)[-2:].tolist() == [0.0, 7.0]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000, "kilobytes"


def test_a_shard_that_shrinks_under_us_is_named(plus_path: Path, tmp_path: Path) -> None:
    weights = _with_transformer_file(plus_path, tmp_path, {"a": torch.ones(1000)})
    path = tmp_path / "model" / "transformer" / "diffusion_pytorch_model.safetensors"
    os.truncate(path, path.stat().st_size - 2000)
    with pytest.raises(ModelFolderError, match=rf"{path} ended"):
        weights.read("a", 0, 1000)


def _replace_transformer(plus_path: Path, tmp_path: Path) -> Path:
    model = Path(shutil.copytree(plus_path, tmp_path / "model", copy_function=os.link))
    for file in (model / "transformer").glob("diffusion*"):
        file.unlink()
    return model


def _with_transformer_file(plus_path: Path, tmp_path: Path, tensors: dict[str, torch.Tensor]) -> TransformerWeights:
    model = _replace_transformer(plus_path, tmp_path)
    save_file(tensors, model / "transformer" / "diffusion_pytorch_model.safetensors")
    return TransformerWeights(open_model_folder(model))
