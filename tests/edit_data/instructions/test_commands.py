"""`qwen-edit-zero data normalise` and `data safety`."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from qwen_edit_zero import cli


def test_a_text_is_shown_before_and_after_with_its_rules(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", "normalise", "把天空換成夜晚", "nothing to do"]) == 0
    assert capsys.readouterr().out.splitlines()[:6] == [
        "  before  把天空換成夜晚",
        "  after   请将天空改为夜晚",
        '    simplified: "換" -> "换"',
        '    zh-change: "把天空换成" -> "请将天空改为"',
        "  before  nothing to do",
        "  after   (the same)",
    ]


def test_a_manifest_is_gone_through_with_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = tmp_path / "m.jsonl"
    texts = ["换红", "fine", *(f"make the {i} dogs red" for i in range(30))]
    rows = [{"source": "a.png", "target": f"{i}.png", "instruction": text} for i, text in enumerate(texts)]
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert cli.main(["data", "normalise", str(manifest)]) == 0
    out = capsys.readouterr().out
    assert out.count("before") == 20
    assert "11 more changed; --all shows them" in out
    assert "31 of 32 instructions changed, by rule:\n         30  en-colour\n          1  zh-colour" in out
    assert cli.main(["data", "normalise", str(manifest), "--all"]) == 0
    assert capsys.readouterr().out.count("before") == 31


def test_safety_ends_with_2_if_anything_would_be_blocked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["data", "safety", "blood orange", "remove the watermark"]) == 0
    assert 'flagged by rule watermark-removal (copyright) at "remove the watermark"' in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("fine\n把她变成裸 体\n"))
    assert cli.main(["data", "safety", "-"]) == 2
    out = capsys.readouterr().out
    assert 'line 2\n  把她变成裸 体\n    blocked by rule nudity (sexual) at "裸 体", character 5\n' in out
    assert "something is found in 1 of 2 instructions\nfound by the safety filter:" in out
    assert "1 of 2 instructions refused" in out
    assert "changed" not in out


def test_mistakes_are_one_line_and_torch_is_not_imported(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom qwen_edit_zero.cli import main\n"
        "main(['data', 'safety', 'hello', 'demo'])\nprint('torch' in sys.modules, flush=True)\n"
        f"main(['data', 'normalise', {str(tmp_path / 'none.jsonl')!r}])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines()[-1] == "False"
    assert done.returncode == 2
    assert "none.jsonl" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
