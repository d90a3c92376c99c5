"""Search: which chain gets how many devices, sharded and replicated how, judged by the simulator.

`problem_of` lines up the components and prices their layers; a strategy (`mmcompile.planner.strategies.strategies`) proposes
candidates; `mmcompile.planner.search.branch_and_bound` decides, `mmcompile.planner.search.outcome` writes the plan.

Source: exact splits over frozen-aware costs, Oobleck / Cornstarch / Entrain dissertation §3.4.1; expected makespan over
the data, DFLOP §3.3.1.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from mmcompile.config import ProjectorPlacement
from mmcompile.costmodel.calibration import Calibration
from mmcompile.costmodel.cluster import Cluster
from mmcompile.costmodel.compute import LayerCost
from mmcompile.costmodel.sharding import TensorShare
from mmcompile.errors import ConfigError, PlanError
from mmcompile.ir.graph import ModelGraph
from mmcompile.passes.cost.cost_table import CostTable
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.plan.plan_record import Fingerprint
from mmcompile.planner.pricing.chains import ChainSet, chain_sets, joined_chain
from mmcompile.planner.pricing.pricing import Pricing
from mmcompile.planner.pricing.workload import Workload
from mmcompile.planner.search.branch_and_bound import TOLERANCE as TOLERANCE
from mmcompile.planner.search.branch_and_bound import BranchAndBound, Judged
from mmcompile.planner.search.candidate import Candidate
from mmcompile.planner.search.colocation import dealt
from mmcompile.planner.search.outcome import plan_of
from mmcompile.planner.search.problem import OPTIMIZER_STATES, Problem
from mmcompile.planner.search.replicas import decided_replicas, towers_of, with_replicas
from mmcompile.planner.search.settings import Degrees, SearchSpace
from mmcompile.planner.search.shared_tensors import with_shared_tensors
from mmcompile.planner.strategies.strategies import AUTO, STRATEGIES, strategy_of

Costs = CostTable | Mapping[str, tuple[LayerCost, ...]]


def search(
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
    strategy: str = AUTO,
) -> Plan:
    """Find the fastest plan. Its `links` and `shared_values` are empty: they are known once stages are lowered.

    Args:
        strategy: who proposes candidates: a name in `mmcompile.planner.strategies.strategies.STRATEGIES`, or `"auto"`: our
            search, over the candidates of all others too.
        others: as `problem_of`.

    Raises:
        PlanError, ConfigError: as `problem_of`; or nothing fits the memory.
    """
    problem = problem_of(
        graph,
        costs,
        cluster,
        dtype=dtype,
        fingerprint=fingerprint,
        num_microbatches=num_microbatches,
        stages=stages,
        replicas=replicas,
        tensor_parallel=tensor_parallel,
        tensor_degrees=tensor_degrees,
        tensor_shares=tensor_shares,
        fsdp=fsdp,
        projector=projector,
        num_devices=num_devices,
        entries=entries,
        shards=shards,
        space=space,
        global_batch=global_batch,
        workload=workload,
        kinds=kinds,
        calibration=calibration,
    )
    engine, best = searched(problem, strategy)
    if best is None:
        raise PlanError(_why_nothing_fits(engine))
    return plan_of(engine, best, strategy=strategy)


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
    """What is to be planned.

    Args:
        graph: its components and the edges between them.
        costs: the table of the cost pass; or component name -> cost of each layer, which then hold for every load.
        cluster: where to run.
        dtype: of the computation, `"bfloat16"`.
        fingerprint: what the plan is made for.
        num_microbatches: of a step, of one replica of the last chain; None where the space has several.
        stages: chain name -> number of stages, for chains whose count is decided. A chain is named after its encoder or
            language model, a projector alone after itself.
        replicas: chain or component name -> replicas, for chains whose number is decided; others of the same tower get as many.
            Without a global batch, chains left get as many as the last, which has 1 if it is not named.
        tensor_parallel: chain or component name -> ranks that share its tensors, 1 for those not named; None: any of the space.
        tensor_degrees: component name -> numbers of ranks that can share its tensors (`tensor_axes`); absent: all can.
        tensor_shares: component name -> number of ranks -> what they exchange and hold in parts, by layer; absent: assumed.
        fsdp: chains and components whose replicas share their parameters.
        projector: where projectors go; None lets the simulator choose.
        num_devices: use only so many devices.
        entries: (producer, consumer) -> first layer of the consumer that reads the producer; 0 where absent.
        shards: ranks that share each stage of the last chain; `costs` are those of one shard.
        space: what may be chosen; by default what the engine runs.
        global_batch: samples of a step; None: the captured batch is one microbatch of one replica of the last chain.
        workload: what samples bring to components; by default all are like those of the captured batch.
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
    sets = chain_sets(graph, table.layers, cluster.device, dtype, projector=projector, entries=entries)
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
        joined = joined_chain(graph, table.layers, cluster.device, dtype, entries=entries)
        sets = (*sets, *((joined,) if joined is not None else ()))
    if not sets:
        sets = chain_sets(graph, table.layers, cluster.device, dtype, projector=projector, entries=entries)
    sets = with_replicas(_named(sets, stages or {}), replicas, follow=global_batch is None)
    sets = with_shared_tensors(sets, tensor_parallel or {})
    problem = Problem(
        graph=graph,
        pricing=pricing,
        sets=tuple(sets),
        num_devices=budget,
        space=_replicated(space, sets, replicas, global_batch),
        tensor_parallel=tensor_parallel or {},
        fsdp=fsdp,
        fingerprint=fingerprint,
        global_batch=global_batch,
        workload=workload,
        stages=stages or {},
        replicas=replicas,
        replicas_follow=global_batch is None,
        entries=entries or {},
    )
    _check_devices(problem)
    return problem


