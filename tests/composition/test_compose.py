"""What `compose` makes: the model LLaVA is, encoders run only where needed, callbacks, freezing, and errors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models.compose_models import AUDIO_ENCODERS, LANGUAGE_MODELS, VISION_ENCODERS
from support.models.freezing import add_adapter
from torch import Tensor, nn
from zoo import ALL
from zoo.parts import IMAGE

import mmcompile as mm
from mmcompile.errors import BatchError, ConfigError


def _vision(key: str = "siglip", **options: Any) -> mm.Encoder:
    part = VISION_ENCODERS[key]
    return mm.Encoder(part.build(torch.float32), **{**part.options, **options})


def _language_model(key: str = "llama") -> nn.Module:
    return LANGUAGE_MODELS[key].build(torch.float32)


def _small(**options: Any) -> Any:
    """A composed model; `Any`, since its parts are attributes that no class declares."""
    encoders = options.pop("encoders", None) or {"vision": _vision()}
    return mm.compose(encoders, options.pop("language_model", None) or _language_model(), **options)


@functools.cache
def _shared() -> tuple[nn.Module, nn.Module]:
    """An encoder and a language model for tests that change neither."""
    return _vision().module, _language_model()


def _batch(model: mm.ComposedModel, **sizes: int) -> dict[str, Tensor]:
    return mm.example_batch(model, **{"text_tokens": 12, "image_size": 56, **sizes})


def test_clip_mlp_and_llama_are_llava() -> None:
    """The same weights in transformers' own LLaVA give the same logits and loss."""
    llava: Any = ALL["llava"].build()
    batch = ALL["llava"].batch()
    config = llava.config
    composed = _small(
        encoders={
            "vision": mm.Encoder(llava.model.vision_tower, layer=config.vision_feature_layer, drop_tokens=1),
        },
        projectors="mlp",
        placeholders={"vision": IMAGE},
        language_model=_language_model(),
    )
    composed.language_model.load_state_dict(
        {"lm_head.weight": llava.lm_head.weight}
        | {f"model.{name}": value for name, value in llava.model.language_model.state_dict().items()}
    )
    composed.vision_projector.load_state_dict(llava.model.multi_modal_projector.state_dict())
    wanted, got = llava(**batch), composed(**batch)
    torch.testing.assert_close(got.logits, wanted.logits)
    torch.testing.assert_close(got.loss, wanted.loss)


def test_without_images_the_encoder_is_not_run_and_the_language_model_is_alone() -> None:
    model = _small()
    model.vision.register_forward_pre_hook(lambda *args: pytest.fail("the encoder ran"))
    batch = _batch(model, images=0)
    assert "pixel_values" not in batch
    torch.testing.assert_close(model(**batch).loss, model.language_model(**batch).loss)
    assert [c.name for c in mm.capture(model, batch).components] == ["language_model"]


def test_features_before_the_text_are_what_the_language_model_sees_first() -> None:
    model = _small(merge="prepend", projectors="qformer", num_queries=3)
    batch = _batch(model, images=2)
    batch["attention_mask"][1, -2:] = 0
    embeddings = model.language_model.get_input_embeddings()(batch["input_ids"])
    features = model.vision_projector(model.vision(batch["pixel_values"]).last_hidden_state)
    assert features.shape == (4, 3, 64)
    prefix = torch.stack([torch.cat([features[0], features[1]]), torch.cat([features[2], features[3]])])
    wanted = model.language_model(
        inputs_embeds=torch.cat([prefix, embeddings], dim=1),
        attention_mask=torch.cat([torch.ones(2, 6, dtype=torch.long), batch["attention_mask"]], dim=1),
        labels=torch.cat([torch.full((2, 6), -100), batch["labels"]], dim=1),
    )
    got = model(**batch)
    torch.testing.assert_close(got.logits, wanted.logits)
    torch.testing.assert_close(got.loss, wanted.loss)


@pytest.mark.slow
def test_positions_given_continue_behind_the_features() -> None:
    model = _small(merge="prepend")
    batch = _batch(model)
    positions = torch.arange(12).expand(2, -1)
    torch.testing.assert_close(model(**batch, position_ids=positions).loss, model(**batch).loss)


def test_padded_sounds_give_as_many_tokens_as_alone() -> None:
    """The second sound is half as long; its padding makes no tokens, and its features are those it has alone."""
    audio = AUDIO_ENCODERS["wav2vec2"].build()
    model = _small(encoders={"audio": audio}, language_model=LANGUAGE_MODELS["llama"].build(), projectors="linear")
    long, short = torch.randn(1, 16000, dtype=torch.float64), torch.randn(1, 8000, dtype=torch.float64)
    mask = torch.ones(2, 16000, dtype=torch.long)
    mask[1, 8000:] = 0
    padded = torch.cat([long, nn.functional.pad(short, (0, 8000))])
    inputs = {"input_values": padded, "audio_attention_mask": mask}
    counts = [model.num_tokens("audio", {"input_values": sound}) for sound in (long, short)]
    assert counts[0] > counts[1] > 0
    assert model.num_tokens("audio", inputs) == sum(counts)
    ids = torch.randint(10, 900, (2, max(counts) + 4))
    for row, count in enumerate(counts):
        ids[row, 2 : 2 + count] = model.placeholders["audio"]
    loss = model(input_ids=ids, labels=ids, **inputs).loss
    assert torch.isfinite(loss)
    with pytest.raises(BatchError, match=f"{sum(counts)} placeholders.*{2 * counts[0]} tokens"):
        model(input_ids=ids, labels=ids, input_values=padded)


