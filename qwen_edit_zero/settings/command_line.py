"""The arguments of a training command, the same for `train.py` and `qwen-edit-zero train`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from qwen_edit_zero.errors import SettingsError
from qwen_edit_zero.settings.names import nearest
from qwen_edit_zero.settings.overrides import is_override

_EPILOG = """\
settings:
  section.key=value, such as batch.global_size=64 optimizer.lr=1e-5 model.lora.rank=16 precision=fp16;
  docs/settings.md lists all of them, and --print-settings shows each with its value and where that comes from.

examples:
  deepspeed --hostfile hostfiles/8node qwen_edit_zero/train.py --ds ds_configs/zero2.json
  torchrun --nproc_per_node 8 qwen_edit_zero/train.py recipes/full_finetune.yaml --engine fsdp2
"""


@dataclass(frozen=True)
class TrainArguments:
    """A parsed training command. `local_rank` is what some launchers add; `resume` is auto, none or a path."""

    recipe: Path | None
    ds: Path | None
    engine: str | None
    resume: str
    accept_changes: bool
    take_over: bool
    fast_dev_run: bool
    print_settings: bool
    cache_only: bool
    doctor: bool
    doctor_seconds: float | None
    json: Path | None
    overrides: tuple[str, ...]
    local_rank: int | None


class Parser(argparse.ArgumentParser):
    """An argument parser whose mistakes are SettingsErrors, so that one rank speaks for all."""

    def error(self, message: str) -> NoReturn:
        """Raise SettingsError with `message`."""
        raise SettingsError(f"{message}; see {self.prog} --help")


def train_parser(prog: str) -> Parser:
    """The parser of training commands."""
    parser = Parser(
        prog=prog,
        description="Train Qwen-Image-Edit. Without a recipe: the demo, a tiny model on demo pictures.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("words", nargs="*", metavar="RECIPE.yaml | section.key=value", help="one recipe; any settings")
    parser.add_argument("--ds", type=Path, metavar="FILE.json", help="train with DeepSpeed and this configuration")
    parser.add_argument("--engine", choices=("ddp", "fsdp2", "deepspeed"), help="the parallel engine")
    parser.add_argument(
        "--resume", default=None, metavar="auto|none|PATH", help="the checkpoint to go on from (auto: the newest)"
    )
    parser.add_argument(
        "--accept-changes",
        action="store_true",
        help="go on from a checkpoint although the data, the global batch or the seed are others now",
    )
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="take the run folder from a run that seems to hold it but is gone: its node died, or was cut off",
    )
    parser.add_argument(
        "--fast-dev-run",
        action="store_true",
        help="two steps on 16 samples, one checkpoint, one picture, in NAME-fast-dev-run, started over each time",
    )
    parser.add_argument("--print-settings", action="store_true", help="print all settings and their sources, and end")
    parser.add_argument(
        "--cache-only", action="store_true", help="compute the latents and embeddings of all samples, and end"
    )
    parser.add_argument(
        "--doctor", action="store_true", help="look at nodes, folders, data and network, and end; nothing is trained"
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=None,
        metavar="SECONDS",
        help="with --doctor: wait so long for ranks, then name those that have not come (default 30)",
    )
    parser.add_argument(
        "--json", type=Path, default=None, metavar="FILE", help="with --doctor: write what was found there as well"
    )
    parser.add_argument("--local_rank", "--local-rank", type=int, dest="local_rank", help=argparse.SUPPRESS)
    return parser


def parse_train_arguments(arguments: Sequence[str], *, prog: str = "train.py") -> TrainArguments:
    """Parse a training command. Raises SettingsError for anything that is not part of one."""
    parser = train_parser(prog)
    known, rest = parser.parse_known_intermixed_args(arguments)
    if rest:
        options = [name for action in parser._actions for name in action.option_strings]
        near = nearest(rest[0].split("=")[0], options)
        key = rest[0].lstrip("-").split("=")[0]
        hint = f"; did you mean {near}?" if near else f"; settings are given without dashes: {key}=value"
        raise SettingsError(f"unknown option {rest[0]}{hint}")
    overrides = tuple(word for word in known.words if is_override(word))
    recipes = [word for word in known.words if not is_override(word)]
    if len(recipes) > 1:
        names = " and ".join(recipes)
        raise SettingsError(f"{names} are given; there is one recipe, and the rest must be section.key=value")
    if known.resume is not None and not known.resume.strip():
        raise SettingsError("--resume is given an empty value; it is auto, none, or the path of a checkpoint")
    if not known.doctor and (known.json is not None or known.timeout is not None):
        raise SettingsError(f"{'--json' if known.json is not None else '--timeout'} goes with --doctor; add that")
    resume = known.resume or ("none" if known.fast_dev_run else "auto")
    return TrainArguments(
        recipe=Path(recipes[0]) if recipes else None,
        ds=known.ds,
        engine=known.engine,
        resume=resume,
        accept_changes=known.accept_changes,
        take_over=known.take_over,
        fast_dev_run=known.fast_dev_run,
        print_settings=known.print_settings,
        cache_only=known.cache_only,
        doctor=known.doctor,
        doctor_seconds=known.timeout,
        json=known.json,
        overrides=overrides,
        local_rank=known.local_rank,
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 1 to 3600")
    return seconds
