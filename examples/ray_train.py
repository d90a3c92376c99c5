"""Train on a Ray cluster: one actor a device, with the variables that a launcher sets.

    pip install "ray>=2.40"
    python examples/ray_train.py --address auto --num-ranks 16 --gpus-per-rank 1 -- train MODEL --data DATA --save checkpoint

What follows `--` is a command of mmcompile. Folders (--save, --resume, --out) must be ones that all machines see. Without
--address, Ray is started on this machine.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

Environment = dict[str, str]


def rank_order(machines: Sequence[str]) -> list[int]:
    """Actors in order of ranks: those of a machine follow each other, as plans have it, and the first actor is rank 0.

    Args:
        machines: of each actor, as Ray placed them.
    """
    first = {machine: index for index, machine in reversed(list(enumerate(machines)))}
    return sorted(range(len(machines)), key=lambda actor: (first[machines[actor]], actor))


def environments(machines: Sequence[str], port: int) -> list[Environment]:
    """What each rank gets, by rank.

    Args:
        machines: address of the machine of each rank; ranks of a machine follow each other.
        port: that is free on the first machine.

    Raises:
        ValueError: ranks of a machine are apart.
    """
    here, found = Counter(machines), Counter[str]()
    result: list[Environment] = []
    for rank, machine in enumerate(machines):
        if found[machine] and machines[rank - 1] != machine:
            raise ValueError(f"rank {rank} is on {machine}, apart from other ranks there: {list(machines)}")
        result.append(
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(machines)),
                "LOCAL_RANK": str(found[machine]),
                "LOCAL_WORLD_SIZE": str(here[machine]),
                "MASTER_ADDR": machines[0],
                "MASTER_PORT": str(port),
            }
        )
        found[machine] += 1
    return result


class Worker:
    """One rank. mmcompile runs in a process of its own, so that nothing it does can disturb the actor."""

    def machine(self) -> str:
        import ray  # pyright: ignore[reportMissingImports]

        return ray.util.get_node_ip_address()

    def free_port(self) -> int:
        with socket.socket() as listener:
            listener.bind(("", 0))
            return listener.getsockname()[1]

    def run(self, environment: Environment, command: Sequence[str]) -> int:
        return subprocess.run(["mmcompile", *command], env={**os.environ, **environment}).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a command of mmcompile on a Ray cluster, one actor a rank.")
    parser.add_argument("--address", help="of the cluster, or auto")
    parser.add_argument("--num-ranks", type=int, required=True)
    parser.add_argument("--gpus-per-rank", type=float, default=0.0)
    parser.add_argument("command", nargs="+", help="after --: train MODEL --data DATA ...")
    options = parser.parse_args()
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError:
        parser.error('Ray is not installed: pip install "ray>=2.40"')
    ray.init(address=options.address)
    # All or none are placed, so ranks never wait for others that find no room.
    bundle = {"CPU": 1.0} | ({"GPU": options.gpus_per_rank} if options.gpus_per_rank else {})
    group = ray.util.placement_group([bundle] * options.num_ranks, strategy="PACK")
    ray.get(group.ready())
    remote = ray.remote(num_cpus=1, num_gpus=options.gpus_per_rank)(Worker)
    workers = [
        remote.options(placement_group=group, placement_group_bundle_index=index).remote()
        for index in range(options.num_ranks)
    ]
    machines = ray.get([worker.machine.remote() for worker in workers])
    order = rank_order(machines)
    port = ray.get(workers[order[0]].free_port.remote())
    given = environments([machines[actor] for actor in order], port)
    codes = ray.get([workers[actor].run.remote(given[rank], options.command) for rank, actor in enumerate(order)])
    for rank, code in enumerate(codes):
        if code:
            print(f"rank {rank} on {machines[order[rank]]} ended with exit code {code}", file=sys.stderr)
    return max(map(abs, codes))


if __name__ == "__main__":
    sys.exit(main())
