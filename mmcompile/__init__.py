"""mmcompile: a compiler for training multimodal models on clusters.

`capture` a model, `plan` where its layers run, `parallelize` it over processes, or train on nodes that may die (`elastic`).
`import mmcompile` loads torch, not transformers.
"""

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
from mmcompile.ir.extract import component_module as component_module
from mmcompile.ir.meta_model import skeleton as skeleton
from mmcompile.ir.sample_inputs import example_batch as example_batch
from mmcompile.planner.plan.plan import Plan as Plan
from mmcompile.runtime.elastic.elastic_engine import ElasticEngine as ElasticEngine
from mmcompile.runtime.engine import Engine as Engine
from mmcompile.runtime.optim.param_groups import ParameterGroup as ParameterGroup
