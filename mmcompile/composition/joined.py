"""`JoinedModel`: forward of a composed model, its parts and which of them train.

Encoders, projectors and a language model as one module, called like a Hugging Face multimodal model.

    pixel_values ─► vision ─► vision_projector ─┐
    input_values ─► audio  ─► audio_projector ──┼─► merge ─► language_model ─► loss, logits
    input_ids ───────────────► embeddings ──────┘

Parts are submodules under these names, so they are components of a plan under these names. An encoder whose inputs a
batch lacks is not run.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from mmcompile.composition import merge
from mmcompile.composition.callbacks import NONE, Callbacks
from mmcompile.composition.encoder import (
    Encoder,
    FeatureLayout,
    Features,
    arrange,
    given_inputs,
    parameters_of,
    run,
    select,
)
from mmcompile.composition.probe import shapes_only
from mmcompile.composition.projectors import QFormer
from mmcompile.errors import BatchError, ConfigError

LANGUAGE_MODEL = "language_model"


def projector_of(name: str) -> str:
    """Return the name of the projector behind encoder `name`: `<name>_projector`."""
    return f"{name}_projector"


class JoinedModel(nn.Module):
    """Module of encoders, projectors and a language model; its forward takes a batch and returns the language model's output."""

    language_model: nn.Module
    base_model_prefix = ""  # transformers asks this of a model that peft adds adapters to

    def __init__(
        self,
        encoders: Mapping[str, Encoder],
        projectors: Mapping[str, nn.Module],
        language_model: nn.Module,
        *,
        layouts: Mapping[str, FeatureLayout],
        input_names: Mapping[str, Mapping[str, str]],
        placeholders: Mapping[str, int],
        merge: merge.Merge,
        callbacks: Mapping[str, Callbacks],
    ) -> None:
        super().__init__()
        for name, encoder in encoders.items():
            self.add_module(name, encoder.module)
            self.add_module(projector_of(name), projectors[name])
        self.add_module(LANGUAGE_MODEL, language_model)
        for part, own in callbacks.items():
            for when, callback in own.given():
                if isinstance(callback, nn.Module):
                    self.add_module(f"{part}_{when}", callback)
        self._encoders = dict(encoders)
        self._layouts = dict(layouts)
        self.input_names = {name: dict(names) for name, names in input_names.items()}
        """Encoder -> parameter name of its forward -> name of the input in a batch."""
        self.placeholders = dict(placeholders)
        """Encoder -> id of the placeholder token that its features replace; empty if features do not enter at placeholders."""
        self.merge = merge
        self.callbacks = dict(callbacks)

    @property
    def config(self) -> Any:
        """Config of the language model; None if it has none."""
        return getattr(self.language_model, "config", None)

    @property
    def encoder_names(self) -> tuple[str, ...]:
        """Names of the encoders, in order."""
        return tuple(self._encoders)

    def encoder(self, name: str) -> Encoder:
        """Return encoder `name` with its options. Raises ConfigError if there is none of that name."""
        if name not in self._encoders:
            raise ConfigError(f"no encoder {name!r}; encoders are {', '.join(self._encoders)}")
        return replace(self._encoders[name], module=self.get_submodule(name))

    def layout(self, name: str) -> FeatureLayout:
        """Return the layout of an encoder's features."""
        return self._layouts[name]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        """Return the output of the language model: `.logits`, and `.loss` where labels are given.

        Args:
            input_ids: [B, S]; with placeholders where features enter, if they do so at placeholders.
            attention_mask: [B, S], 0 at padding.
            position_ids: [B, S].
            labels: [B, S], not shifted; -100 carries no loss. Placeholders never do.
            inputs: inputs of the encoders, under the batch names in `input_names`, with the images or sounds of all
                samples in order; and further arguments of the language model.

        Raises:
            BatchError: an input that no part takes, incomplete inputs of an encoder, features that do not fit the
                placeholders.
        """
        self._check(inputs)
        features = {
            name: self.features(name, given)
            for name, names in self.input_names.items()
            if (given := given_inputs(name, names, self.get_submodule(name), inputs))
        }
        ids = merge.text_ids(input_ids, self.placeholders) if self.placeholders else input_ids
        text = merge.TextInputs(
            embeddings=self._embed(ids), attention_mask=attention_mask, position_ids=position_ids, labels=labels
        )
        text = self._merged(text, features, input_ids)
        arguments: dict[str, Any] = {
            "inputs_embeds": text.embeddings,
            "attention_mask": text.attention_mask,
            "position_ids": text.position_ids,
            "labels": text.labels,
            **{name: value for name, value in inputs.items() if name in self._language_inputs()},
        }
        if "use_cache" in self._language_inputs():
            # A cache is of no use in training, and with one, packed documents would see each other.
            arguments.setdefault("use_cache", False)
        arguments = {name: value for name, value in arguments.items() if value is not None}
        callbacks = self.callbacks.get(LANGUAGE_MODEL, NONE)
        return callbacks.run("after", self.language_model(**callbacks.run("before", arguments)))

    def features(self, name: str, inputs: Mapping[str, Any]) -> Features:
        """Return the projected features of encoder `name` for inputs given by parameter name."""
        encoder, callbacks = self.encoder(name), self.callbacks.get(name, NONE)
        given = callbacks.run("before_encoder", dict(inputs))
        found = select(encoder, callbacks.run("after_encoder", run(encoder, given)), name)
        made = arrange(encoder, self._layouts[name], found, given)
        made = replace(made, values=callbacks.run("before_projector", made.values))
        made = self._projected(name, made)
        return replace(made, values=callbacks.run("after_projector", made.values))

    def _projected(self, name: str, made: Features) -> Features:
        projector = self.get_submodule(projector_of(name))
        if isinstance(projector, QFormer):
            return Features(values=projector(made.values, made.valid))
        values = projector(made.values)
        if made.valid is not None and values.shape[:2] != made.valid.shape:
            raise ConfigError(
                f"the projector of {name!r} turns {list(made.values.shape)} with padding into {list(values.shape)}: which tokens "
                'are padding is lost; keep their number, use projector "qformer", or pass inputs without padding'
            )
        return replace(made, values=values)

    def num_tokens(self, name: str, inputs: Mapping[str, Any]) -> int:
        """Return the number of tokens in the text that carry the features of `inputs`; only shapes and integer values are read.

        Args:
            name: an encoder.
            inputs: name in a batch -> value, as a processor returns it for one or several images or audio clips.
        """
        encoder = self.encoder(name)
        given = given_inputs(name, self.input_names[name], encoder.module, inputs)
        if not given:
            wanted = ", ".join(self.input_names[name].values())
            raise BatchError(f"no input of encoder {name!r} in {', '.join(inputs) or 'nothing'}; it takes {wanted}")
        with shapes_only(self) as fake:
            made = {key: fake(value) if isinstance(value, Tensor) else value for key, value in given.items()}
            return int(self.features(name, made).rows().shape[0])

    def freeze(self, *parts: str, except_: Sequence[str] = ()) -> None:
        """Stop training the given parts; other parts keep their state.

        Args:
            parts: names of encoders, `"<encoder>_projector"`, `"language_model"`.
            except_: globs over parameter names within these parts that still train: `"*.lora_*"`, `"lm_head*"`.
        """
        self._set_trainable(parts, except_, trainable=False)

    def unfreeze(self, *parts: str, except_: Sequence[str] = ()) -> None:
        """Train the given parts, also parameters that their own code froze (fixed positions of Whisper), but not `except_`."""
        self._set_trainable(parts, except_, trainable=True)

    def _set_trainable(self, parts: Iterable[str], except_: Sequence[str], *, trainable: bool) -> None:
        unused = set(except_)
        for part in parts:
            if part not in dict(self.named_children()):
                raise ConfigError(f"no part {part!r}; parts are {', '.join(dict(self.named_children()))}")
            for name, parameter in self.get_submodule(part).named_parameters():
                matched = {pattern for pattern in except_ if fnmatch.fnmatchcase(name, pattern)}
                unused -= matched
                if not matched:
                    parameter.requires_grad_(trainable)
        if unused:
            raise ConfigError(f"except_ {', '.join(sorted(unused))} matches no parameter of {', '.join(parts)}")

    def extra_repr(self) -> str:
        """Describe merge and placeholders in the module's repr."""
        how = (
            self.merge
            if isinstance(self.merge, str)
            else getattr(self.merge, "__qualname__", type(self.merge).__name__)
        )
        return f"merge={how}, placeholders={self.placeholders}"

    def _embed(self, ids: Tensor) -> Tensor:
        model: Any = self.language_model
        return model.get_input_embeddings()(ids)

    def _merged(self, text: merge.TextInputs, features: Mapping[str, Features], input_ids: Tensor) -> merge.TextInputs:
        if self.merge == "placeholder":
            return merge.at_placeholders(text, features, input_ids, self.placeholders)
        if self.merge == "prepend":
            return merge.prepend(text, features)
        assert not isinstance(self.merge, str)
        return merge.by_function(self.merge, text, features, input_ids) if features else text

    def _language_inputs(self) -> frozenset[str]:
        return language_inputs(self.get_submodule(LANGUAGE_MODEL))

    def _check(self, inputs: Mapping[str, Any]) -> None:
        known = {name for names in self.input_names.values() for name in names.values()} | self._language_inputs()
        unknown = [name for name, value in inputs.items() if value is not None and name not in known]
        if unknown:
            media = "; ".join(f"{name} takes {', '.join(names.values())}" for name, names in self.input_names.items())
            raise BatchError(
                f"no part takes {', '.join(unknown)}: {media}; the language model {', '.join(sorted(known))}"
            )


def language_inputs(module: nn.Module) -> frozenset[str]:
    """Return the argument names of a language model's forward, which cannot be names of encoder inputs."""
    return frozenset(parameters_of(module))
