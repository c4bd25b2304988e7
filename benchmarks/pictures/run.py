"""Pictures a second, on one core: the decoder with its checks beside Pillow's bare `convert("RGB")`.

`python -m benchmarks.pictures.run`
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable

import numpy as np
from PIL import Image

from qwen_edit_zero.edit_data.pictures.decode import load_picture
from qwen_edit_zero.edit_data.storage.files import HeldFile

SIDE = 1024
FORMATS = {"JPEG": {"quality": 90}, "PNG": {}, "WEBP": {"quality": 90}}


def photo() -> Image.Image:
    """Noise at several scales: of about the detail of a photograph."""
    rng = np.random.default_rng(0)
    total = np.zeros((SIDE, SIDE, 3))
    for cells in (4, 16, 64, 256, 1024):
        layer = Image.fromarray(rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8)).resize((SIDE, SIDE))
        total += np.asarray(layer, float) / cells**0.5
    return Image.fromarray(((total - total.min()) / np.ptp(total) * 255).astype(np.uint8))


def seconds(decode: Callable[[], object], repeats: int = 20) -> float:
    """Least CPU time of several."""
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        decode()
        times.append(time.process_time() - begin)
    return min(times)


def main() -> None:
    """Print a Markdown table."""
    picture = photo()
    print("| 1024 x 1024 | bytes | pictures/s | bare Pillow | ratio of time |\n|---|---|---|---|---|")
    for kind, options in FORMATS.items():
        buffer = io.BytesIO()
        picture.save(buffer, kind, **options)
        content = buffer.getvalue()
        ours = seconds(lambda content=content: load_picture(HeldFile("a", content)))  # type: ignore[misc]
        bare = seconds(lambda content=content: Image.open(io.BytesIO(content)).convert("RGB"))  # type: ignore[misc]
        print(f"| {kind} | {len(content):,} | {1 / ours:.0f} | {1 / bare:.0f} | {ours / bare:.2f} |")


if __name__ == "__main__":
    main()
