"""Whatever bytes a manifest has, opening it gives a table or one clear error, never a traceback."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from qwen_edit_zero.edit_data.manifests.opening import open_manifest
from qwen_edit_zero.errors import DataError
from tests.edit_data.builders import row
from tests.edit_data.manifests.test_formats import embedded, parquet, sample_members, shard

_MUTATIONS = 60
_CHOSEN = b'{}[]":,\\\n\r\t\0\xff\xef\xbb\xbf#-.0aue()*&!|>=/'


def jsonl(path: Path) -> None:
    path.write_text("".join(json.dumps(row(i, 2, weight=1.5)) + "\n" for i in range(4)))


def array(path: Path) -> None:
    rows = [{"image": f"t{i}.png", "edit_image": ["a.png", 'b"\\.png'], "prompt": "改色"} for i in range(4)]
    path.write_text(json.dumps(rows, indent=1))


def table(path: Path) -> None:
    path.write_text('\ufeffimage,edit_image,prompt,weight\n"t,1.png",s.png,"a ""b""\nc",2\nt2.png,s.png,x,1\n')


def config(path: Path) -> None:
    path.write_text("config:\n  process:\n    - datasets:\n        - folder_path: t\n          control_path: [a, b]\n")


def toml(path: Path) -> None:
    path.write_text(
        "[general]\ncaption_extension = '.txt'\n[[datasets]]\nimage_directory = 't'\ncontrol_directory='c'\n"
    )


def cells(path: Path) -> None:
    parquet(path, source=embedded(1, 2, 3), target=embedded(4, 5, 6), instruction=["x", "y", "z"])


def members(path: Path) -> None:
    shard(path, [*sample_members("a", 1), *sample_members("b", 2)])


def message_of(path: Path) -> str | None:
    """What is wrong with a manifest; None if nothing is. Any other error goes on."""
    try:
        list(open_manifest(path))
    except DataError as error:
        return str(error)
    return None


@pytest.mark.parametrize("make", [jsonl, array, table, config, toml, cells, members])
def test_damage_is_told_in_a_message(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """Changed, added and missing bytes; Parquet is only cut, because pyarrow may crash on changed bytes."""
    path = tmp_path / {"config": "x.yaml", "toml": "x.toml"}.get(make.__name__, "x")
    make(path)
    sound = path.read_bytes()
    draws = random.Random(make.__name__)
    refused = 0
    for _ in range(_MUTATIONS):
        damaged = bytearray(sound)
        kind = draws.randrange(3) if make is not cells else 2
        at = draws.randrange(len(sound))
        if kind == 0:
            damaged[at] = draws.choice(_CHOSEN)
        elif kind == 1:
            damaged[at:at] = bytes(draws.choices(_CHOSEN, k=draws.randrange(1, 9)))
        else:
            del damaged[at : None if make is cells else at + draws.randrange(1, len(sound))]
        path.write_bytes(damaged)
        told = message_of(path)
        refused += told is not None
        assert told is None or path.name in told or "folder" in told, "the message says which file"
    assert refused > _MUTATIONS // 8, "most damage to text is found; archives hold pictures, which are looked at later"
