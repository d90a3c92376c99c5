"""After `warm_up`, forked processes run every layer forward and backward and compile nothing."""

from __future__ import annotations

import functools
import os
import pickle
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.graphs.layer_run import layer_patterns, llama, run_layers
from support.oracles.eager import Outcome, difference, eager_outcome
from support.processes.time_limit import time_limit
from torch import nn
from torch._dynamo.utils import counters
from zoo import ALL
from zoo.family import Family, Size

from mmcompile.codegen.compiled import CompiledLayers, load_compiled_stage
from mmcompile.codegen.program import PatternPrograms, Port, PreparedMicrobatch, StageProgram
from mmcompile.codegen.program_cache import Patterns
from mmcompile.config import Recompute, ScheduleKind
from mmcompile.ir.graph import ParameterSpec
from mmcompile.planner.plan.placement import PlacedStage
from mmcompile.runtime.elastic.warm_up import warm_up
from mmcompile.runtime.executor.loaded_stage import LoadedStage

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
"""Dynamo hides both unless warnings are errors."""
CPU = torch.device("cpu")
LLAMA = llama(4)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model and how many distinct layers it has."""

    family: Family
    num_graphs: int
    frozen: str = ""
    """A module whose parameters do not train."""
    schedule: ScheduleKind = "1f1b"
    recompute: Recompute = "none"


CASES = {
    # Embedding; rotary tables; decoder layer; norm, head and loss.
    "llama": Case(family=LLAMA, num_graphs=4),
    # Patches; vision layer; projector; embedding and merge; rotary tables; decoder layer; norm, head and loss.
    "llava": Case(family=ALL["llava"], num_graphs=7),
    # The same; those of the tower are forwards without gradients.
    "llava, tower frozen": Case(family=ALL["llava"], num_graphs=7, frozen="model.vision_tower"),
    "llama, backward in two parts": Case(family=LLAMA, num_graphs=4, schedule="zb-h1", recompute="full"),
}
INDUCTOR = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # inductor itself calls torch.jit
]


@functools.cache
def _known(case: Case) -> tuple[nn.Module, Patterns, PreparedMicrobatch]:
    """The model, patterns that know batches of several sizes, and a microbatch of theirs."""
    model = case.family.build()
    if case.frozen:
        model.get_submodule(case.frozen).requires_grad_(False)
    patterns = layer_patterns(model, case.family.batch(), case.schedule, case.recompute)
    return model, patterns, patterns.prepare(case.family.second_batch())


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("llama", "aot_eager"),
        ("llama, backward in two parts", "aot_eager"),
        pytest.param("llava, tower frozen", "aot_eager", marks=pytest.mark.slow),
        *(pytest.param(name, "inductor", marks=INDUCTOR) for name in CASES),
    ],
)
def test_a_forked_process_compiles_nothing(name: str, backend: str) -> None:
    case = CASES[name]
    model, patterns, microbatch = _known(case)
    model.zero_grad()
    state, threads, children = torch.get_rng_state(), _threads(), _children()
    torch._dynamo.reset()
    assert warm_up([microbatch], patterns.parameters(), backend=backend) == case.num_graphs
    assert len(microbatch.programs.programs) > case.num_graphs
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert _threads() == threads
    assert _children() == children

    wanted = eager_outcome(model, case.family.second_batch())
    outcome, compiled = _forked(lambda: _run(model, microbatch, backend))
    assert compiled == 0
    assert (found := difference(outcome, wanted)).within(1e-5), str(found)
    assert len(outcome.gradients) > 10


@pytest.mark.slow
def test_depth_does_not_add_graphs() -> None:
    """A tower of 4 layers takes 4 graphs too, as above."""
    _, patterns, microbatch = _known(Case(family=llama(16), num_graphs=4))
    torch._dynamo.reset()
    assert warm_up([microbatch], patterns.parameters(), backend="aot_eager") == 4
    assert len(microbatch.programs.programs) == 18


def test_other_sizes_are_tried_and_need_no_graph() -> None:
    _, patterns, first = _known(CASES["llama"])
    sizes = [Size(samples=samples, length=length, media=0) for samples, length in [(2, 9), (9, 2), (6, 6)]]
    others = [patterns.prepare(LLAMA.draw(size, seed=1)) for size in sizes]
    torch._dynamo.reset()
    assert warm_up([first, *others], patterns.parameters(), backend="aot_eager") == 4
    assert warm_up([*others, first], patterns.parameters(), backend="aot_eager") == 0


def test_stages_of_other_ranks_replicas_and_layers_share_what_is_compiled() -> None:
    _, patterns, microbatch = _known(CASES["llama"])
    programs = microbatch.programs.programs
    shared = set()
    for ranks in ([0, 0, 0, 0, 0, 0], [2, 2, 1, 1, 0, 0]):
        stages = [
            PlacedStage(name=f"{name}.r{replica}", program=name, replica=replica, ranks=(rank,), depth=5 - at)
            for replica in range(2)
            for at, (name, rank) in enumerate(zip(programs, ranks, strict=True))
        ]
        for at, stage in enumerate(stages):
            held = {name: tensor.detach().clone() for name, tensor in patterns.parameters().items()}
            loaded = LoadedStage.load(programs[stage.program_name], held, stages, at, device=CPU, compiled=True)
            runner = loaded.run.runner
            assert isinstance(runner, CompiledLayers)
            shared |= {runner.compiled(name) for name in runner.layers}
    assert len(shared) == 4


MAKES = """
aten = torch.ops.aten

