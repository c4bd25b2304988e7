"""What `qwen-edit-zero data convert` does, as text."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import yaml
from tqdm import tqdm

from qwen_edit_zero.edit_data.manifests.convert import Converted, convert_manifest
from qwen_edit_zero.edit_data.manifests.formats.columns import Columns
from qwen_edit_zero.edit_data.manifests.formats.recognise import FORMATS
from qwen_edit_zero.edit_data.manifests.samples import OnError
from qwen_edit_zero.edit_data.wording import nearest, shown
from qwen_edit_zero.errors import SettingsError

_MOST_SHOWN = 10


def convert(
    source: str,
    out: Path,
    *,
    form: str,
    columns: str | None,
    split: str | None,
    outside: Sequence[str],
    on_error: OnError,
    max_references: int,
    strict: bool = False,
) -> tuple[str, int]:
    """Convert; (what was done, exit status). Raises DataError, SettingsError, StorageError.

    Status 2: no row has all of its pictures, or, with `strict`, some row has not.
    """
    if form not in ("auto", *FORMATS):
        near = nearest(form, FORMATS)
        hint = f"did you mean {near}?" if near else f"there are auto, {', '.join(FORMATS)}"
        raise SettingsError(f"--format {shown(form)} is no format; {hint}")
    with tqdm(unit=" rows", delay=5, leave=False, disable=not sys.stderr.isatty(), dynamic_ncols=True) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        done = convert_manifest(
            source,
            out,
            form=form,
            columns=_columns(columns),
            split=split,
            outside=outside,
            on_error=on_error,
            max_references=max_references,
            on_progress=show,
        )
    lines = [done.description]
    lines += [f"left out: {refusal}" for refusal in done.refused[:_MOST_SHOWN]]
    if done.refused_count > _MOST_SHOWN:
        lines.append(f"left out: {done.refused_count - _MOST_SHOWN:,} more rows; all are in {done.refused_file}")
        lines += [f"  {count:>9,}  {reason}" for reason, count in list(done.reasons.items())[:_MOST_SHOWN]]
    taken = f", and {done.pictures:,} pictures from archives into {done.pictures_folder}" if done.pictures else ""
    lines.append(f"written: {done.rows:,} row{'s' if done.rows != 1 else ''} to {out}{taken}")
    if done.outside:
        more = f" and {len(done.outside) - 3} more folders" if len(done.outside) > 3 else ""
        lines.append(
            f"pictures lie outside the folder of {out}: in {', '.join(map(shown, done.outside[:3]))}{more}; train with "
            f"data.outside naming {'them' if len(done.outside) > 1 else 'it'}, or write OUT above its pictures"
        )
    lines += _absent(done)
    missing = done.absent_rows == done.rows or (strict and done.absent_rows > 0)
    return "\n".join(lines), 2 if missing else 0


def _absent(done: Converted) -> list[str]:
    """What is not there."""
    lines = []
    if done.absent_rows:
        lines.append(
            f"{done.absent_rows:,} of {done.rows:,} rows name pictures that are not there; they are written all the "
            "same, and training refuses them, or leaves them out with data.on_error=skip:"
        )
        lines += [f"  {text}" for text in done.absent]
        if done.absent_rows > len(done.absent):
            lines.append(f"  and {done.absent_rows - len(done.absent):,} more; `qwen-edit-zero data check` lists all")
    if done.unasked_rows:
        lines.append(
            f"whether the pictures of {done.unasked_rows:,} rows are on their store was not asked; `qwen-edit-zero "
            "data check` looks at them"
        )
    return lines


def _columns(text: str | None) -> Columns | None:
    if text is None:
        return None
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = None
    if not isinstance(value, dict) or not all(isinstance(item, str | list) for item in value.values()):
        raise SettingsError(
            f"--columns {shown(text)} is no mapping; write it as in '{{source: [before, style], target: after}}'"
        )
    return value