def searched(problem: Problem, strategy: str = AUTO) -> tuple[BranchAndBound, Judged | None]:
    """Run a strategy: the fastest candidate, and the engine that knows the others; None if nothing fits the memory.

    Raises:
        ConfigError: no strategy of that name, or the space leaves it nothing to begin with.
    """
    engine = BranchAndBound(problem=problem)
    apart = any(not chains.colocated for chains in problem.sets)
    if strategy != AUTO:
        if not apart:
            raise ConfigError(
                f"strategy {strategy} begins with chains on ranks of their own; allow placement 'disjoint'"
            )
        proposed = list(strategy_of(strategy)(problem))
        for candidate in proposed:
            if _keeps_replicas(problem, candidate):
                engine.judge([candidate], strategy)
        if proposed and not engine.judged:
            raise ConfigError(
                f"strategy {strategy} decides replicas itself, and found none with {_named_counts(problem.replicas)}; ask for "
                "other replicas, or take strategy auto"
            )
        return engine, engine.best()
    for chains in problem.sets:
        if _needs_sharing(problem, chains):
            for setting in (own for own in engine.combos.settings if own.dp == 1):
                candidate = dealt(problem, chains, setting)
                if max(candidate.rank_bytes) <= problem.memory_bytes(candidate.num_ranks):
                    engine.judge([candidate])
    engine.run()
    if problem.global_batch is not None and apart:
        for name, propose in STRATEGIES.items():
            proposed = propose(replace(problem, beat_s=engine.fastest_s))
            engine.judge([candidate for candidate in proposed if _within(problem, candidate)], name)
    return engine, engine.best()


def _within(problem: Problem, candidate: Candidate) -> bool:
    """Whether a candidate, whoever proposes it, keeps to what may be chosen."""
    space, setting = problem.space, candidate.setting
    placing = "colocated" if candidate.chains.colocated else "disjoint"
    return (
        setting.schedule in space.schedules
        and setting.recompute in space.recomputes
        and placing in space.placements
        and (space.microbatches is None or setting.num_microbatches in space.microbatches)
        and (space.dp is None or setting.dp in space.dp)
        and _keeps_replicas(problem, candidate)
        and all(
            degrees.tp in problem.tensor_degrees(chain)
            for chain, degrees in zip(candidate.chains.chains, candidate.degrees, strict=True)
        )
        and candidate.degrees[-1].cp in space.cp
        and not (space.dp is not None and any(degrees.fsdp for degrees in candidate.degrees))
    )


def _keeps_replicas(problem: Problem, candidate: Candidate) -> bool:
    """Whether chains have the replicas decided, and as many as others of their tower."""
    wanted = decided_replicas(candidate.chains, problem.replicas, follow=problem.replicas_follow)
    own = [degrees.dp for degrees in candidate.degrees]
    return (
        wanted is not None
        and all(number in (None, dp) for number, dp in zip(wanted, own, strict=True))
        and all(len({own[index] for index in tower}) == 1 for tower in towers_of(candidate.chains))
    )


