"""Make the shipped demo data: editing triplets cut from free photographs (`photos.py`) by fixed rules (`edits.py`).

    python tools/make_demo_data.py --wallpapers FOLDER

Writes `qwen_edit_zero/assets/demo/{train,validation}.jsonl`, `images/` and `LICENSES.md`. Everything follows from the
seed. Targets are computed from the stored (JPEG-decoded) references, so the two agree wherever the edit leaves pixels
alone. Counts are such that every training bucket (target size and references' sizes) is a multiple of 16.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import edits
import numpy as np
import phrases
from photos import PHOTOS, Photo, Split, load_photo
from PIL import Image, ImageFilter

ROOT = Path(__file__).parent.parent / "qwen_edit_zero/assets"
FONT = ROOT / "fonts/WenQuanYiMicroHei-subset.ttf"
SQUARE, WIDE, TALL = (128, 128), (160, 96), (96, 160)
Size = tuple[int, int]


@dataclass
class Stored:
    """A picture in the data set: its file, and its pixels as a reader of the file will see them."""

    file: str
    pixels: Image.Image


@dataclass
class Maker:
    """Makes the triplets of one split."""

    split: Split
    photos: dict[str, Image.Image]
    out: Path
    seed: int
    rows: list[dict[str, object]] = field(default_factory=list)
    crops: dict[Size, list[Stored]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{self.seed}-{self.split}")

    def store(self, name: str, picture: Image.Image) -> Stored:
        buffer = io.BytesIO()
        picture.save(buffer, "JPEG", quality=80, subsampling=2, optimize=True)
        (self.out / f"images/{name}.jpg").write_bytes(buffer.getvalue())
        return Stored(f"images/{name}.jpg", Image.open(buffer).convert("RGB"))

    def cut_crops(self, per_photo: dict[Size, int]) -> None:
        """Cut regions of several scales out of every photograph."""
        for size, count in per_photo.items():
            for name, photo in self.photos.items():
                for i in range(count):
                    crop = self._crop(photo, size, i / max(1, count - 1))
                    suffix = {SQUARE: "s", WIDE: "w", TALL: "t"}[size]
                    stored = self.store(f"{self.split[:3]}-{name}-{suffix}{i}", crop)
                    self.crops.setdefault(size, []).append(stored)

    def _crop(self, photo: Image.Image, size: Size, zoom: float) -> Image.Image:
        """A region of the size's aspect: the largest at zoom 0, down to about 1.3 source pixels a pixel at 1."""
        largest = min(photo.width / size[0], photo.height / size[1])
        scale = largest * (min(1.3, largest) / largest) ** zoom
        w, h = size[0] * scale, size[1] * scale
        best, contrast = photo, -1.0
        for _ in range(3):  # of three places the one with most in it
            x, y = self.rng.uniform(0, photo.width - w), self.rng.uniform(0, photo.height - h)
            crop = photo.resize(size, Image.Resampling.LANCZOS, box=(x, y, x + w, y + h))
            crop = crop.filter(ImageFilter.GaussianBlur(0.6))
            spread = float(np.asarray(crop).std())
            if spread > contrast:
                best, contrast = crop, spread
        return best

    def pick(self, size: Size) -> Stored:
        """A crop; every crop is used once before any is used again."""
        key = f"deck-{size}"
        deck: list[Stored] = self.__dict__.setdefault(key, [])
        if not deck:
            deck.extend(self.rng.sample(self.crops[size], len(self.crops[size])))
        return deck.pop()

    def pick_others(self, size: Size, count: int) -> list[Stored]:
        """`count` crops of different photographs."""
        chosen: list[Stored] = []
        while len(chosen) < count:
            crop = self.pick(size)
            if all(crop.file.split("-")[1] != other.file.split("-")[1] for other in chosen):
                chosen.append(crop)
        return chosen

    def add(self, category: str, sources: list[Stored], instruction: str, target: Stored) -> None:
        number = self.counts[category]
        self.counts[category] += 1
        self.rows.append(
            {
                "id": f"{self.split}-{category}-{number:03d}",
                "source": sources[0].file if len(sources) == 1 else [s.file for s in sources],
                "instruction": instruction,
                "target": target.file,
                "category": category,
            }
        )

    def name(self, category: str, role: str) -> str:
        return f"{self.split[:3]}-{category}-{self.counts[category]:03d}-{role}"

    # ---- one function a category: each adds one triplet; `i` cycles through the category's variants ----

    def recolour(self, i: int, size: Size) -> None:
        base, colour = self.pick(size), list(edits.COLOURS)[i % len(edits.COLOURS)]
        target = self.store(self.name("recolour", "target"), edits.recolour(base.pixels, edits.COLOURS[colour]))
        self.add("recolour", [base], phrases.recolour(i, colour), target)

    def style(self, i: int, size: Size) -> None:
        kinds: tuple[edits.Style, ...] = ("greyscale", "night", "sepia", "negative")
        base, kind = self.pick(size), kinds[i % 4]
        target = self.store(self.name("style", "target"), edits.style(base.pixels, kind))
        self.add("style", [base], phrases.style(i // 4, kind), target)

    def geometry(self, i: int, size: Size) -> None:
        kinds: tuple[edits.Turn, ...] = ("mirror", "flip", "half_turn")
        base, kind = self.pick(size), kinds[i % 3]
        target = self.store(self.name("geometry", "target"), edits.turn(base.pixels, kind))
        pair = (base, target) if self.rng.random() < 0.5 else (target, base)  # each of these undoes itself
        self.add("geometry", [pair[0]], phrases.geometry(i // 3, kind), pair[1])

    def add_text(self, i: int, size: Size) -> None:
        base = self.pick(size)
        text = phrases.TEXTS[i % len(phrases.TEXTS)]
        place: edits.Place = "bottom" if self.rng.random() < 0.5 else "top"
        colour = list(phrases.BANNERS)[(i // 2) % len(phrases.BANNERS)]
        picture = edits.banner(base.pixels, text, place, phrases.BANNERS[colour], FONT)
        target = self.store(self.name("add_text", "target"), picture)
        self.add("add_text", [base], phrases.add_text(i, text, place, colour), target)

    def remove(self, i: int, size: Size) -> None:
        base = self.pick(size)
        shapes: tuple[edits.Shape, ...] = ("disc", "square", "diamond")
        shape = shapes[i % 3]
        radius = self.rng.uniform(0.25, 0.32) * min(size)
        centre = (self.rng.uniform(radius, size[0] - radius), self.rng.uniform(radius, size[1] - radius))
        mask = edits.mask_of(size, shape, centre, radius)
        # One of the three colours that stand out most from what they cover.
        by_contrast = sorted(edits.COLOURS, key=lambda c: -edits.contrast(base.pixels, mask, edits.COLOURS[c]))
        colour = self.rng.choice(by_contrast[:3])
        picture = edits.sticker(base.pixels, mask, edits.COLOURS[colour])
        source = self.store(self.name("remove", "source"), picture)
        self.add("remove", [source], phrases.remove(i, shape, colour), base)

    def _posed(self, i: int, subject: Image.Image, backdrop: Image.Image) -> tuple[Image.Image, Image.Image]:
        """A subject before a studio backdrop (every third time a blurred photograph), and its mask."""
        shape: edits.Shape = "disc" if i % 2 else "square"
        mask = edits.mask_of(subject.size, shape, (subject.width / 2, subject.height / 2), 0.36 * min(subject.size))
        if i % 3:
            colour = ((20, 190, 70), (245, 245, 245), (40, 40, 45), (60, 140, 235))[i % 4]
            backdrop = Image.new("RGB", subject.size, colour)
        else:
            backdrop = backdrop.filter(ImageFilter.GaussianBlur(12))
        return edits.in_front(subject, backdrop, mask), mask

    def replace_background(self, i: int, size: Size) -> None:
        subject, old, new = self.pick_others(size, 3)
        posed, mask = self._posed(i, subject.pixels, old.pixels)
        source = self.store(self.name("replace_background", "source"), posed)
        picture = edits.in_front(source.pixels, new.pixels, mask)
        target = self.store(self.name("replace_background", "target"), picture)
        self.add("replace_background", [source, new], phrases.replace_background(i), target)

    def compose(self, i: int, size: Size, references: int) -> None:
        if references == 3 and i % 2:
            subject, new, tone = self.pick_others(size, 3)
            posed, mask = self._posed(i // 2, subject.pixels, tone.pixels)
            source = self.store(self.name("compose", "source"), posed)
            picture = edits.tone_of(edits.in_front(source.pixels, new.pixels, mask), tone.pixels)
            target = self.store(self.name("compose", "target"), picture)
            self.add("compose", [source, new, tone], phrases.compose_tone(i // 2), target)
            return
        parts = self.pick_others(size, references)
        target = self.store(self.name("compose", "target"), edits.side_by_side([p.pixels for p in parts]))
        self.add("compose", parts, phrases.side_by_side(i // 2, references), target)

    def many(self, make: Callable[[int, Size], None], *plan: tuple[int, Size]) -> None:
        i = 0
        for count, size in plan:
            for _ in range(count):
                make(i, size)
                i += 1


def make_split(maker: Maker) -> None:
    if maker.split == "train":
        maker.cut_crops({SQUARE: 7, WIDE: 2, TALL: 1})
        maker.many(maker.recolour, (40, SQUARE), (16, WIDE))
        maker.many(maker.add_text, (40, SQUARE), (16, WIDE))
        maker.many(maker.remove, (48, SQUARE), (8, TALL))
        maker.many(maker.style, (40, SQUARE), (8, TALL))
        maker.many(maker.geometry, (40, SQUARE))
        maker.many(maker.replace_background, (48, SQUARE))
        maker.many(lambda i, size: maker.compose(i, size, 2), (16, SQUARE))
        maker.many(lambda i, size: maker.compose(i, size, 3), (32, SQUARE))
    else:
        maker.cut_crops({SQUARE: 4, WIDE: 1, TALL: 1})
        maker.many(maker.recolour, (5, SQUARE), (1, WIDE))
        maker.many(maker.add_text, (5, SQUARE), (1, WIDE))
        maker.many(maker.remove, (5, SQUARE), (1, TALL))
        maker.many(maker.style, (7, SQUARE), (1, TALL))
        maker.many(maker.geometry, (6, SQUARE))
        maker.many(maker.replace_background, (6, SQUARE))
        maker.many(lambda i, size: maker.compose(i, size, 2), (2, SQUARE))
        maker.many(lambda i, size: maker.compose(i, size, 3), (4, SQUARE))
    maker.rng.shuffle(maker.rows)


def write_licences(out: Path, used: list[Photo]) -> None:
    lines = [
        "The pictures in `images/` are crops and edits of these photographs. CC-BY asks that the author is named and",
        "that changes are told: all are cropped and scaled down, and edited as their file names say.",
        "",
        "| name in file names | split | author | licence | source |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {p.name} | {p.split} | {p.author} | {p.licence} | {p.package}: `{p.file}` |" for p in used]
    lines += [
        "",
        "Licence texts: CC0-1.0 https://creativecommons.org/publicdomain/zero/1.0/legalcode,",
        "CC-BY-2.0 https://creativecommons.org/licenses/by/2.0/legalcode,",
        "CC-BY-4.0 https://creativecommons.org/licenses/by/4.0/legalcode.",
    ]
    (out / "LICENSES.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wallpapers", type=Path, required=True, help="unpacked Debian package")
    parser.add_argument("--out", type=Path, default=ROOT / "demo")
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    shutil.rmtree(args.out / "images", ignore_errors=True)
    (args.out / "images").mkdir(parents=True)
    for split in ("train", "validation"):
        photos = {p.name: load_photo(p, args.wallpapers) for p in PHOTOS if p.split == split}
        maker = Maker(split, photos, args.out, args.seed)  # type: ignore[arg-type]
        make_split(maker)
        used = {str(f) for row in maker.rows for f in [*np.atleast_1d(row["source"]), row["target"]]}  # type: ignore[arg-type]
        for path in (args.out / "images").glob(f"{split[:3]}-*.jpg"):
            if f"images/{path.name}" not in used:
                path.unlink()
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in maker.rows)
        (args.out / f"{split}.jsonl").write_text(text, encoding="utf-8")
        print(split, len(maker.rows), dict(maker.counts), len(used), "pictures")
    write_licences(args.out, list(PHOTOS))
    print(sum(f.stat().st_size for f in args.out.rglob("*") if f.is_file()), "bytes")


if __name__ == "__main__":
    main()
