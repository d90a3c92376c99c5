"""`problem_of`: the problem that a search solves, from costs and a request; refuses requests that no candidate can meet."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from mmcompile.config import ProjectorPlacement
from mmcompile.costmodel.calibration import Calibration
from mmcompile.costmodel.cluster import Cluster
from mmcompile.costmodel.compute import LayerCost
from mmcompile.costmodel.sharding import TensorShare
from mmcompile.errors import PlanError
from mmcompile.ir.graph import ModelGraph
from mmcompile.passes.cost.cost_table import CostTable
from mmcompile.planner.plan.plan_record import Fingerprint
from mmcompile.planner.pricing.chains import ChainSet, chain_sets, joined_chain
from mmcompile.planner.pricing.pricing import Pricing
from mmcompile.planner.pricing.workload import Workload
from mmcompile.planner.search.problem import ChainPrices, Problem, balance_groups_of, decided_replicas
from mmcompile.planner.search.settings import SearchSpace

Costs = CostTable | Mapping[str, tuple[LayerCost, ...]]


def problem_of(
    graph: ModelGraph,
    costs: Costs,
    cluster: Cluster,
    *,
    dtype: str,
    fingerprint: Fingerprint,
    num_microbatches: int | None = None,
    stages: Mapping[str, int] | None = None,
    replicas: Mapping[str, int] | None = None,
    tensor_parallel: Mapping[str, int] | None = None,
    tensor_degrees: Mapping[str, tuple[int, ...]] | None = None,
    tensor_shares: Mapping[str, Mapping[int, tuple[TensorShare, ...]]] | None = None,
    fsdp: Collection[str] = (),
    projector: ProjectorPlacement | None = None,
    num_devices: int | None = None,
    entries: Mapping[tuple[str, str], int] | None = None,
    shards: int = 1,
    space: SearchSpace | None = None,
    global_batch: int | None = None,
    workload: Workload | None = None,
    kinds: Mapping[str, tuple[str, ...]] | None = None,
    calibration: Calibration | None = None,
) -> Problem:
    """Return the planning problem.

    Args:
        graph: its components and the edges between them.
        costs: the table of the cost pass; or component name -> cost of each layer, which then hold for every load.
        cluster: cluster to run on.
        dtype: dtype of the computation, `"bfloat16"`.
        fingerprint: model and versions that the plan is for.
        num_microbatches: microbatches of a step, of one replica of the last chain; None where the space has several.
        stages: chain name -> number of stages, for chains whose count is decided. A chain is named after its encoder or
            language model, a projector alone after itself.
        replicas: chain or component name -> replicas, for chains whose number is decided; other chains of the same balance group
            get as many. Without a global batch, all other chains get as many as the last chain, which has 1 if it is not named.
        tensor_parallel: chain or component name -> ranks that share its tensors, 1 for those not named; None: any of the space.
        tensor_degrees: component name -> numbers of ranks that can share its tensors (`tensor_axes`); absent: all can.
        tensor_shares: component name -> number of ranks -> share and collectives of each layer; absent: assumed.
        fsdp: chains and components whose replicas share their parameters.
        projector: placement of projectors; None lets the simulator choose.
        num_devices: number of devices to use; None: all.
        entries: (producer, consumer) -> first layer of the consumer that reads the producer; 0 where absent.
        shards: ranks that share each stage of the last chain; `costs` are those of one shard.
        space: choices of the search; by default those that the engine runs.
        global_batch: samples of a step; None: the captured batch is one microbatch of one replica of the last chain.
        workload: loads of samples in components; by default those of the captured batch.
        kinds: component -> kind of each layer, for the calibration.
        calibration: measured seconds of kinds of layers.

    Raises:
        PlanError: unknown chain names, more stages than layers or devices, replicas that no chains can have.
        ConfigError: `projector` has no effect, or the device has no figure for `dtype`.
    """
    if num_microbatches is not None and num_microbatches < 1:
        raise PlanError(f"num_microbatches is {num_microbatches}; a step has at least one")
    if global_batch is not None and global_batch < 1:
        raise PlanError(f"global_batch is {global_batch}; a step has at least one sample")
    budget = _budget(cluster, num_devices)
    space = _space(space or SearchSpace.runnable(), num_microbatches, shards, global_batch)
    replicas = replicas or {}
    table = costs if isinstance(costs, CostTable) else CostTable(layers=costs)
    sets = chain_sets(graph, table.layers, projector=projector, entries=entries)
    pricing = Pricing(
        table=table,
        cluster=cluster,
        dtype=dtype,
        merging=frozenset(consumer for _, consumer, _ in graph.edges),
        token_sharing=frozenset((graph.loss_component,)),
        kinds=kinds or {},
        calibration=calibration,
        given_cp=shards,
        tensor_degrees=tensor_degrees or {},
        tensor_shares=tensor_shares or {},
    )
    if "disjoint" not in space.placements:
        sets = ()
    if "colocated" in space.placements and projector is None:
        joined = joined_chain(graph, table.layers, entries=entries)
        sets = (*sets, *((joined,) if joined is not None else ()))
    if not sets:
        sets = chain_sets(graph, table.layers, projector=projector, entries=entries)
    sets = _with_replicas(_named(sets, stages or {}), replicas, follow=global_batch is None)
    sets = _with_shared_tensors(sets, tensor_parallel or {})
    problem = Problem(
        prices=ChainPrices(graph=graph, pricing=pricing, workload=workload),
        sets=tuple(sets),
        num_devices=budget,
        space=_replicated(space, sets, replicas, global_batch),
        tensor_parallel=tensor_parallel or {},
        fsdp=fsdp,
        fingerprint=fingerprint,
        global_batch=global_batch,
        stages=stages or {},
        replicas=replicas,
        replicas_follow=global_batch is None,
        entries=entries or {},
    )
    _check_devices(problem)
    return problem


def needs_sharing(problem: Problem, chains: ChainSet) -> bool:
    """Return whether there are fewer devices than chains while no option forbids chains to share devices."""
    alone = all(number in (None, 1) for number in problem.decided[chains])
    return not problem.stages and alone and problem.space.cp == (1,) and problem.num_devices < len(chains.chains)


def _budget(cluster: Cluster, num_devices: int | None) -> int:
    if num_devices is None:
        return cluster.num_devices
    if num_devices < 1 or (num_devices > cluster.num_devices and not cluster.is_local):
        raise PlanError(f"num_devices is {num_devices}; cluster {cluster} has {cluster.num_devices}, use 1 to as many")
    return num_devices


def _space(space: SearchSpace, num_microbatches: int | None, shards: int, global_batch: int | None) -> SearchSpace:
    """Return the search space with only the number of microbatches, and cp equal to `shards`, if the request fixes them."""
    if num_microbatches is not None:
        space = replace(space, microbatches=(num_microbatches,))
    if shards > 1:
        space = replace(space, cp=(shards,))
    if global_batch is None and space.microbatches is None:
        raise PlanError("num_microbatches or global_batch is needed: one of them says how much a step is")
    return space


def _replicated(
    space: SearchSpace, sets: Sequence[ChainSet], replicas: Mapping[str, int], global_batch: int | None
) -> SearchSpace:
    """Return the space with only the numbers of replicas of the last chain that the request fixes, if it fixes any."""
    wanted = [decided_replicas(chains, replicas, follow=global_batch is None) for chains in sets]
    numbers = {each[-1] for each in wanted if each is not None}
    decided = tuple(sorted(number for number in numbers if number is not None))
    if len(decided) == len(numbers):
        space = replace(space, dp=decided)
    if global_batch is not None and space.dp is not None and all(global_batch % dp for dp in space.dp):
        raise PlanError(f"global_batch is {global_batch}; none of {space.dp} replicas gets whole samples")
    return space


def _check_devices(problem: Problem) -> None:
    """Raise a PlanError if the demanded stages need more devices than the cluster has."""
    shards, stages = min(problem.space.cp), problem.stages
    needs = [problem.least_ranks(chains, shards) for chains in problem.sets]
    possible = problem.cluster.is_local or any(needs_sharing(problem, chains) for chains in problem.sets)
    if min(needs) > problem.num_devices and not possible:
        asked = f"{named_counts(stages)}, " if stages else ""
        last = problem.sets[0].chains[-1]
        width = shards * min(problem.tensor_degrees(last))
        shared = f", {width} ranks for each of {last.name}" if width > 1 else ""
        copies = f", replicas {named_counts(problem.replicas)}" if problem.replicas else ""
        raise PlanError(
            f"stages ({asked}at least one for every other chain{shared}{copies}) need {min(needs)} devices, got "
            f"{problem.num_devices} of {problem.cluster}; ask for fewer stages{' or replicas' * bool(copies)} or a larger cluster"
        )


def named_counts(counts: Mapping[str, int]) -> str:
    """Return counts by name as text for messages: `vision 2, language_model 4`."""
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _named(sets: Sequence[ChainSet], stages: Mapping[str, int]) -> list[ChainSet]:
    """Return the chain sets that have every chain named in `stages`, with at least as many layers as stages."""
    longest: dict[str, int] = {}
    for chains in sets:
        for chain in chains.chains:
            longest[chain.name] = max(longest.get(chain.name, 0), len(chain.layers))
    for name, count in stages.items():
        if name not in longest:
            raise PlanError(f"no chain {name!r} to give {count} stages; chains are {', '.join(longest)}")
        if not 1 <= count <= longest[name]:
            raise PlanError(f"{name} has {longest[name]} layers, cannot be {count} stages; use 1 to {longest[name]}")
    fitting = [chains for chains in sets if _fits(chains, stages)]
    if not fitting:
        raise PlanError(f"no placement of the projector gives stages {dict(stages)}; chains are {_chain_texts(sets)}")
    return fitting


def _fits(chains: ChainSet, stages: Mapping[str, int]) -> bool:
    sizes = {chain.name: len(chain.layers) for chain in chains.chains}
    return all(count <= sizes.get(name, 0) for name, count in stages.items())


def _chain_texts(sets: Sequence[ChainSet]) -> str:
    texts = (", ".join(f"{c.name} ({len(c.layers)} layers)" for c in chains.chains) for chains in sets)
    return " | ".join(texts)


def _with_replicas(sets: Sequence[ChainSet], wanted: Mapping[str, int], *, follow: bool) -> list[ChainSet]:
    """Return the chain sets that can have the given replicas.

    Raises:
        PlanError: a name that is neither of a chain nor of a component, a number below 1, or replicas that no chain set can have.
    """
    _check_names(sets, wanted, "{} replicas")
    fitting = [chains for chains in sets if decided_replicas(chains, wanted, follow=follow) is not None]
    if not fitting:
        asked = ", ".join(f"{name} {number}" for name, number in wanted.items())
        groups = " | ".join(
            ", ".join("+".join(chains.chains[index].name for index in group) for group in balance_groups_of(chains))
            for chains in sets
        )
        raise PlanError(
            f"no placement gives {asked} replicas: chains that lead from one encoder to the language model have equally many, "
            f"and so have components of one chain; they are {groups}"
        )
    return fitting


def _check_names(sets: Sequence[ChainSet], wanted: Mapping[str, int], words: str) -> None:
    names = dict.fromkeys(name for each in sets for chain in each.chains for name in (chain.name, *chain.components))
    for name, number in wanted.items():
        what = words.format(number)
        if name not in names:
            raise PlanError(f"no chain {name!r} to give {what}; chains and components are {', '.join(names)}")
        if number < 1:
            raise PlanError(f"{name} cannot have {what}; give 1 or more")


def _with_shared_tensors(sets: Sequence[ChainSet], wanted: Mapping[str, int]) -> list[ChainSet]:
    """Return the chain sets whose chains can have the given degrees.

    Args:
        wanted: chain or component name -> ranks that share its tensors; 1 for those not named.

    Raises:
        PlanError: a name that is neither of a chain nor of a component, a number below 1, or degrees that no chain set can have.
    """
    _check_names(sets, wanted, "tensor parallel degree {}")
    fitting = [
        each for each in sets if all(len(_degrees(chain.name, chain.components, wanted)) <= 1 for chain in each.chains)
    ]
    if not fitting:
        chains = " | ".join(", ".join("+".join(chain.components) for chain in each.chains) for each in sets)
        asked = ", ".join(f"{name} {number}" for name, number in wanted.items())
        raise PlanError(
            f"no placement gives tensor parallel degrees {asked}: components of one chain have the same; chains are {chains}"
        )
    return fitting


def _degrees(name: str, components: Sequence[str], wanted: Mapping[str, int]) -> set[int]:
    return {wanted[each] for each in (name, *components) if each in wanted}
