"""What coordinator, agents and workers tell each other. Agents pass messages on between the other two.

Each is a frozen dataclass. On the wire it is a JSON object with the class in `kind` and the fields in `body`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import msgspec

from mmcompile.runtime.control.control_errors import ProtocolError

PROTOCOL_VERSION = 1


class Phase(StrEnum):
    """Where a generation stands."""

    WAITING = "waiting"
    """Not enough nodes, or none yet."""
    RESUMING = "resuming"
    """The coordinator was restarted and waits for the members it remembers."""
    PREPARE = "prepare"
    """Workers are told, and leave what they wait for in the generation before."""
    RENDEZVOUS = "rendezvous"
    """Workers connect their groups."""
    READY = "ready"
    """Workers copy the state they lack."""
    ACTIVE = "active"
    """Steps run."""
    ENDED = "ended"


class Advice(StrEnum):
    """What an agent that is refused should do."""

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
    """Agent: it knows the secret."""

    nonce: str
    mac: str
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class Accepted:
    """Coordinator: so does it."""

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
    """Last step they know to be committed."""


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
    """Worker: all gradients of a step are final and it can apply them without talking to anybody."""

    generation: int
    step: int
    worker: int
    microbatches: tuple[int, ...]
    """Ids this worker answers for; over all workers each id of the step occurs once."""
    cursor: str | None
    """What a later run must know to go on after this step (data, schedule, random state); JSON text of one worker."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Worker: a message to another worker failed, and nobody said why."""

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
    """Worker: no membership could go on; end training."""

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
class Prepare:
    """Coordinator: leave what you do and get ready for a generation."""

    generation: int
    first_rank: int
    """Of the node; its workers follow each other."""
    world_size: int
    nodes: tuple[str, ...]
    """Members in order of ranks."""
    joined: tuple[str, ...]
    """Members that hold no state yet."""
    active: int
    """Last generation that became active, 0 if none: what its members hold is the state of step `committed`."""
    committed: int
    """Steps that are done; the next one is number `committed + 1`."""
    cursor: str | None
    """Of the last committed step."""
    payload: str
    """JSON text of the planner."""
    store: str
    """host:port of the store."""
    cause: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Advance:
    """Coordinator: everybody reached the phase before; this one begins."""

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
    | Prepare
    | Advance
    | Commit
    | Suspend
    | Release
)

_KINDS: dict[str, type[Message]] = {
    kind.__name__: kind
    for kind in (
        *(Challenge, Proof, Accepted, Refused, Hello, Heartbeat, Idle, Reached, Reduced, Fault, Finished),
        *(Abort, Failed, Drain, Lost, Prepare, Advance, Commit, Suspend, Release),
    )
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Envelope:
    kind: str
    body: msgspec.Raw


def encode(message: Message) -> bytes:
    """A message as JSON text."""
    return msgspec.json.encode({"kind": type(message).__name__, "body": message})


def decode(data: bytes) -> Message:
    """The message in a JSON text.

    Raises:
        ProtocolError: it is none.
    """
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
        if envelope.kind not in _KINDS:
            raise ProtocolError(f"unknown message {envelope.kind[:40]!r}; both sides must run one version of mmcompile")
        return msgspec.json.decode(envelope.body, type=_KINDS[envelope.kind])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed message: {error}") from error
