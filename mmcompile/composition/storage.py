"""Composed models on disk: a folder that loads without code, replaced as a whole.

composed.json               how the parts are joined (`Composed`)
<part>/                     each encoder and the language model, as its own `save_pretrained` writes it
<part>/adapter/             the adapters of a part that is a peft model; <part>/ is then the model inside the peft wrapper
joints.safetensors          weights of projectors, and of modules among the callbacks

Functions and modules of the user are not stored. Their import paths are, and the caller of `load` gives them again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import TypeVar

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mmcompile.composition.callbacks import Callbacks
from mmcompile.composition.encoder import Encoder
from mmcompile.composition.joined import LANGUAGE_MODEL, JoinedModel, projector_of
from mmcompile.composition.manifest import MANIFEST, VERSION, Composed, SavedEncoder, SavedProjector, path_of, read
from mmcompile.composition.merge import KINDS, MergeFunction
from mmcompile.composition.parts import load_part, save_part, saved_part
from mmcompile.composition.projectors import MLP, PROJECTORS, QFormer
from mmcompile.errors import CheckpointError, ConfigError, OutputError
from mmcompile.files import write_atomic
from mmcompile.runtime.checkpoint.checkpoint_folder import place_of, replacing, resolved, swap

_JOINTS = "joints.safetensors"
ModelT = TypeVar("ModelT", bound=JoinedModel)


def save(model: JoinedModel, folder: str | os.PathLike[str], state_dict: Mapping[str, Tensor] | None = None) -> None:
    """Write a composed model. Which parameters are frozen is not saved.

    Args:
        folder: target folder; a composed model in it is replaced, and unrelated files are kept.
        state_dict: parameter name in `model` -> weights to write; None writes the weights of `model`.

    Raises:
        ConfigError: a part that cannot be loaded again: no model of transformers, adapters that are not a peft model's,
            a lambda.
        OutputError: the folder holds something else.
        CheckpointError: the folder cannot be written; its old content is unchanged.
    """
    target = resolved(Path(folder))
    if target.exists() and not (target / MANIFEST).is_file() and (not target.is_dir() or any(target.iterdir())):
        raise OutputError(f"{target} exists and holds no {MANIFEST}; name another folder, or empty it")
    manifest = _manifest(model)
    weights = model.state_dict() if state_dict is None else dict(state_dict)
    there = read(target, folder) if (target / MANIFEST).is_file() else manifest
    ours = (MANIFEST, _JOINTS, LANGUAGE_MODEL, *there.encoders)
    with replacing(target) as fresh:
        parts = {name: saved.part for name, saved in manifest.encoders.items()} | {
            LANGUAGE_MODEL: manifest.language_model
        }
        for name, part in parts.items():
            own = {key.removeprefix(f"{name}."): value for key, value in weights.items() if key.startswith(f"{name}.")}
            save_part(name, model.get_submodule(name), part, own, fresh / name)
        joints = {
            key: value.detach().cpu().contiguous() for key, value in weights.items() if key.split(".")[0] not in parts
        }
        save_file({key: value.clone() for key, value in joints.items()}, fresh / _JOINTS)
        write_atomic(fresh / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
        swap(fresh, target, lambda path: PurePath(path).parts[0] in ours)


def load(
    model_class: type[ModelT],
    folder: str | os.PathLike[str],
    projectors: Mapping[str, nn.Module],
    merge: MergeFunction | None,
    callbacks: Mapping[str, Callbacks],
) -> ModelT:
    """Read a composed model, with all parameters trainable.

    Args:
        projectors, merge, callbacks: modules and functions of the user that were saved by import path.

    Raises:
        CheckpointError: the folder holds no composed model, or a damaged one, or one of another version.
        ConfigError: code that the model was saved with is not given, or code is given that it was not saved with.
    """
    place = place_of(Path(folder), MANIFEST) or resolved(Path(folder))
    manifest = read(place, folder)
    _check_code(
        "merge", {} if manifest.merge in KINDS else {"merge": manifest.merge}, {} if merge is None else {"merge": merge}
    )
    own_kinds = {name: saved.kind for name, saved in manifest.projectors.items() if not saved.sizes}
    _check_code("projectors", own_kinds, {name: type(module) for name, module in projectors.items()})
    _check_code(
        "callbacks",
        {f"{part}.{when}": path for part, own in manifest.callbacks.items() for when, path in own.items()},
        {f"{part}.{when}": callback for part, own in callbacks.items() for when, callback in own.given()},
    )
    try:
        model = model_class(
            {name: _encoder(place / name, saved) for name, saved in manifest.encoders.items()},
            {
                name: projectors.get(name) or PROJECTORS[saved.kind](**saved.sizes)
                for name, saved in manifest.projectors.items()
            },
            load_part(place / LANGUAGE_MODEL, manifest.language_model),
            layouts={name: saved.layout for name, saved in manifest.encoders.items()},
            input_names={name: saved.input_names for name, saved in manifest.encoders.items()},
            placeholders=manifest.placeholders,
            merge=manifest.merge if merge is None else merge,  # type: ignore[arg-type]
            callbacks=callbacks,
        )
        joints = load_file(place / _JOINTS)
    except (OSError, SafetensorError, ImportError, AttributeError) as error:
        raise CheckpointError(f"the composed model at {folder} is damaged: {error}; load an older one") from error
    return _with_joints(model, joints, folder)


def _with_joints(model: ModelT, joints: Mapping[str, Tensor], folder: object) -> ModelT:
    parts = {*model.encoder_names, LANGUAGE_MODEL}
    wanted = {key: value for key, value in model.state_dict().items() if key.split(".")[0] not in parts}
    saved, have = ({key: tuple(value.shape) for key, value in tensors.items()} for tensors in (joints, wanted))
    if saved != have:
        differ = sorted(key for key in saved.keys() | have.keys() if saved.get(key) != have.get(key))
        raise CheckpointError(
            f"weights at {folder} do not fit: {', '.join(f'{key} {saved.get(key)} for {have.get(key)}' for key in differ[:3])}; "
            "give the projectors and callbacks it was saved with"
        )
    for name, module in model.named_children():
        if name not in parts:
            own = {key.removeprefix(f"{name}."): v for key, v in joints.items() if key.startswith(f"{name}.")}
            if own:
                module.to(next(iter(own.values())).dtype).load_state_dict(own)
    return model


def _manifest(model: JoinedModel) -> Composed:
    encoders = {name: model.encoder(name) for name in model.encoder_names}
    joints = {name: model.get_submodule(projector_of(name)) for name in encoders}
    return Composed(
        version=VERSION,
        encoders={
            name: SavedEncoder(
                part=saved_part(name, encoder.module),
                output=encoder.output,
                layer=encoder.layer,
                drop_tokens=encoder.drop_tokens,
                layout=model.layout(name),
                input_names=model.input_names[name],
            )
            for name, encoder in encoders.items()
        },
        projectors={name: _saved_projector(name, module) for name, module in joints.items()},
        language_model=saved_part(LANGUAGE_MODEL, model.get_submodule(LANGUAGE_MODEL)),
        merge=model.merge if isinstance(model.merge, str) else path_of("merge", model.merge),
        placeholders=model.placeholders,
        callbacks={
            part: {when: path_of(f"callback {when} of {part!r}", callback) for when, callback in own.given()}
            for part, own in model.callbacks.items()
        },
    )


def _encoder(folder: Path, saved: SavedEncoder) -> Encoder:
    return Encoder(load_part(folder, saved.part), output=saved.output, layer=saved.layer, drop_tokens=saved.drop_tokens)


def _saved_projector(name: str, module: nn.Module) -> SavedProjector:
    if type(module) is nn.Linear and "bias" in dict(module.named_parameters()):
        return SavedProjector(kind="linear", sizes={"features": module.in_features, "hidden": module.out_features})
    if type(module) is MLP:
        first = module.linear_1
        return SavedProjector(kind="mlp", sizes={"features": first.in_features, "hidden": first.out_features})
    if type(module) is QFormer:
        sizes = {"features": module.features_norm.normalized_shape[0], "hidden": module.queries.shape[1]}
        sizes |= {"num_queries": module.queries.shape[0], "depth": len(module.blocks)}
        return SavedProjector(kind="qformer", sizes=sizes)
    return SavedProjector(kind=path_of(f"projector of {name!r}", type(module)))


def _check_code(option: str, saved: Mapping[str, str], given: Mapping[str, object]) -> None:
    """Raise ConfigError unless a caller gives exactly the functions and classes that a model was saved with.

    Args:
        option: argument of `load` in which they are given, for the message.
        saved: name -> import path when the model was saved.
        given: name -> function or class.
    """
    if missing := set(saved) - set(given):
        lines = ", ".join(f"{key} {saved[key]}" for key in sorted(missing))
        raise ConfigError(f"this model was saved with code of its own in {option}: {lines}; pass {option}=")
    if unused := set(given) - set(saved):
        raise ConfigError(f"{option} {', '.join(sorted(unused))} has no effect: the model was saved without; drop it")
    for key, value in given.items():
        if path_of(f"{option} {key}", value) != saved[key]:
            raise ConfigError(
                f"{option} {key} is {path_of(f'{option} {key}', value)}; the model was saved with {saved[key]}"
            )
