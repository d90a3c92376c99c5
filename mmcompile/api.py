"""What scripts and the command line call: capture, freeze, plan, look at stages, parallelize."""

from __future__ import annotations

import fnmatch
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from mmcompile.costmodel.cluster import Cluster
from mmcompile.errors import ConfigError
from mmcompile.ir.capture import Capture
from mmcompile.ir.capture import capture as _capture
from mmcompile.ir.graph import ModelGraph, component_of, info
from mmcompile.ir.inputs import completed
from mmcompile.ir.sample_inputs import example_batch
from mmcompile.ir.skeleton import skeleton
from mmcompile.lower.attention import AttentionChoice, with_attention, with_shared_tokens, with_words
from mmcompile.lower.cut import cut
from mmcompile.lower.patterns import Patterns
from mmcompile.lower.program import StageProgram
from mmcompile.lower.stages import links, lower
from mmcompile.passes.cost import Cost
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.passes.pipeline import Pipeline
from mmcompile.plan.chains import ProjectorPlacement
from mmcompile.plan.placement import Placement
from mmcompile.plan.plan import Attention, Fingerprint, Plan, check_fingerprint
from mmcompile.plan.search import search
from mmcompile.plan.shared_tokens import SharedTokens
from mmcompile.runtime.engine import Engine

DEFAULT_MICROBATCHES = 4
PROJECTOR_MODULES = frozenset({"merger", "deepstack_merger_list", "connector", "aligner", "language_projection"})
"""Modules that are projectors by another name: `freeze(model, "projector")` trains them too."""


def capture(
    model: nn.Module | str | Path, batch: Mapping[str, Any] | None = None, dynamic: Mapping[str, Any] | None = None
) -> ModelGraph:
    """Capture the training step of a model as a graph of components and layers, with gradient flow annotated.

    Args:
        model: a Hugging Face model or any module whose forward returns a loss, with real weights or fake ones; or the path of a
            config.json (or a folder with one, or an id in the local cache): then it is built without weights.
        batch: what the model is called with, by name; at best two samples or more, with every modality in it. Made from the
            config for Hugging Face models of common conventions when not given.
        dynamic: a second batch: sizes in which it differs stay symbolic where the model's code allows.

    Raises:
        BatchError: the model refuses the batch.
        CaptureError: the model cannot be captured; the message has the reasons.
    """
    return _captured(*_built(model, batch), dynamic).graph


def freeze(model: nn.Module, train: str | Sequence[str]) -> None:
    """Train what matches and freeze the rest.

    Args:
        model: changed in place (`requires_grad`).
        train: `"all"`, or patterns over parameter names: a component or module name (`projector`, `language_model`), or a
            glob (`*.lora_*`).

    Raises:
        ConfigError: a pattern matches no parameter.
    """
    patterns = [train] if isinstance(train, str) else list(train)
    names = [name for name, _ in model.named_parameters()]
    chosen: set[str] = set()
    for pattern in patterns:
        matched = {name for name in names if _matches(name, pattern)}
        if not matched:
            modules = sorted({name.rpartition(".")[0].split(".")[i] for name in names for i in range(name.count("."))})
            known = ", ".join(part for part in modules if not part.isdigit())
            raise ConfigError(f"train pattern {pattern!r} matches no parameter; use 'all', a glob, or one of: {known}")
        chosen |= matched
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen)


def _matches(name: str, pattern: str) -> bool:
    if pattern == "all":
        return True
    if any(mark in pattern for mark in "*?["):
        return fnmatch.fnmatchcase(name, pattern)
    parts = name.split(".")
    if pattern == "projector" and not PROJECTOR_MODULES.isdisjoint(parts):
        return True
    wanted = pattern.split(".")
    inside = any(parts[i : i + len(wanted)] == wanted for i in range(len(parts)))
    return inside or any(part.endswith("_" + pattern) for part in parts)


