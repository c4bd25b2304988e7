#!/usr/bin/env bash
# In the box: plug_in.sh FOLDER NAME ADDRESS   Starts a node, also again after its crash, and plugs it into the bridge.
set -e
folder=$1 name=$2 address=$3 here=$(dirname "$(readlink -f "$0")")
ip link delete "$name" 2>/dev/null || true # of a crashed node, which the kernel has not taken away yet
unshare --net --uts --mount --pid --fork --kill-child \
    bash "$here/node.sh" "$folder" "$name" "$address" </dev/null >>"$folder/$name.log" 2>&1 &
until [ "$(readlink "/proc/$!/ns/net")" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.01; done
# The same hardware address each time: neighbours remember it
ip link add "$name" type veth peer name eth0 address "$(printf '02:00:%02x:%02x:%02x:%02x' ${address//./ })" netns $!
ip link set "$name" master br0 up
