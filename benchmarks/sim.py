"""The simulator against reality: predicted and measured seconds of a step, for pipelines of two processes on this machine.

For each pipeline the layers are measured just before (`mmcompile profile`), at other sizes than it runs at; then it trains for
a few steps, one core and one thread a process. Prints a table and, last, the median absolute error; exits with 1 if that is
above 10%.

    python -P benchmarks/sim.py [--steps 10] [--only NAME]
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # for the module beside this one

import torch  # noqa: E402
import transformers  # noqa: E402
from measured_prediction import MeasuredStep, TrainedParameters, predict_measured  # noqa: E402
from torch import nn  # noqa: E402

from mmcompile import api  # noqa: E402
from mmcompile.config import ProjectorPlacement  # noqa: E402
from mmcompile.costmodel.calibration import Calibration, RuntimeCosts  # noqa: E402
from mmcompile.costmodel.cluster import Cluster  # noqa: E402
from mmcompile.costmodel.compute import LayerTimes  # noqa: E402
from mmcompile.costmodel.load import Load  # noqa: E402
from mmcompile.data.collate import Sample, collate  # noqa: E402
from mmcompile.ir.graph import ModelGraph, torch_dtype  # noqa: E402
from mmcompile.ir.sample_inputs import example_batch  # noqa: E402
from mmcompile.ir.tensor_spec import TensorSpec  # noqa: E402
from mmcompile.passes.cost.cost import Cost  # noqa: E402
from mmcompile.passes.layer_kinds import layer_kinds  # noqa: E402
from mmcompile.passes.pipeline import analyse  # noqa: E402
from mmcompile.planner.plan.placement import Placement  # noqa: E402
from mmcompile.planner.plan.plan import Plan  # noqa: E402
from mmcompile.planner.plan.plan_record import Link  # noqa: E402
from mmcompile.planner.schedule.measured import LinkMessages  # noqa: E402
from mmcompile.profile import profile  # noqa: E402
from mmcompile.runtime.runtime_probe import probe_runtime  # noqa: E402

LIMIT = 0.10
WARM_UP = 3
VOCABULARY = 2048
IMAGE, AUDIO, START, END = 2000, 2001, 2002, 2003

TEXT: dict[str, Any] = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOWER: dict[str, Any] = {
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """A microbatch of equal samples, with one image or sound each where the model takes any."""

    samples: int
    text_tokens: int


SIZES = (
    Size(samples=1, text_tokens=96),
    Size(samples=1, text_tokens=320),
    Size(samples=2, text_tokens=160),
    Size(samples=5, text_tokens=64),
)
"""At which layers are measured."""
RUN = Size(samples=2, text_tokens=112)
"""At which pipelines run."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A model in two processes."""

    name: str
    model: Callable[[], nn.Module]
    train: tuple[str, ...]
    stages: Mapping[str, int]
    projector: ProjectorPlacement | None = None
    microbatches: int = 5


def llava() -> nn.Module:
    vision = transformers.CLIPVisionConfig(**TOWER, image_size=112, patch_size=14, projection_dim=64)
    text = transformers.LlamaConfig(**TEXT)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_seq_length=64, image_token_index=IMAGE
    )
    return transformers.LlavaForConditionalGeneration(config)


def qwen2_5_vl() -> nn.Module:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12], "type": "mrope"}
    config = transformers.Qwen2_5_VLConfig(
        vision_config={
            "depth": 4,
            "hidden_size": 256,
            "intermediate_size": 688,
            "num_heads": 4,
            "out_hidden_size": 384,
            "patch_size": 14,
            "fullatt_block_indexes": [1, 3],
            "window_size": 56,
        },
        text_config={**TEXT, "rope_parameters": rope},
        image_token_id=IMAGE,
        video_token_id=AUDIO,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def qwen2_audio() -> nn.Module:
    audio = transformers.Qwen2AudioEncoderConfig(
        d_model=384,
        encoder_layers=4,
        encoder_attention_heads=6,
        encoder_ffn_dim=1536,
        num_mel_bins=32,
        max_source_positions=128,
    )
    text = transformers.Qwen2Config(**TEXT)
    config = transformers.Qwen2AudioConfig(audio_config=audio, text_config=text, audio_token_index=AUDIO)
    return transformers.Qwen2AudioForConditionalGeneration(config)


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**TEXT, "num_hidden_layers": 8}))


LANGUAGE = ("language_model", "lm_head")
PROJECTOR = "multi_modal_projector"
VISION = {"vision_tower": 1, "language_model": 1}
VISUAL = {"visual": 1, "language_model": 1}
SOUND = {"audio_tower": 1, "language_model": 1}
TWO = {"language_model": 2}
UPPER = ("layers.4", "layers.5", "layers.6", "layers.7", "lm_head")
PIPELINES = (
    Pipeline("llava, all", llava, ("all",), VISION, "with_encoder"),
    Pipeline("llava, frozen tower", llava, (PROJECTOR, *LANGUAGE), VISION, "with_encoder"),
    Pipeline("llava, projector only", llava, (PROJECTOR,), VISION, "with_encoder"),
    Pipeline("qwen2.5-vl, all", qwen2_5_vl, ("all",), VISUAL),
    Pipeline("qwen2.5-vl, frozen tower", qwen2_5_vl, LANGUAGE, VISUAL),
    Pipeline("qwen2-audio, frozen tower", qwen2_audio, (PROJECTOR, *LANGUAGE), SOUND, "with_encoder"),
    Pipeline("llama in two, all", llama, ("all",), TWO),
    Pipeline("llama in two, upper half", llama, UPPER, TWO),
)


