"""Help the `deepspeed` command start this package's training script.

DeepSpeed asks every hostfile's first host by ssh who it is, even where that is this machine and has no ssh server;
where nodes cannot be reached it ends in a traceback about the first of them; it reads hostfiles and files of variables
carelessly, and changes words on their way to other nodes (see `forwarding`). `prepare` is registered as an entry point
that torch calls when it is imported (group torch.backends). It does nothing unless the running command is `deepspeed`
(or `torchrun`, see `torchrun_launch`) and the script it is to start is ours; then it mends the command, or ends it with
a clear word.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from qwen_edit_zero.cluster import torchrun_launch

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, MutableMapping, Sequence

    from qwen_edit_zero.cluster.hostfile import Host

_SCRIPT = "qwen_edit_zero/train.py"
_BY_SSH = ("pdsh", "openmpi", "mpich", "impi", "mvapich")
_PROGRAMS = {"pdsh": "pdsh", "openmpi": "mpirun", "mpich": "mpirun", "impi": "mpirun", "slurm": "srun"}


def prepare() -> None:
    """Look at the command that is running; see the module. Costs nothing in any other command."""
    command = getattr(sys, "argv", [])
    if not command or not (os.path.basename(command[0]) == "deepspeed" or torchrun_launch.is_torchrun(command[0])):
        return
    script = next((i for i, word in enumerate(command) if os.path.abspath(word).endswith(f"/{_SCRIPT}")), None)
    if script is None:
        return
    if torchrun_launch.is_torchrun(command[0]):
        torchrun_launch.prepare(os.environ)
        return
    from qwen_edit_zero.errors import UserError

    try:
        options, arguments = mended(command[1:script], command[script + 1 :], os.environ)
        sys.argv[1:] = [*options, command[script], *arguments]
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(error.exit_status) from None


def mended(
    options: Sequence[str], arguments: Sequence[str], environ: MutableMapping[str, str]
) -> tuple[list[str], list[str]]:
    """Return options and script arguments of a `deepspeed` command so that it does what they and its hostfile say.

    DS_ENV_FILE in `environ` is set to a file that DeepSpeed reads rightly. Raises UserError if the hostfile, a file
    of variables or the settings are wrong, if nodes cannot be reached, or if the launcher is missing or cannot do it.
    """
    from pathlib import Path

    from qwen_edit_zero.cluster.hostfile import filter_hosts, parse_hostfile
    from qwen_edit_zero.cluster.interfaces import is_this_machine
    from qwen_edit_zero.cluster.launch import check_training
    from qwen_edit_zero.cluster.reach import notice_lost_nodes
    from qwen_edit_zero.errors import ClusterError

    given = _parse(options)
    if not given.hostfile.is_file():
        if any(word.startswith(("--hostfile", "-H")) for word in options):
            raise ClusterError(f"the hostfile {given.hostfile} does not exist (working directory: {Path.cwd()})")
        chosen = _visible_devices(given, environ, "localhost", None)
        alone = ["--no_ssh_check", "--master_addr=127.0.0.1"] if chosen else []
        return [*options, *chosen, *alone], list(arguments)
    hosts = parse_hostfile(given.hostfile)
    left = filter_hosts(hosts, include=given.include, exclude=given.exclude)
    names = list(left)[: given.num_nodes] if given.num_nodes > 0 else list(left)
    added = _hostfile_for_deepspeed(given.hostfile, hosts)
    launcher = given.launcher.lower()
    if given.no_ssh:
        return [*options, *added], list(arguments)
    if len(names) == 1 and not given.force_multi:
        if not is_this_machine(names[0]):
            raise ClusterError(
                f"{names[0]} is the only node that {given.hostfile} leaves, and it is not this machine, but deepspeed "
                "would start its ranks here; add --force_multi before the script, or run the command there"
            )
        added += _visible_devices(given, environ, names[0], len(left[names[0]]))
        added += [] if given.no_ssh_check else ["--no_ssh_check"]
        added += [] if given.master_addr else ["--master_addr=127.0.0.1"]
        return [*options, *added], list(arguments)
    used = [host for host in hosts if host.name in names]
    slots = {name: given.num_gpus if given.num_gpus > 0 else len(left[name]) for name in names}
    check_training(arguments, sum(slots.values()))
    _check_reach(given, launcher, used)
    variables = _variables(environ)
    if launcher == "pdsh":
        from qwen_edit_zero.cluster.forwarding import argument_for_deepspeed, value_for_deepspeed

        _check_folder(Path.cwd())
        notice_lost_nodes(environ)
        _write_variables({name: value_for_deepspeed(value) for name, value in variables.items()}, environ)
        return [*options, *added], [argument_for_deepspeed(word) for word in arguments]
    _check_plain(variables, launcher)
    _write_variables(variables, environ)
    if launcher == "openmpi":
        added += _openmpi_interface(given.launcher_args, used)
    return [*options, *added], list(arguments)


def _parse(options: Sequence[str]) -> argparse.Namespace:
    import argparse
    from pathlib import Path

    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("-H", "--hostfile", type=Path, default=Path("/job/hostfile"))
    parser.add_argument("-i", "--include", default="")
    parser.add_argument("-e", "--exclude", default="")
    parser.add_argument("--num_nodes", type=int, default=-1)
    parser.add_argument("--num_gpus", type=int, default=-1)
    parser.add_argument("--master_addr", default="")
    parser.add_argument("--launcher", default="pdsh")
    parser.add_argument("--launcher_args", default="")
    parser.add_argument("--ssh_port", type=int, default=None)
    parser.add_argument("--no_ssh_check", action="store_true")
    parser.add_argument("--no_ssh", action="store_true")
    parser.add_argument("--force_multi", action="store_true")
    return parser.parse_known_args(options)[0]


def _hostfile_for_deepspeed(path: os.PathLike[str], hosts: Sequence[Host]) -> list[str]:
    """Nothing if DeepSpeed reads the file as we do; else the option that gives it a plain copy."""
    import re
    from pathlib import Path

    from qwen_edit_zero.cluster.hostlists import written

    lines = (line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines())
    read = [re.search(r"^(\S+)\s+slots=(\d+)", line) for line in lines if line and not line.startswith("#")]
    ours = [(f"{host.user}@{host.name}" if host.user else host.name, str(host.slots)) for host in hosts]
    if [match.groups() if match else None for match in read] == ours:
        return []
    return [f"--hostfile={_written(written(hosts, 'deepspeed'), 'hostfile-')}"]


def _visible_devices(given: argparse.Namespace, environ: Mapping[str, str], name: str, slots: int | None) -> list[str]:
    """Options that keep ranks of this machine to the GPUs of CUDA_VISIBLE_DEVICES, if it names some.

    By itself DeepSpeed takes its ids for places in the list without a hostfile (4,5 are then "not there"), and with one
    it starts on GPUs 0, 1 ... whatever is visible. `slots`: how many ranks the hostfile asks for; None: no hostfile.
    """
    from qwen_edit_zero.errors import ClusterError

    visible = environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    if visible in ("", "-1", "NoDevFiles") or given.include or given.exclude:
        return []
    ids = [word.strip() for word in visible.split(",")]
    if not all(word.isascii() and word.isdigit() for word in ids):
        raise ClusterError(
            f"CUDA_VISIBLE_DEVICES is {visible}, but deepspeed knows GPUs by number only; give it numbers "
            "(nvidia-smi -L shows both), or start with torchrun"
        )
    wanted = given.num_gpus if given.num_gpus > 0 else len(ids) if slots is None else slots
    if wanted > len(ids):
        raise ClusterError(
            f"{wanted} ranks are to start here, but CUDA_VISIBLE_DEVICES={visible} shows {len(ids)} GPUs; "
            "ask for fewer slots, or show more"
        )
    chosen = ids[:wanted]
    if given.num_gpus > 0 or given.num_nodes > 0:  # which cannot be given with --include
        if chosen == [str(i) for i in range(wanted)]:
            return []
        raise ClusterError(
            f"deepspeed would start on GPUs 0 to {wanted - 1} instead of {','.join(chosen)}, which "
            "CUDA_VISIBLE_DEVICES shows; leave out --num_gpus and --num_nodes, and let it show those to use only"
        )
    copy = _written(f"{name} slots={max(map(int, chosen)) + 1}\n", "hostfile-")
    return [f"--hostfile={copy}", f"--include={name}:{','.join(chosen)}"]


def _written(text: str, prefix: str) -> str:
    """A file that this command, and what it starts, can read until it ends."""
    import atexit
    import contextlib
    import tempfile

    with tempfile.NamedTemporaryFile("w", prefix=prefix, delete=False, encoding="utf-8") as file:
        file.write(text)

    def remove() -> None:
        with contextlib.suppress(OSError):
            os.unlink(file.name)

    atexit.register(remove)
    return file.name


def _check_reach(given: argparse.Namespace, launcher: str, hosts: Sequence[Host]) -> None:
    import shutil

    from qwen_edit_zero.cluster.reach import unreachable
    from qwen_edit_zero.errors import ClusterError

    if launcher == "openmpi" and (given.include or given.exclude or given.num_nodes != -1 or given.num_gpus != -1):
        raise ClusterError(
            "deepspeed's openmpi launcher knows no --include, --exclude, --num_nodes or --num_gpus; "
            "write a hostfile of the nodes and slots to use"
        )
    if launcher in _BY_SSH and not given.no_ssh_check:
        reasons = unreachable(hosts, port=given.ssh_port)
        if reasons:
            shown = "".join(f"\n  {name}: {reason}" for name, reason in reasons.items())
            raise ClusterError(
                f"{len(reasons)} of the {len(hosts)} nodes of {given.hostfile} cannot be reached by ssh without a "
                f"password:{shown}\ncheck the names, and that `ssh NODE true` works from this machine for each of "
                "them; for this machine alone use hostfiles/localhost"
            )
    program = _PROGRAMS.get(launcher)
    if program is not None and shutil.which(program) is None:
        raise ClusterError(f"deepspeed starts ranks on other nodes with {program}, which is not installed here")


def _check_folder(folder: os.PathLike[str]) -> None:
    import shlex

    from qwen_edit_zero.errors import ClusterError

    if shlex.quote(str(folder)) != str(folder):
        raise ClusterError(f"deepspeed cannot change to {folder} on other nodes; use a folder without blanks or signs")


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """What other nodes are to have in their environment: ours, then what the files of variables say."""
    from pathlib import Path

    from qwen_edit_zero.cluster.forwarding import environment_files, inherited, read_environment_file

    found = inherited(environ)
    for file in environment_files(environ, Path.cwd()):
        found |= read_environment_file(file)
    return found


def _check_plain(variables: Mapping[str, str], launcher: str) -> None:
    """mpirun gets no shell to take off the quotes that DeepSpeed puts round values that are not plain."""
    import re

    from qwen_edit_zero.errors import ClusterError

    for name, value in variables.items():
        if re.search(r"[^\w@%+=:,./-]", value):
            raise ClusterError(
                f"deepspeed's {launcher} launcher would put {name}={value!r} between quotes that stay; "
                f"unset {name}, or start with mpirun itself: mpirun -x {name} ..."
            )


def _write_variables(variables: Mapping[str, str], environ: MutableMapping[str, str]) -> None:
    if variables or "DS_ENV_FILE" in environ:
        text = "".join(f"{name}={value}\n" for name, value in variables.items())
        environ["DS_ENV_FILE"] = _written(text, "deepspeed-env-")


def _openmpi_interface(launcher_args: str, hosts: Sequence[Host]) -> list[str]:
    """DeepSpeed names eth0 to Open MPI; where there is none, name the interface that leads to another node."""
    from qwen_edit_zero.cluster.interfaces import interface_addresses, interface_towards, is_this_machine

    other = next((host.name for host in hosts if not is_this_machine(host.name)), None)
    if "btl_tcp_if_include" in launcher_args or other is None or "eth0" in interface_addresses():
        return []
    name = interface_towards(other)
    choice = f"{launcher_args} --mca btl_tcp_if_include {name} --mca oob_tcp_if_include {name}".strip()
    return [f"--launcher_args={choice}"] if name else []
