"""mmcompile: a compiler for training multimodal models on clusters.

`capture` a model, `plan` where its layers run, `parallelize` it over processes, or train on nodes that may die (`elastic`).
Names are imported when they are first used: `import mmcompile` loads neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmcompile.api import capture as capture
    from mmcompile.api import freeze as freeze
    from mmcompile.api import pack as pack
    from mmcompile.api import parallelize as parallelize
    from mmcompile.api import plan as plan
    from mmcompile.api import stage_programs as stage_programs
    from mmcompile.composition.build import compose as compose
    from mmcompile.composition.callbacks import Callbacks as Callbacks
    from mmcompile.composition.encoder import Encoder as Encoder
    from mmcompile.composition.model import ComposedModel as ComposedModel
    from mmcompile.composition.processor import ComposedProcessor as ComposedProcessor
    from mmcompile.costmodel.cluster import Cluster as Cluster
    from mmcompile.data.batches import IterableBatches as IterableBatches
    from mmcompile.data.batches import MapBatches as MapBatches
    from mmcompile.elastic_run import elastic as elastic
    from mmcompile.errors import MMCompileError as MMCompileError
    from mmcompile.ir.copy import component_module as component_module
    from mmcompile.ir.meta_model import skeleton as skeleton
    from mmcompile.ir.sample_inputs import example_batch as example_batch
    from mmcompile.planner.plan.plan import Plan as Plan
    from mmcompile.runtime.elastic.elastic_engine import ElasticEngine as ElasticEngine
    from mmcompile.runtime.engine import Engine as Engine
    from mmcompile.runtime.optim.param_groups import ParameterGroup as ParameterGroup

_MODULES = {
    "Callbacks": "mmcompile.composition.callbacks",
    "Cluster": "mmcompile.costmodel.cluster",
    "ComposedModel": "mmcompile.composition.model",
    "ComposedProcessor": "mmcompile.composition.processor",
    "ElasticEngine": "mmcompile.runtime.elastic.elastic_engine",
    "Encoder": "mmcompile.composition.encoder",
    "Engine": "mmcompile.runtime.engine",
    "IterableBatches": "mmcompile.data.batches",
    "MMCompileError": "mmcompile.errors",
    "MapBatches": "mmcompile.data.batches",
    "ParameterGroup": "mmcompile.runtime.optim.param_groups",
    "Plan": "mmcompile.planner.plan.plan",
    "capture": "mmcompile.api",
    "component_module": "mmcompile.ir.copy",
    "compose": "mmcompile.composition.build",
    "elastic": "mmcompile.elastic_run",
    "example_batch": "mmcompile.ir.sample_inputs",
    "freeze": "mmcompile.api",
    "pack": "mmcompile.api",
    "parallelize": "mmcompile.api",
    "plan": "mmcompile.api",
    "skeleton": "mmcompile.ir.meta_model",
    "stage_programs": "mmcompile.api",
}
"""Public name of the package -> name of the module that defines it."""

if not TYPE_CHECKING:
    __all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Import a public name from its module when it is first used (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
