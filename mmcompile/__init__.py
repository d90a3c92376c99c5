"""mmcompile: a compiler for training multimodal models on clusters.

`capture` a model, `plan` where its layers run, `parallelize` it over processes. `import mmcompile` loads torch, not transformers.
"""

from mmcompile.api import capture as capture
from mmcompile.api import freeze as freeze
from mmcompile.api import parallelize as parallelize
from mmcompile.api import plan as plan
from mmcompile.api import stage_programs as stage_programs
from mmcompile.costmodel.cluster import Cluster as Cluster
from mmcompile.errors import MMCompileError as MMCompileError
from mmcompile.plan.plan import Plan as Plan
from mmcompile.runtime.engine import Engine as Engine
