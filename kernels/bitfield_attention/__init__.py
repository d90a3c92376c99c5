"""Attention under multimodal masks that are given as one 64-bit word per token.

`masks/words.py` defines the words, `masks/builder.py` and `masks/convert.py` make them, and `masks/block_plan.py` finds
the tiles to compute. `impl/` computes them in torch or Triton, `ops.py` has the torch ops, and `huggingface.py` puts
them into models.
"""

from mmcompile.kernels.bitfield_attention.api import bitfield_attention as bitfield_attention
from mmcompile.kernels.bitfield_attention.impl.backends import resolve_impl as resolve_impl
from mmcompile.kernels.bitfield_attention.impl.dense_reference import (
    bitfield_attention_reference as bitfield_attention_reference,
)
from mmcompile.kernels.bitfield_attention.masks.block_plan import plan_blocks as plan_blocks
from mmcompile.kernels.bitfield_attention.masks.builder import Audio as Audio
from mmcompile.kernels.bitfield_attention.masks.builder import Document as Document
from mmcompile.kernels.bitfield_attention.masks.builder import Image as Image
from mmcompile.kernels.bitfield_attention.masks.builder import Padding as Padding
from mmcompile.kernels.bitfield_attention.masks.builder import Prefix as Prefix
from mmcompile.kernels.bitfield_attention.masks.builder import Text as Text
from mmcompile.kernels.bitfield_attention.masks.builder import Video as Video
from mmcompile.kernels.bitfield_attention.masks.builder import build_mask as build_mask
from mmcompile.kernels.bitfield_attention.masks.convert import words_from_ids as words_from_ids
from mmcompile.kernels.bitfield_attention.masks.visible_pairs import visible_pairs as visible_pairs
