"""Optimizer state held once, though several ranks hold a parameter: one rank updates it, and sends the others its new value.

This is stage 1 of ZeRO (Rajbhandari et al., SC 2020), by whole parameters: any optimizer works unchanged, and saved state
has the shapes of the parameters. Gradients of a parameter are summed on its updater alone, so a step sends as many bytes as when
every owner gets the sum.
"""

# pyright: reportPrivateImportUsage=false
# torch re-exports the functions its optimizers are built on without saying so.

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from mmcompile.runtime.comm.groups import Groups, Lane, Work, wait
from mmcompile.runtime.optim.gradient_bucket import OwnerSet
from mmcompile.runtime.optim.gradients import BUCKET_BYTES, buckets_of


def assign_updaters(
    owners: Mapping[str, Collection[int]], num_bytes: Mapping[str, int], before: Mapping[str, int]
) -> dict[str, int]:
    """Return the rank that updates each parameter: balanced by bytes, largest first, each to the least loaded owner.

    Parameters with one owner have no choice, and come first. (Longest processing time first: Graham 1969.)

    Args:
        owners: ranks that hold each trainable parameter.
        num_bytes: size of each parameter in bytes.
        before: earlier assignments, which stay since the optimizer state is on that rank.

    Returns:
        The updater of every parameter, including `before`; independent of the order of the arguments' items.
    """
    loads: Counter[int] = Counter()
    updaters = dict(before)
    for name, rank in before.items():
        loads[rank] += num_bytes[name]
    new = owners.keys() - before.keys()
    for name in sorted(new, key=lambda name: (len(owners[name]) > 1, -num_bytes[name], name)):
        updaters[name] = min(owners[name], key=lambda rank: (loads[rank], rank))
        loads[updaters[name]] += num_bytes[name]
    return updaters


@final
class NewValues:
    """Values of parameters after an update, in transfer from the ranks that update them to the other ranks that hold them.

    They are sent while the engine continues; parameters must not be read or written before `finish`.

    Args:
        parameters: trainable parameters of this rank, by original name.
        shared: owner sets of the updated parameters, the same on all ranks.
    """

    def __init__(self, groups: Groups, parameters: Mapping[str, nn.Parameter], shared: Sequence[OwnerSet]) -> None:
        self._works: list[Work] = []
        self._kept: list[Tensor] = []
        """Tensors that this rank is sending, kept alive until they are sent."""
        self._received: list[tuple[Tensor, list[nn.Parameter]]] = []
        # Their buckets of gradients leave the second tag unused: no sums are sent to other owners.
        sharded = [item for item in shared if item.updater is not None]
        for item, part, (_, tag) in buckets_of(sharded, parameters, groups.rank, BUCKET_BYTES):
            assert item.updater is not None
            held = list(part.values())
            if groups.rank == item.updater:
                values = torch.cat([parameter.detach().flatten() for parameter in held])
                self._kept.append(values)
                for owner in item.owners:
                    if owner != groups.rank and len(values):
                        self._works.append(groups.send(values, Lane(groups.rank, owner, "values"), tag))
            else:
                values = torch.empty(sum(p.numel() for p in held), dtype=held[0].dtype, device=held[0].device)
                self._received.append((values, held))
                if len(values):
                    self._works.append(groups.receive(values, Lane(item.updater, groups.rank, "values"), tag))

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for all messages, and copy received values into the parameters."""
        for work in self._works:
            wait(work)
        for values, held in self._received:
            flat = values.split([parameter.numel() for parameter in held])
            parts = [part.view_as(parameter) for part, parameter in zip(flat, held, strict=True)]
            torch._foreach_copy_([*held], parts)  # pyright: ignore[reportPrivateUsage]
        self._works.clear()
        self._kept.clear()
        self._received.clear()