def anything_fits(problem: Problem) -> str | None:
    """Whether some candidate of the problem's space fits the memory: None if so, else why not, in words."""
    engine = BranchAndBound(problem=problem)
    if engine.first() is not None:
        return None
    return _why_nothing_fits(engine)


def _why_nothing_fits(engine: BranchAndBound) -> str:
    """What each chain needs in all, against what it can get."""
    problem = engine.problem
    setting = engine.combos.settings[-1]
    lines: list[str] = []
    for chain in problem.sets[0].chains:
        priced = problem.priced(chain, Degrees(cp=problem.pricing.given_cp), replace(setting, dp=1))
        fixed = priced.parameter_bytes + (1 + OPTIMIZER_STATES) * priced.trainable_bytes
        saved = priced.worst_bytes
        biggest = max(
            int(fixed[index + 1] - fixed[index] + saved[index + 1] - saved[index]) for index in range(len(chain.layers))
        )
        lines.append(
            f"  {chain.name}: {_gib(int(fixed[-1]))} of parameters, gradients and optimizer state, "
            f"{_gib(int(saved[-1]))} of activations a microbatch, biggest layer {_gib(biggest)}"
        )
    head = (
        f"no plan fits {problem.num_devices} devices of {problem.cluster}: each has {_gib(problem.memory_bytes(1))}, and in "
        "every allocation a stage needs more; use more devices, smaller microbatches, or freeze parameters"
    )
    return "\n".join((head, *lines))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _needs_sharing(problem: Problem, chains: ChainSet) -> bool:
    """Fewer devices than chains, and nothing that forbids chains to share them."""
    alone = all(number in (None, 1) for number in problem.decided_replicas(chains))
    return not problem.stages and alone and problem.space.cp == (1,) and problem.num_devices < len(chains.chains)


def _budget(cluster: Cluster, num_devices: int | None) -> int:
    if num_devices is None:
        return cluster.num_devices
    if num_devices < 1 or (num_devices > cluster.num_devices and not cluster.is_local):
        raise PlanError(f"num_devices is {num_devices}; cluster {cluster} has {cluster.num_devices}, use 1 to as many")
    return num_devices


def _space(space: SearchSpace, num_microbatches: int | None, shards: int, global_batch: int | None) -> SearchSpace:
    """The space with what is decided."""
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
    """The space with the replicas of the last chain that are decided."""
    wanted = [decided_replicas(chains, replicas, follow=global_batch is None) for chains in sets]
    numbers = {each[-1] for each in wanted if each is not None}
    decided = tuple(sorted(number for number in numbers if number is not None))
    if len(decided) == len(numbers):
        space = replace(space, dp=decided)
    if global_batch is not None and space.dp is not None and all(global_batch % dp for dp in space.dp):
        raise PlanError(f"global_batch is {global_batch}; none of {space.dp} replicas gets whole samples")
    return space


def _check_devices(problem: Problem) -> None:
    """Refuse stages that need more devices than there are."""
    shards, stages = min(problem.space.cp), problem.stages
    needs = [problem.least_ranks(chains, shards) for chains in problem.sets]
    possible = problem.cluster.is_local or any(_needs_sharing(problem, chains) for chains in problem.sets)
    if min(needs) > problem.num_devices and not possible:
        asked = f"{_named_counts(stages)}, " if stages else ""
        last = problem.sets[0].chains[-1]
        width = shards * min(problem.tensor_degrees(last))
        shared = f", {width} ranks for each of {last.name}" if width > 1 else ""
        copies = f", replicas {_named_counts(problem.replicas)}" if problem.replicas else ""
        raise PlanError(
            f"stages ({asked}at least one for every other chain{shared}{copies}) need {min(needs)} devices, got "
            f"{problem.num_devices} of {problem.cluster}; ask for fewer stages{' or replicas' * bool(copies)} or a larger cluster"
        )


def _named_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _named(sets: Sequence[ChainSet], stages: Mapping[str, int]) -> list[ChainSet]:
    """The chain sets that have every chain named, with enough layers."""
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
