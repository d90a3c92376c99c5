"""What can go wrong between coordinator, agents and workers."""

from __future__ import annotations


class ProtocolError(Exception):
    """The other side of a link sent something it must not send; the link is closed."""


class Superseded(Exception):
    """The generation is over: drop its groups, keep your state, and call `wait_generation` again."""


class Released(Exception):
    """Training ended, or the node was let go: the worker may exit."""
