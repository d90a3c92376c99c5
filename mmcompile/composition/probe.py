"""Probe of an encoder by a run on tensors without storage: hidden size, layout, tokens of an image.

Inputs made here follow the conventions of Hugging Face configs and processors. Integer inputs (image grids) keep their
values during the run, so encoders can compute sizes from them in Python.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mmcompile.composition.callbacks import Callbacks
from mmcompile.composition.encoder import Encoder, FeatureLayout, modality, parameters_of, run, select
from mmcompile.errors import ConfigError
from mmcompile.ir.compat import FakeTensorMode, fake_mode_of, transformers_eager_paths
from mmcompile.ir.known_values import KnownValues, known_values
from mmcompile.ir.sample_inputs import first_field

_PROBED = 2
"""Number of images or audio clips in a probe. With two, the dim of images differs from dims of size 1."""
_DEFAULT_SIDE = 224
_SAMPLING_RATE = 16000
"""Audio samples per second, the rate of all speech encoders of transformers; a probe's clip lasts one second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """Hidden size and layout of an encoder's features, found by a run on shapes, and the inputs of that run."""

    hidden_size: int
    layout: FeatureLayout
    inputs: Mapping[str, Tensor]
    """Parameter name of the encoder -> example value that the encoder was run on."""


def probe(name: str, encoder: Encoder, callbacks: Callbacks) -> Probe:
    """Run an encoder on an example input, with its callbacks, to find the shape of its features.

    Raises:
        ConfigError: no example that we can make is accepted, or the output has no features; the message names the
            option.
    """
    problems: list[str] = []
    for example in _examples(encoder):
        try:
            with shapes_only(encoder.module) as fake:
                inputs = callbacks.run("before_encoder", {key: fake(value) for key, value in example.items()})
                found = select(encoder, callbacks.run("after_encoder", run(encoder, inputs)), name)
                shape = tuple(int(size) for size in found.shape)
        except ConfigError:
            raise
        except Exception as error:  # an encoder refuses inputs it does not know with whatever its own Python raises
            shapes = ", ".join(f"{key} {tuple(value.shape)}" for key, value in example.items())
            problems.append(f"{shapes}: {type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:160]}")
            continue
        return Probe(hidden_size=shape[-1], layout=_layout(name, encoder, shape), inputs=example)
    tried = "; ".join(problems) or "its config names no sizes that we know"
    raise ConfigError(
        f"cannot find what encoder {name!r} ({type(encoder.module).__name__}) returns. Tried {tried}. Give inputs for two images "
        f"or sounds: Encoder(module, example={{{', '.join(repr(p) + ': ...' for p in parameters_of(encoder.module))}}})"
    )


def _layout(name: str, encoder: Encoder, shape: tuple[int, ...]) -> FeatureLayout:
    media = len(shape) == 3 and shape[0] == _PROBED
    layout = (
        FeatureLayout.MEDIA
        if media
        else FeatureLayout.POOLED
        if len(shape) == 2 and shape[0] == _PROBED
        else FeatureLayout.PACKED
    )
    dropped = encoder.drop_tokens
    if dropped and (layout is not FeatureLayout.MEDIA or dropped >= shape[1]):
        raise ConfigError(
            f"drop_tokens={dropped} has no effect on encoder {name!r}, which returns {list(shape)} for {_PROBED} inputs; "
            "wanted [images, tokens, hidden] with more tokens than that"
        )
    return layout


@contextlib.contextmanager
def shapes_only(module: nn.Module) -> Generator[Callable[[Tensor], Tensor]]:
    """Run the block on tensors without storage; yields the function that makes such a tensor. Integers keep their values."""
    mode = fake_mode_of(module) or FakeTensorMode(allow_non_fake_inputs=True)
    known = KnownValues()

    def fake(value: Tensor) -> Tensor:
        made = mode.from_tensor(value, static_shapes=True)
        known.learn(made, value)
        return made

    # RNG: a module in training mode draws, on fake tensors too.
    with torch.random.fork_rng(devices=[]), torch.no_grad(), mode, transformers_eager_paths(), known_values(known):
        yield fake


def _examples(encoder: Encoder) -> Iterator[dict[str, Tensor]]:
    """Yield example inputs to try on an encoder, the most likely first: parameter name -> tensor."""
    if encoder.example is not None:
        yield dict(encoder.example)
    elif modality(encoder.module) == "audio":
        yield from sounds(encoder.module, _PROBED)
    else:
        yield images(encoder.module, _PROBED)


def images(module: nn.Module, count: int, side: int = _DEFAULT_SIDE) -> dict[str, Tensor]:
    """Return random images for a vision encoder, by parameter name.

    Args:
        count: number of images.
        side: pixels of height and width, if the config has none.
    """
    config, takes = getattr(module, "config", None), parameters_of(module)
    dtype = dtype_of(module)
    main = next(iter(takes))
    channels = first_field(config, "num_channels", "in_channels", "in_chans", default=3)
    size = first_field(config, "image_size", default=side)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    patch = first_field(config, "patch_size", default=16)
    if "grid_thw" in takes:  # patches of all images end to end, each with the frames of its time span
        merge = first_field(config, "spatial_merge_size", default=1)
        edge = max(1, side // (patch * merge)) * merge
        values = channels * first_field(config, "temporal_patch_size", default=1) * patch**2
        grid = torch.tensor([[1, edge, edge]] * count)
        return {main: torch.randn(count * edge**2, values, dtype=dtype), "grid_thw": grid}
    if "spatial_shapes" in takes:  # patches of each image, padded to a common number
        number = first_field(config, "num_patches", default=(side // patch) ** 2)
        edge = int(number**0.5)
        found = {main: torch.randn(count, number, channels * patch**2, dtype=dtype)}
        found["spatial_shapes"] = torch.tensor([[edge, edge]] * count)
        if "pixel_attention_mask" in takes:
            found["pixel_attention_mask"] = (torch.arange(number) < edge**2).long().repeat(count, 1)
        return found
    found = {main: torch.randn(count, channels, height, width, dtype=dtype)}
    if "image_sizes" in takes:
        found["image_sizes"] = torch.tensor([[height, width]] * count)
    return found


def sounds(module: nn.Module, count: int) -> Iterator[dict[str, Tensor]]:
    """Yield random audio clips that an audio encoder may accept, by parameter name.

    Spectrograms are first, if the config has a number of mel bins; the last is a waveform of one second.
    """
    config, main = getattr(module, "config", None), next(iter(parameters_of(module)))
    dtype = dtype_of(module)
    bins = first_field(config, "num_mel_bins", default=None)
    if bins is not None:
        positions = first_field(config, "max_source_positions", default=None)
        if positions is not None:  # every second frame is a position
            yield {main: torch.randn(count, bins, 2 * positions, dtype=dtype)}
        frames = first_field(config, "max_length", default=1024)
        yield {main: torch.randn(count, frames, bins, dtype=dtype)}
    yield {main: torch.randn(count, _SAMPLING_RATE, dtype=dtype)}


def dtype_of(module: nn.Module) -> torch.dtype:
    """Return the dtype of the module's floating-point parameters; float32 if it has none."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
