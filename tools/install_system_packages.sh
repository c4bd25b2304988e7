#!/usr/bin/env bash
# Install the Debian packages that some tests drive (pdsh, ssh, libaio); without root or apt those tests say what they miss.
set -euo pipefail

packages=(pdsh openssh-client openmpi-bin libaio-dev)
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
apt-get update -qq >/dev/null || true
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null 2>&1 ||
    echo "apt-get could not install ${missing[*]}; the tests that need them will be skipped."
