"""`qwen-edit-zero cache`: filling is a training command that ends before it trains; the rest looks after the folder."""

from __future__ import annotations

import argparse
import logging
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from qwen_edit_zero.errors import SettingsError
from qwen_edit_zero.settings.command_line import Parser
from qwen_edit_zero.settings.overrides import is_override

if TYPE_CHECKING:
    from qwen_edit_zero.settings.models import Settings

VERBS = ("status", "verify", "prune")
_EPILOG = """\
without a verb: have latents and embeddings of all samples of a recipe in its cache, and end. All options and settings
of a training command apply, and ranks of a launcher share the work:

  qwen-edit-zero cache recipes/lora.yaml data.manifest=/data/train.jsonl
  torchrun --nproc_per_node 8 qwen_edit_zero/train.py recipes/lora.yaml --cache-only
  sbatch --nodes 4 slurm/train.sbatch recipes/lora.yaml --cache-only
"""

BytesBar = Callable[[], AbstractContextManager[Callable[[int, int], None] | None]]


def parser() -> Parser:
    """The parser of the verbs."""
    made = Parser(
        prog="qwen-edit-zero cache",
        description="Fill the cache of latents and embeddings, and look after it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    verbs = made.add_subparsers(required=True, metavar="VERB")
    what = "what a cache holds, and what a recipe still needs"
    verb = verbs.add_parser("status", help=what, description=what)
    _add_place(verb)
    verb.set_defaults(verb=_status)
    what = "read every entry and compare it with its checksum; exit status 2 if something is damaged"
    verb = verbs.add_parser("verify", help=what, description=what)
    _add_place(verb)
    verb.add_argument("--repair", action="store_true", help="take what is damaged out, so that it is made again")
    verb.set_defaults(verb=_verify)
    what = "find entries that none of the recipes uses, and delete them"
    verb = verbs.add_parser("prune", help=what, description=what)
    verb.add_argument(
        "words", nargs="*", metavar="RECIPE.yaml | section.key=value", help="all recipes that use the cache; settings"
    )
    verb.add_argument("--recipe", nargs="+", action="extend", default=[], metavar="RECIPE", help="the same")
    verb.add_argument("--dir", type=Path, metavar="FOLDER", help="the cache (default: that of the recipes)")
    verb.add_argument(
        "--delete", action="store_true", help="delete them; without it, only their number and size are said"
    )
    verb.set_defaults(verb=_prune)
    return made


def run(given: Sequence[str], bytes_bar: BytesBar) -> int:
    """Run one verb and return the exit status."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # peft imports it, and it would warn of 4 bits
    parsed = parser().parse_args(given)
    status: int = parsed.verb(parsed, bytes_bar)
    return status


def _add_place(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "words", nargs="*", metavar="RECIPE.yaml | section.key=value", help="a run; its cache is looked at"
    )
    verb.add_argument("--dir", type=Path, metavar="FOLDER", help="the cache (default: that of the run)")


def _settings(parsed: Namespace) -> Settings | None:
    """The settings of the run that is named; None if only a folder is."""
    from qwen_edit_zero.settings.load import load_settings

    recipes = [word for word in parsed.words if not is_override(word)]
    if len(recipes) > 1:
        raise SettingsError(
            f"{' and '.join(recipes)} are given; there is one recipe, and the rest must be section.key=value"
        )
    if not parsed.words and parsed.dir is not None:
        return None
    overrides = [word for word in parsed.words if is_override(word)]
    return load_settings(Path(recipes[0]) if recipes else None, overrides=overrides).settings


def _status(parsed: Namespace, bytes_bar: BytesBar) -> int:
    settings = _settings(parsed)
    from qwen_edit_zero.training.caching import cache_folder_of, status_text

    print(status_text(cache_folder_of(parsed.dir, settings), settings))
    return 0


def _verify(parsed: Namespace, bytes_bar: BytesBar) -> int:
    settings = _settings(parsed)
    from qwen_edit_zero.edit_data.cache.manage import verify
    from qwen_edit_zero.training.caching import cache_folder_of

    folder = cache_folder_of(parsed.dir, settings)
    with bytes_bar() as progress:
        problems = verify(folder, repair=parsed.repair, on_bytes=progress or (lambda done, total: None))
    for problem in problems:
        print(problem)
    if not problems:
        print(f"{folder}: every entry is whole")
    elif parsed.repair:
        print("what is damaged was taken out; the next run, or `qwen-edit-zero cache RECIPE`, makes it again")
    else:
        print("--repair takes out what is damaged, so that it is made again")
    return 2 if problems else 0


def _prune(parsed: Namespace, bytes_bar: BytesBar) -> int:
    from qwen_edit_zero.settings.load import load_settings

    words = [*parsed.words, *parsed.recipe]
    overrides = [word for word in words if is_override(word)]
    named = [word for word in words if not is_override(word)]
    if not named:
        raise SettingsError("name all recipes that use the cache: what none of them uses is what would be deleted")
    recipes = [(name, load_settings(Path(name), overrides=overrides).settings) for name in named]
    from qwen_edit_zero.training.caching import cache_folder_of, prune_text

    print(prune_text(cache_folder_of(parsed.dir, recipes[0][1]), recipes, delete=parsed.delete))
    return 0
