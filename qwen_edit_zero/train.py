"""The script that launchers start: parse, check, train.

Run as a file, Python looks for modules in this folder first, where names such as `settings` would be found instead of
others' packages; so the folder above takes its place.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

if __name__ == "__main__":
    _here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [os.path.dirname(_here)] + [p for p in sys.path if os.path.abspath(p or ".") != _here]

from qwen_edit_zero.cluster import signals
from qwen_edit_zero.cluster.device_setup import choose_allocator
from qwen_edit_zero.cluster.failure import run_guarded
from qwen_edit_zero.cluster.identity import discover, guess_ranks
from qwen_edit_zero.settings.command_line import parse_train_arguments, train_parser


def main(arguments: Sequence[str] | None = None, *, prog: str = "train.py") -> int:
    """Run a training command and return its exit status; errors end this process and all other ranks."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    return run_guarded(lambda: _run(given, prog))


def _run(given: list[str], prog: str) -> int:
    speaks = not guess_ranks()[0]  # rank 0, or the only process
    if {"-h", "--help"} & set(given):
        if speaks:
            print(train_parser(prog).format_help(), end="")
        return 0
    arguments = parse_train_arguments(given, prog=prog)
    if not arguments.print_settings:
        signals.listen()
    identity = discover(local_rank_argument=arguments.local_rank)
    is_single = identity.launcher == "single"

    looks_only = arguments.print_settings or arguments.doctor

    from qwen_edit_zero.settings.load import load_settings

    loaded = load_settings(
        arguments.recipe,
        overrides=arguments.overrides,
        ds=arguments.ds,
        engine=arguments.engine,
        fast_dev_run=arguments.fast_dev_run,
        world_size=None if arguments.cache_only or (looks_only and is_single) else identity.world_size,
    )
    if arguments.print_settings:
        from qwen_edit_zero.settings.render import settings_yaml

        if speaks:
            print(settings_yaml(loaded), end="")
        return 0

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost peer is told in words, not as a C++ stack
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # peft imports it, and every rank would warn of 4 bits
    choose_allocator(loaded.settings)
    if arguments.doctor:
        from qwen_edit_zero.doctor.examination import SECONDS, examine

        seconds = arguments.doctor_seconds or SECONDS
        return examine(loaded, identity, seconds=seconds, json_path=arguments.json)
    from qwen_edit_zero.doctor.quick import QuickCheck

    check = QuickCheck(loaded.settings, identity, os.environ)
    if arguments.cache_only:
        from qwen_edit_zero.training.caching import fill_cache

        return fill_cache(loaded.settings, identity, take_over=arguments.take_over, check=check)
    from qwen_edit_zero.training.run import train  # imports torch: everything cheap has been checked before

    return train(
        loaded,
        identity,
        arguments.resume,
        accept_changes=arguments.accept_changes,
        take_over=arguments.take_over,
        check=check,
    )


if __name__ == "__main__":
    sys.exit(main())
