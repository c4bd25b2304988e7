"""The pictures of a run: the loss plot and the contact sheet of held-out samples."""

from __future__ import annotations

from pathlib import Path

from qwen_edit_zero.errors import DataError
from qwen_edit_zero.training.held_out_records import held_out_records
from qwen_edit_zero.training.report.contact_sheet import contact_sheet
from qwen_edit_zero.training.report.loss_plot import loss_plot, read_metrics
from qwen_edit_zero.training.report.samples import read_samples, save_sample, step_folder, step_folders

__all__ = ["contact_sheet", "save_sample", "step_folder", "write_report"]

LOSS_PLOT, CONTACT_SHEET = "loss.png", "contact_sheet.png"


def write_report(run: Path, *, max_rows: int = 24) -> list[Path]:
    """Write `RUN/loss.png` and `RUN/contact_sheet.png` from what the run has left so far; returns those written.

    The contact sheet is of the newest step that has samples. A run without metrics or without samples, interrupted
    anywhere, gets the pictures that can be made of it. Raises DataError if there is nothing of a run in the folder.
    """
    written = []
    metrics = run / "metrics.jsonl"
    if not metrics.is_file() and not step_folders(run):
        raise DataError(
            f"{run} is no run: it holds neither metrics.jsonl nor samples/. Give a folder such as runs/demo"
        )
    rows = read_metrics(metrics) if metrics.is_file() else []
    if rows:
        held_out = held_out_records(metrics)
        written.append(loss_plot(rows, run / LOSS_PLOT, title=f"{run.name}: training loss", held_out=held_out))
    for step, folder in reversed(step_folders(run)):
        records, _ = read_samples(folder)
        if records:
            title = f"{run.name}, step {step:,}\n{len(records)} held-out samples"
            written.append(contact_sheet(folder, run / CONTACT_SHEET, title=title, max_rows=max_rows))
            break
    return written
