"""Messages between coordinator, agents and workers. Agents pass messages on between the other two.

Each is a frozen dataclass. On the wire it is a JSON object with the class in `kind` and the fields in `body`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias, get_args

import msgspec

PROTOCOL_VERSION = 2


class ProtocolError(Exception):
    """The other side of a link sent something it must not send; the link is closed."""


class Phase(StrEnum):
    """Phase of a generation."""

    WAITING = "waiting"
    """Not enough nodes, or none yet."""
    RESUMING = "resuming"
    """The coordinator was restarted and waits for the members it remembers."""
    PREPARE = "prepare"
    """Workers leave what they wait for in the generation before."""
    RENDEZVOUS = "rendezvous"
    """Workers connect their groups."""
    READY = "ready"
    """Workers copy the state they lack."""
    ACTIVE = "active"
    """Steps run."""
    ENDED = "ended"


class Advice(StrEnum):
    """Next action of an agent that is refused."""

    RETRY = "retry"
    """Come back with the same workers."""
    RESTART = "restart"
    """Kill the workers and come back with new ones."""
    GIVE_UP = "give_up"


@dataclass(frozen=True, kw_only=True, slots=True)
class Challenge:
    """Coordinator: first frame of a connection."""

    nonce: str
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """Agent: proof that it has the secret."""

    nonce: str
    mac: str
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class Accepted:
    """Coordinator: proof that it has the secret."""

    mac: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """Coordinator: why the connection ends."""

    reason: str
    advice: Advice


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """Agent: all its workers have started and wait for a generation, or it was connected before."""

    node: str
    incarnation: str
    """Unique to one set of workers of a node."""
    num_workers: int
    generation: int
    """Last generation these workers were active in; 0 if none."""
    committed: int
    """Number of the last step whose commit reached them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """Both ways, on every link."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Idle:
    """Worker to agent: it has started and waits for its first generation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """Worker: it completed a phase (PREPARE, RENDEZVOUS or READY) of a generation."""

    generation: int
    phase: Phase
    worker: int
    """Index within its node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduced:
    """Worker: all gradients of a step are final and it can apply them without further messages."""

    generation: int
    step: int
    worker: int
    microbatches: tuple[int, ...]
    """Ids of microbatches this worker reports; over all workers each id of the step occurs once."""
    cursor: str | None
    """State from which a later run continues after this step (data, metrics); JSON text of one worker."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Worker: a message to another worker failed, for an unknown reason."""

    generation: int
    worker: int
    error: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """Worker: it has done its last step."""

    generation: int
    step: int
    worker: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Abort:
    """Worker: end training, since no membership could continue."""

    generation: int
    worker: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """Worker to agent: why it is about to exit."""

    error: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Drain:
    """Agent or worker: this node will be taken away soon."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """Agent: its workers are dead; sent after they were killed, so nothing of them can act any more."""

    cause: str
    returns: bool
    """It starts new ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """Coordinator: leave the generation before and get ready for this one. A worker's work until further notice."""

    number: int
    """Never used before; also not by a coordinator that was restarted."""
    rank: int
    """Rank of the worker; sent to an agent, the rank of the node's first worker, whose others follow."""
    world_size: int
    nodes: tuple[str, ...]
    """Members in order of ranks."""
    joined: tuple[str, ...]
    """Members that hold no state, a worker's own node among them if it holds none that counts."""
    active: int
    """Last generation that became active, 0 if none: what its members hold is the state of step `committed`. It can be one
    that a worker left while it waited in `ready`: the state it had in place then counts, not the one before."""
    committed: int
    """Number of the last committed step; the next one is `committed + 1`."""
    cursor: str | None
    """Cursor of the last committed step."""
    payload: str
    """JSON text of the planner."""
    store: str
    """host:port of the store."""
    cause: str

    @property
    def prefix(self) -> str:
        """Prefix of this generation's keys in the store; no other generation ever uses it."""
        return f"generation/{self.number}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Advance:
    """Coordinator: all workers reached the phase before; this one begins."""

    generation: int
    phase: Phase


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """Coordinator: apply the gradients of a step."""

    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspend:
    """Coordinator: the generation is over and the next one needs more nodes, or does not need yours."""

    generation: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """Coordinator: end your workers."""

    reason: str
    success: bool


Message: TypeAlias = (
    Challenge
    | Proof
    | Accepted
    | Refused
    | Hello
    | Heartbeat
    | Idle
    | Reached
    | Reduced
    | Fault
    | Finished
    | Abort
    | Failed
    | Drain
    | Lost
    | Generation
    | Advance
    | Commit
    | Suspend
    | Release
)

_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """A message as JSON text."""
    return msgspec.json.encode({"kind": type(message).__name__, "body": message})


def decode(data: bytes) -> Message:
    """The message in a JSON text.

    Raises:
        ProtocolError: it is none.
    """
    try:
        fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        kind = msgspec.json.decode(fields["kind"], type=str)
        if kind not in _KINDS:
            raise ProtocolError(f"unknown message {kind[:40]!r}; both sides must run one version of mmcompile")
        return msgspec.json.decode(fields["body"], type=_KINDS[kind])
    except (msgspec.DecodeError, KeyError, RecursionError) as error:
        raise ProtocolError(f"malformed message: {error}") from error
