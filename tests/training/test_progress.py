"""A log file gets plain lines; ranks other than 0 stay silent."""

import io
import time

import pytest

from qwen_edit_zero.training.progress import LateProgress, Progress, format_seconds


def test_a_log_file_gets_whole_lines_without_control_characters() -> None:
    out = io.StringIO()
    progress = Progress("step", 4, rank=0, every=2, stream=out)
    for i in range(4):
        progress.advance(1, f"loss {i}")
    progress.close()
    lines = out.getvalue().splitlines()
    assert [line.split("  left")[0] for line in lines] == ["step 2/4  loss 1", "step 4/4  loss 3"]
    assert "\r" not in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_the_last_step_is_always_shown() -> None:
    out = io.StringIO()
    progress = Progress("step", 5, rank=0, every=3, stream=out)
    for _ in range(5):
        progress.advance()
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["3/5", "5/5"]


def test_other_ranks_are_silent() -> None:
    out = io.StringIO()
    progress = Progress("step", 1, rank=1, stream=out)
    progress.advance(1, "loss 1")
    progress.say("hello")
    assert out.getvalue() == ""


def test_work_done_before_a_line_was_due_counts_for_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred units, one every two seconds: six seconds after the start 97 are left, for 194 seconds."""
    clock, out = [0.0], io.StringIO()
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    progress = LateProgress("encoding", 100, rank=0, after_seconds=5.0, stream=out)
    for _ in range(3):
        clock[0] += 2.0
        progress.advance()
    assert out.getvalue() == "encoding 3/100  left 3:14\n"


def test_seconds_read_like_a_clock() -> None:
    assert [format_seconds(s) for s in (0, 59.6, 83.2, 7384)] == ["0:00", "1:00", "1:23", "2:03:04"]
