"""The benchmark of opening manifests runs on sets of any size."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.manifests import run


def test_a_set_that_opens_within_a_tick_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "CONTESTANTS", ("ours",))
    monkeypatch.setattr("sys.argv", ["run", str(tmp_path), "--rows", "20", "--rounds", "1"])
    assert run.main() == 0
    cells = [cell.strip() for cell in capsys.readouterr().out.splitlines()[-1].split("|")]
    assert cells[1:3] == ["20", "ours"]
    assert int(cells[5].replace(",", "")) > 0, "rows a processor second"
