#!/usr/bin/env bash
# PID 1 of a node: node.sh FOLDER NAME ADDRESS   Its own name, network, processes, /run and /dev/shm; files are shared.
folder=$1 name=$2 address=$3
hostname "$name"
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs -o mode=755 run /run
mount -t tmpfs -o mode=1777 shm /dev/shm
mkdir -p /run/sshd
mount --bind "$folder/hosts" /etc/hosts
mount --bind "$folder/ssh_config" /etc/ssh/ssh_config
until ip addr add "$address/24" dev eth0 2>/dev/null; do sleep 0.02; done
ip link set eth0 up
ip link set lo up
"$(command -v sshd || echo /usr/sbin/sshd)" -f "$folder/sshd_config" -o "ListenAddress=$address" -E "$folder/$name.sshd.log" &&
    touch "$folder/$name.ready"
while :; do wait; sleep 1; done # reaps
