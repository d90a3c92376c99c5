"""Where a graph is cut: values that several stages need are computed again or sent, and the numbers stay the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.graphs.split import captured, eager_from_logits, even_plan, root_values, run_split, with_present_flags
from support.oracles.eager import difference

from mmcompile.codegen.cut import cut
from mmcompile.codegen.stage_programs import lower
from mmcompile.costmodel.cluster import Cluster, Interconnect
from mmcompile.errors import PlanError
from mmcompile.ir.capture import Capture
from mmcompile.ir.graph import info

STAGES = {"language_model": 3}
LANGUAGE = tuple(f"language_model.{index}" for index in range(3))


def _captured(name: str) -> Capture:
    model, _, found = captured(name)
    return with_present_flags(model.requires_grad_(True), found)


def _cluster_of_slow_memory() -> Cluster:
    """Computing anything takes ages, sending takes no time."""
    local = Cluster.local(2)
    link = Interconnect(bytes_per_s=1e15, latency_s=0.0, source="made up")
    return replace(local, device=replace(local.device, memory_bytes_per_s=1.0), intra=link, inter=link)


@pytest.mark.parametrize(("name", "num_shared"), [("two_encoder_net", 1), ("llava", 2), ("qwen3_vl", 2)])
def test_masks_and_rotary_tables_are_computed_again_where_links_are_slow(name: str, num_shared: int) -> None:
    """One mask in ours; cosines and sines in the others."""
    found = _captured(name)
    plan = even_plan(found.graph, STAGES, Cluster.local(2))
    language = [shared for shared in plan.shared_values if set(shared.stages) & set(LANGUAGE)]
    assert [shared.stages for shared in language] == [LANGUAGE] * num_shared
    assert {shared.choice for shared in plan.shared_values} == {"recompute"}
    assert all(shared.recompute_s <= shared.send_s for shared in plan.shared_values)
    crossing = {port.name for program in lower(found, plan).programs.values() for port in program.outputs}
    assert not crossing & {shared.name for shared in plan.shared_values}


@pytest.mark.parametrize("name", ["two_encoder_net", "llava", "qwen3_vl", "mllama"])
def test_they_are_sent_where_memory_is_slow_and_numbers_stay(name: str) -> None:
    found = _captured(name)
    model, batch, _ = captured(name)
    plan = even_plan(found.graph, STAGES, _cluster_of_slow_memory())
    assert plan.shared_values
    assert {shared.choice for shared in plan.shared_values} == {"send"}
    programs = lower(found, plan)
    run = run_split(model, programs, root_values(found, batch))
    sent = {
        crossing.output for crossing in run.crossings if crossing.output.name in {s.name for s in plan.shared_values}
    }
    assert sent
    for port in sent:
        assert not port.gradient
        assert port.peers == next(s.stages for s in plan.shared_values if s.name == port.name)[1:]
    wanted, num_tokens = eager_from_logits(model, batch)
    assert run.num_tokens == num_tokens
    assert (outcome := difference(run.outcome, wanted)).within(1e-9), str(outcome)


def test_a_value_that_is_sent_is_computed_once() -> None:
    found = _captured("two_encoder_net")
    graph = found.graph
    near = cut(graph, even_plan(graph, STAGES, Cluster.local(2)))
    far = cut(graph, even_plan(graph, STAGES, _cluster_of_slow_memory()))
    (shared,) = far.shared_values
    holders = {name: [n.name for n in part.nodes].count(shared.name) for name, part in near.stages.items()}
    assert {name for name, count in holders.items() if count} == set(LANGUAGE)
    assert [name for name, part in far.stages.items() if shared.name in {n.name for n in part.nodes}] == [LANGUAGE[0]]


@pytest.mark.parametrize("name", ["mllama", "two_encoder_net"])
def test_every_node_that_is_not_shared_is_in_exactly_one_stage(name: str) -> None:
    graph = _captured(name).graph
    parts = cut(graph, even_plan(graph, STAGES)).stages.values()
    own = [node for part in parts for node in part.nodes if not info(node).shared]
    calls = [n for n in graph.module.graph.nodes if n.op == "call_function" and not info(n).shared]
    assert sorted(node.name for node in own) == sorted(node.name for node in calls)


def test_a_plan_that_lacks_a_layer_is_refused() -> None:
    graph = _captured("two_encoder_net").graph
    plan = even_plan(graph, STAGES)
    *others, language = plan.chains
    short = replace(plan, chains=(*others, replace(language, stages=language.stages[:-1])))
    with pytest.raises(
        PlanError, match=r"layer \d of component 'language_model' is in no stage of the plan; plan this"
    ):
        cut(graph, short)
