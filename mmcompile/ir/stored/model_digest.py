"""`model_digest`: equal for two models whose Python makes the same calls, in any process."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from mmcompile.ir.compat import FakeTensor

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def text_digest(*parts: str) -> str:
    """Return a digest of some texts."""
    made = hashlib.blake2b(digest_size=16)
    for part in parts:
        made.update(f"{len(part)} {part}\n".encode())
    return made.hexdigest()


def model_digest(model: nn.Module) -> str:
    """Return a digest of all that a capture of a model depends on, except its batch.

    It contains versions, the sources of this package and of the model's classes; plain attributes, config and hooks of every
    module; names, shapes, types and flags of parameters, and which are tied; and the values of buffers.
    """
    return text_digest(*_environment(), *_modules(model), *_tensors(model))


def batch_digest(batch: Any) -> str:
    """Return a digest of the names, types, shapes and values of a flat batch."""
    return text_digest(
        *(
            f"{name} {_tensor(value, valued=True) if isinstance(value, Tensor) else repr(value)}"
            for name, value in sorted(batch.items())
        )
    )


def _environment() -> Iterator[str]:
    yield f"{sys.version_info[:3]} {torch.__version__} {transformers.__version__} {_own_sources()}"
    yield f"{torch.get_default_dtype()} {torch.are_deterministic_algorithms_enabled()}"


@functools.cache
def _own_sources() -> str:
    made = hashlib.blake2b(digest_size=16)
    root = Path(__file__).parents[2]
    for folder in ("ir", "passes", "kernels"):
        for file in sorted((root / folder).rglob("*.py")):
            made.update(file.read_bytes())
    return made.hexdigest()


@functools.cache
def _source(kind: type) -> str:
    try:
        file = inspect.getsourcefile(kind)
    except TypeError:  # built in, or made in an interactive session
        return ""
    return "" if file is None or not Path(file).is_file() else hashlib.blake2b(Path(file).read_bytes()).hexdigest()


def _modules(model: nn.Module) -> Iterator[str]:
    sources = {kind.__qualname__: _source(kind) for module in model.modules() for kind in type(module).__mro__}
    yield from (f"{name} {source}" for name, source in sorted(sources.items()))
    configs: dict[int, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        yield f"{path} {type(module).__module__}.{type(module).__qualname__}"
        yield from (f"  {name} {_value(value, configs)}" for name, value in sorted(vars(module).items()))


def _value(value: Any, configs: dict[int, str]) -> str:
    """Return an attribute of a module as text; `configs`: identity of a config -> its name, once its text was given."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, (set, frozenset)):
        return str(sorted(_value(part, configs) for part in value))
    if isinstance(value, (list, tuple)):
        return f"{type(value).__qualname__} {[_value(part, configs) for part in value]}"
    if isinstance(value, dict):
        # Handles of hooks are numbers that count in a process.
        return str([("" if isinstance(key, int) else key, _value(part, configs)) for key, part in value.items()])
    if isinstance(value, Tensor):
        return _tensor(value, valued=False)
    if hasattr(value, "to_dict") and not isinstance(value, type):
        if id(value) not in configs:
            configs[id(value)] = f"config {len(configs)}"
            parts = [_value(part, configs) for part in vars(value).values() if hasattr(part, "to_dict")]
            own = getattr(value, "_attn_implementation", None)
            return json.dumps([value.to_dict(), own, parts], sort_keys=True, default=repr)
        return configs[id(value)]
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def _tensors(model: nn.Module) -> Iterator[str]:
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first.setdefault(id(parameter), name)
        yield f"{name} {first[id(parameter)]} {_tensor(parameter, valued=False)}"
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield f"{name} {_tensor(buffer, valued=True)}"


def _tensor(tensor: Tensor, *, valued: bool) -> str:
    text = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.device} {tensor.requires_grad}"
    if not valued or tensor.is_meta or isinstance(tensor, FakeTensor) or not tensor.numel():
        return text
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return f"{text} {hashlib.blake2b(data.data, digest_size=16).hexdigest()}"
