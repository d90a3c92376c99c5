"""A stage's source needs no model library: written to a file it runs in a process of its own, and compiles whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.graphs.split import captured, even_plan, root_values, with_present_flags
from torch import Tensor

from mmcompile.codegen.load import load_stage
from mmcompile.codegen.program import StageProgram
from mmcompile.codegen.stage_programs import lower

RUN_ALONE = """
import importlib.util, sys
import torch

folder = sys.argv[1]
spec = importlib.util.spec_from_file_location("stage", folder + "/stage.py")
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
given = torch.load(folder + "/given.pt", weights_only=True)
parameters = {name: torch.nn.Parameter(tensor) for name, tensor in given["parameters"].items()}
stage = module.Stage(parameters, given["buffers"], given["constants"])
results = stage(*given["arguments"])
results[0].sum().backward()
gradients = {name: parameter.grad for name, parameter in parameters.items()}
assert not [name for name in sys.modules if name.partition(".")[0] in ("transformers", "peft", "tokenizers")]
torch.save({"results": [result.detach() for result in results], "gradients": gradients}, folder + "/got.pt")
"""


def _programs(name: str) -> tuple[dict[str, StageProgram], dict[str, Tensor], dict[str, object]]:
    model, batch, found = captured(name)
    found = with_present_flags(model.requires_grad_(True), found)
    programs = lower(found, even_plan(found.graph, {"language_model": 3})).programs
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    return dict(programs), tensors, root_values(found, batch)


def _fresh(program: StageProgram, tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    return {
        "parameters": {spec.name: tensors[spec.name].detach().clone() for spec in program.parameters},
        "buffers": {name: tensors[name] for name in program.buffers},
        "constants": dict(program.constants),
    }


def test_a_fresh_process_runs_a_stage_without_transformers(tmp_path: Path) -> None:
    """Qwen3-VL's encoder: our packed attention, host values, deep features."""
    programs, tensors, roots = _programs("qwen3_vl")
    program = programs["visual.0"]
    arguments = [roots[port.name] for port in program.inputs]
    given = _fresh(program, tensors)
    (tmp_path / "stage.py").write_text(program.source)
    torch.save({**given, "arguments": arguments}, tmp_path / "given.pt")
    subprocess.run([sys.executable, "-P", "-c", RUN_ALONE, str(tmp_path)], check=True, timeout=120)
    got = torch.load(tmp_path / "got.pt", weights_only=True)
    stage = load_stage(program, {**given["parameters"], **given["buffers"]})
    results = stage(*arguments)
    assert len(got["results"]) == len(program.outputs) > 1
    for have, want in zip(got["results"], results, strict=True):
        torch.testing.assert_close(have, want.detach(), rtol=0, atol=1e-12)
    results[0].sum().backward()
    wanted = {name: parameter.grad for name, parameter in stage.named_parameters()}
    assert got["gradients"].keys() == wanted.keys()
    assert sum(gradient is not None for gradient in wanted.values()) > 20
    for name, gradient in wanted.items():
        torch.testing.assert_close(got["gradients"][name], gradient, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor itself calls torch.jit
@pytest.mark.parametrize("stage_name", ["hearing.0", "language_model.1", "language_model.2"])
def test_inductor_compiles_a_stage_whole(stage_name: str) -> None:
    programs, tensors, roots = _programs("two_encoder_net")
    program = programs[stage_name]
    links = {
        port.name: torch.randn([int(size) for size in port.shape], dtype=torch.float64, requires_grad=True)
        for port in program.inputs
        if port.kind == "link"
    }
    leaves = [*links.values()]
    outcomes = []
    for compiled in (False, True):
        stage = load_stage(program, {n: t.detach().clone() for n, t in tensors.items()})
        run = torch.compile(stage, backend="inductor", fullgraph=True) if compiled else stage
        results = run(*(links[p.name] if p.kind == "link" else roots[p.name] for p in program.inputs))
        wanted = [*leaves, *stage.parameters()]
        gradients = torch.autograd.grad(results[0].square().sum(), wanted)
        outcomes.append((*results, *gradients))
    for got, want in zip(outcomes[1], outcomes[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
