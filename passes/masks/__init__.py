"""The pass `bitfield-attention`, and the analysis of attention masks behind it."""