def plan(
    model: nn.Module | str | Path,
    batch: Mapping[str, Any] | None = None,
    *,
    cluster: Cluster | str = "local",
    num_microbatches: int = DEFAULT_MICROBATCHES,
    stages: Mapping[str, int] | None = None,
    projector: ProjectorPlacement | None = None,
    attention: Attention | None = None,
    context_parallel: int = 1,
) -> Plan:
    """Find where every layer runs.

    Args:
        model: with `requires_grad` as it will train; or a path, as for `capture`.
        batch: one microbatch, with every modality in it; made from the config when not given.
        cluster: for example `"4x8xH100"`, or `"local"` for this machine.
        num_microbatches: microbatches of a step.
        stages: chain name -> number of stages, where that is decided already.
        projector: `"with_encoder"`, `"alone"`, `"with_language_model"`; None lets the simulator choose.
        attention: `"model"`, as the model does it; or `"bitfield"`: in the language model, masks become words of one int64 a
            token and empty parts of the mask cost nothing. None: bitfield if context_parallel needs it.
        context_parallel: ranks that share the tokens of each stage of the language model.

    Raises:
        BatchError, CaptureError: from the capture.
        PlanError: nothing fits, or `stages` asks for what does not exist; the model's tokens cannot be shared.
        ConfigError: `context_parallel` with the model's own attention.
    """
    model, batch = _built(model, batch)
    return _planned(
        _captured(model, batch),
        completed(model, batch),
        cluster,
        num_microbatches,
        stages,
        projector,
        _attention(attention, context_parallel),
    )


def _attention(attention: Attention | None, context_parallel: int) -> AttentionChoice:
    if context_parallel < 1:
        raise ConfigError(
            f"context_parallel is {context_parallel}; each stage of the language model has at least 1 rank"
        )
    if attention == "model" and context_parallel > 1:
        raise ConfigError(
            f"context_parallel {context_parallel} needs attention 'bitfield', got 'model': the model's own masks are for whole "
            "sequences"
        )
    if attention not in (None, *get_args(Attention)):
        raise ConfigError(f"attention is {attention!r}; choose one of {', '.join(get_args(Attention))}")
    return AttentionChoice(
        attention=attention or ("bitfield" if context_parallel > 1 else "model"), context_parallel=context_parallel
    )


def _built(model: nn.Module | str | Path, batch: Mapping[str, Any] | None) -> tuple[nn.Module, Mapping[str, Any]]:
    """The model, built without weights where a path was given, and a batch for it."""
    module = model if isinstance(model, nn.Module) else skeleton(model)
    return module, example_batch(module) if batch is None else batch


def stage_programs(model: nn.Module, batch: Mapping[str, Any], plan: Plan) -> Mapping[str, StageProgram]:
    """The programs that the stages of a plan run for batches like `batch`, by stage name."""
    captured = _captured(model, batch)
    check_fingerprint(plan, fingerprint_of(captured.graph))
    return lower(with_attention(captured, AttentionChoice.of(plan)), plan).programs


def parallelize(
    model: nn.Module,
    batch: Mapping[str, Any] | None = None,
    plan: Plan | None = None,
    *,
    cluster: Cluster | str = "local",
    num_microbatches: int = DEFAULT_MICROBATCHES,
    stages: Mapping[str, int] | None = None,
    projector: ProjectorPlacement | None = None,
    attention: Attention | None = None,
    context_parallel: int = 1,
    on_capture: Callable[[int], None] | None = None,
    **options: Any,
) -> Engine:
    """Split a model over processes and return the engine that trains it.

    In a plain script the other processes are started here; under torchrun the launched ranks are used.

    Args:
        model: on rank 0, with real weights.
        batch: one microbatch, with every modality in it; its values are not trained on. Made from the config for Hugging Face
            models of common conventions when not given.
        plan: as made by `plan`; by default it is made here, for `cluster`.
        cluster, num_microbatches, stages, projector, attention, context_parallel: as for `plan`, when none is given.
        on_capture: called before each later capture with the number of captures so far.
        options: of `Engine` (optimizer, scheduler, clip_norm, compile, ...).
    """
    model, batch = _built(model, batch)
    captured = _captured(model, batch)
    wanted = _attention(attention, context_parallel)
    if plan is None:
        plan = _planned(captured, completed(model, batch), cluster, num_microbatches, stages, projector, wanted)
    elif attention not in (None, plan.attention) or context_parallel not in (1, plan.context_parallel):
        raise ConfigError(
            f"the plan has attention {plan.attention!r} and context_parallel {plan.context_parallel}, asked were "
            f"{wanted.attention!r} and {context_parallel}: a plan decides these; leave them out, or make another plan"
        )
    check_fingerprint(plan, fingerprint_of(captured.graph))
    patterns = Patterns(model, plan, captured, batch, on_capture)
    options.setdefault("pad", _padding(model))
    return Engine(Placement.of(plan), patterns, model=model, **options)


