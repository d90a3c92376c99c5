"""Gradients of a step: summed over microbatches and over the ranks that hold a parameter, while backwards still run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from mmcompile.config import Reduction
from mmcompile.errors import EngineError
from mmcompile.runtime.comm.groups import Groups
from mmcompile.runtime.monitoring.fail_points import fail_point
from mmcompile.runtime.optim.arithmetic import Arithmetic, Largest, arithmetic_of
from mmcompile.runtime.optim.gradient_bucket import Bucket, OwnerSet, gradient_tags, split_into_buckets
from mmcompile.runtime.optim.master_weights import HALF

BUCKET_BYTES = 16 * 2**20
"""Maximum bytes of a bucket's parameters; a larger parameter has a bucket of its own.

Smaller buckets start earlier, and delay other messages between the same ranks for less time; larger ones need fewer messages.
"""


def buckets_of(
    shared: Sequence[OwnerSet], parameters: Mapping[str, nn.Parameter], rank: int, bucket_bytes: int
) -> Iterator[tuple[OwnerSet, dict[str, nn.Parameter], tuple[int, int]]]:
    """Yield (owner set, parameters by name, two message tags) of each bucket of parameters that this rank shares with others.

    The first tag is of gradients sent to be summed, the second of the sums, or updated parameters, sent back.

    Args:
        shared: all owner sets, the same on all ranks, so that every rank yields its buckets in the same order.
    """
    ordered = sorted(shared, key=lambda item: (item.owners, item.givers, -1 if item.updater is None else item.updater))
    for place, item in enumerate(ordered):
        if item.givers and rank in item.owners:
            held = {name: parameters[name] for name in item.names}
            for number, part in enumerate(split_into_buckets(held, bucket_bytes)):
                yield item, part, gradient_tags(place, len(ordered), number)


@final
class CarriedSums:
    """Sums of one rank's gradients over the calls of a step before its last. Ranks exchange sums in the last call, which updates.

    Sums that torch accumulates in `.grad` stay there; this object has all others, in the reduction's format (float64 for "fp64").

    Args:
        master_weights: half-precision parameters have float32 masters.
    """

    def __init__(self, reduction: Reduction, *, master_weights: bool) -> None:
        self._arithmetics = {master: arithmetic_of(reduction, master=master) for master in {False, master_weights}}
        self._master_weights = master_weights
        self.parameters: Mapping[str, nn.Parameter] = {}
        """Trainable parameters of this rank, by original name; to be set before each call, and may be more than before."""
        self._num_terms: Counter[str] = Counter()
        self._sums: dict[str, Tensor] = {}
        self._largest = Largest(self._arithmetics[False].limit)

    def ran(self, names: Iterable[str]) -> None:
        """Add what a backward left in `.grad` of the parameters `names` to their sums; called after every backward."""
        for name in names:
            parameter = self.parameters[name]
            self._num_terms[name] += 1
            arithmetic = self._arithmetics[self._master_weights and parameter.dtype in HALF]
            if parameter.grad is None or not arithmetic.moves:
                continue
            gradient = parameter.grad.flatten()
            if name not in self._sums:
                shape, dtype = (len(gradient), *arithmetic.width), arithmetic.dtype(parameter.dtype)
                self._sums[name] = torch.zeros(shape, dtype=dtype, device=gradient.device)
            arithmetic.add(self._sums[name], gradient)
            self._largest.note(name, gradient)
            parameter.grad = None

    def finish(self, step: int | None = None) -> dict[str, float]:
        """Return name -> largest absolute gradient element, where too large, infinite or NaN to be added. `step` is not used."""
        return self._largest.faults()

    def num_terms(self, name: str) -> int:
        """Return the number of backwards that touched a parameter so far."""
        return self._num_terms[name]

    def take(self, name: str) -> Tensor | None:
        """Remove and return a parameter's sum, in the reduction's number format; None if it has none, or only in `.grad`."""
        return self._sums.pop(name, None)


@final
class GradientSums:
    """Sums the gradients of one step: every rank that updates a parameter gets the same bits in `.grad`.

    Parameters with the same owners (ranks that hold them) and givers (owners that run a backward of them) are summed in buckets
    (`Bucket`). In phase 1, givers send gradients to the owners that add them up; in phase 2, these send the sums to all owners. A
    bucket starts as soon as the last backward of its parameters has run here, and is sent while other backwards run. Ranks need
    not start buckets in one order: each bucket has tags of its own, and no rank blocks before `finish`. There, a rank starts
    phase 1 of all its buckets before it waits for any, then likewise phase 2. NCCL has no tags: with it, all buckets start in
    `finish`, in one order. A gradient of None counts as zero; None on all owners stays None. Without a backward, nothing is sent.

    **Memory**, beside parameters and optimizer state. "fast" keeps `.grad`, as torch does. For parameters on several ranks a
    bucket takes the place of `.grad` once it starts, and this rank receives its part of the bucket from each other giver. "fp64"
    and "fixed" keep sums of 8 and 16 bytes an element from a parameter's first backward on, and receive such sums; `.grad` lasts
    only for one backward. Half-precision parameters with masters have such sums in "fast" too, of 4 bytes. The rounded sum is
    `.grad` in the end, for parameters on one rank right after their last backward. With a sharded optimizer, the one owner that
    updates a parameter receives whole buckets, and the others keep no sum.
    """

    def __init__(
        self,
        groups: Groups,
        parameters: Mapping[str, nn.Parameter],
        shared: Sequence[OwnerSet],
        backwards: Mapping[str, int],
        *,
        reduction: Reduction = "fast",
        masters: Mapping[str, nn.Parameter] | None = None,
        carried: CarriedSums | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Prepare the gradient sums of a step.

        Args:
            parameters: trainable parameters of this rank, by original name.
            shared: owner sets of parameters that several ranks hold, the same on all ranks. Each parameter is in one set.
            backwards: number of backwards on this rank that give a gradient for a parameter in this step, by name; 0 if absent.
            masters: float32 masters of half-precision parameters that this rank updates, by name; their sums are left in `.grad`
                of the master. None: no rank has masters.
            carried: sums of earlier calls of the step, which are moved out of it.
            bucket_bytes: bytes of parameters in a bucket, the same on all ranks.

        Raises:
            EngineError: more buckets, or backwards of a parameter, than can be numbered.
        """
        self._groups = groups
        self._reduction: Reduction = reduction
        self._masters = masters
        self._carried = carried or CarriedSums(reduction, master_weights=masters is not None)
        self._early = groups.device.type != "cuda"
        self._left = {name: backwards.get(name, 0) for name in parameters}
        self._num_terms = {name: left + self._carried.num_terms(name) for name, left in self._left.items()}
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[str, Bucket] = {}
        self._open: dict[Bucket, int] = {}
        """Number of backwards still to run that touch each bucket that is not started. Buckets are in one order on all ranks."""
        for item, part, tags in buckets_of(shared, parameters, groups.rank, bucket_bytes):
            self._open_bucket(part, item, tags)
        elsewhere = {name for item in shared for name in item.names}
        alone = {
            name: parameter
            for name, parameter in parameters.items()
            if self._num_terms[name] and name not in elsewhere and self._arithmetic(parameter).moves
        }
        if alone:
            here = OwnerSet(names=tuple(alone), owners=(groups.rank,), givers=(groups.rank,))
            for part in split_into_buckets(alone, bucket_bytes):
                self._open_bucket(part, here, (0, 0))
        for bucket in [bucket for bucket, left in self._open.items() if not left]:
            self._last_has_run(bucket)

    def ran(self, names: Iterable[str]) -> None:
        """Add the gradients that a backward left on parameters `names`. Start to send buckets that no later backward adds to."""
        for name in names:
            assert self._left[name], f"a backward touched {name} after the last one announced"
            self._left[name] -= 1
            if (bucket := self._bucket_of.get(name)) is None:
                continue
            if bucket.moves:
                bucket.enter(name)
            self._open[bucket] -= 1
            if not self._open[bucket]:
                self._last_has_run(bucket)

    def finish(self, step: int | None = None) -> dict[str, float]:
        """Wait for all sums, and leave them in `.grad`.

        Args:
            step: number of the step, for tests that make a rank fail here.

        Returns:
            By parameter, the largest absolute gradient element on this rank, if the reduction cannot add it (infinite, NaN,
            or too large). The sums of these parameters are invalid on every rank.
        """
        assert not any(self._left.values()), f"backwards are missing: {self._left}"
        for bucket in self._open:
            bucket.start()
        for bucket in self._buckets:
            if not bucket.is_local:
                bucket.add()
        fail_point("reducing", rank=self._groups.rank, step=step)
        for bucket in self._buckets:
            if not bucket.is_local:
                bucket.give()
        return {name: size for bucket in self._buckets for name, size in bucket.faults().items()}

    def _arithmetic(self, parameter: nn.Parameter) -> Arithmetic:
        return arithmetic_of(self._reduction, master=self._has_master(parameter))

    def _has_master(self, parameter: nn.Parameter) -> bool:
        return self._masters is not None and parameter.dtype in HALF

    def _open_bucket(self, parameters: Mapping[str, nn.Parameter], shared: OwnerSet, tags: tuple[int, int]) -> None:
        first = next(iter(parameters.values()))
        arithmetic = self._arithmetic(first)
        for name in parameters:
            num_terms = self._num_terms[name] * len(shared.owners)
            if num_terms > arithmetic.max_terms:
                raise EngineError(
                    f"{name} has gradients of up to {num_terms:,} backwards in a step; this reduction adds at most "
                    f"{int(arithmetic.max_terms):,}: use fewer microbatches a step, or reduction='fp64'"
                )
        masters = self._masters or {}
        targets = [masters.get(name, parameter) for name, parameter in parameters.items()]
        dtype = torch.float32 if self._has_master(first) else first.dtype
        bucket = Bucket(self._groups, arithmetic, parameters, targets, dtype, shared, tags)
        for name in parameters:
            if (total := self._carried.take(name)) is not None:
                bucket.resume(name, total)
        self._buckets.append(bucket)
        self._bucket_of |= dict.fromkeys(parameters, bucket)
        self._open[bucket] = sum(self._left[name] for name in parameters)

    def _last_has_run(self, bucket: Bucket) -> None:
        if bucket.is_local:
            bucket.add()
            bucket.give()
        elif self._early:
            bucket.start()
        else:
            return
        del self._open[bucket]
