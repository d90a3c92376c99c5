"""Stage programs from a captured graph and a plan."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import fx, nn

from mmcompile.codegen.cut import GraphCut, StageCut, cut
from mmcompile.codegen.pipeline import layer_choices
from mmcompile.codegen.program import PatternPrograms, Port, StageProgram
from mmcompile.codegen.source import LayerChoices, stage_source
from mmcompile.ir.capture import Capture
from mmcompile.ir.compat import FakeTensor
from mmcompile.ir.functional import changed_buffers
from mmcompile.ir.graph import ModelGraph, ParameterSpec, dtype_name, info, results_of
from mmcompile.ir.host_shapes import attribute
from mmcompile.ir.sizes import shape_of, spec_of
from mmcompile.passes.values import num_bytes, op_name
from mmcompile.planner.plan.placement import shard_name, shard_names
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.plan.plan_record import Link, Stage


def lower(capture: Capture, plan: Plan) -> PatternPrograms:
    """Return stage programs of one captured graph, one for each shard. Nodes must be annotated by gradient-flow."""
    graph = capture.graph
    parts = cut(graph, plan)
    shards = _Shards.of(graph, plan, parts)
    choices = layer_choices(graph, plan)
    programs = {
        shard: shards.program(_program(graph, plan, parts, part, index % shards.tp[name], choices), index)
        for name, part in parts.stages.items()
        for index, shard in enumerate(shards.names[name])
    }
    digest = hashlib.sha256("".join(program.source for program in programs.values()).encode()).hexdigest()[:12]
    return PatternPrograms(
        pattern=digest,
        programs={name: replace(program, pattern=digest) for name, program in programs.items()},
        per_token=graph.loss.per_token,
    )


def links(parts: GraphCut) -> tuple[Link, ...]:
    """Return the links of a plan, from the cut of the graph it was made for."""
    found = []
    for name, part in parts.stages.items():
        for target in dict.fromkeys(peer for _, peers in part.sent for peer in peers):
            nodes = [node for node, peers in part.sent if target in peers]
            found.append(
                Link(
                    source=name,
                    target=target,
                    tensors=tuple(map(spec_of, nodes)),
                    gradient=tuple(n.name for n in nodes if n in parts.needs_gradient),
                    num_bytes=sum(num_bytes(n.meta["val"]) for n in nodes),
                )
            )
    return tuple(found)


def _program(
    graph: ModelGraph, plan: Plan, parts: GraphCut, part: StageCut, index: int, choices: LayerChoices
) -> StageProgram:
    """Return the program of tensor-parallel rank number `index` of a stage; its peers are stages, not yet ranks of stages."""
    # Of a sharded parameter, the part that replica 0 of the rank holds.
    specs = {spec.name: spec for spec in graph.parameters}
    specs |= {name: specs[name].part(shard, shard.index(index)) for name, shard in graph.shards.items()}
    loss = list(results_of(graph.module.graph))
    is_loss = parts.owner.get(loss[0]) == part.stage
    program = part_program(
        graph,
        part,
        specs,
        [*(node for node, _ in part.sent), *(loss if is_loss else ())],
        title=f"Stage {part.stage} of {graph.name}.",
        notes=partial(_notes, plan.stage(part.stage)),
        choices=choices,
    )
    return replace(
        program,
        inputs=(
            *(_root_port(node) for node in part.roots),
            *(_link_port(node, parts, (parts.owner[node],)) for node in part.received),
        ),
        outputs=(
            *(_link_port(node, parts, peers) for node, peers in part.sent),
            *(_loss_ports(loss) if is_loss else ()),
        ),
        is_loss=is_loss,
    )


def part_program(
    graph: ModelGraph,
    part: StageCut,
    specs: Mapping[str, ParameterSpec],
    results: Sequence[fx.Node],
    *,
    title: str,
    notes: Callable[[tuple[ParameterSpec, ...]], str],
    choices: LayerChoices,
) -> StageProgram:
    """Return the program of a part of a graph annotated by gradient-flow, still without inputs and outputs.

    Args:
        graph: graph of the whole model.
        part: nodes of the program.
        specs: first name of a parameter -> the parameter, or the part of it that the program reads.
        results: nodes returned, in order.
        title: first line of the source's docstring.
        notes: function from the parameters read to the further lines of the docstring.
        choices: options for writing layers.
    """
    held = {name: spec.name for name, spec in specs.items()} | {name: name for name in graph.buffers}
    names = {node: held[str(node.target)] for node in part.tensors if str(node.target) in held}
    constants = {node: str(node.target) for node in part.tensors if node not in names}
    read = dict.fromkeys(str(node.target) for node in names)
    parameters = tuple(specs[name] for name in read if name in specs)
    trained = frozenset(spec.name for spec in parameters if spec.trainable)
    gathers = [node for node in part.nodes if op_name(node) == "mmcompile.gather_parameter"]
    return StageProgram(
        stage=part.stage,
        pattern="",
        source=stage_source(
            part, names, constants, results, title, notes(parameters), trained=trained, choices=choices
        ),
        inputs=(),
        outputs=(),
        parameters=parameters,
        buffers=tuple(name for name in read if name not in specs),
        changed=tuple(name for name in changed_buffers(part.nodes) if name in graph.buffers),
        constants={name: _constant(graph.module, node) for node, name in constants.items()},
        has_backward=any(info(node).carries_gradient for node in part.nodes),
        gathered=tuple(str(node.all_input_nodes[0].target) for node in gathers),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shards:
    """Connections between the shards of stages, which are each stage's parts over tensor-parallel ranks and over tokens.

    Shards are numbered by part of the tokens, then by tensor-parallel rank. Stages of a chain have equally many shards, and
    each communicates with the one of the same number. A value sent between chains has all tokens: the first shard of the
    stage that makes it sends it to all shards that read it, and gets all their gradients. The other tensor-parallel ranks
    compute it too, do not send it, and run its backward with the first (`tp_exit`).
    """

    names: Mapping[str, tuple[str, ...]]
    """Stage -> names of its shards in programs, in order."""
    chains: Mapping[str, str]
    """Stage -> its chain."""
    tp: Mapping[str, int]
    """Stage -> number of its tensor-parallel ranks."""
    differing: frozenset[str]
    """Names of graph inputs whose value is different on each shard of a stage, such as its tokens' positions."""

    @classmethod
    def of(cls, graph: ModelGraph, plan: Plan, parts: GraphCut) -> _Shards:
        nodes = graph.module.graph.nodes
        placed = [(stage, chain) for chain in plan.chains for stage in chain.stages if stage.name in parts.stages]
        return cls(
            names={stage.name: shard_names(stage, chain.dp) for stage, chain in placed},
            chains={stage.name: chain.name for stage, chain in placed},
            tp={stage.name: chain.tp for stage, chain in placed},
            differing=frozenset(str(n.target) for n in nodes if n.op == "placeholder" and "shard" in n.meta),
        )

    def program(self, program: StageProgram, index: int) -> StageProgram:
        """Return a stage's program for shard (rank) number `index`: stages with which it exchanges values become shards."""
        stage = program.stage
        return replace(
            program,
            stage=self.names[stage][index],
            inputs=tuple(self._input(port, stage, index) for port in program.inputs),
            outputs=tuple(self._output(port, stage, index) for port in program.outputs),
        )

    def _input(self, port: Port, stage: str, index: int) -> Port:
        if port.kind == "host" and port.name in self.differing:
            return replace(port, name=shard_name(port.name, index // self.tp[stage]))
        return replace(
            port, peers=tuple(self.names[peer][index if self._together(stage, peer) else 0] for peer in port.peers)
        )

    def _output(self, port: Port, stage: str, index: int) -> Port:
        peers: list[str] = []
        for peer in port.peers:
            if self._together(stage, peer):
                peers.append(self.names[peer][index])
            elif index == 0:
                peers += self.names[peer]
        return replace(port, peers=tuple(peers))

    def _together(self, stage: str, peer: str) -> bool:
        return self.chains[stage] == self.chains[peer]


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


def _link_port(node: fx.Node, parts: GraphCut, peers: tuple[str, ...]) -> Port:
    return Port(
        name=node.name,
        kind="link",
        shape=shape_of(node),
        dtype=dtype_name(node.meta["val"].dtype),
        gradient=node in parts.needs_gradient,
        peers=peers,
    )


def _loss_ports(loss: list[fx.Node]) -> tuple[Port, ...]:
    pairs = zip(("loss_sum", "num_tokens"), loss, strict=False)
    return tuple(Port(name=name, kind="link", shape=(), dtype=dtype_name(n.meta["val"].dtype)) for name, n in pairs)


def _constant(module: nn.Module, node: fx.Node) -> torch.Tensor:
    value = attribute(module, str(node.target))
    assert not isinstance(value, FakeTensor)
    return value
