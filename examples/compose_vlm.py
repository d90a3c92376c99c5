"""Compose a vision encoder, a speech encoder and a language model that never met, and train the joints over processes.

All three are tiny and random; with real ones, only the lines that build them change, to
`SiglipVisionModel.from_pretrained(...)` and so on. The frozen encoders run forward only, each on a device of its own; a step
without sounds does not run the speech encoder.

    python examples/compose_vlm.py --out composed
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    SiglipVisionConfig,
    SiglipVisionModel,
    Wav2Vec2Config,
    Wav2Vec2Model,
)

import mmcompile as mm

NUM_STEPS, NUM_SAMPLES, NUM_MICROBATCHES = 4, 4, 2
TOWER: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}


def build_model() -> mm.ComposedModel:
    """Two frozen encoders, projectors that train, and a language model whose last layer and head train."""
    torch.manual_seed(0)
    vision = SiglipVisionModel(SiglipVisionConfig(**TOWER, image_size=56, patch_size=14))
    speech = Wav2Vec2Model(
        Wav2Vec2Config(
            **TOWER, conv_dim=[32] * 7, num_conv_pos_embedding_groups=4, apply_spec_augment=False, layerdrop=0.0
        )
    )
    language = LlamaForCausalLM(LlamaConfig(**TOWER, vocab_size=512, max_position_embeddings=512, pad_token_id=0))
    model = mm.compose(
        {"vision": vision, "speech": speech},
        language,
        projectors={"vision": "mlp", "speech": "qformer"},
        num_queries=8,
    )
    model.freeze("vision", "speech")
    model.freeze("language_model", except_=["model.layers.3.*", "lm_head.*"])
    return model


def samples_of(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Conversations one by one, as `mm.ComposedProcessor` makes them of text, pictures and sounds."""
    return [{name: value[i : i + 1] for name, value in batch.items()} for i in range(NUM_SAMPLES)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the trained model")
    out: Path = parser.parse_args().out
    model = build_model()
    draw = functools.partial(mm.example_batch, model, batch_size=NUM_SAMPLES, text_tokens=24)
    seen, heard = samples_of(draw()), samples_of(draw(audios=0))
    plan = mm.plan(model, draw(), stages={"language_model": 1}, num_microbatches=NUM_MICROBATCHES)
    print(plan)
    adamw = functools.partial(torch.optim.AdamW, lr=3e-3)
    with mm.parallelize(model, draw(), plan, optimizer=adamw) as engine:
        for step in range(NUM_STEPS):
            metrics = engine.step(heard if step % 2 else seen)
            print(f"step {metrics.step}: loss {metrics.loss:.4f} over {metrics.num_tokens} tokens")
        engine.pull()
    model.save_pretrained(out)
    again = mm.ComposedModel.from_pretrained(out)
    print(
        f"saved to {out}: {sum(p.numel() for p in again.parameters()):,} parameters load again, as {type(again).__name__}"
    )


if __name__ == "__main__":
    main()
