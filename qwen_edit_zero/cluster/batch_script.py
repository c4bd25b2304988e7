"""The batch script that trains under Slurm: slurm/train.sbatch is what `train_script(BatchJob())` makes."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchJob:
    """What is asked of Slurm. `options` are further lines of #SBATCH, such as `--partition=gpu`.

    The script runs one task a GPU of whatever the allocation turns out to be, so `sbatch --nodes` and
    `--gpus-per-node` on the command line win over these.
    """

    nodes: int = 1
    gpus_per_node: int = 8
    name: str = "qwen-edit"
    options: tuple[str, ...] = ()


def train_script(job: BatchJob, arguments: Sequence[str] = ()) -> str:
    """Return the text of a batch script; `arguments` of the training command come before those given to sbatch."""
    fixed = f'set -- {shlex.join(arguments)} "$@"\n' if arguments else ""
    options = "".join(f"#SBATCH {option}\n" for option in job.options)
    text = _SCRIPT.replace("@NODES@", str(job.nodes)).replace("@GPUS@", str(job.gpus_per_node))
    return text.replace("@NAME@", job.name).replace("@OPTIONS@\n", options).replace("@ARGUMENTS@\n", fixed)


_SCRIPT = r"""#!/usr/bin/env bash
# Train on Slurm, one task a GPU. Everything behind the script goes to the training command:
#
#   sbatch --nodes 8 slurm/train.sbatch recipes/full_finetune.yaml model.path=/models/Qwen-Image-Edit-2509 \
#       data.manifest=/data/train.jsonl
#   sbatch --nodes 8 slurm/train.sbatch recipes/full_finetune.yaml --ds ds_configs/zero3.json ...
#
# Nodes, tasks and GPUs are those of the allocation: --nodes and --gpus-per-node of sbatch are all there is to change.
# Submit from the root of the checkout, or set PROJECT. PYTHON names another interpreter than .venv/bin/python; both,
# and run.dir, must be on a file system that all nodes share. The environment of sbatch reaches every rank.
#
# Ten minutes before the time limit, or on `scancel --signal=USR1 --batch JOB`, all ranks save and end, the job goes
# back into the queue, and when it runs again it goes on from there. A second signal ends it at once, without return.
# `scancel JOB` sends SIGTERM: the ranks save if Slurm's KillWait lets them, and the job does not come back.
#
# A sweep: --array=1-4 with SWEEP=FILE adds line N of FILE, such as `run.name=hot optimizer.lr=3e-5`, in task N.
#SBATCH --job-name=@NAME@
#SBATCH --nodes=@NODES@
#SBATCH --ntasks-per-node=@GPUS@
#SBATCH --gpus-per-node=@GPUS@
#SBATCH --cpus-per-task=12
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@600
@OPTIONS@
set -euo pipefail
@ARGUMENTS@

fail() {
    echo "error: $1" >&2
    exit 2
}

cd "${PROJECT:-${SLURM_SUBMIT_DIR:?start this script with sbatch}}"
python=${PYTHON:-$PWD/.venv/bin/python}
[[ -f qwen_edit_zero/train.py ]] ||
    fail "$PWD holds no qwen_edit_zero/train.py; submit from the root of the checkout, or set PROJECT"
[[ -x $python ]] || fail "there is no Python at $python; run make install, or set PYTHON"

# Conda, or modules, instead of .venv:
#   source /opt/conda/etc/profile.d/conda.sh && conda activate qwen && python=$(command -v python)
# What NCCL and gloo need to know of the network (docs/launch.md):
#   export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0 NCCL_IB_HCA=mlx5
# In a container (pyxis and enroot), behind srun:
#   --container-image=/images/qwen.sqsh --container-mounts="$PWD,/models,/data" --container-workdir="$PWD"

if [[ -n ${SWEEP:-} ]]; then
    [[ -n ${SLURM_ARRAY_TASK_ID:-} ]] || fail "SWEEP is set, but this is no array job; add --array=1-N"
    [[ -r $SWEEP ]] || fail "the sweep $SWEEP cannot be read"
    line=$(sed -n "${SLURM_ARRAY_TASK_ID}p" "$SWEEP")
    [[ -n $line ]] || fail "$SWEEP has no line $SLURM_ARRAY_TASK_ID, or it is empty; --array must fit the lines"
    split=$(xargs -n 1 printf '%s\n' <<<"$line") || fail "line $SLURM_ARRAY_TASK_ID of $SWEEP: unmatched quotes"
    mapfile -t words <<<"$split"
    [[ $line == *run.name=* ]] || words+=("run.name=${SLURM_JOB_NAME:-sweep}-$SLURM_ARRAY_JOB_ID-$SLURM_ARRAY_TASK_ID")
    set -- "$@" "${words[@]}"
fi

# The first node of the list has rank 0. Jobs that share a node have different numbers, so different ports.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((15000 + SLURM_JOB_ID % 15000))
export MASTER_ADDR MASTER_PORT
tasks=${SLURM_GPUS_ON_NODE:-${SLURM_NTASKS_PER_NODE:-1}}
cpus=$((${SLURM_CPUS_ON_NODE:-$tasks} / tasks))
# What srun would otherwise read, and find at odds with the numbers above
unset SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK

step='' asked=0 since=0 traps=0
on_usr1() {
    traps=$((traps + 1))
    # What comes within five seconds is the same request, here and in the ranks
    if ((asked == 0)); then asked=1 since=$SECONDS; elif ((SECONDS - since > 5)); then asked=2; fi
    echo "signal to the batch script: passed on to the ranks, which $( ((asked == 1)) && echo save and end || echo end)"
    [[ -z $step ]] || kill -USR1 "$step" || true
}
trap on_usr1 USR1
trap 'traps=$((traps + 1)) asked=9; echo "the job is cancelled"' TERM INT # Slurm tells the ranks itself

# In the background, or the traps would only run when srun has ended.
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks=$((SLURM_JOB_NUM_NODES * tasks)) --ntasks-per-node="$tasks" \
    --cpus-per-task=$((cpus > 0 ? cpus : 1)) --export=ALL --kill-on-bad-exit=1 --label \
    "$python" -u qwen_edit_zero/train.py "$@" &
step=$!
status=0
while :; do # a trap interrupts wait, which then shows the trap's signal, whether srun goes on or not
    before=$traps
    wait "$step" && status=0 || status=$?
    ((traps == before)) && break
done

# 75: the ranks saved because they were told to. One that srun ends because another has left shows a signal instead.
if ((asked < 2 && status == 75 || asked == 1 && status > 128)); then
    trap '' TERM # Slurm ends this script as it takes the job back
    echo "back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""
