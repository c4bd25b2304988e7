from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_edit_zero.edit_data.batches.buckets import Bucket, assign_buckets, bucket_of, prepared_size
from qwen_edit_zero.edit_data.manifests.opening import open_manifest
from qwen_edit_zero.edit_data.manifests.samples import Sample
from qwen_edit_zero.edit_data.storage.local import LocalPlace
from qwen_edit_zero.errors import DataError
from tests.edit_data.builders import row, save, write_manifest


def sample(folder: Path, *sources: str, target: str = "t.png") -> Sample:
    return Sample("a", LocalPlace(folder), sources, "x", target, line=1)


def test_sizes_are_those_of_the_diffusers_pipeline() -> None:
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_dimensions

    for width in (8, 33, 100, 640, 1023, 1024, 4000):
        for height in (8, 57, 480, 1024, 3000):
            for area in (64 * 64, 384 * 384, 1024 * 1024):
                theirs = calculate_dimensions(area, width / height)
                assert prepared_size(width, height, area=area) == (theirs[1], theirs[0])


@given(st.integers(1, 20_000), st.integers(1, 20_000), st.sampled_from([128 * 128, 512 * 512, 1024 * 1024]))
def test_sides_are_multiples_of_32_and_the_area_is_near(width: int, height: int, area: int) -> None:
    h, w = prepared_size(width, height, area=area)
    assert h % 32 == w % 32 == 0
    if max(width, height) <= 4 * min(width, height):
        assert abs(h * w / area - 1) < 0.6


def test_a_bucket_is_the_target_and_the_references_in_order(tmp_path: Path) -> None:
    save(tmp_path / "t.png", (64, 32))
    save(tmp_path / "wide.png", (64, 32))
    save(tmp_path / "tall.png", (32, 64))
    wide, tall = (96, 192), (192, 96)
    assert bucket_of(sample(tmp_path, "wide.png", "tall.png"), vae_area=128 * 128) == Bucket(wide, (wide, tall))
    assert bucket_of(sample(tmp_path, "tall.png", "wide.png"), vae_area=128 * 128) == Bucket(wide, (tall, wide))
    assert Bucket(wide, (tall,)).target_latent == (12, 24)
    assert Bucket(wide, (tall,)).reference_latents == ((24, 12),)


def test_size_is_that_of_the_upright_picture(tmp_path: Path) -> None:
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112] = 6
    save(tmp_path / "t.jpg", (64, 32), exif=exif)
    save(tmp_path / "s.png", (32, 32))
    assert bucket_of(sample(tmp_path, "s.png", target="t.jpg"), vae_area=128 * 128).target == (192, 96)


def test_a_picture_that_would_be_resized_to_nothing_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "t.png")
    save(tmp_path / "long.png", (1600, 8))
    with pytest.raises(DataError, match=r"long\.png.*1600 x 8.*resized to 896 x 0"):
        bucket_of(sample(tmp_path, "long.png"), vae_area=64 * 64)


def test_buckets_keep_the_order_and_leave_out_unreadable_pictures(tmp_path: Path) -> None:
    rows = [row(i) for i in range(40)]
    for i, r in enumerate(rows):
        save(tmp_path / r["source"][0], (32 + 32 * (i % 3), 32))
        save(tmp_path / r["target"], (32, 32))
    samples = open_manifest(write_manifest(tmp_path, rows))
    (tmp_path / "t7.png").write_bytes(b"damaged")
    result = assign_buckets(samples, vae_area=128 * 128)
    assert [s.id for s in result.samples] == [f"a{i}" for i in range(40) if i != 7]
    assert [(r.line, r.id) for r in result.refused] == [(8, "a7")]
    assert "t7.png" in str(result.refused[0])
    for s, bucket in zip(result.samples, result.buckets, strict=True):
        assert bucket == bucket_of(s, vae_area=128 * 128)
