"""Address at which a rank listens for ranks on other machines."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping

from mmcompile.errors import ConfigError

_ANY_PORT = 9
"""Any port: it is the target of a datagram socket that finds the local address, and that sends no datagram."""


def listen_at(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Return a network interface, or an address of this machine that the other machines can reach.

    The interface is GLOO_SOCKET_IFNAME, if it is set. Otherwise the address is the local end of the route to MASTER_ADDR, since
    gloo's default, the address of the host's own name, is a loopback address on many systems.

    Returns:
        ("interface", name) or ("hostname", address); None if no launcher set an address.

    Raises:
        ConfigError: there are other machines, and the address is loopback; or MASTER_ADDR names no machine.
    """
    if name := environment.get("GLOO_SOCKET_IFNAME"):
        return "interface", name
    if not (master := environment.get("MASTER_ADDR")):
        return None
    found = address_towards(master)
    world, here = environment.get("WORLD_SIZE"), environment.get("LOCAL_WORLD_SIZE")
    if ipaddress.ip_address(found).is_loopback and here is not None and here != world:
        raise ConfigError(
            f"rank {environment.get('RANK')} would listen at {found}, which other machines cannot reach, since MASTER_ADDR is "
            f"{master} here: launch with an address of the first machine instead of its name (--master-addr, or --local-addr), "
            "or set GLOO_SOCKET_IFNAME to a network interface that all are joined by"
        )
    return "hostname", found


def address_towards(machine: str) -> str:
    """Return the local address from which packets to another machine are sent. No packet is sent.

    Raises:
        ConfigError: there is no such machine, or no route to it.
    """
    try:
        kind, how, protocol, _, address = socket.getaddrinfo(machine, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, how, protocol) as way:
            way.connect(address)
            return way.getsockname()[0]
    except OSError as error:
        raise ConfigError(f"MASTER_ADDR is {machine!r}, which this machine finds no way to: {error}") from error
