"""A small tokenizer for any family: byte pairs trained on real text, and the family's special tokens at the zoo's ids."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from zoo.parts import VOCABULARY

FIRST_SPECIAL = 890
"""First id that is no text. Special tokens without an id of their own begin here; placeholders stand at 990 and above."""
_BASIC = ("<pad>", "<s>", "</s>", "<unk>")
_NO_TEXT = re.compile(r"[^\w\s.,;:()'-]|_{2,}|-{2,}|={2,}")


@functools.cache
def sentences() -> tuple[str, ...]:
    """Return the sentences of the descriptions of data sets that scikit-learn contains."""
    files = (file for file in resources.files("sklearn.datasets.descr").iterdir() if file.name.endswith(".rst"))
    texts = (file.read_text() for file in sorted(files, key=lambda file: file.name))
    found = (part.split() for text in texts for part in re.split(r"(?<=[.;])\s", _NO_TEXT.sub(" ", text)))
    return tuple(" ".join(words) for words in found if 4 <= len(words) <= 60)


def small_tokenizer(
    placed: Mapping[str, int], *, named: Mapping[str, str] | None = None, others: Iterable[str] = (), **options: Any
) -> PreTrainedTokenizerFast:
    """Return a tokenizer of `VOCABULARY` ids.

    Args:
        placed: Special token -> its id, as in the zoo's configuration.
        named: Attribute (`image_token`) -> special token, for processors that read it from their tokenizer.
        others: Special tokens whose ids are free.
        options: Arguments of `PreTrainedTokenizerFast`.
    """
    model = _byte_pairs()
    taken = set(placed.values())
    free = (token_id for token_id in range(FIRST_SPECIAL, VOCABULARY) if token_id not in taken)
    special = {**placed, **dict(zip(others, free, strict=False))}
    vocabulary = {**model["vocab"], **special}
    merges = [tuple(merge) for merge in model["merges"]]
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens([*_BASIC, *special])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_input_names=["input_ids", "attention_mask"],
        extra_special_tokens=dict(named or {}),
        **options,
    )


@functools.cache
def _byte_pairs() -> dict[str, Any]:
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=FIRST_SPECIAL,
        special_tokens=list(_BASIC),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(sentences(), trainer)
    return json.loads(trained.to_str())["model"]
