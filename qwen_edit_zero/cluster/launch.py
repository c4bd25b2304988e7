"""The command that starts training on a described cluster, with each launcher."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qwen_edit_zero.cluster.batch_script import BatchJob, train_script
from qwen_edit_zero.cluster.forwarding import for_pdsh, inherited
from qwen_edit_zero.cluster.hostfile import Host, parse_hostfile
from qwen_edit_zero.cluster.hostlists import TORCHRUN_PORT
from qwen_edit_zero.cluster.reach import notice_lost_nodes
from qwen_edit_zero.cluster.slurm import compress_nodelist
from qwen_edit_zero.errors import ClusterError
from qwen_edit_zero.settings.command_line import parse_train_arguments
from qwen_edit_zero.settings.load import load_settings

LAUNCHERS = ("deepspeed", "torchrun", "srun", "sbatch")
_SCRIPT = Path(__file__).resolve().parents[1] / "train.py"


@dataclass(frozen=True)
class Cluster:
    """`nodes` nodes with `gpus_per_node` ranks each; `hostfile` names them where no scheduler does."""

    nodes: int
    gpus_per_node: int
    hostfile: Path | None = None

    @property
    def ranks(self) -> int:
        """How many ranks there are in all."""
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class Launch:
    """A command, and what it reads from its standard input."""

    command: tuple[str, ...]
    script: str | None = None

    def shown(self) -> str:
        """What to type, or the batch script."""
        return self.script if self.script is not None else shlex.join(self.command) + "\n"

    def run(self) -> int:
        """Run it and return its exit status. Raises ClusterError if the launcher is not installed here."""
        program = self.command[0]
        if shutil.which(program) is None:
            raise ClusterError(f"{program} is not installed on this machine; --dry-run shows the command all the same")
        if self.script is None:
            notice_lost_nodes(os.environ)
            os.execvp(program, self.command)  # signals and the exit status are then the launcher's own
        return subprocess.run(self.command, input=self.script, text=True, check=False).returncode


def check_training(arguments: Sequence[str], ranks: int) -> None:
    """Raise SettingsError if settings say that a training command with these arguments cannot work on so many ranks.

    Said here it is said once, before anything is queued or started.
    """
    given = parse_train_arguments([word for word in arguments if word not in ("-h", "--help")])
    load_settings(
        given.recipe,
        overrides=given.overrides,
        ds=given.ds,
        engine=given.engine,
        fast_dev_run=given.fast_dev_run,
        world_size=None if given.cache_only or given.print_settings else ranks,
    )


def plan(cluster: Cluster, launcher: str, arguments: Sequence[str], *, options: Sequence[str] = ()) -> Launch:
    """Return how `launcher` starts the training command with `arguments` on `cluster`.

    `options` are the launcher's own, in front of the script (for sbatch lines of #SBATCH). Raises ClusterError if the
    hostfile is missing, wrong or too small, or is given to a launcher that takes its nodes from Slurm.
    """
    script = _relative(_SCRIPT)
    if launcher in ("srun", "sbatch"):
        if cluster.hostfile is not None:
            raise ClusterError(
                f"{launcher} takes its nodes from Slurm, not from the hostfile {cluster.hostfile}; "
                f"`qwen-edit-zero hostfile convert {cluster.hostfile} --to slurm` shows the options that ask for them"
            )
        if launcher == "sbatch":
            job = BatchJob(cluster.nodes, cluster.gpus_per_node, options=tuple(options))
            return Launch(("sbatch",), train_script(job, arguments))
        per_node = (f"--ntasks-per-node={cluster.gpus_per_node}", f"--gpus-per-node={cluster.gpus_per_node}")
        how = ("--kill-on-bad-exit=1", "--label", *options)
        return Launch(("srun", f"--nodes={cluster.nodes}", *per_node, *how, sys.executable, "-u", script, *arguments))
    hosts = _hosts(cluster)
    if launcher == "deepspeed":
        return Launch(("deepspeed", *_deepspeed_nodes(cluster, hosts), *options, script, *arguments))
    ranks = ("--nproc_per_node", str(cluster.gpus_per_node))
    if not hosts:
        return Launch(("torchrun", "--standalone", *ranks, *options, script, *arguments))
    # Told which node they are: by itself torchrun does not see that it is on the first where names mean loopback
    meeting = ("--master_addr", hosts[0].name, "--master_port", str(TORCHRUN_PORT))
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    first = (torchrun, "--nnodes", str(cluster.nodes), "--node_rank")
    rest = (*ranks, *meeting, *options, script, *arguments)
    exports = [f"export {name}={for_pdsh(value)};" for name, value in inherited(os.environ).items()]
    cd = ("cd", for_pdsh(str(Path.cwd())), "&&")
    remote = " ".join([*exports, *cd, *map(for_pdsh, first), "%n", *map(for_pdsh, rest)])  # pdsh counts the nodes
    return Launch(("pdsh", "-S", "-R", "ssh", "-w", compress_nodelist([_ssh_name(host) for host in hosts]), remote))


def _hosts(cluster: Cluster) -> list[Host]:
    """The hosts to use; none if it is this machine alone."""
    if cluster.hostfile is None:
        if cluster.nodes > 1:
            raise ClusterError(f"--nodes is {cluster.nodes}, but nothing says which they are; give --hostfile FILE")
        return []
    hosts = parse_hostfile(cluster.hostfile)
    if len(hosts) < cluster.nodes:
        raise ClusterError(f"--nodes is {cluster.nodes}, but {cluster.hostfile} names {len(hosts)}")
    used = hosts[: cluster.nodes]
    if small := next((host for host in used if host.slots < cluster.gpus_per_node), None):
        raise ClusterError(
            f"--gpus-per-node is {cluster.gpus_per_node}, but {cluster.hostfile}:{small.line} gives {small.name} "
            f"{small.slots} slots"
        )
    return used


def _deepspeed_nodes(cluster: Cluster, hosts: list[Host]) -> tuple[str, ...]:
    if cluster.hostfile is None:
        return ("--num_gpus", str(cluster.gpus_per_node))
    given: tuple[str, ...] = ("--hostfile", str(cluster.hostfile))
    if len(parse_hostfile(cluster.hostfile)) > cluster.nodes:
        given += ("--num_nodes", str(cluster.nodes))
    if any(host.slots > cluster.gpus_per_node for host in hosts):
        given += ("--num_gpus", str(cluster.gpus_per_node))
    return given


def _ssh_name(host: Host) -> str:
    return f"{host.user}@{host.name}" if host.user else host.name


def _relative(path: Path) -> str:
    """As the documentation names it, if that is what the working directory makes of it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