def make(embed: "float32 [93, 2], trained", ids: "int64 [1, 3]"):
    return (aten.embedding.default(embed, ids), ids % 4)

class Stage(StageModule):
    def forward(self, ids):
        return self.run(make, self.t["embed"], ids)
"""
READS = """
aten = torch.ops.aten

def read(table: "float32 [4, 2], trained", hidden: "float32 [1, 3, 2], gradient", places: "int64 [1, 3]"):
    return ((hidden + aten.embedding.default(table, places)).sum(),)

class Stage(StageModule):
    def forward(self, hidden, places):
        return self.run(read, self.t["places"], hidden, places)
"""


def test_values_that_cannot_be_random_are_computed() -> None:
    """Places index a table of four rows: what is made up would be out of its range."""
    ids = torch.tensor([[90, 91, 92]])
    hidden = Port(name="hidden", kind="link", shape=(1, 3, 2), dtype="float32", gradient=True, peers=("a",))
    places = Port(name="places", kind="link", shape=(1, 3), dtype="int64", peers=("a",))
    programs = {
        "a": _program(
            "a", MAKES, (Port(name="ids", kind="root", shape=(1, 3), dtype="int64"),), (hidden, places), "embed", 93
        ),
        "b": _program(
            "b", READS, (hidden, places), (Port(name="loss_sum", kind="link", shape=(), dtype="float32"),), "places", 4
        ),
    }
    microbatch = PreparedMicrobatch(
        programs=PatternPrograms(pattern="p", programs=programs, per_token=False),
        sizes={},
        values={"ids": ids},
        link_shapes={"hidden": (1, 3, 2), "places": (1, 3)},
    )
    tensors = {"embed": torch.ones(93, 2), "places": torch.ones(4, 2)}
    torch._dynamo.reset()
    assert warm_up([microbatch], tensors, backend="aot_eager") == 2


def _program(
    stage: str, source: str, inputs: tuple[Port, ...], outputs: tuple[Port, ...], parameter: str, rows: int
) -> StageProgram:
    return StageProgram(
        stage=stage,
        pattern="p",
        source=source,
        inputs=inputs,
        outputs=outputs,
        parameters=(ParameterSpec(name=parameter, shape=(rows, 2), dtype="float32", trainable=True),),
        buffers=(),
        is_loss=stage == "b",
        has_backward=True,
    )


def _run(model: nn.Module, microbatch: PreparedMicrobatch, backend: str) -> tuple[Outcome, int]:
    """The outcome, and how many graphs it compiled."""
    before = counters["stats"]["unique_graphs"]
    outcome = run_layers(model, microbatch, lambda p, tensors: load_compiled_stage(p, tensors, backend=backend))
    return outcome, counters["stats"]["unique_graphs"] - before


def _forked(work: Callable[[], tuple[Outcome, int]]) -> tuple[Outcome, int]:
    """What a forked process returns."""
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        try:
            os.close(reading)
            with os.fdopen(writing, "wb") as file:
                pickle.dump(work(), file)
        finally:
            os._exit(0)
    os.close(writing)
    with time_limit(60), os.fdopen(reading, "rb") as file:
        data = file.read()
    os.waitpid(pid, 0)
    assert data, "the forked process failed; its traceback is above"
    return pickle.loads(data)


def _threads() -> tuple[int, int]:
    """Threads of this process as Python and as the system count them."""
    return threading.active_count(), len(list(Path("/proc/self/task").iterdir()))


def _children() -> str:
    return "".join(path.read_text() for path in Path("/proc/self/task").glob("*/children")).strip()