def _scale(value: dict[str, Any]) -> dict[str, Any]:
    return {**value, "pixel_values": value["pixel_values"] * 2}


def test_callbacks_run_where_they_say_and_are_in_the_graph() -> None:
    plain, extra = _small(projectors="linear"), nn.Linear(64, 64)
    seen: list[str] = []

    def note(name: str, change: Callable[[Any], Any] = lambda value: value) -> Callable[[Any], Any]:
        return lambda value: (seen.append(name), change(value))[1]

    model = _small(
        encoders={"vision": mm.Encoder(plain.vision)},
        language_model=plain.language_model,
        projectors=plain.vision_projector,
        callbacks={
            "vision": mm.Callbacks(
                before_encoder=note("before_encoder", _scale),
                after_encoder=note("after_encoder", lambda output: output.last_hidden_state + 1),
                before_projector=note("before_projector", torch.tanh),
                after_projector=extra,
            ),
            "language_model": mm.Callbacks(before=note("before"), after=note("after")),
        },
    )
    batch = _batch(model)
    seen.clear()
    loss = model(**batch).loss
    assert seen == ["before_encoder", "after_encoder", "before_projector", "before", "after"]
    features = torch.tanh(plain.vision(2 * batch["pixel_values"]).last_hidden_state + 1)
    features = extra(plain.vision_projector(features))
    embeddings = plain.language_model.get_input_embeddings()(batch["input_ids"].clamp(max=999))
    where = (batch["input_ids"] == model.placeholders["vision"])[..., None]
    embeddings = embeddings.masked_scatter(where.expand_as(embeddings), features)
    wanted = plain.language_model(inputs_embeds=embeddings, labels=batch["labels"]).loss
    torch.testing.assert_close(loss, wanted)
    graph = mm.capture(model, batch)
    read = {name for component in graph.components for layer in component.layers for name in layer.parameters}
    assert {"vision_after_projector.weight", "vision_after_projector.bias"} <= read


def test_freezing_by_part_and_by_pattern() -> None:
    model = _small(projectors="linear")
    model.freeze("vision")
    model.freeze("language_model", except_=("lm_head*", "*.layers.3.*"))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name.split(".")[0] for name in trained} == {"vision_projector", "language_model"}
    inside = {name for name in trained if name.startswith("language_model")}
    assert inside and all("lm_head" in name or ".layers.3." in name for name in inside)
    model.unfreeze("language_model")
    assert all(p.requires_grad for p in model.language_model.parameters())
    mm.freeze(model, ["projector"])
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        "vision_projector.weight",
        "vision_projector.bias",
    }
    with pytest.raises(ConfigError, match="no part 'audio'; parts are vision, vision_projector, language_model"):
        model.freeze("audio")
    with pytest.raises(ConfigError, match="except_ nothing matches no parameter of vision"):
        model.freeze("vision", except_=["nothing"])


@pytest.mark.slow
def test_adapters_inside_the_language_model_train_alone() -> None:
    model = _small(projectors="linear")
    add_adapter(model)
    model.freeze("vision", "vision_projector", "language_model", except_=["*.lora_*"])
    graph = mm.capture(model, _batch(model))
    trained = [spec.name for spec in graph.parameters if spec.trainable]
    assert trained and all("lora_" in name for name in trained)


def test_labels_at_placeholders_never_count() -> None:
    model = _small()
    batch = _batch(model)
    wanted = model(**batch).loss
    copied = torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"])
    torch.testing.assert_close(model(**{**batch, "labels": copied}).loss, wanted)


@pytest.mark.slow
def test_two_encoders_of_one_modality_take_inputs_of_their_own() -> None:
    model = _small(encoders={"left": _vision(), "right": _vision("dinov2")})
    assert model.input_names["left"]["pixel_values"] == "left_pixel_values"
    batch = _batch(model)
    assert {"left_pixel_values", "right_pixel_values"} < set(batch)
    assert len(mm.capture(model, batch).components) == 5


