"""`compose`: make one model of encoders and a language model."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mmcompile.composition.callbacks import NONE, Callbacks, check_callbacks
from mmcompile.composition.encoder import Encoder, FeatureLayout, input_names
from mmcompile.composition.joined import LANGUAGE_MODEL, language_inputs, projector_of
from mmcompile.composition.merge import KINDS, Merge
from mmcompile.composition.model import ComposedModel
from mmcompile.composition.probe import Probe, probe, shapes_only
from mmcompile.composition.projectors import DEFAULT_QUERIES, make_projector
from mmcompile.errors import ConfigError
from mmcompile.ir.compat import FakeTensor


def compose(
    encoders: Mapping[str, nn.Module | Encoder],
    language_model: nn.Module,
    *,
    projectors: str | nn.Module | Mapping[str, str | nn.Module] = "mlp",
    merge: Merge = "placeholder",
    placeholders: Mapping[str, int] | None = None,
    num_queries: int | None = None,
    callbacks: Mapping[str, Callbacks] | None = None,
) -> ComposedModel:
    """Join encoders and a language model by projectors.

    The output of an encoder (hidden size, tokens of an image) is found by running it on shapes. Weights are those of
    the modules given; projectors made from a name have new weights, in the dtype and on the device of the language model.

    Args:
        encoders: name -> module, or `Encoder(module, ...)` with options. Names become component names: `vision`,
            `audio`.
        language_model: takes `inputs_embeds` and `labels` and returns `.loss` and `.logits`, as Hugging Face causal
            models do.
        projectors: `"linear"`, `"mlp"` (two linears with GELU), `"qformer"` (learned queries), a module, or one of
            these for each encoder.
        merge: `"placeholder"`: features replace the embeddings of placeholder tokens; `"prepend"`: features before the
            text; or a function (embeddings, features by encoder, input_ids) -> embeddings.
        placeholders: encoder -> token id. By default ids behind the embedding table, which no tokenizer gives.
        num_queries: number of tokens per image that a `"qformer"` makes; 32 by default.
        callbacks: part -> functions run before and after it.

    Raises:
        ConfigError: names that cannot be used, options without effect or that conflict, an encoder or language model
            that we cannot run; the message names the option.
    """
    specs = {name: e if isinstance(e, Encoder) else Encoder(e) for name, e in encoders.items()}
    callbacks = dict(callbacks or {})
    _check_names(specs)
    check_callbacks(callbacks, specs, LANGUAGE_MODEL)
    if isinstance(merge, str) and merge not in KINDS:
        raise ConfigError(f"merge is {merge!r}; choose one of {', '.join(map(repr, KINDS))}, or give a function")
    rows, hidden = _embeddings(language_model)
    tokens = _placeholders(specs, merge, placeholders, rows)
    names = input_names(specs, language_inputs(language_model) | {"input_ids"})
    probes = {name: probe(name, spec, callbacks.get(name, NONE)) for name, spec in specs.items()}
    made = _projectors(specs, probes, projectors, language_model, hidden, num_queries)
    for name, found in probes.items():
        if merge == "prepend" and found.layout is FeatureLayout.PACKED:
            raise ConfigError(
                f'encoder {name!r} returns tokens of all images end to end, which merge="prepend" cannot deal out to samples; '
                'use merge="placeholder"'
            )
    model = ComposedModel(
        specs,
        made,
        language_model,
        layouts={name: found.layout for name, found in probes.items()},
        input_names=names,
        placeholders=tokens,
        merge=merge,
        callbacks=callbacks,
    )
    for name, found in probes.items():
        _check_projected(model, name, found, hidden)
    return model


def _check_names(specs: Mapping[str, Encoder]) -> None:
    if not specs:
        raise ConfigError("compose got no encoders; without one, train the language model itself")
    parts = [*specs, *map(projector_of, specs), LANGUAGE_MODEL]
    for name in specs:
        if not name.isidentifier() or parts.count(name) > 1 or hasattr(ComposedModel, name):
            raise ConfigError(
                f"encoder name {name!r} cannot be used: wanted an identifier that is no part's and no attribute of a module; "
                "for example 'vision'"
            )


def _embeddings(language_model: nn.Module) -> tuple[int, int]:
    """Return (number of rows, hidden size) of a language model's table of token embeddings."""
    getter: Any = getattr(language_model, "get_input_embeddings", None)
    weight = getattr(getter() if getter is not None else None, "weight", None)
    if not isinstance(weight, Tensor) or "inputs_embeds" not in language_inputs(language_model):
        raise ConfigError(
            f"{type(language_model).__name__} is no language model that composition can use: wanted get_input_embeddings() and a "
            "forward that takes inputs_embeds, as Hugging Face's AutoModelForCausalLM has"
        )
    return int(weight.shape[0]), int(weight.shape[1])


