"""Whether the nodes of a hostfile can be reached the way launchers do it: by ssh, without a password; and are still."""

from __future__ import annotations

import subprocess
from collections.abc import MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from qwen_edit_zero.cluster.hostfile import Host
from qwen_edit_zero.errors import ClusterError

_PDSH = "PDSH_SSH_ARGS_APPEND"
_NOTICE = "-o ServerAliveInterval=10 -o ServerAliveCountMax=3"


def notice_lost_nodes(environ: MutableMapping[str, str]) -> None:
    """Have pdsh give a node up that has not answered for 30 s: by itself ssh waits for one that was cut off for ever.

    Does nothing where the user has set how ssh is to look.
    """
    given = environ.get(_PDSH, "")
    if "serveralive" not in given.lower():
        environ[_PDSH] = f"{given} {_NOTICE}".strip()


def unreachable(hosts: Sequence[Host], *, port: int | None = None, timeout_seconds: int = 5) -> dict[str, str]:
    """Return the hosts on which `ssh HOST true` fails, with ssh's reason. All are tried at once.

    `port` is ssh's; None: as ssh is configured. Raises ClusterError if there is no ssh on this machine.
    """

    def reason(host: Host) -> str:
        target = f"{host.user}@{host.name}" if host.user else host.name
        command = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={timeout_seconds}", target, "true"]
        if port is not None:
            command[1:1] = ["-p", str(port)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=3 * timeout_seconds, check=False)
        except FileNotFoundError:
            raise ClusterError("there is no ssh on this machine, so no other node can be reached") from None
        except subprocess.TimeoutExpired:
            return f"no answer within {3 * timeout_seconds} s"
        lines = [line for line in done.stderr.strip().splitlines() if line]
        return "" if done.returncode == 0 else (lines[-1] if lines else f"ssh ended with status {done.returncode}")

    with ThreadPoolExecutor(max_workers=64) as pool:
        reasons = list(pool.map(reason, hosts))
    return {host.name: text for host, text in zip(hosts, reasons, strict=True) if text}
