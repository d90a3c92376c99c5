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
from mmcompile.compose.build import compose as compose
from mmcompile.compose.callbacks import Callbacks as Callbacks
from mmcompile.compose.encoder import Encoder as Encoder
from mmcompile.compose.model import ComposedModel as ComposedModel
from mmcompile.compose.processor import ComposedProcessor as ComposedProcessor
from mmcompile.costmodel.cluster import Cluster as Cluster
from mmcompile.errors import MMCompileError as MMCompileError
from mmcompile.fault_tolerant import elastic as elastic
from mmcompile.ir.extract import component_module as component_module
from mmcompile.ir.sample_inputs import example_batch as example_batch
from mmcompile.ir.skeleton import skeleton as skeleton
from mmcompile.plan.plan import Plan as Plan
from mmcompile.runtime.elastic.data import IterableBatches as IterableBatches
from mmcompile.runtime.elastic.data import MapBatches as MapBatches
from mmcompile.runtime.elastic.engine import ElasticEngine as ElasticEngine
from mmcompile.runtime.engine import Engine as Engine
from mmcompile.runtime.param_groups import ParameterGroup as ParameterGroup
