"""`Endpoint` of a coordinator, and proofs by which both ends of a link show that they have the secret, without sending it.

A proof is HMAC-SHA256 over fresh random numbers.

Later messages on the link are neither encrypted nor signed: the secret keeps out strangers and other jobs, not an attacker who
can change packets on the wire. Use a private network, as for the tensors themselves.
"""

from __future__ import annotations

import hmac
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

from mmcompile.errors import ConfigError
from mmcompile.runtime.control.times import Times

_LEAST_BYTES = 16
_NONCE_BYTES = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Address of a coordinator, with the secret and timeouts that its nodes share."""

    host: str
    port: int
    key: bytes
    """Secret of the run, shared by all its nodes."""
    times: Times = field(default_factory=Times)

    @classmethod
    def parse(cls, address: str, key: bytes) -> Endpoint:
        """Return the endpoint at `host:port`.

        Raises:
            ConfigError: `address` has another form, or other machines cannot connect to it.
        """
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 2**16:
            raise ConfigError(f"address {address!r} is not HOST:PORT, for example 10.0.0.1:29400")
        if host in ("0.0.0.0", "::"):
            raise ConfigError(
                f"{host} is no address that workers can connect to; give the one that they reach this machine by"
            )
        return cls(host=host, port=int(port), key=key)


def make_secret() -> bytes:
    """Return a new random secret for one job, as 64 hexadecimal digits."""
    return secrets.token_hex(32).encode()


def read_secret(path: Path) -> bytes:
    """Return the secret in a file, without surrounding white space.

    Raises:
        ConfigError: there is no such file, other users may read it, or the secret is too short.
    """
    try:
        mode, secret = path.stat().st_mode, path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"cannot read the secret {path}: {error.strerror}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"{path} can be read by others (mode {stat.S_IMODE(mode):o}): run chmod 600 {path}")
    if len(secret) < _LEAST_BYTES:
        raise ConfigError(f"the secret in {path} has {len(secret)} bytes, the least is {_LEAST_BYTES}")
    return secret


def make_nonce() -> str:
    """Return a fresh random number as hexadecimal text."""
    return secrets.token_hex(_NONCE_BYTES)


def prove(secret: bytes, side: str, challenge: str, answer: str) -> str:
    """Return the proof (HMAC-SHA256 in hex) of `side`, "agent" or "coordinator", over the nonces of both.

    Args:
        challenge, answer: nonces of the coordinator and of the agent.
    """
    return hmac.new(secret, f"mmcompile/{side}/{challenge}/{answer}".encode(), "sha256").hexdigest()


def proves(mac: str, secret: bytes, side: str, challenge: str, answer: str) -> bool:
    """Return whether `mac` is the proof of that side, in a time that does not depend on the result."""
    return hmac.compare_digest(mac.encode(), prove(secret, side, challenge, answer).encode())
