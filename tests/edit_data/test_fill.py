from __future__ import annotations

import pickle
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from qwen_edit_zero.edit_data.cache.fill import FilledCache, fill_cache
from qwen_edit_zero.edit_data.cache.store import CachedSample, ConditioningCache
from qwen_edit_zero.edit_data.manifests.manifest import Sample, read_manifest
from qwen_edit_zero.errors import DataError
from tests.edit_data.builders import quadrants, row, save_pictures, write_manifest


class Encoder:
    """Stands for the frozen models: its entry is a function of the pictures and the instruction."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, references: Sequence[Image.Image], instruction: str, target: Image.Image) -> CachedSample:
        self.calls.append(instruction)

        def latent(image: Image.Image) -> torch.Tensor:
            return torch.from_numpy(np.array(image.resize((4, 4)))).float().mean(-1).expand(16, 4, 4).contiguous()

        length = 1 + len(instruction)
        return CachedSample(latent(target), tuple(map(latent, references)), torch.full((length, 3), float(length)))


def run_ranks(
    samples: Sequence[Sample], folder: Path, world_size: int, **options: Any
) -> tuple[FilledCache, list[Encoder]]:
    """Fill with one thread a rank; asserts that all ranks get the same outcome."""
    barrier = threading.Barrier(world_size)
    box: list[Any] = [None] * world_size
    encoders = [Encoder() for _ in range(world_size)]

    def rank(number: int) -> FilledCache:
        def exchange(mine: Any) -> list[Any]:
            box[number] = pickle.dumps(mine)
            barrier.wait(20)
            everyone = [pickle.loads(part) for part in box]
            barrier.wait(20)
            return everyone

        cache = ConditioningCache(folder, "f")
        return fill_cache(
            samples, cache, encoders[number], rank=number, world_size=world_size, exchange=exchange, **options
        )

    with ThreadPoolExecutor(world_size) as pool:
        results = list(pool.map(rank, range(world_size)))
    assert all(result == results[0] for result in results)
    return results[0], encoders


@pytest.fixture
def samples(tmp_path: Path) -> tuple[Sample, ...]:
    rows = [row(i, references=1 + i % 3) for i in range(11)]
    save_pictures(tmp_path, rows)
    return read_manifest(write_manifest(tmp_path, rows)).samples


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*.safetensors")}


def test_the_result_does_not_depend_on_the_number_of_ranks(samples: tuple[Sample, ...], tmp_path: Path) -> None:
    one, _ = run_ranks(samples, tmp_path / "one", 1)
    three, encoders = run_ranks(samples, tmp_path / "three", 3)
    assert one == three
    assert one.computed == 11
    assert files(tmp_path / "one") == files(tmp_path / "three")
    assert sorted(len(e.calls) for e in encoders) == [3, 4, 4]


def test_a_full_cache_is_used_by_any_number_of_ranks(samples: tuple[Sample, ...], tmp_path: Path) -> None:
    first, _ = run_ranks(samples, tmp_path / "c", 3)
    again, encoders = run_ranks(samples, tmp_path / "c", 4)
    assert again.keys == first.keys
    assert again.computed == 0
    assert not any(e.calls for e in encoders)


def test_what_one_rank_had_left_undone_is_split_evenly(samples: tuple[Sample, ...], tmp_path: Path) -> None:
    done, _ = run_ranks(samples, tmp_path / "c", 2)
    cache = ConditioningCache(tmp_path / "c", "f")
    for key in done.keys[1::2]:  # all of rank 1's
        cache.path(key).unlink()
    _, encoders = run_ranks(samples, tmp_path / "c", 2)
    assert sorted(len(e.calls) for e in encoders) == [2, 3]


def test_exactly_what_changed_or_broke_is_computed_again(samples: tuple[Sample, ...], tmp_path: Path) -> None:
    before, _ = run_ranks(samples, tmp_path / "c", 1)
    cache = ConditioningCache(tmp_path / "c", "f")
    quadrants(40, 40).save(samples[4].target.name)
    broken = cache.path(before.keys[7])
    broken.write_bytes(broken.read_bytes()[:-3])
    flipped = cache.path(before.keys[9])
    data = bytearray(flipped.read_bytes())
    data[-1] ^= 1
    flipped.write_bytes(data)
    after, [encoder] = run_ranks(samples, tmp_path / "c", 1, verify=True)
    assert sorted(encoder.calls) == sorted(samples[i].instruction for i in (4, 7, 9))
    assert [i for i in range(11) if before.keys[i] != after.keys[i]] == [4]
    assert all(cache.has(key, verify=True) for key in after.keys)


def test_samples_of_equal_content_share_an_entry(tmp_path: Path) -> None:
    rows = [row(0), {**row(0), "id": "twin", "weight": 3}]
    save_pictures(tmp_path, rows)
    samples = read_manifest(write_manifest(tmp_path, rows)).samples
    filled, [encoder] = run_ranks(samples, tmp_path / "c", 1)
    assert filled.keys[0] == filled.keys[1]
    assert len(encoder.calls) == filled.computed == 1


def test_one_instruction_with_other_references_is_another_entry(tmp_path: Path) -> None:
    rows = [{**row(i, references=2), "instruction": "same"} for i in range(3)]
    save_pictures(tmp_path, rows)
    rows.append({**rows[0], "id": "swapped", "source": rows[0]["source"][::-1]})
    filled, _ = run_ranks(read_manifest(write_manifest(tmp_path, rows)).samples, tmp_path / "c", 2)
    assert len(set(filled.keys)) == 4


def test_pictures_that_do_not_decode_stop_or_are_left_out_on_every_rank(
    samples: tuple[Sample, ...], tmp_path: Path
) -> None:
    target = Path(samples[5].target.name)
    data = target.read_bytes()
    target.write_bytes(data[: len(data) // 2])
    Path(samples[8].sources[0].name).unlink()
    with pytest.raises(DataError, match=r"line 9 .*a8.*s8_0\.png"):
        fill_cache(samples, ConditioningCache(tmp_path / "c", "f"), Encoder())
    filled, _ = run_ranks(samples, tmp_path / "c", 3, on_error="skip")
    assert [(r.line, r.id) for r in filled.refused] == [(6, "a5"), (9, "a8")]
    assert "t5.png" in filled.refused[0].reason
    assert [s.id for s in filled.samples] == [f"a{i}" for i in range(11) if i not in (5, 8)]
    assert len(filled.keys) == filled.computed == 9


def test_numbers_that_are_not_finite_never_reach_the_cache(samples: tuple[Sample, ...], tmp_path: Path) -> None:
    def overflow(references: Sequence[Image.Image], instruction: str, target: Image.Image) -> CachedSample:
        made = Encoder()(references, instruction, target)
        made.prompt_embeds[0, 0] = float("nan")
        return made

    with pytest.raises(DataError, match=r"line 1 .*not finite"):
        fill_cache(samples, ConditioningCache(tmp_path / "c", "f"), overflow)
    assert not files(tmp_path / "c")


def test_a_run_killed_while_filling_keeps_what_it_had(samples: tuple[Sample, ...], tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    made = Encoder()

    def until_killed(references: Sequence[Image.Image], instruction: str, target: Image.Image) -> CachedSample:
        if len(made.calls) == 4:
            raise Killed
        return made(references, instruction, target)

    with pytest.raises(Killed):
        fill_cache(samples, ConditioningCache(tmp_path / "c", "f"), until_killed)
    assert len(files(tmp_path / "c")) == 4
    filled, [encoder] = run_ranks(samples, tmp_path / "c", 1)
    assert len(encoder.calls) == 7
    assert len(filled.keys) == 11


def test_progress_tells_both_phases_to_the_end(samples: tuple[Sample, ...], tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    fill_cache(samples, ConditioningCache(tmp_path / "c", "f"), Encoder(), on_progress=lambda *news: told.append(news))
    assert told == [(phase, i, 11) for phase in ("digest", "encode") for i in range(12)]
