"""Attention within segments of a packed sequence: images or windows one after another, which do not see each other.

out[:, i] = sum over j in segment(i) of softmax_j(scale * q_i . k_j) v_j, where segment s holds positions cu_seqlens[s]
.. cu_seqlens[s + 1] - 1. It is one op for any number of segments, so that a graph does not unroll over images.
"""

from mmcompile.kernels.packed_attention.packed_ops import packed_attention as packed_attention
