"""Both ends of a link prove that they know a secret without sending it (HMAC-SHA256 over fresh random numbers).

What follows on the link is neither encrypted nor signed: the secret keeps out strangers and other jobs, not somebody who
can change packets on the wire. Use a private network, as for the tensors themselves.
"""

from __future__ import annotations

import hmac
import secrets
import stat
from pathlib import Path

from mmcompile.errors import ConfigError

_LEAST_BYTES = 16
_NONCE_BYTES = 32


def make_secret() -> bytes:
    """A new secret for one job."""
    return secrets.token_hex(32).encode()


def read_secret(path: Path) -> bytes:
    """The secret in a file, without white space around it.

    Raises:
        ConfigError: there is no such file, others may read it, or it is too short.
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
    """A fresh random number as hexadecimal text."""
    return secrets.token_hex(_NONCE_BYTES)


def prove(secret: bytes, side: str, challenge: str, answer: str) -> str:
    """The proof of one side over the nonces of both."""
    return hmac.new(secret, f"mmcompile/{side}/{challenge}/{answer}".encode(), "sha256").hexdigest()


def proves(mac: str, secret: bytes, side: str, challenge: str, answer: str) -> bool:
    """True if `mac` is the proof of that side. Takes as long for a wrong one."""
    return hmac.compare_digest(mac.encode(), prove(secret, side, challenge, answer).encode())
