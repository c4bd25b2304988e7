"""Damaged files of every format end in a picture or in one DataError; never in a crash, a hang or gigabytes."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.edit_data.builders import CASES


def test_mutated_files_are_decoded_or_refused_within_bounds() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.edit_data.fuzz_pictures", "300", "1.0"],
        cwd=CASES.parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert report["wrong"] == []
    assert report["peak_gib"] < 1
    assert set(report["formats"]) == {"JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000"}
    for format, outcome in report["formats"].items():
        assert sum(outcome.values()) == 300, format
        assert outcome["refused"] > 100, format
        assert outcome["right"] > 0, format
