"""The photographs from which the demo data is cut, where they come from and under which licence.

Most ship inside scikit-image, scikit-learn and matplotlib; the others are in Debian's package lomiri-wallpapers-16.04
(`apt-get download lomiri-wallpapers-16.04 && dpkg-deb -x lomiri-*.deb FOLDER`).
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from PIL import Image

Split = Literal["train", "validation"]


@dataclass(frozen=True)
class Photo:
    """One photograph; `file` is relative to its package (`skimage`, ...) or to the unpacked Debian package."""

    name: str
    package: Literal["skimage", "sklearn", "matplotlib", "lomiri-wallpapers-16.04"]
    file: str
    author: str
    licence: str
    split: Split
    grey: bool = False


def _sk(name: str, file: str, author: str, licence: str, split: Split = "train", grey: bool = False) -> Photo:
    return Photo(name, "skimage", f"data/{file}", author, licence, split, grey)


def _lomiri(name: str, file: str, author: str, licence: str, split: Split = "train") -> Photo:
    return Photo(name, "lomiri-wallpapers-16.04", f"usr/share/backgrounds/{file}", author, licence, split)


PHOTOS: tuple[Photo, ...] = (
    _sk("astronaut", "astronaut.png", "NASA (Eileen Collins)", "public domain"),
    _sk("coffee", "coffee.png", "Rachel Michetti", "CC0-1.0"),
    _sk("rocket", "rocket.jpg", "SpaceX", "public domain"),
    _sk("retina", "retina.jpg", "Haggstrom, M.", "CC0-1.0"),
    _sk("hubble", "hubble_deep_field.jpg", "NASA, ESA (Hubble eXtreme Deep Field)", "public domain"),
    _sk("camera", "camera.png", "Lav Varshney", "CC0-1.0", grey=True),
    Photo("flower", "sklearn", "datasets/images/flower.jpg", "vultilion", "CC-BY-2.0", "train"),
    Photo("hopper", "matplotlib", "mpl-data/sample_data/grace_hopper.jpg", "US Navy", "public domain", "train"),
    _lomiri("brushes", "Picture_1A_by_freespace.jpg", "Trevor 'Freespace'", "CC-BY-4.0"),
    _lomiri("wine", "Wine_by_Jakkub_Mede.jpg", "Jakub Mede", "CC-BY-4.0"),
    _lomiri("meadow", "aitzgorri_by_Aitzol_Berasategi.jpg", "Aitzol Berasategi", "CC-BY-4.0"),
    _lomiri("brook", "life_by_Aitzol_Berasategi.jpg", "Aitzol Berasategi", "CC-BY-4.0"),
    _lomiri("sunset", "sunset_by_Aitzol_Berasategi.jpg", "Aitzol Berasategi", "CC-BY-4.0"),
    _lomiri("dandelion", "seeding_by_Clements_Engelhardt.jpg", "Clemens Engelhardt", "CC0-1.0"),
    _lomiri("umang", "umang_by_Abhishek_Mudgal.jpg", "Abhishek Mudgal", "CC-BY-4.0"),
    _sk("chelsea", "chelsea.png", "Stefan van der Walt", "CC0-1.0", "validation"),
    Photo("china", "sklearn", "datasets/images/china.jpg", "danielbuechele", "CC-BY-2.0", "validation"),
    _lomiri("fig", "Picture_0B_by_freespace.jpg", "Trevor 'Freespace'", "CC-BY-4.0", "validation"),
    _lomiri("dogs", "friends_by_Aitzol_Berasategi.jpg", "Aitzol Berasategi", "CC-BY-4.0", "validation"),
    _lomiri("peaks", "picosdeeuropa_by_Aitzol_Berasategi.jpg", "Aitzol Berasategi", "CC-BY-4.0", "validation"),
)


def load_photo(photo: Photo, wallpapers: Path, long_side: int = 1024) -> Image.Image:
    """The photograph as RGB, shrunk so that its longer side is at most `long_side` pixels."""
    if photo.package == "lomiri-wallpapers-16.04":
        path = wallpapers / photo.file
    else:
        spec = importlib.util.find_spec(photo.package)
        assert spec is not None, f"{photo.package} is not installed"
        assert spec.origin is not None
        path = Path(spec.origin).parent / photo.file
    picture = Image.open(path).convert("RGB")
    scale = long_side / max(picture.size)
    if scale < 1:
        size = (round(picture.width * scale), round(picture.height * scale))
        picture = picture.resize(size, Image.Resampling.LANCZOS)
    return picture