def make_samples(model: nn.Module, size: Size) -> list[Sample]:
    sample = example_batch(model, batch_size=1, text_tokens=size.text_tokens, image_size=112)
    return [sample] * size.samples


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A pipeline predicted and run [s]."""

    pipeline: Pipeline
    predicted: MeasuredStep
    measured: Sequence[float]
    fit_error: float
    """Median over layer kinds."""

    @property
    def measured_s(self) -> float:
        return statistics.median(self.measured)

    @property
    def error(self) -> float:
        return self.predicted.iteration_s / self.measured_s - 1


def run(pipeline: Pipeline, runtime: RuntimeCosts, num_steps: int) -> Result:
    """Measure the layers of a pipeline, predict its step, and train for a few steps."""
    torch.manual_seed(0)
    model = pipeline.model().train()
    api.freeze(model, pipeline.train)
    calibration = profile(model, [collate(make_samples(model, size)) for size in SIZES], device_name="cpu")
    samples = make_samples(model, RUN)
    batch = collate(samples)
    plan = api.plan(
        model,
        batch,
        cluster=Cluster.local(2),
        num_microbatches=pipeline.microbatches,
        stages=pipeline.stages,
        projector=pipeline.projector,
    )
    predicted = predict(plan, api.capture(model, batch), calibration, runtime)
    measured: list[float] = []
    with api.parallelize(model, batch, plan, device="cpu", allow_unused=True) as engine:
        for number in range(WARM_UP + num_steps):
            metrics = engine.step(samples * pipeline.microbatches)
            if number >= WARM_UP:
                measured.append(metrics.seconds)
    return Result(
        pipeline=pipeline,
        predicted=predicted,
        measured=measured,
        fit_error=statistics.median(kind.median_error for kind in calibration.kinds),
    )


def predict(plan: Plan, graph: ModelGraph, calibration: Calibration, runtime: RuntimeCosts) -> MeasuredStep:
    """A step of a plan at the sizes of `graph`, from measured layers."""
    loads, kinds = analyse(Cost(), graph).loads, layer_kinds(graph)
    return predict_measured(
        Placement.of(plan).stages,
        {stage.name: stage_times(plan, stage.name, loads, kinds, calibration) for stage in plan.stages},
        [messages(link) for link in plan.links],
        {stage.ranks[0]: trained(plan, stage.name, graph) for stage in plan.stages},
        runtime=runtime,
        prepare_s=sum(
            host.seconds.at(loads[graph.loss_component]) for host in calibration.hosts if host.model == graph.name
        ),
        num_microbatches=plan.num_microbatches,
    )


def stage_times(
    plan: Plan, name: str, loads: Mapping[str, Load], kinds: Mapping[str, Sequence[str]], calibration: Calibration
) -> LayerTimes:
    """Sum of the measured layers of a stage."""
    forward_s = input_grad_s = weight_grad_s = 0.0
    for segment in plan.stage(name).segments:
        for kind in kinds[segment.component][segment.first : segment.last]:
            times = calibration.times(kind, loads[segment.component])
            if times is None:
                raise SystemExit(f"layer kind {kind} was not measured: it depends on the sizes of the batch")
            forward_s += times.forward_s
            input_grad_s += times.input_grad_s
            weight_grad_s += times.weight_grad_s
    return LayerTimes(forward_s=forward_s, input_grad_s=input_grad_s, weight_grad_s=weight_grad_s)


def messages(link: Link) -> LinkMessages:
    sizes = {tensor.name: num_bytes(tensor) for tensor in link.tensors}
    return LinkMessages(
        source=link.source,
        target=link.target,
        sizes=tuple(sizes.values()),
        gradient_sizes=tuple(sizes[name] for name in link.gradient),
    )


def num_bytes(tensor: TensorSpec) -> int:
    return math.prod(int(size) for size in tensor.shape) * torch_dtype(tensor.dtype).itemsize


def trained(plan: Plan, name: str, graph: ModelGraph) -> TrainedParameters:
    specs = {text: spec for spec in graph.parameters for text in (spec.name, *spec.aliases)}
    own = {
        specs[parameter].name: specs[parameter]
        for segment in plan.stage(name).segments
        for layer in graph.component(segment.component).layers[segment.first : segment.last]
        for parameter in layer.parameters
        if specs[parameter].trainable
    }
    return TrainedParameters(num_bytes=sum(spec.num_bytes for spec in own.values()), num_tensors=len(own))


ROW = "{:<27}{:>10}{:>14}{:>13}{:>9}{:>9}{:>9}"
HEADER = ROW.format("pipeline", "fit error", "predicted ms", "measured ms", "spread", "error", "bubble")


def row(result: Result) -> str:
    spread = (max(result.measured) - min(result.measured)) / result.measured_s
    return ROW.format(
        result.pipeline.name,
        f"{result.fit_error:.1%}",
        f"{result.predicted.iteration_s * 1e3:.1f}",
        f"{result.measured_s * 1e3:.1f}",
        f"{spread:.1%}",
        f"{result.error:+.1%}",
        f"{result.predicted.timeline.bubble:.1%}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="steps timed (default 10)")
    parser.add_argument("--only", default="", help="pipelines whose name holds this text")
    options = parser.parse_args()
    torch.set_num_threads(1)
    runtime = probe_runtime()
    print(HEADER)
    errors: list[float] = []
    for pipeline in (pipeline for pipeline in PIPELINES if options.only in pipeline.name):
        result = run(pipeline, runtime, options.steps)
        errors.append(abs(result.error))
        print(row(result), flush=True)
    median = statistics.median(errors)
    print(f"median absolute error: {median:.1%}")
    raise SystemExit(int(median > LIMIT))


if __name__ == "__main__":
    main()
