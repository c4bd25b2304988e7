"""`qwen-edit-zero launch` and `qwen-edit-zero hostfile`: their arguments, and what they print."""

from __future__ import annotations

import argparse
import shutil
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path

from qwen_edit_zero.cluster.hostfile import filter_hosts, parse_hostfile
from qwen_edit_zero.cluster.hostlists import READ, WRITTEN, read_hosts, written
from qwen_edit_zero.cluster.launch import LAUNCHERS, Cluster, check_training, plan
from qwen_edit_zero.cluster.reach import unreachable
from qwen_edit_zero.errors import ClusterError
from qwen_edit_zero.settings.command_line import Parser

_EPILOG = """\
Everything behind -- goes to the training command. Settings are checked against the number of ranks before anything is
started. sbatch: the script is slurm/train.sbatch with these numbers and arguments in it; redirect it to keep it.

examples:
  qwen-edit-zero launch recipes/lora.yaml --gpus-per-node 8 --launcher torchrun -- --engine fsdp2
  qwen-edit-zero launch recipes/full_finetune.yaml --nodes 8 --gpus-per-node 8 --launcher sbatch \\
      --option=--partition=gpu --dry-run -- --ds ds_configs/zero2.json data.manifest=/data/train.jsonl
"""


def launch_parser() -> Parser:
    """The parser of `launch`, without what is behind `--`."""
    parser = Parser(
        prog="qwen-edit-zero launch",
        description="Start training on a cluster, or show the command that does.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("recipe", metavar="RECIPE", help="the recipe, such as recipes/lora.yaml")
    parser.add_argument("--nodes", type=_count, default=1, metavar="N", help="(default 1)")
    parser.add_argument("--gpus-per-node", type=_count, default=8, metavar="G", help="ranks on each node (default 8)")
    parser.add_argument("--launcher", choices=LAUNCHERS, default="torchrun", help="(default torchrun)")
    parser.add_argument("--hostfile", type=Path, metavar="FILE", help="names the nodes, for deepspeed and torchrun")
    parser.add_argument(
        "--option", action="append", default=[], metavar="OPTION",
        help="one of the launcher, such as --option=--partition=gpu; may be repeated",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="print the command, or the batch script, and end")
    return parser


def launch(given: Sequence[str]) -> int:
    """Start training, or print how; returns the exit status. Raises UserError if it could not work."""
    words = list(given)
    cut = words.index("--") if "--" in words else len(words)
    parsed = launch_parser().parse_args(words[:cut])
    arguments = [parsed.recipe, *words[cut + 1 :]]
    cluster = Cluster(parsed.nodes, parsed.gpus_per_node, parsed.hostfile)
    planned = plan(cluster, parsed.launcher, arguments, options=parsed.option)
    check_training(arguments, cluster.ranks)
    if parsed.dry_run:
        print(planned.shown(), end="")
        return 0
    return planned.run()


def hostfile_parser() -> Parser:
    """The parser of `hostfile`."""
    parser = Parser(
        prog="qwen-edit-zero hostfile",
        description="Check a hostfile, or write it for another launcher.",
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB", dest="verb")
    what = "read it strictly, and say what it asks for; exit status 2 if something is wrong"
    verb = verbs.add_parser("check", help=what, description=what)
    verb.add_argument("file", type=Path, metavar="FILE")
    verb.add_argument("--include", default="", metavar="HOST:ID,..@..", help="as deepspeed's")
    verb.add_argument("--exclude", default="", metavar="HOST:ID,..@..", help="as deepspeed's")
    verb.add_argument("--ssh", action="store_true", help="try `ssh HOST true` for these hosts, too")
    what = "write its hosts in the form of another launcher"
    verb = verbs.add_parser("convert", help=what, description=what)
    verb.add_argument("file", type=Path, metavar="FILE")
    verb.add_argument("--to", choices=WRITTEN, required=True, help="slurm: options; torchrun: options for each host")
    verb.add_argument(
        "--from", dest="form", choices=READ, default="deepspeed", help="the form of FILE (default deepspeed)"
    )
    verb.add_argument("--slots", type=_count, metavar="N", help="ranks a host, with --from slurm")
    return parser


def hostfile(given: Sequence[str]) -> int:
    """Check or convert a hostfile; returns the exit status. Raises ClusterError if it is wrong."""
    parsed = hostfile_parser().parse_args(given)
    if parsed.verb == "convert":
        hosts = read_hosts(parsed.file, parsed.form, slots=parsed.slots)
        if (lost := [host.name for host in hosts if host.user]) and parsed.to != "deepspeed":
            print(f"the users of {', '.join(lost[:8])} are left out; put them into ~/.ssh/config", file=sys.stderr)
        if parsed.to == "slurm" and [host.name for host in hosts] != sorted(host.name for host in hosts):
            print("Slurm puts nodes into an order of its own, and rank 0 on its first one", file=sys.stderr)
        print(written(hosts, parsed.to), end="")
        return 0
    return _check_hostfile(parsed)


def _check_hostfile(parsed: Namespace) -> int:
    hosts = parse_hostfile(parsed.file)
    slots = filter_hosts(hosts, include=parsed.include, exclude=parsed.exclude)
    rank = 0
    for name, ids in slots.items():
        print(f"{name}: ranks {rank}-{rank + len(ids) - 1} on slots {','.join(map(str, ids))}")
        rank += len(ids)
    nodes = f"{len(slots)} node{'s' if len(slots) > 1 else ''}"
    print(f"{nodes}, {rank} ranks; rank 0 is on {next(iter(slots))}")
    if parsed.ssh:
        if shutil.which("ssh") is None:
            raise ClusterError("there is no ssh on this machine")
        if reasons := unreachable([host for host in hosts if host.name in slots]):
            shown = "".join(f"\n  {name}: {reason}" for name, reason in reasons.items())
            raise ClusterError(f"{len(reasons)} of {nodes} cannot be reached by ssh without a password:{shown}")
        print("all of them can be reached by ssh without a password")
    return 0


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 0 < int(text) <= 100_000:
        raise ArgumentTypeError(f"{text!r} is not a whole number from 1 to 100000")
    return int(text)
