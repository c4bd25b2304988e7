"""`qwen-edit-zero data check`: its arguments, which mix with settings as those of a training command do."""

from __future__ import annotations

import argparse
from argparse import ArgumentTypeError
from collections.abc import Sequence
from pathlib import Path

from qwen_edit_zero.errors import SettingsError
from qwen_edit_zero.settings.command_line import Parser
from qwen_edit_zero.settings.overrides import is_override

_EPILOG = """\
A recipe is checked with its own settings and model; a manifest with the defaults and the settings that are given, such
as data.vae_area=589824 model.path=/models/Qwen-Image-Edit-2509 data.cache_dir=/data/cache. What was found out about
pictures is remembered, so a check that was ended goes on, and one of an unchanged set takes little time.

exit status: 0 if all is clean, 1 if rows are left out by training or something should be looked at, 2 if no row can be
used (with --strict instead of 1, too)

examples:
  qwen-edit-zero data check /data/train.jsonl --out checked
  qwen-edit-zero data check recipes/lora.yaml data.manifest=/data/train.jsonl --strict
"""


def parser() -> Parser:
    """The parser of the command."""
    made = Parser(
        prog="qwen-edit-zero data check",
        description="Look at every row and every picture of a data set before it is trained on, and report.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument(
        "words", nargs="*", metavar="MANIFEST|RECIPE.yaml | section.key=value", help="what to check; any settings"
    )
    made.add_argument("--out", type=Path, metavar="FOLDER", help="for the results (default: data_check/NAME)")
    made.add_argument("--format", help="of the manifest, as data.format (default: told by content)")
    made.add_argument(
        "--strict", action="store_true", help="leave rows with warnings out of the clean manifest; exit status 2 for 1"
    )
    made.add_argument("--workers", type=_count, metavar="N", help="processes (default: one a processor)")
    return made


def run(given: Sequence[str]) -> int:
    """Check, and return the exit status. Raises SettingsError for anything that is not part of the command."""
    parsed, rest = parser().parse_known_intermixed_args(given)
    if rest:
        raise SettingsError(f"unknown option {rest[0]}; see {parser().prog} --help")
    what = [word for word in parsed.words if not is_override(word)]
    if len(what) != 1:
        found = " and ".join(what) if what else "nothing"
        raise SettingsError(
            f"{found} is given to check; give one manifest or recipe, and settings as section.key=value"
        )

    from qwen_edit_zero.training.data_check import CheckCommand, run_check

    command = CheckCommand(
        what[0],
        overrides=tuple(word for word in parsed.words if is_override(word)),
        out=parsed.out,
        form=parsed.format,
        strict=parsed.strict,
        workers=parsed.workers,
    )
    return run_check(command)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is no number of processes; give 1 or more")
    return int(text)
