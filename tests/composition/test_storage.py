"""Saved and loaded: the same model, without code; what does not load without code is refused or given again."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.compose_models import AUDIO_ENCODERS, LANGUAGE_MODELS, VISION_ENCODERS
from torch import Tensor, nn

import mmcompile as mm
from mmcompile.errors import CheckpointError, ConfigError, OutputError


def _model(**options: Any) -> Any:
    """A composed model; `Any`, since its parts are attributes that no class declares."""
    vision = VISION_ENCODERS["clip"]
    options.setdefault("encoders", {"vision": mm.Encoder(vision.build(torch.float32), **vision.options)})
    encoders = options.pop("encoders")
    return mm.compose(encoders, options.pop("language_model", None) or _llama(), **options)


def _llama() -> nn.Module:
    return LANGUAGE_MODELS["llama"].build(torch.float32)


def _assert_same(got: mm.ComposedModel, wanted: mm.ComposedModel) -> None:
    batch = mm.example_batch(wanted, text_tokens=12, image_size=56)
    first, second = got.state_dict(), wanted.state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) and first[name].dtype == second[name].dtype for name in second)
    assert torch.equal(got(**batch).loss, wanted(**batch).loss)


def test_a_loaded_model_is_the_saved_one(tmp_path: Path) -> None:
    audio, moe = AUDIO_ENCODERS["whisper"].build(), LANGUAGE_MODELS["mixtral"].build()
    qwen = VISION_ENCODERS["qwen2_vl"]
    model = mm.compose(
        {"audio": audio, "vision": mm.Encoder(qwen.build(), **qwen.options)},
        moe,
        projectors={"audio": "qformer", "vision": "linear"},
        num_queries=5,
        placeholders={"audio": 990},
    )
    model.save_pretrained(tmp_path / "model")
    again: Any = mm.ComposedModel.from_pretrained(tmp_path / "model")
    again.language_model.set_experts_implementation("eager")  # not in the config; others do not know float64
    assert (again.placeholders, again.input_names, again.merge) == (
        model.placeholders,
        model.input_names,
        "placeholder",
    )
    _assert_same(again, model)


def _mean(embeddings: Tensor, features: Mapping[str, Tensor], input_ids: Tensor) -> Tensor:
    return embeddings + features["vision"].mean()


class Bias(nn.Module):
    """A callback with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(64))

    def forward(self, features: Tensor) -> Tensor:
        return features + self.bias


@pytest.mark.slow
def test_code_of_ones_own_is_named_in_the_file_and_given_again(tmp_path: Path) -> None:
    model = _model(merge=_mean, projectors=Bias(), callbacks={"vision": mm.Callbacks(after_projector=Bias())})
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"saved with code of its own in merge: merge .*:_mean; pass merge="):
        mm.ComposedModel.from_pretrained(tmp_path)
    own: dict[str, Any] = {"merge": _mean, "callbacks": {"vision": mm.Callbacks(after_projector=Bias())}}
    with pytest.raises(ConfigError, match=r"in projectors: vision .*:Bias; pass projectors="):
        mm.ComposedModel.from_pretrained(tmp_path, **own)
    with pytest.raises(ConfigError, match=r"projectors vision is .*:Linear; the model was saved with .*:Bias"):
        mm.ComposedModel.from_pretrained(tmp_path, projectors={"vision": nn.Linear(64, 64)}, **own)
    _assert_same(mm.ComposedModel.from_pretrained(tmp_path, projectors={"vision": Bias()}, **own), model)


def test_what_would_not_load_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    injected = _model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj"]), injected.language_model)
    cases = [
        (_model(merge=lambda e, f, i: e), "merge is .*<lambda>, which has no name in a file"),
        (injected, "is not what a fresh LlamaForCausalLM has; add adapters with peft.get_peft_model"),
    ]
    for model, message in cases:
        with pytest.raises(ConfigError, match=message):
            model.save_pretrained(tmp_path / "refused")
    assert not list(tmp_path.iterdir())


def test_a_peft_model_is_saved_as_model_and_adapter(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = peft.get_peft_model(_llama(), peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    model = _model(language_model=wrapped)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    model.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again: Any = mm.ComposedModel.from_pretrained(tmp_path)
    _assert_same(again, model)
    trained = {name for name, p in again.language_model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)


def test_a_folder_is_replaced_whole_and_strangers_in_it_stay(tmp_path: Path) -> None:
    model = _model()
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "README").write_text("mine")
    with torch.no_grad():
        model.vision_projector.linear_1.bias.add_(1)
    model.save_pretrained(tmp_path / "model")
    assert (tmp_path / "model" / "README").read_text() == "mine"
    _assert_same(mm.ComposedModel.from_pretrained(tmp_path / "model"), model)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    (tmp_path / "model").rename(tmp_path / "model.previous")  # as a crash between the two renames leaves it
    _assert_same(mm.ComposedModel.from_pretrained(tmp_path / "model"), model)
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("mine")
    with pytest.raises(OutputError, match="holds no composed.json"):
        model.save_pretrained(other)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    _model().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 9}, "has version 9; this mmcompile reads version 1"),
        ({"placeholders": "x"}, "damaged"),
        ({"language_model": {"module": "os", "name": "system", "adapter": False}}, "wanted one of transformers"),
    ],
)
def test_a_damaged_manifest_is_an_error(saved: Path, change: dict[str, Any], message: str) -> None:
    manifest = saved / "composed.json"
    whole = manifest.read_text()
    manifest.write_text(json.dumps({**json.loads(whole), **change}))
    with pytest.raises(CheckpointError, match=message):
        mm.ComposedModel.from_pretrained(saved)
    manifest.write_text(whole)


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no composed model at .*: wanted a folder with composed.json"):
        mm.ComposedModel.from_pretrained(tmp_path / "nowhere")
