#!/usr/bin/env bash
# Install the Debian packages that some tests drive: pdsh and ssh, Slurm, Open MPI, libaio. Without root or apt those tests
# say what they miss. Their daemons are not left running: the tests start their own.
set -euo pipefail

packages=(
    iproute2 util-linux procps                      # nodes made of namespaces
    pdsh openssh-client openssh-server              # deepspeed --hostfile
    slurm-wlm slurm-client slurmctld slurmd munge   # srun, sbatch
    openmpi-bin                                     # mpirun
    libaio-dev                                      # DeepSpeed's asynchronous I/O
)
missing=()
for package in "${packages[@]}"; do
    dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "Not installed, and this user cannot install them: ${missing[*]}. The tests that need them will be skipped."
    exit 0
fi
echo "Installing ${missing[*]} ..."
export DEBIAN_FRONTEND=noninteractive
export RUNLEVEL=1 # tells invoke-rc.d to start nothing
apt-get update -qq >/dev/null || true
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null 2>&1 ||
    echo "apt-get could not install ${missing[*]}; the tests that need them will be skipped."
