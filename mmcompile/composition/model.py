"""`ComposedModel`: encoders, projectors and a language model as one module, called like a Hugging Face multimodal model."""

from __future__ import annotations

import os
from collections.abc import Mapping

from torch import Tensor, nn

from mmcompile.composition import example, storage
from mmcompile.composition.callbacks import Callbacks
from mmcompile.composition.joined import JoinedModel
from mmcompile.composition.merge import MergeFunction


class ComposedModel(JoinedModel):
    """Encoders and a language model as one module, with example batches and storage. Made by `compose` or `from_pretrained`."""

    def example_batch(
        self, *, batch_size: int, text_tokens: int, images: int, image_size: int, audios: int
    ) -> dict[str, Tensor]:
        """Return a random batch for this model; `mm.example_batch` calls this method."""
        return example.example_batch(
            self, batch_size=batch_size, text_tokens=text_tokens, images=images, image_size=image_size, audios=audios
        )

    def save_pretrained(
        self, folder: str | os.PathLike[str], *, state_dict: Mapping[str, Tensor] | None = None
    ) -> None:
        """Write the model to `folder`, with the weights of `state_dict` if given; layout in `mmcompile.composition.storage`."""
        storage.save(self, folder, state_dict)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        *,
        projectors: Mapping[str, nn.Module] | None = None,
        merge: MergeFunction | None = None,
        callbacks: Mapping[str, Callbacks] | None = None,
    ) -> ComposedModel:
        """Load a folder written by `save_pretrained`.

        The user's own modules and functions must be given; they are never imported.
        """
        return storage.load(cls, folder, projectors or {}, merge, callbacks or {})
