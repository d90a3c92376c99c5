"""`CapturedModel`: a model with the microbatch on which it is captured, and the fingerprint of the capture."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmcompile.batching.isolation import check_packing
from mmcompile.batching.pack import Packer
from mmcompile.data.collate import Sample
from mmcompile.errors import ConfigError, PlanError
from mmcompile.ir.capture import Capture
from mmcompile.ir.capture import capture as _capture
from mmcompile.ir.graph import ModelGraph
from mmcompile.ir.inputs import completed
from mmcompile.ir.meta_model import skeleton
from mmcompile.ir.sample_inputs import example_batch
from mmcompile.ir.stored.capture_store import CaptureStore
from mmcompile.passes.capture_pipeline import annotated
from mmcompile.planner.plan.plan_record import Fingerprint, Packing


def built(model: nn.Module | str | Path, batch: Mapping[str, Any] | None) -> tuple[nn.Module, Mapping[str, Any]]:
    """Return (model, batch): a model given by path is built without weights; instead of a batch of None an example is made."""
    module = model if isinstance(model, nn.Module) else skeleton(model)
    return module, example_batch(module) if batch is None else batch


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturedModel:
    """A model and the microbatch on which it is captured, with the samples packed into it."""

    model: nn.Module = field(repr=False)
    batch: Mapping[str, Any] = field(repr=False)
    packing: Packing | None = None
    """Isolation of the documents packed into `batch`; None for a padded batch."""
    num_samples: int | None = None
    """Number of samples packed into the batch; None if the shapes of the batch give the number."""
    store: CaptureStore | None = field(default=None, repr=False)
    """Captures of earlier runs, taken in place of new ones; None for none."""

    @classmethod
    def of(
        cls,
        model: nn.Module | str | Path,
        batch: Mapping[str, Any] | None,
        packing: Sequence[Sample] | None = None,
        cache: str | Path | None = None,
    ) -> CapturedModel:
        """Return a model with a batch: the given one, the given samples packed in one row, or an example made from the config.

        Args:
            model, batch, packing: as for `mmcompile.plan`.
            cache: folder of captures of earlier runs; None for none.

        Raises:
            ConfigError: a batch is given beside samples to pack.
            PlanError: packed documents would see each other.
        """
        if packing is None:
            module, batch = built(model, batch)
            return cls(model=module, batch=batch, store=_store(cache, module))
        if batch is not None:
            raise ConfigError(
                "batch has no effect beside packing, whose samples make the microbatch; drop one of the two"
            )
        module = model if isinstance(model, nn.Module) else skeleton(model)
        found = check_packing(module, packing, padding(module))
        if not found.isolates:
            raise PlanError(
                f"samples of {type(module).__name__} cannot be packed: {found.reason}; plan without packing"
            )
        packed = Packer.of(module, padding(module)).pack(packing)
        store = _store(cache, module)
        return cls(model=module, batch=packed, packing=found, num_samples=len(packing), store=store)

    def capture(self) -> Capture:
        """Return the captured training step, with gradient flow annotated."""
        captured = self._captured()
        if self.num_samples is None:
            return captured
        return replace(captured, graph=replace(captured.graph, num_samples=self.num_samples))

    def _captured(self) -> Capture:
        if self.store is None:
            return captured_step(self.model, self.batch)
        flat = completed(self.model, self.batch)
        return self.store.captured(flat, lambda: captured_step(self.model, flat))


def _store(cache: str | Path | None, model: nn.Module) -> CaptureStore | None:
    return None if cache is None else CaptureStore(cache, model)


def text_config(model: nn.Module) -> Any:
    """Return the config of a Hugging Face model's only text model, else its whole config; None for other models."""
    config: Any = getattr(model, "config", None)
    with contextlib.suppress(AttributeError, ValueError):  # no text model, or several (MusicGen's encoder and decoder)
        return config.get_text_config()
    return config


def padding(model: nn.Module) -> dict[str, int]:
    """Return {"input_ids": pad token id} if the model's text config names a pad token, else an empty dict."""
    pad = getattr(text_config(model), "pad_token_id", None)
    return {} if pad is None else {"input_ids": int(pad)}


def captured_step(model: nn.Module, batch: Mapping[str, Any], dynamic: Mapping[str, Any] | None = None) -> Capture:
    """Return the captured training step with gradient flow annotated; sizes that differ between both batches stay symbolic."""
    return annotated(_capture(model, batch, dynamic=dynamic))


def fingerprint_of(graph: ModelGraph) -> Fingerprint:
    """Return the fingerprint of a graph: the model, its parameters and the library versions that a plan is made for."""
    text = "\n".join(f"{p.name} {p.shape} {p.dtype} {p.trainable}" for p in graph.parameters)
    return Fingerprint(
        model=graph.name,
        parameters=hashlib.sha256(text.encode()).hexdigest(),
        torch=torch.__version__.split("+")[0],
        transformers=version("transformers"),
    )
