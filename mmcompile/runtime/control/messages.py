"""Messages between coordinator, agents and workers. Agents forward messages between coordinator and workers.

Each message is a frozen dataclass. On the wire it is a JSON object with the class in `kind` and the fields in `body`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias, get_args

import msgspec

PROTOCOL_VERSION = 2


class ProtocolError(Exception):
    """The other end of a link sent an invalid message; the link is closed."""


class Phase(StrEnum):
    """Phase of a generation, from waiting for nodes to its end."""

    WAITING = "waiting"
    """Too few nodes are connected for a generation, at the start or after losses."""
    RESUMING = "resuming"
    """The coordinator was restarted and waits for the members in its log."""
    PREPARE = "prepare"
    """Workers leave the previous generation."""
    RENDEZVOUS = "rendezvous"
    """Workers connect their process groups."""
    READY = "ready"
    """Workers receive the state they lack."""
    ACTIVE = "active"
    """The generation is active: steps run."""
    ENDED = "ended"


class Advice(StrEnum):
    """Next action of an agent that the coordinator refused."""

    RETRY = "retry"
    """Connect again with the same workers."""
    RESTART = "restart"
    """Kill the workers, and connect again with new ones."""
    GIVE_UP = "give_up"


@dataclass(frozen=True, kw_only=True, slots=True)
class Challenge:
    """Coordinator to agent: first message of a connection, with a random number for the proof of the secret."""

    nonce: str
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """Agent to coordinator: proof that the agent has the secret."""

    nonce: str
    mac: str
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class Accepted:
    """Coordinator to agent: proof that the coordinator has the secret."""

    mac: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """Coordinator to agent: reason why the connection ends, and what to do next."""

    reason: str
    advice: Advice


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """Agent to coordinator: all workers have started and wait for a generation, or the agent reconnects."""

    node: str
    incarnation: str
    """Random name of one set of a node's workers; new workers have a new one."""
    num_workers: int
    generation: int
    """Last generation in which these workers were active; 0 if they never were."""
    committed: int
    """Number of the last step whose commit reached the workers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """Sign of life, sent in both directions on every link."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Idle:
    """Worker to agent: the worker has started and waits for its first generation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """Worker to coordinator: the worker completed a phase (PREPARE, RENDEZVOUS or READY) of a generation."""

    generation: int
    phase: Phase
    worker: int
    """Index of the worker within its node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduced:
    """Worker to coordinator: its gradients of a step are final, and can be applied without further messages."""

    generation: int
    step: int
    worker: int
    microbatches: tuple[int, ...]
    """Ids of the microbatches that this worker reports; over all workers each id of the step occurs once."""
    cursor: str | None
    """JSON text (data, metrics) from which a later run continues after this step; given by one worker, None by the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Worker to coordinator: a message to or from another worker failed, for an unknown reason."""

    generation: int
    worker: int
    error: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """Worker to coordinator: the worker has done its last step."""

    generation: int
    step: int
    worker: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Abort:
    """Worker to coordinator: end training, since no membership could continue."""

    generation: int
    worker: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """Worker to agent: error because of which the worker is about to exit."""

    error: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Drain:
    """Agent or worker, to each other and to the coordinator: the node will be taken away soon."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """Agent to coordinator: the node's workers are dead. Sent after they were killed, so none of them can act any more."""

    cause: str
    returns: bool
    """True if the agent will start new workers and join again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """Coordinator to agents and workers: leave the previous generation and prepare for this one."""

    number: int
    """Number that no other generation has, also not one of a restarted coordinator."""
    rank: int
    """Rank of the worker. In the message to an agent: rank of the node's first worker; its other workers have the next ranks."""
    world_size: int
    nodes: tuple[str, ...]
    """Member nodes in order of ranks."""
    joined: tuple[str, ...]
    """Member nodes that were not in generation `active`, or have new workers since; any state that they hold is outdated."""
    active: int
    """Last generation that became active, 0 if none did: its members hold the state of step `committed`.

    A worker that left it while still waiting in `MembershipClient.ready` is a member too: it had copied the state before.
    """
    committed: int
    """Number of the last committed step; the next one is `committed + 1`."""
    cursor: str | None
    """Data cursor of the last committed step; None before the first."""
    payload: str
    """JSON text of the planner's plan for this generation."""
    store: str
    """host:port of the store where workers connect."""
    cause: str

    @property
    def prefix(self) -> str:
        """Prefix of this generation's keys in the store, which no other generation uses."""
        return f"generation/{self.number}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Advance:
    """Coordinator to workers: all workers have completed the previous phase; this phase begins."""

    generation: int
    phase: Phase


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """Coordinator to workers: apply the gradients of this step."""

    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspend:
    """Coordinator to workers: the generation is over, and the next one needs more nodes, or does not include this node."""

    generation: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """Coordinator to agent and workers: end the workers."""

    reason: str
    success: bool


Report: TypeAlias = Reached | Reduced | Fault | Finished | Abort
"""Messages of workers that their agent passes on to the coordinator."""
Message: TypeAlias = (
    Challenge
    | Proof
    | Accepted
    | Refused
    | Hello
    | Heartbeat
    | Idle
    | Report
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
    """Return a message as JSON text."""
    return msgspec.json.encode({"kind": type(message).__name__, "body": message})


def decode(data: bytes) -> Message:
    """Return the message in a JSON text.

    Raises:
        ProtocolError: the text is no message.
    """
    try:
        fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        kind = msgspec.json.decode(fields["kind"], type=str)
        if kind not in _KINDS:
            raise ProtocolError(f"unknown message {kind[:40]!r}; both sides must run one version of mmcompile")
        return msgspec.json.decode(fields["body"], type=_KINDS[kind])
    except (msgspec.DecodeError, KeyError, RecursionError) as error:
        raise ProtocolError(f"malformed message: {error}") from error
