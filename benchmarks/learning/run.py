"""Does training teach the tiny model to edit? PSNR of outputs on held-out pictures, beside doing nothing.

Trains with the same command as any run, then compares for every held-out sample

    output     the sampled picture                    against the target
    untouched  the reference (the first, if several)  against the target

All pictures pass through the VAE, so that its loss of detail counts for neither side. The training noise is seeded; so
is the sampling noise. Usage: python benchmarks/learning/run.py [section.key=value ...]
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from qwen_edit_zero.edit_data.pictures.decode import load_picture
from qwen_edit_zero.edit_model.components import load_pipeline
from qwen_edit_zero.edit_model.folder import open_model_folder
from qwen_edit_zero.edit_model.sampling import decode

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "runs" / "learning"
NEEDED_WINS = 4


def main() -> int:
    """Train, measure, print and write the table; 0 if the outputs win in enough categories."""
    began = time.monotonic()
    train(sys.argv[1:])
    minutes = (time.monotonic() - began) / 60
    newest = sorted((RUN / "samples").glob("step-*"))[-1]
    rows = measure(newest)
    table = as_table(rows, f"{newest.name}, {minutes:.1f} minutes on 2 ranks")
    print(table)
    (RUN / "learning.md").write_text(table, encoding="utf-8")
    wins = sum(output > untouched for _, output, untouched, _ in summary(rows))
    print(f"outputs win in {wins} of {len(summary(rows))} categories (needed: {NEEDED_WINS})")
    return 0 if wins >= NEEDED_WINS else 1


def train(overrides: list[str]) -> None:
    """The ordinary command, with the benchmark's recipe."""
    command = [
        str(Path(sys.executable).parent / "deepspeed"),
        "--hostfile",
        str(ROOT / "hostfiles" / "localhost"),
        str(ROOT / "qwen_edit_zero" / "train.py"),
        str(Path(__file__).parent / "recipe.yaml"),
        "--ds",
        str(ROOT / "ds_configs" / "zero2.json"),
        "--resume",
        "none",
        f"run.dir={RUN.parent}",
        f"run.name={RUN.name}",
        *overrides,
    ]
    subprocess.run(command, check=True)


Row = tuple[str, float, float]  # category, PSNR of the output, PSNR of the untouched reference


@torch.no_grad()
def measure(samples: Path) -> list[Row]:
    """PSNR in dB of every sample in a sample folder of a run."""
    pipeline = load_pipeline(open_model_folder("tiny"))

    def through_vae(path: Path, size: tuple[int, int]) -> Image.Image:
        pixels = pipeline.image_processor.preprocess(load_picture(path), size[1], size[0]).unsqueeze(2)
        return decode(pipeline.vae, pipeline._encode_vae_image(image=pixels, generator=None)[0, :, 0])

    rows = []
    for description in sorted(samples.glob("*.json")):
        told = json.loads(description.read_text(encoding="utf-8"))
        output = load_picture(samples / told["output"])
        target = through_vae(samples / told["target"], output.size)
        untouched = through_vae(samples / told["references"][0], output.size)
        rows.append((told["category"], psnr(output, target), psnr(untouched, target)))
    return rows


def psnr(a: Image.Image, b: Image.Image) -> float:
    """10 log10(255^2 / mean square difference), in dB."""
    difference = np.asarray(a, np.float64) - np.asarray(b, np.float64)
    return 10 * math.log10(255**2 / max(float((difference**2).mean()), 1e-9))


def summary(rows: list[Row]) -> list[tuple[str, float, float, int]]:
    """(category, mean PSNR of outputs, of untouched references, number of samples)."""
    by_category: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_category[row[0]].append(row)
    return [
        (c, statistics.mean(r[1] for r in rs), statistics.mean(r[2] for r in rs), len(rs))
        for c, rs in sorted(by_category.items())
    ]


def as_table(rows: list[Row], title: str) -> str:
    """The result in Markdown."""
    lines = [
        f"Learning on the demo set, held-out pictures ({title})",
        "",
        "| category | output vs target, dB | untouched reference vs target, dB | samples | wins |",
        "|---|---|---|---|---|",
    ]
    for category, output, untouched, count in summary(rows):
        wins = "yes" if output > untouched else "no"
        lines.append(f"| {category} | {output:.2f} | {untouched:.2f} | {count} | {wins} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
