"""One graph serves every stage, process state, size and memory layout that its layer meets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from support.graphs.layer_run import layer_patterns, llama, run_layers
from support.oracles.eager import difference, eager_outcome
from torch import Tensor
from torch._dynamo.utils import counters
from zoo.family import Size

from mmcompile.codegen.compiled import load_compiled_stage
from mmcompile.codegen.program import PreparedMicrobatch, StageProgram
from mmcompile.codegen.program_cache import Patterns
from mmcompile.codegen.stage_module import StageModule
from mmcompile.errors import VerifyError

FAMILY = llama(3)
SIZES = [(5, 5), (3, 15), (15, 3), (2, 40), (4, 7)]
"""Samples and length. At the first, two sizes that vary are equal by chance."""


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def compiled(program: StageProgram, tensors: Mapping[str, Tensor]) -> StageModule:
    return load_compiled_stage(program, tensors, backend="aot_eager")


@pytest.fixture(scope="module")
def patterns() -> Patterns:
    model = FAMILY.build()
    found = layer_patterns(model, FAMILY.batch())
    found.prepare(FAMILY.second_batch())
    return found


def prepared(patterns: Patterns, samples: int, length: int) -> PreparedMicrobatch:
    before = patterns.num_captures
    found = patterns.prepare(batch(samples, length))
    assert patterns.num_captures == before
    return found


def batch(samples: int, length: int) -> dict[str, Tensor]:
    return FAMILY.draw(Size(samples=samples, length=length, media=0), seed=length)


def test_four_graphs_serve_all_layers_sizes_and_layouts(patterns: Patterns) -> None:
    """Embedding, rotary tables, decoder layer, head: every run loads all programs anew, as a generation does."""
    model = FAMILY.build()
    torch._dynamo.reset()
    before = num_graphs()
    for samples, length in SIZES:
        microbatch = prepared(patterns, samples, length)
        for load, given in [(compiled, microbatch), (_transposed, microbatch), (compiled, _with_offset(microbatch))]:
            outcome = run_layers(model, given, load)
            wanted = eager_outcome(model, batch(samples, length))
            assert (found := difference(outcome, wanted)).within(1e-5), str(found)
            assert num_graphs() - before == 4


def test_a_layer_without_gradients_has_a_graph_of_its_own(patterns: Patterns) -> None:
    microbatch = prepared(patterns, 3, 15)
    program = microbatch.programs.programs["language_model.2"]
    hidden = torch.randn(microbatch.link_shapes[program.inputs[-1].name])
    inputs = [*(microbatch.sizes[port.name] for port in program.inputs[:-1]), hidden]
    torch._dynamo.reset()
    before = num_graphs()
    with torch.no_grad():
        (result,) = compiled(program, patterns.parameters())(*inputs)
    assert not result.requires_grad
    assert num_graphs() == before + 2  # with the rotary tables
    (again,) = compiled(program, patterns.parameters())(*inputs[:-1], hidden.requires_grad_())
    assert again.requires_grad
    assert num_graphs() == before + 4
    torch.testing.assert_close(again, result)


def test_what_goes_wrong_names_the_stage(patterns: Patterns) -> None:
    microbatch = prepared(patterns, 3, 15)
    program = microbatch.programs.programs["language_model.2"]
    sizes = [microbatch.sizes[port.name] for port in program.inputs[:-1]]
    with pytest.raises(RuntimeError) as failure:
        compiled(program, patterns.parameters())(*sizes, torch.ones(7, 7, 64))
    where = f"function language_model_layer of stage language_model.2 of pattern {program.pattern}"
    assert f"in compiled {where}" in failure.value.__notes__


def test_missing_tensors_are_named(patterns: Patterns) -> None:
    program = prepared(patterns, 3, 15).programs.programs["language_model.0"]
    with pytest.raises(VerifyError, match=r"reads \['model.embed_tokens.weight'\], which were not given"):
        compiled(program, {})


def _transposed(program: StageProgram, tensors: Mapping[str, Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """The stage on inputs that lie in memory another way, as a value may that comes from a stage of the same rank."""
    stage = compiled(program, tensors)

    def run(*inputs: Tensor | int) -> tuple[Tensor, ...]:
        return stage(*(x if isinstance(x, int) else x.transpose(0, -1).contiguous().transpose(0, -1) for x in inputs))

    return run


def _with_offset(microbatch: PreparedMicrobatch) -> PreparedMicrobatch:
    """With inputs that do not start where their memory does, as those of one message do."""
    values = {
        name: torch.cat([v.flatten()[:1], v.flatten()])[1:].view(v.shape) for name, v in microbatch.values.items()
    }
    assert all(value.storage_offset() == 1 for value in values.values())
    return replace(microbatch, values=values)
