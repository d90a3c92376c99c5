"""Allocation of whole devices to shares of work: largest remainder, with a minimum each."""

from __future__ import annotations

from collections.abc import Mapping

from mmcompile.errors import ConfigError


def allocate(work: Mapping[str, float], devices: int, minimum: int = 1) -> dict[str, int]:
    """Allocate devices in proportion to work, by largest remainder; ties go to the component named first.

    A component whose share is below the minimum gets the minimum, and the others share the rest.

    Args:
        work: component -> seconds, FLOPs or any other measure of work.
        devices: number of devices to allocate, all of them.
        minimum: fewest devices of a component.

    Raises:
        ConfigError: fewer devices than the minimum takes, or work that is negative or zero in all.
    """
    if devices < minimum * len(work):
        raise ConfigError(
            f"{devices} devices for {len(work)} components of at least {minimum}; give {minimum * len(work)} or more"
        )
    if min(work.values()) < 0 or not sum(work.values()):
        raise ConfigError(f"work is {dict(work)}; wanted none negative and at least one above zero")
    free = dict(work)
    given: dict[str, int] = {}
    left = devices
    while small := [name for name, amount in free.items() if amount / sum(free.values()) * left < minimum]:
        for name in small:
            given[name] = minimum
            left -= minimum
            del free[name]
    total = sum(free.values())
    shares = {name: amount / total * left for name, amount in free.items()}
    given |= {name: int(share) for name, share in shares.items()}
    rest = devices - sum(given.values())
    for name in sorted(shares, key=lambda name: int(shares[name]) - shares[name])[:rest]:
        given[name] += 1
    return {name: given[name] for name in work}
