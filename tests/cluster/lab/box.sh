#!/usr/bin/env bash
# PID 1 of the box: box.sh FOLDER NAME...   A bridge, and a node of each name on it. Everything ends with this process.
set -e
folder=$1 here=$(dirname "$(readlink -f "$0")")
shift
mount --make-rprivate /
mount -t proc proc /proc
ip link set lo up
ip link add br0 type bridge
ip addr add 10.77.0.1/24 dev br0
ip link set br0 up
number=10
for name in "$@"; do
    number=$((number + 1))
    bash "$here/plug_in.sh" "$folder" "$name" "10.77.0.$number"
done
touch "$folder/box.ready"
set +e
while :; do wait; sleep 1; done # reaps
