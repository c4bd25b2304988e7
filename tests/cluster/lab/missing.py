"""What this machine lacks for nodes made of namespaces, for Slurm and for MPI: one line, or nothing."""

from __future__ import annotations

import os
import shutil
import subprocess

NODES = {
    "ip": "iproute2", "nsenter": "util-linux", "unshare": "util-linux", "setpriv": "util-linux",
    "sshd": "openssh-server", "ssh": "openssh-client", "ssh-keygen": "openssh-client", "pdsh": "pdsh",
}  # fmt: skip
SLURM = {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "srun": "slurm-wlm", "sbatch": "slurm-wlm", "munged": "munge"}
OPENMPI = {"mpirun": "openmpi-bin", "ompi_info": "openmpi-bin"}
_PROBE = """
mount --make-rprivate / && mount -t proc proc /proc && mount -t tmpfs x /dev/shm && ip link add br0 type bridge &&
ip link add veth0 type veth peer name veth1 && unshare --net --uts --mount --pid --fork mount -t proc proc /proc
"""


def find(command: str) -> str | None:
    """The path of a command, daemons in sbin included."""
    return shutil.which(command, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin:/usr/local/sbin")


def packages(commands: dict[str, str]) -> str | None:
    """What to install so that all of `commands` are there; None if they are."""
    missing = sorted({f"{package} ({name})" for name, package in commands.items() if find(name) is None})
    return f"not installed: {', '.join(missing)}; see tools/install_system_packages.sh" if missing else None


def nodes() -> str | None:
    """Why nodes cannot be made of namespaces here; None if they can."""
    if lacking := packages(NODES):
        return lacking
    if os.geteuid() != 0:
        return "nodes are made of namespaces, which needs root"
    done = subprocess.run(
        ["unshare", "--net", "--pid", "--mount", "--uts", "--fork", "--kill-child", "sh", "-c", _PROBE],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    return f"nodes cannot be made of namespaces here: {reason}" if done.returncode else None
