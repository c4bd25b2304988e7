"""A process that writes one part of an index; `build.py` starts it. Exit status 2: a mistake in the manifest."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from qwen_edit_zero.edit_data.manifests.build import write_part
from qwen_edit_zero.edit_data.manifests.formats.base import LocalFolder
from qwen_edit_zero.edit_data.manifests.formats.jsonl import OwnLines
from qwen_edit_zero.edit_data.manifests.names import NameRules
from qwen_edit_zero.errors import QwenEditError


def main(task: str) -> int:
    """Do the task, given as JSON."""
    values = json.loads(task)
    file, part = Path(values["file"]), Path(values["part"])
    reader = OwnLines(LocalFolder(file.parent), file.name, start=values["start"], end=values["end"])
    rules = NameRules(values["root"], tuple(values["outside"]))
    progress = part / "progress"

    def report(done: int, total: int) -> None:
        progress.write_text(str(done))

    try:
        write_part(
            reader,
            part,
            rules,
            location=values["file"],
            max_references=values["max_references"],
            on_progress=report,
        )
    except QwenEditError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    except OSError as error:
        print(error.strerror or error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
