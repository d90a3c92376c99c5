"""Families that cannot be captured: their forward decides by values of activations, or runs Python that no graph has.

Each has the part of the message that a user gets, with the line that decides.
"""

_FINITE = r": if not torch.isfinite\(hidden_states\).all\(\)"

REFUSED: dict[str, str] = {
    "glm5_next": r"modeling_glm5_next.py:\d+: pool_keys, pool_indices, pool_valid = self.get_pooled_states",
    "phi4_multimodal": r"modeling_phi4_multimodal.py:\d+: if self.training and np.random.rand\(\) > 0.5",
    "vilt": r"masking_utils.py:\d+: and \(padding_mask is None or padding_mask.all\(\)\)",
    "vilt_masked": r"masking_utils.py:\d+: and \(padding_mask is None or padding_mask.all\(\)\)",
    "flava": r"modeling_flava.py:\d+: mim_labels_filtered = mim_labels",
    "detr": r"modeling_detr.py:\d+" + _FINITE,
    "grounding_dino": r"modeling_grounding_dino.py:\d+" + _FINITE,
    "mm_grounding_dino": r"modeling_mm_grounding_dino.py:\d+" + _FINITE,
    "csm": r"masking_utils.py:\d+: if batch_size != position_ids.shape",
    "sew_d": r"modeling_sew_d.XSoftmax, whose backward is Python",
    "step3p7": r"modeling_step3p7.py:\d+: for expert_idx in hit",
}
"""Family -> regular expression that the message of the refusal holds."""
