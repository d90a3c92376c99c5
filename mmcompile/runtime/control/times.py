"""`Times`: every timeout of the control plane, derived from one deadline."""

from __future__ import annotations

from dataclasses import dataclass

from mmcompile.errors import ConfigError

_LEAST_DEADLINE_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Timeouts derived from the recovery deadline, so that no inner timeout exceeds the outer one.

    A failure is noticed within `fault_grace_s` and an attempt to recover takes at most `attempt_s`; together they are the
    deadline. Most failures are noticed in milliseconds: the lease is for links that fall silent and processes that hang.

    Raises:
        ConfigError: the deadline is too short for a lease that a busy machine can keep.
    """

    recovery_deadline_s: float = 20.0
    """Maximum seconds from a failure to the next active generation, if no further failure happens meanwhile.

    Also the seconds for which agents try to reach a lost coordinator before they end their workers.
    """
    max_attempts: int = 8
    """Number of generations in a row without a committed step before training stops."""

    def __post_init__(self) -> None:
        if not self.recovery_deadline_s >= _LEAST_DEADLINE_S:
            raise ConfigError(
                f"recovery_deadline_s is {self.recovery_deadline_s}, the least is {_LEAST_DEADLINE_S}: members send a sign "
                "of life every 1/25 of it and are given up after 1/5 of it, which a busy machine must be able to keep"
            )
        if self.max_attempts < 1:
            raise ConfigError(f"max_attempts is {self.max_attempts}, the least is 1")

    @property
    def lease_s(self) -> float:
        """Seconds of silence after which a member counts as lost."""
        return self.recovery_deadline_s / 5

    @property
    def heartbeat_s(self) -> float:
        """Seconds between two heartbeats."""
        return self.lease_s / 5

    @property
    def fault_grace_s(self) -> float:
        """Seconds from a worker's report of a broken link to a new generation, if no member is lost.

        Longer than one lease, within which a dead member is noticed.
        """
        return self.lease_s * 1.25

    @property
    def attempt_s(self) -> float:
        """Seconds after which members that have not completed a generation's preparation count as lost."""
        return self.recovery_deadline_s - self.fault_grace_s

    @property
    def resume_s(self) -> float:
        """Seconds that a restarted coordinator waits for the members in its log."""
        return self.lease_s * 1.25

    @property
    def tick_s(self) -> float:
        """Seconds between two checks of leases and timers."""
        return min(0.25, self.heartbeat_s / 2)
