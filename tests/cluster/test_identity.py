"""Who a process is, from the variables of each launcher."""

from __future__ import annotations

import pytest

from qwen_edit_zero.cluster.identity import Identity, discover, guess_ranks
from qwen_edit_zero.errors import ClusterError

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
DEEPSPEED = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_SIZE": "2", "CROSS_RANK": "1",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}  # fmt: skip
SRUN = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1", "SLURM_NNODES": "2", "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_JOB_NODELIST": "n[583,752]",
}  # fmt: skip


def without(env: dict[str, str], *names: str, **changed: str) -> dict[str, str]:
    return {name: value for name, value in (env | changed).items() if name not in names}


def test_each_launcher_is_recognised() -> None:
    assert discover(TORCHRUN) == Identity(3, 1, 4, 2, "torchrun", "node1", 29500)
    assert discover(DEEPSPEED) == Identity(3, 1, 4, 2, "deepspeed", "10.0.0.1", 29500)
    assert discover(without(TORCHRUN, "TORCHELASTIC_RUN_ID")).launcher == "environment"
    slurm = discover(SRUN)
    assert (slurm.rank, slurm.local_rank, slurm.world_size, slurm.local_world_size) == (3, 1, 4, 2)
    assert (slurm.launcher, slurm.master_addr) == ("slurm", "n583")
    assert discover({}) == Identity(0, 0, 1, 1, "single", "127.0.0.1", 0)


def test_ranks_of_one_job_meet_at_one_place_and_other_jobs_elsewhere() -> None:
    ports = {discover(SRUN | {"SLURM_PROCID": str(n), "SLURM_NODEID": str(n // 2)}).master_port for n in range(4)}
    assert len(ports) == 1
    assert ports != {discover(SRUN | {"SLURM_JOB_ID": "78"}).master_port}
    mpi = {discover(OPENMPI | {"OMPI_COMM_WORLD_RANK": str(n), "PMIX_NAMESPACE": "a@1"}).master_port for n in range(2)}
    assert len(mpi) == 1
    assert mpi != {discover(OPENMPI | {"PMIX_NAMESPACE": "b@1"}).master_port}


def test_master_addr_and_port_that_are_set_win() -> None:
    for env in (SRUN, OPENMPI):
        identity = discover(env | {"MASTER_ADDR": "here", "MASTER_PORT": "1234"})
        assert (identity.master_addr, identity.master_port) == ("here", 1234)


def test_mpi_over_several_nodes_leaves_the_meeting_point_to_mpi() -> None:
    assert discover(OPENMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}).master_addr == ""


def test_other_mpis() -> None:
    hydra = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    assert (discover(hydra).rank, discover(hydra).launcher) == (1, "pmi")
    mvapich = {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_LOCAL_RANK": "1"}
    assert (discover(mvapich).world_size, discover(mvapich).launcher) == (2, "mvapich")


def test_mpirun_inside_one_slurm_task_counts_by_mpi_and_says_so() -> None:
    identity = discover(OPENMPI | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"})
    assert (identity.rank, identity.world_size) == (1, 4)
    assert "Slurm says task 0 of 1" in identity.note


def test_torchrun_inside_srun_counts_by_torchrun() -> None:
    assert discover(TORCHRUN | SRUN | {"SLURM_PROCID": "1"}).launcher == "torchrun"


def test_uneven_nodes_under_slurm() -> None:
    env = SRUN | {"SLURM_TASKS_PER_NODE": "2(x3),1", "SLURM_NTASKS": "7", "SLURM_PROCID": "6", "SLURM_LOCALID": "0"}
    assert discover(env | {"SLURM_NODEID": "3"}).local_world_size == 1


def test_one_slurm_task_is_a_single_process() -> None:
    assert discover({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "5"}).world_size == 1


def test_local_rank_may_come_as_an_argument_but_not_contradict() -> None:
    assert discover(without(TORCHRUN, "LOCAL_RANK"), local_rank_argument=1).local_rank == 1
    assert discover(TORCHRUN, local_rank_argument=1).local_rank == 1
    with pytest.raises(ClusterError, match=r"--local_rank says 0, but torchrun says local rank 1"):
        discover(TORCHRUN, local_rank_argument=0)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (TORCHRUN | {"RANK": ""}, "RANK is ''"),
        (TORCHRUN | {"RANK": "x"}, "RANK is 'x'"),
        (TORCHRUN | {"RANK": "-1"}, "RANK is '-1'"),
        ({"RANK": "", "WORLD_SIZE": "4"}, "RANK is ''"),
        ({"WORLD_SIZE": "4"}, "RANK is not set"),
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"RANK": "4", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, "rank must be less than the world size"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "rank must be less than the world size"),
        (without(TORCHRUN, "MASTER_ADDR"), "MASTER_ADDR is not set"),
        (without(TORCHRUN, "LOCAL_RANK"), "LOCAL_RANK is not set"),
        (without(TORCHRUN, "LOCAL_WORLD_SIZE", MASTER_ADDR="192.0.2.1"), "LOCAL_WORLD_SIZE is not set"),
        (TORCHRUN | {"MASTER_PORT": "99999"}, "MASTER_PORT is 99999"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "contradict"),
        (without(TORCHRUN, "TORCHELASTIC_RUN_ID") | OPENMPI, "unset RANK"),
        ({"SLURM_JOB_ID": "1", "SLURM_NNODES": "2", "SLURM_NTASKS": "2"}, "without srun"),
        (without(SRUN, "SLURM_STEP_ID", SLURM_PROCID="0"), "batch script"),
        (
            {
                "SLURM_NNODES": "1", "SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "2", "SLURM_PROCID": "0",
                "SLURM_LOCALID": "0",
            },
            "1 task in all but 2 a node",
        ),
        (SRUN | {"SLURM_TASKS_PER_NODE": "2(x"}, "SLURM_TASKS_PER_NODE"),
        (SRUN | {"SLURM_NODEID": "5"}, "SLURM_NODEID is 5"),
        (without(SRUN, "SLURM_JOB_NODELIST"), "SLURM_JOB_NODELIST is not set"),
        (without(OPENMPI, "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_SIZE is not set"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(env: dict[str, str], words: str) -> None:
    with pytest.raises(ClusterError) as caught:
        discover(env)
    assert words in str(caught.value)


def test_guessing_never_fails() -> None:
    assert guess_ranks({"RANK": "3", "LOCAL_RANK": "x"}) == (3, None)
    assert guess_ranks({"RANK": "", "SLURM_PROCID": "2", "SLURM_LOCALID": "1"}) == (2, 1)
    assert guess_ranks({}) == (None, None)