@pytest.mark.slow
def test_a_plan_is_made_without_a_batch_and_packing_keeps_conversations_apart() -> None:
    model = _small(projectors="linear")
    model.freeze("vision")
    plan = mm.plan(model, stages={"language_model": 2})
    assert [chain.components for chain in plan.chains] == [("vision", "vision_projector"), ("language_model",)]
    batch = _batch(model)
    samples = [
        {"pixel_values": batch["pixel_values"][i : i + 1], **{k: batch[k][i : i + 1] for k in ("input_ids", "labels")}}
        for i in range(2)
    ]
    packed = mm.pack(model, samples)
    assert packed["input_ids"].shape == (1, batch["input_ids"].numel())  # type: ignore[union-attr]
    losses = [model(**{**sample, "labels": sample["labels"]}).loss for sample in samples]
    torch.testing.assert_close(model(**packed).loss, sum(losses) / 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b.pop("pixel_values"), "hold 32 placeholders of 'vision' .token 1000. but the batch has no input"),
        (lambda b: b["input_ids"].__setitem__((0, 2), 5), "31 placeholders of 'vision'.*features are 32 tokens"),
        (lambda b: b.update(pixels=b["pixel_values"]), "no part takes pixels: vision takes pixel_values"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(change: Callable[[dict[str, Tensor]], object], message: str) -> None:
    model = _small(encoders={"vision": mm.Encoder(_shared()[0])}, language_model=_shared()[1])
    batch = _batch(model)
    change(batch)
    with pytest.raises(BatchError, match=message):
        model(**batch)


@pytest.mark.slow
def test_a_wrong_number_of_placeholders_is_refused_in_capture_too() -> None:
    model = _small(encoders={"vision": mm.Encoder(_shared()[0])}, language_model=_shared()[1])
    batch = _batch(model)
    batch["input_ids"][0, 2] = 5
    with pytest.raises(BatchError, match="31 placeholders of 'vision'"):
        mm.capture(model, batch)


def test_part_of_an_encoders_inputs_is_refused() -> None:
    model = _small(encoders={"vision": _vision("qwen2_vl")})
    batch = _batch(model)
    del batch["image_grid_thw"]
    with pytest.raises(BatchError, match="has pixel_values but no image_grid_thw, which encoder 'vision' needs too"):
        model(**batch)


class _Odd(nn.Module):
    """An encoder that no convention knows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 7)

    def forward(self, points: Tensor) -> dict[str, Tensor]:
        assert points.shape[-1] == 5, "wanted points of 5 numbers"
        return {"found": self.linear(points)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            lambda: {"encoders": {"vision": _Odd()}},
            r"wanted points of 5 numbers.*Encoder\(module, example=\{'points': ...\}\)",
        ),
        (lambda: {"encoders": {"vision": _vision(output="pooled")}}, "without features in 'pooled'.*last_hidden_state"),
        (lambda: {"encoders": {"vision": _vision(layer=9)}}, "layer=9, but returned 5 hidden states"),
        (lambda: {"encoders": {"vision": _vision("pixtral", drop_tokens=1)}}, "drop_tokens=1 has no effect"),
        (lambda: {"encoders": {"train": _vision()}}, "encoder name 'train' cannot be used"),
        (lambda: {"encoders": {"vision": _vision(inputs={"pixels": "x"})}}, "names pixels, which .* does not take"),
        (lambda: {"encoders": {"vision": _vision("pixtral")}, "projectors": "qformer"}, "reads one image at a time"),
        (lambda: {"encoders": {"vision": _vision("pixtral")}, "merge": "prepend"}, "end to end"),
        (lambda: {"language_model": nn.Linear(2, 2)}, "Linear is no language model"),
        (lambda: {"projectors": "resampler"}, "choose one of 'linear', 'mlp', 'qformer'"),
        (lambda: {"projectors": {"audio": "mlp"}}, "wanted one for each encoder: vision"),
        (lambda: {"projectors": nn.Linear(3, 64)}, "does not take features of size 64"),
        (lambda: {"projectors": nn.Linear(64, 3)}, "embedding size 64"),
        (lambda: {"num_queries": 4}, 'needs a projector "qformer"'),
        (lambda: {"merge": "append"}, "choose one of 'placeholder', 'prepend'"),
        (lambda: {"merge": "prepend", "placeholders": {"vision": 1}}, "placeholders have no effect"),
        (lambda: {"callbacks": {"audio": mm.Callbacks()}}, "parts are vision, language_model"),
        (lambda: {"callbacks": {"vision": mm.Callbacks(after=print)}}, "callback after of 'vision' would never run"),
    ],
)
def test_what_cannot_be_composed_says_what_to_give(options: Callable[[], dict[str, Any]], message: str) -> None:
    given = {"encoders": {"vision": mm.Encoder(_shared()[0])}, "language_model": _shared()[1], **options()}
    with pytest.raises(ConfigError, match=message):
        _small(**given)


def test_an_odd_encoder_is_composed_with_an_example_and_a_callback() -> None:
    model = _small(
        encoders={"points": mm.Encoder(_Odd(), example={"points": torch.randn(2, 3, 5)})},
        callbacks={"points": mm.Callbacks(after_encoder=lambda output: output["found"])},
    )
    assert model.num_tokens("points", {"points": torch.randn(4, 6, 5)}) == 24


def test_a_merge_of_ones_own_must_keep_the_shape() -> None:
    model = _small(merge=lambda embeddings, features, input_ids: features["vision"])
    batch = _batch(model)
    with pytest.raises(ConfigError, match=r"returned \[2, 16, 64\]; wanted embeddings \[2, 12, 64\]"):
        model(**batch)
