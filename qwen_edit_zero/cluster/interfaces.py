"""Network interfaces of this machine, and the address by which others reach it."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct

_ELSEWHERE = "192.0.2.1"  # an address that nobody has (RFC 5737)
_OF_THIS_MACHINE = ("docker", "br-", "virbr", "cni", "flannel", "cali", "veth", "podman", "lxc")
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def interface_addresses() -> dict[str, str]:
    """The IPv4 address of every interface that has one, loopback included."""
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine's loopback: by name, by address, or because its name resolves to one."""
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except (OSError, ValueError):
        return host == "localhost"


def is_this_machine(host: str) -> bool:
    """Whether `host` is a name or an IPv4 address of this machine."""
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return host in ("localhost", socket.gethostname())
    return ipaddress.ip_address(address).is_loopback or address in interface_addresses().values()


def is_served_here(host: str) -> bool:
    """Whether a server on this machine can be reached as `host`: it resolves to an address that sockets can bind."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False


def own_address() -> str:
    """An address of this machine that other machines can use; 127.0.0.1 if it has no other."""
    try:
        named = socket.gethostbyname(socket.gethostname())
    except OSError:
        named = "127.0.0.1"
    if not ipaddress.ip_address(named).is_loopback:
        return named
    others = [a for a in interface_addresses().values() if not ipaddress.ip_address(a).is_loopback]
    return others[0] if others else named


def interface_towards(host: str) -> str | None:
    """The interface through which this machine reaches `host`; None if it has no route or the interface is loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # UDP: chooses a route, sends nothing
        except OSError:
            return None
        source = probe.getsockname()[0]
    names = [name for name, address in interface_addresses().items() if address == source]
    return names[0] if names and not ipaddress.ip_address(source).is_loopback else None


def outward_interface() -> str | None:
    """The interface of the default route; without one the first that has an address and is neither loopback nor one
    that containers and virtual machines of this machine share. None if there is none."""
    if (routed := interface_towards(_ELSEWHERE)) is not None:
        return routed
    for name, address in interface_addresses().items():
        if not ipaddress.ip_address(address).is_loopback and not name.startswith(_OF_THIS_MACHINE):
            return name
    return None


def name_resolves_to_loopback() -> bool:
    """Whether this machine's own name is unknown or stands for loopback: gloo would then bind where nobody reaches."""
    try:
        return ipaddress.ip_address(socket.gethostbyname(socket.gethostname())).is_loopback
    except OSError:
        return True
