"""Help the `deepspeed` command start this package's training script.

DeepSpeed asks every hostfile's first host by ssh who it is, even where that is this machine and has no ssh server; and
where nodes cannot be reached it ends in a traceback about the first of them. `prepare` is registered as an entry point
that torch calls when it is imported (group torch.backends). It does nothing unless the running command is `deepspeed`
and the script it is to start is ours; then it adds options of DeepSpeed's own, or ends the command with a clear word.
"""

from __future__ import annotations

import os
import sys

_SCRIPT = "qwen_edit_zero/train.py"


def prepare() -> None:
    """Look at the command that is running; see the module. Costs nothing in any other command."""
    command = getattr(sys, "argv", [])
    if not command or os.path.basename(command[0]) != "deepspeed":
        return
    script = next((i for i, word in enumerate(command) if os.path.abspath(word).endswith(f"/{_SCRIPT}")), None)
    if script is None:
        return
    from qwen_edit_zero.errors import ClusterError

    try:
        sys.argv[1:1] = extra_options(command[1:script])
    except ClusterError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(error.exit_status) from None


def extra_options(options: list[str]) -> list[str]:
    """Return what to add to the options of a `deepspeed` command so that it does what its hostfile says.

    Raises ClusterError if the hostfile is wrong, if nodes cannot be reached, or if the launcher is not installed.
    """
    import argparse
    import shutil
    from pathlib import Path

    from qwen_edit_zero.cluster.hostfile import filter_hosts, parse_hostfile
    from qwen_edit_zero.cluster.interfaces import is_this_machine
    from qwen_edit_zero.cluster.reach import unreachable
    from qwen_edit_zero.errors import ClusterError

    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("-H", "--hostfile", type=Path, default=Path("/job/hostfile"))
    parser.add_argument("-i", "--include", default="")
    parser.add_argument("-e", "--exclude", default="")
    parser.add_argument("--num_nodes", type=int, default=-1)
    parser.add_argument("--master_addr", default="")
    parser.add_argument("--launcher", default="pdsh")
    parser.add_argument("--ssh_port", type=int, default=None)
    parser.add_argument("--no_ssh_check", action="store_true")
    parser.add_argument("--no_ssh", action="store_true")
    parser.add_argument("--force_multi", action="store_true")
    given, _ = parser.parse_known_args(options)
    if not given.hostfile.is_file():
        if any(word.startswith(("--hostfile", "-H")) for word in options):
            raise ClusterError(f"the hostfile {given.hostfile} does not exist (working directory: {Path.cwd()})")
        return []
    hosts = parse_hostfile(given.hostfile)
    left = list(filter_hosts(hosts, include=given.include, exclude=given.exclude))
    names = left[: given.num_nodes] if given.num_nodes > 0 else left
    if len(names) == 1 and not given.force_multi and not given.no_ssh:
        if not is_this_machine(names[0]):
            raise ClusterError(
                f"{names[0]} is the only node that {given.hostfile} leaves, and it is not this machine, but deepspeed "
                "would start its ranks here; add --force_multi before the script, or run the command there"
            )
        options = [] if given.no_ssh_check else ["--no_ssh_check"]
        return options if given.master_addr else [*options, "--master_addr=127.0.0.1"]
    if given.no_ssh_check or given.no_ssh or given.launcher.lower() != "pdsh":
        return []
    reasons = unreachable([host for host in hosts if host.name in names], port=given.ssh_port)
    if reasons:
        shown = "".join(f"\n  {name}: {reason}" for name, reason in reasons.items())
        raise ClusterError(
            f"{len(reasons)} of the {len(names)} nodes of {given.hostfile} cannot be reached by ssh without a password:"
            f"{shown}\ncheck the names, and that `ssh NODE true` works from this machine for each of them; "
            "for this machine alone use hostfiles/localhost"
        )
    if shutil.which("pdsh") is None:
        raise ClusterError("deepspeed starts ranks on other nodes with pdsh, which is not installed here; install it")
    return []
