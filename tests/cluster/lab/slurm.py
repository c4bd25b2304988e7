"""A real Slurm on the nodes: munge and slurmd on each, slurmctld on the first, with its own key, state and logs."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.cluster.lab.missing import find
from tests.cluster.lab.nodes import Ended, Nodes

# Any Slurm from 22.05 on. linuxproc and cgroup/v1: no cgroup tree is mounted in the nodes. The intervals make waiting,
# requeueing and losing a node quick; nothing of a user's job depends on them.
_CONF = """\
ClusterName=lab
SlurmctldHost={first}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=2,batch_sched_delay=0
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout={slurmd_timeout}
MessageTimeout=10
KillWait={kill_wait}
MinJobAge=3600
JobRequeue=1
GresTypes=gpu
SlurmdParameters=config_overrides
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""
_DAEMONS = """
mkdir -p /run/munge /run/pmix && chmod 755 /run/munge && export SLURM_CONF={folder}/slurm.conf
{munged} --key-file={folder}/munge.key --socket=/run/munge/munge.socket.2 --pid-file=/run/munge/munged.pid \\
    --log-file=/run/munge/munged.log --seed-file=/run/munge/seed --num-threads=2 --force || exit 1
{controller}
{slurmd} -f {folder}/slurm.conf
"""
_OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}


class Slurm:
    """A cluster of the first `size` nodes, each with 96 processors and `gpus` GPUs, on paper only."""

    def __init__(self, nodes: Nodes, folder: Path, size: int, *, gpus: int = 8, kill_wait: int = 30) -> None:
        self.nodes, self.folder, self.names = nodes, folder, nodes.names[:size]
        self.first = self.names[0]
        folder.mkdir(parents=True)
        (folder / "state").mkdir()
        lines = (
            f"NodeName={name} NodeAddr={nodes.address(name)} CPUs=96 RealMemory=64000 Gres=gpu:{gpus} State=UNKNOWN"
            for name in self.names
        )
        conf = _CONF.format(
            first=self.first, address=nodes.address(self.first), folder=folder, nodes="\n".join(lines),
            slurmd_timeout=15, kill_wait=kill_wait,
        )  # fmt: skip
        (folder / "slurm.conf").write_text(conf)
        for number in range(gpus):
            (folder / f"gpu{number}").touch()  # Slurm counts files; it opens none of them
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-{gpus - 1}]\n")
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (folder / "mpi.conf").write_text("PMIxCliTmpDirBase=/run/pmix\n")
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)

    def start(self) -> None:
        """Start all daemons and wait until every node is idle. They end with the nodes."""
        for name in self.names:
            (self.folder / f"spool.{name}").mkdir(exist_ok=True)
            self.start_daemons(name)
        self.wait_until_idle()

    def wait_until_idle(self, timeout: float = 90.0) -> None:
        """Wait until every node can take a job."""
        deadline = time.monotonic() + timeout
        while (told := self.run("sinfo", "-h", "-t", "idle", "-o", "%D")).text.strip() != str(len(self.names)):
            logs = "".join(f"\n{f.name}:\n{f.read_text()[-2000:]}" for f in sorted(self.folder.glob("*.log")))
            assert time.monotonic() < deadline, f"Slurm's nodes do not become idle: {told.text}{logs}"
            time.sleep(0.2)

    def start_daemons(self, name: str) -> None:
        """Start what runs on a node, again after a crash of it."""
        controller = f"{find('slurmctld')} -i -f {self.folder}/slurm.conf" if name == self.first else ""
        script = _DAEMONS.format(
            folder=self.folder, controller=controller, munged=find("munged"), slurmd=find("slurmd")
        )
        log = self.folder / f"{name}.start.log"
        # Daemons would keep a pipe open, so what is said on the way goes to a file
        done = self.nodes.run(name, "bash", "-c", f"({script}) >>{log} 2>&1", cwd=self.folder)
        assert done.status == 0, f"Slurm's daemons do not start on {name}: {log.read_text()}"

    def run(
        self,
        *command: str | Path,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        timeout: float = 300.0,
    ) -> Ended:
        """Run a command on the first node, such as srun or scontrol."""
        settings = {"SLURM_CONF": str(self.folder / "slurm.conf"), **(environment or {})}
        return self.nodes.run(self.first, *command, cwd=cwd or self.folder, environment=settings, timeout=timeout)

    def submit(self, *arguments: str | Path, cwd: Path, environment: Mapping[str, str] | None = None) -> str:
        """Submit with sbatch and return the job's id."""
        done = self.run("sbatch", "--parsable", *arguments, cwd=cwd, environment=environment)
        assert done.status == 0, done.text
        return done.text.strip().splitlines()[-1]

    def job(self, job: str) -> dict[str, str]:
        """What scontrol says of a job: JobState, ExitCode, Restarts, NodeList ..."""
        done = self.run("scontrol", "show", "job", job, "-o")
        assert done.status == 0, done.text
        return dict(re.findall(r"(\S+?)=(\S*)", done.text.splitlines()[0]))

    def wait(self, job: str, *, states: Sequence[str] | None = None, timeout: float = 300.0) -> dict[str, str]:
        """Wait until a job is over, or in one of `states`, and return what scontrol then says of it."""
        wanted = set(states or _OVER)
        deadline = time.monotonic() + timeout
        while (told := self.job(job))["JobState"] not in wanted:
            assert time.monotonic() < deadline, f"job {job} is still {told['JobState']} after {timeout:.0f} s: {told}"
            time.sleep(0.3)
        return told