def _padding(model: nn.Module) -> dict[str, int]:
    """What `input_ids` are padded with: the pad token of the model's text config, if it names one."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    pad = getattr(text, "pad_token_id", None)
    return {} if pad is None else {"input_ids": int(pad)}


def _captured(model: nn.Module, batch: Mapping[str, Any], dynamic: Mapping[str, Any] | None = None) -> Capture:
    captured = _capture(model, batch, dynamic=dynamic)
    Pipeline(passes=(GradientFlow(),)).run(captured.graph)
    return captured


def _planned(
    captured: Capture,
    batch: Mapping[str, Any],
    cluster: Cluster | str,
    num_microbatches: int,
    stages: Mapping[str, int] | None,
    projector: ProjectorPlacement | None,
    choice: AttentionChoice,
) -> Plan:
    captured = with_words(captured, choice, batch)
    graph = captured.graph
    where = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    table = Cost().run(graph)
    costs = {component.name: table[component.name] for component in graph.components}
    if choice.context_parallel > 1:
        link = SharedTokens(graph=graph, num_ranks=choice.context_parallel, cluster=where, dtype=_main_dtype(graph))
        choice = replace(choice, head_stride=link.head_stride)
        costs = link.costs(costs)
    found = search(
        graph,
        costs,
        where,
        num_microbatches=num_microbatches,
        dtype=_main_dtype(graph),
        fingerprint=fingerprint_of(graph),
        stages=stages,
        projector=projector,
        entries=_entries(graph),
        shards=choice.context_parallel,
    )
    found = replace(found, attention=choice.attention, head_stride=choice.head_stride)
    parts = cut(with_shared_tokens(captured, choice).graph, found)
    return replace(found, links=links(parts), shared_values=parts.shared_values)


def _entries(graph: ModelGraph) -> dict[tuple[str, str], int]:
    """(producer, consumer) -> first layer of the consumer that reads the producer."""
    first: dict[tuple[str, str], int] = {}
    for node in graph.module.graph.nodes:
        for source in node.all_input_nodes if node.op == "call_function" else ():
            if source.op == "call_function" and not info(source).shared and not info(node).shared:
                pair = (component_of(source), component_of(node))
                if pair[0] != pair[1]:
                    first[pair] = min(first.get(pair, info(node).layer), info(node).layer)
    return first


def _main_dtype(graph: ModelGraph) -> str:
    """The dtype of most parameter elements."""
    counts: Counter[str] = Counter()
    for spec in graph.parameters:
        counts[spec.dtype] += spec.num_elements
    return counts.most_common(1)[0][0] if counts else "float32"


def fingerprint_of(graph: ModelGraph) -> Fingerprint:
    """What a plan for this graph belongs to."""
    text = "\n".join(f"{p.name} {p.shape} {p.dtype} {p.trainable}" for p in graph.parameters)
    return Fingerprint(
        model=graph.name,
        parameters=hashlib.sha256(text.encode()).hexdigest(),
        torch=torch.__version__.split("+")[0],
        transformers=version("transformers"),
    )