def _placeholders(
    specs: Mapping[str, Encoder], merge: Merge, given: Mapping[str, int] | None, rows: int
) -> dict[str, int]:
    if merge != "placeholder":
        if given:
            raise ConfigError(f'placeholders have no effect with merge={merge!r}; drop them or use merge="placeholder"')
        return {}
    tokens = {name: rows + index for index, name in enumerate(specs)} | dict(given or {})
    if unknown := set(tokens) - set(specs):
        raise ConfigError(f"placeholders for {', '.join(sorted(unknown))}; encoders are {', '.join(specs)}")
    if len(set(tokens.values())) < len(tokens) or min(tokens.values()) < 0:
        raise ConfigError(f"placeholders are {tokens}; every encoder needs a token id of its own, 0 or more")
    return tokens


def _projectors(
    specs: Mapping[str, Encoder],
    probes: Mapping[str, Probe],
    wanted: str | nn.Module | Mapping[str, str | nn.Module],
    language_model: nn.Module,
    hidden: int,
    num_queries: int | None,
) -> dict[str, nn.Module]:
    each = dict(wanted) if isinstance(wanted, Mapping) else dict.fromkeys(specs, wanted)
    if set(each) != set(specs):
        raise ConfigError(f"projectors are for {', '.join(each)}; wanted one for each encoder: {', '.join(specs)}")
    if isinstance(wanted, nn.Module) and len(specs) > 1:
        raise ConfigError(
            f"one projector module for {len(specs)} encoders; give each its own: {{{next(iter(specs))!r}: ...}}"
        )
    if num_queries is not None and ("qformer" not in each.values() or num_queries < 1):
        raise ConfigError(f'num_queries={num_queries} needs a projector "qformer" and at least 1 query')
    like = next(p for p in language_model.parameters() if p.is_floating_point())
    made: dict[str, nn.Module] = {}
    for name, kind in each.items():
        if kind == "qformer" and probes[name].layout is FeatureLayout.PACKED:
            raise ConfigError(
                f'projector "qformer" reads one image at a time, and encoder {name!r} returns tokens of all images end to end; '
                'use "mlp" or "linear"'
            )
        if isinstance(kind, nn.Module):
            made[name] = kind
            continue
        with _like(like):
            made[name] = make_projector(kind, probes[name].hidden_size, hidden, num_queries or DEFAULT_QUERIES)
    return made


@contextlib.contextmanager
def _like(parameter: nn.Parameter) -> Generator[None]:
    """Create tensors in the `with` block with the dtype and device of `parameter`, and without data if it is a fake tensor."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(parameter.dtype)
    try:
        with (
            torch.device(parameter.device),
            parameter.fake_mode if isinstance(parameter, FakeTensor) else contextlib.nullcontext(),
        ):
            yield
    finally:
        torch.set_default_dtype(before)


def _check_projected(model: ComposedModel, name: str, found: Probe, hidden: int) -> None:
    """Raise ConfigError unless the projector of encoder `name` returns features of size `hidden`, that of the text embeddings."""
    try:
        with shapes_only(model) as fake:
            shape = tuple(model.features(name, {key: fake(value) for key, value in found.inputs.items()}).values.shape)
    except RuntimeError as error:
        raise ConfigError(
            f"the projector of {name!r} does not take features of size {found.hidden_size}: {str(error).splitlines()[0]}"
        ) from error
    if shape[-1] != hidden:
        raise ConfigError(
            f"the projector of {name!r} returns {list(shape)}; wanted the language model's embedding size {hidden} last"
        )
