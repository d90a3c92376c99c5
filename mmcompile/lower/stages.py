"""From a captured graph and a plan to stage programs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx, nn

from mmcompile.ir.capture import Capture
from mmcompile.ir.compat import FakeTensor
from mmcompile.ir.graph import ModelGraph, ParameterSpec, TensorSpec, dtype_name, results_of
from mmcompile.ir.host import attribute
from mmcompile.ir.sizes import shape_of
from mmcompile.lower.cut import Cut, StageCut, cut
from mmcompile.lower.program import PatternPrograms, Port, StageProgram
from mmcompile.lower.source import stage_source
from mmcompile.plan.placement import shard_name, shard_names
from mmcompile.plan.plan import Link, Plan, Stage


def lower(capture: Capture, plan: Plan) -> PatternPrograms:
    """Stage programs of one captured graph, one for each shard of a stage. Nodes must be annotated by gradient-flow."""
    graph = capture.graph
    parts = cut(graph, plan)
    whole = {name: _program(graph, plan, parts, part) for name, part in parts.stages.items()}
    replicas = {stage.name: chain.dp for chain in plan.chains for stage in chain.stages}
    names = {name: shard_names(plan.stage(name), replicas[name]) for name in whole}
    differing = frozenset(
        str(node.target) for node in graph.module.graph.nodes if node.op == "placeholder" and "shard" in node.meta
    )
    programs = {
        shard: _shard(program, index, names, differing)
        for name, program in whole.items()
        for index, shard in enumerate(names[name])
    }
    digest = hashlib.sha256("".join(program.source for program in programs.values()).encode()).hexdigest()[:12]
    return PatternPrograms(
        pattern=digest,
        programs={name: replace(program, pattern=digest) for name, program in programs.items()},
        per_token=graph.loss.per_token,
    )


def links(parts: Cut) -> tuple[Link, ...]:
    """The links of a plan, from the cut of the graph it was made for."""
    found = []
    for name, part in parts.stages.items():
        for target in dict.fromkeys(peer for _, peers in part.sent for peer in peers):
            nodes = [node for node, peers in part.sent if target in peers]
            found.append(
                Link(
                    source=name,
                    target=target,
                    tensors=tuple(
                        TensorSpec(name=n.name, shape=shape_of(n), dtype=dtype_name(n.meta["val"].dtype)) for n in nodes
                    ),
                    gradient=tuple(n.name for n in nodes if n in parts.needs_gradient),
                    num_bytes=sum(n.meta["val"].numel() * n.meta["val"].element_size() for n in nodes),
                )
            )
    return tuple(found)


def _program(graph: ModelGraph, plan: Plan, parts: Cut, part: StageCut) -> StageProgram:
    specs = {spec.name: spec for spec in graph.parameters}
    buffers = set(graph.buffers)
    names = {
        node: str(node.target) for node in part.tensors if str(node.target) in specs or str(node.target) in buffers
    }
    constants = {node: str(node.target) for node in part.tensors if node not in names}
    outputs = [node for node, _ in part.sent]
    loss = list(results_of(graph.module.graph))
    is_loss = parts.owner.get(loss[0]) == part.stage
    results = [*outputs, *(loss if is_loss else ())]
    stage = plan.stage(part.stage)
    parameters = tuple(specs[name] for name in dict.fromkeys(names.values()) if name in specs)
    return StageProgram(
        stage=part.stage,
        pattern="",
        source=stage_source(
            part, names, constants, results, f"Stage {part.stage} of {graph.name}.", _notes(stage, parameters)
        ),
        inputs=(
            *(_root_port(node) for node in part.roots),
            *(_link_port(node, parts, (parts.owner[node],)) for node in part.received),
        ),
        outputs=(
            *(_link_port(node, parts, peers) for node, peers in part.sent),
            *(_loss_ports(loss) if is_loss else ()),
        ),
        parameters=parameters,
        buffers=tuple(name for name in dict.fromkeys(names.values()) if name in buffers),
        constants={name: _constant(graph.module, node) for node, name in constants.items()},
        is_loss=is_loss,
        has_backward=any(node in parts.needs_gradient for node in part.nodes),
    )


def _shard(
    program: StageProgram, index: int, names: Mapping[str, tuple[str, ...]], differing: frozenset[str]
) -> StageProgram:
    """The program of one shard: a sharded stage talks to the shard of the same number, a whole stage to all shards.

    Args:
        index: of the shard.
        names: names of the shards of every stage.
        differing: inputs whose value differs by shard.
    """
    own = names[program.stage]

    def placed(port: Port) -> Port:
        if port.kind == "host" and port.name in differing:
            return replace(port, name=shard_name(port.name, index))
        shards = (names[peer] for peer in port.peers)
        peers = (others[index : index + 1] if len(others) == len(own) else others for others in shards)
        return replace(port, peers=tuple(name for group in peers for name in group))

    return replace(
        program,
        stage=own[index],
        inputs=tuple(map(placed, program.inputs)),
        outputs=tuple(map(placed, program.outputs)),
    )


def _notes(stage: Stage, parameters: tuple[ParameterSpec, ...]) -> str:
    trained = sum(spec.num_elements for spec in parameters if spec.trainable)
    frozen = sum(spec.num_elements for spec in parameters if not spec.trainable)
    layers = "\n".join(f"    {name}" for name in stage.layer_names)
    return f"Trains {trained:,} parameters, keeps {frozen:,} frozen. Layers:\n{layers}"


def _root_port(node: fx.Node) -> Port:
    # By target, the batch's own name: the node of an input called "id" has another, since that is a Python builtin.
    name = str(node.target)
    if "size" in node.meta:
        return Port(name=name, kind="size", shape=(), dtype="int64", expression=node.meta["size"])
    kind = "host" if "roots" in node.meta else "root"
    return Port(name=name, kind=kind, shape=shape_of(node), dtype=dtype_name(node.meta["val"].dtype))


def _link_port(node: fx.Node, parts: Cut, peers: tuple[str, ...]) -> Port:
    return Port(
        name=node.name,
        kind="link",
        shape=shape_of(node),
        dtype=dtype_name(node.meta["val"].dtype),
        gradient=node in parts.needs_gradient,
        peers=peers,
    )


def _loss_ports(loss: list[fx.Node]) -> tuple[Port, ...]:
    names = ("loss_sum", "num_tokens")[: len(loss)]
    return tuple(
        Port(name=name, kind="link", shape=(), dtype=dtype_name(node.meta["val"].dtype))
        for name, node in zip(names, loss, strict=True)
    )


def _constant(module: nn.Module, node: fx.Node) -> torch.Tensor:
    value = attribute(module, str(node.target))
    assert not isinstance(value, FakeTensor)
    return value
