"""The components of every family, as its authors built it: encoders, what lies between them and the language model.

One path an encoder: from its name through projectors to the language model. Written from the models' code, not from what a
capture finds.
"""

from __future__ import annotations

from itertools import pairwise

_LLAVA = "vision_tower > multi_modal_projector > language_model"
_QWEN = "visual > language_model"
_HEARING = "audio_tower > multi_modal_projector > language_model"
_CONNECTED = "vision_model > connector > language_model"
_DECODER = "encoder > language_model"
_ONE = "language_model"
_WHOLE_TOWER = "vision_tower > language_model"
_MERGED = "vision_tower > merger > language_model"
_TOWERS = "vision_model > language_model, text_model > language_model"
_PROJECTED_TOWERS = "vision_model > visual_projection > language_model, text_model > text_projection > language_model"
_ADAPTED = "vision_tower > vision_adapter > language_model"

PATHS: dict[str, str] = {
    # LLaVA and its kin
    "llava": _LLAVA,
    "vipllava": _LLAVA,
    "video_llava": "image_tower > multi_modal_projector > language_model, video_tower > multi_modal_projector",
    "internvl": _LLAVA,
    "paligemma": _LLAVA,
    "gemma3": _LLAVA,
    "aya_vision": _LLAVA,
    "cohere2_vision": _LLAVA,
    "ovis2": "vision_tower > visual_embeddings_table > language_model",
    "janus": "vision_model > aligner > language_model",
    "got_ocr2": _LLAVA,
    "deepseek_vl": "vision_model > aligner > language_model",
    # encoders that merge patches themselves
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_5": _QWEN,
    "glm4v": _QWEN,
    "video_llama_3": "vision_model > projector > language_model",
    "kimi_k25": "vision_tower > mm_projector > language_model",
    "mistral3": _LLAVA,
    "pixtral": _LLAVA,
    # tiles and patches
    "llava_next": _LLAVA,
    "llava_onevision": _LLAVA,
    "idefics2": _CONNECTED,
    "idefics3": _CONNECTED,
    "smolvlm": _CONNECTED,
    "gemma4": "vision_tower > embed_vision > language_model",
    "mllama": "vision_model > multi_modal_projector > language_model",
    "llama4": "vision_model > multi_modal_projector > language_model",
    "lfm2_vl": _LLAVA,
    "fuyu": "vision_embed_tokens > language_model",
    # queries, encoder-decoders
    "blip2": "vision_model > qformer > language_projection > language_model",
    "instructblip": "vision_model > qformer > language_projection > language_model",
    "kosmos2": "vision_model > image_to_text_projection > language_model",
    "florence2": _LLAVA,
    "vision_encoder_decoder": _DECODER,
    # sound
    "qwen2_audio": _HEARING,
    "qwen2_audio_merged": _HEARING,
    "voxtral": _HEARING,
    "audioflamingo3": _HEARING,
    "glmasr": _HEARING,
    "granite_speech": "encoder > projector > language_model",
    "qwen2_5_omni": "audio_tower > language_model, visual > language_model",
    "whisper": _DECODER,
    # two towers and a loss over pairs
    "clip": _PROJECTED_TOWERS,
    "siglip": _TOWERS,
    "clap": "audio_model > audio_projection > language_model, text_model > text_projection > language_model",
    "chinese_clip": _PROJECTED_TOWERS,
    "altclip": _PROJECTED_TOWERS,
    "metaclip_2": _PROJECTED_TOWERS,
    "owlvit": _PROJECTED_TOWERS,
    "owlv2": _PROJECTED_TOWERS,
    "siglip2": _TOWERS,
    "tipsv2": _TOWERS,
    "align": "vision_model > language_model, text_model > text_projection > language_model",
    "groupvit": _PROJECTED_TOWERS,
    "blip_contrastive": _PROJECTED_TOWERS,
    "xclip": "vision_model > mit > language_model, "
    "vision_model > prompts_visual_layernorm > language_model, text_model > text_projection > language_model",
    "videoprism": "video_model > language_model, text_model > language_model",
    # Its conditioning encoder joins sounds and words: behind them, decoder and speech encoder are one chain to the loss.
    "clvp": "mel_attn_blocks > language_model, text_encoder_model > language_model",
    # text read with a picture, with a page, with regions
    "bridgetower": "text_model > cross_modal_text_transform > language_model, text_model > itc_text_head > language_model, "
    "vision_model > cross_modal_image_transform > language_model",
    "bridgetower_masked": "text_model > cross_modal_text_transform > language_model, "
    "vision_model > cross_modal_image_transform > language_model",
    "lxmert": "r_layers > language_model, layer > language_model",
    "visual_bert": "visual_projection > language_model",
    "git": "image_encoder > visual_projection > language_model",
    "git_video": "image_encoder > visual_projection > language_model",
    "modernvbert": _CONNECTED,
    "layoutlm": _ONE,
    "layoutlmv3": "patch_embed > language_model",
    "layoutlmv3_answers": "patch_embed > language_model",
    "pix2struct": _DECODER,
    "udop": _DECODER,
    "kosmos2_5": "vision_model > image_to_text_projection > language_model",
    "clipseg": "vision_model > reduces > language_model, text_model > text_projection > language_model",
    "blip": "vision_model > language_model",
    "blip_questions": "vision_model > text_encoder > language_model",
    "idefics": "vision_model > perceiver_resampler > language_model",
    "chameleon": "vqmodel > language_model",
    "emu3": "vqmodel > language_model",
    "apertus1p5": "vision_tokenizer > language_model, audio_tokenizer > language_model",
    # more encoders that merge patches themselves, and their mixtures of experts
    "glm46v": _QWEN,
    "glm_ocr": _QWEN,
    "paddleocr_vl": "visual > projector > language_model",
    "lighton_ocr": "vision_encoder > vision_projection > language_model",
    "cohere_compass": _QWEN,
    "cosmos3_edge": "visual > projector > language_model",
    "cosmos3_omni": _QWEN,
    "exaone4_5": _QWEN,
    "aria": _LLAVA,
    "qwen3_vl_moe": _QWEN,
    "qwen3_vl_moe_balanced": _QWEN,
    "qwen3_5_moe": _QWEN,
    "glm4v_moe": _QWEN,
    "ernie4_5_vl_moe": "vision_tower > resampler_model > language_model",
    "deepseek_ocr2": _LLAVA,
    # several frames, several modalities
    "llava_next_video": _LLAVA,
    "instructblipvideo": "vision_model > qformer > language_projection > language_model",
    "qwen2_vl_video": _QWEN,
    "deepseek_vl_hybrid": "vision_model > aligner > language_model, high_res_vision_model > aligner",
    "fast_vlm": _LLAVA,
    "evolla": "protein_encoder > language_model",
    "qwen3_omni_moe": "audio_tower > language_model, visual > language_model",
    "dots3_note": "vision_tower > language_model, audio_tower > language_model",
    "gemma4_unified": "embed_vision > language_model, embed_audio > language_model",
    # towers inside other modules, projectors for several layers
    "pi0": "vision_tower > multi_modal_projector > language_model, embed_action_time > language_model",
    "t5gemma2": "vision_tower > multi_modal_projector > encoder > language_model",
    "granite4_vision": "vision_tower > layerwise_projectors > language_model, vision_tower > spatial_projectors > language_model",
    "granite_docling": "vision_model > language_model, vision_model > density_router > language_model",
    # chosen experts and keys
    "hy_v4_vl": _WHOLE_TOWER,
    "inkling_mm_model": _WHOLE_TOWER,
    "inkling2": _WHOLE_TOWER,
    "inkling2_loop": _WHOLE_TOWER,
    "minimax_m3_vl": _LLAVA,
    "mistral_large4": _LLAVA,
    "qwen4_exp": _QWEN,
    # documents
    "hunyuan_vl": _WHOLE_TOWER,
    "hyperclovax_vision_v2": "vision_model > projector > language_model",
    "minicpm_ocr": _MERGED,
    "minicpmv4_6": _MERGED,
    "minicpmv4_7": _MERGED,
    "molmo2": _LLAVA,
    "pp_formulanet": _DECODER,
    "qianfan_ocr": _LLAVA,
    "unlimited_ocr": _LLAVA,
    # several kinds of layers
    "lfm3_vl": _LLAVA,
    "muse_glimmer": _ADAPTED,
    "muse_spark": _ADAPTED + ", audio_tower > language_model",
    "nemotron_h_omni": "vision_model > multi_modal_projector > language_model, audio_tower > embed_audio > language_model",
    "step3p7": "vision_model > multi_modal_projector > language_model",
    # language models of speech and music
    "fun_asr_nano": _HEARING,
    "granite_speech_plus": "encoder > projector > language_model",
    "moss_transcribe_diarize": _HEARING,
    "nemo_speechlm": _HEARING,
    "qwen3_asr": _HEARING,
    "vibevoice_asr": "acoustic_tokenizer_encoder > multi_modal_projector > language_model, "
    "semantic_tokenizer_encoder > multi_modal_projector",
    "voxtral_realtime": _HEARING,
    "musicflamingo": _HEARING,
    "higgs_audio_v2": _ONE,
    # speech and music
    "wav2vec2": _ONE,
    "wav2vec2_bert": _ONE,
    "wav2vec2_conformer": _ONE,
    "hubert": _ONE,
    "sew": _ONE,
    "sew_d": _ONE,
    "unispeech": _ONE,
    "unispeech_sat": _ONE,
    "wavlm": _ONE,
    "data2vec_audio": _ONE,
    "omniasr_ctc": _ONE,
    "parakeet_ctc": _ONE,
    "parakeet_tdt": "encoder > encoder_projector > language_model",
    "granite_speech5": _ONE,
    "lasr_ctc": _ONE,
    "audio_spectrogram_transformer": _ONE,
    "speech_to_text": _DECODER,
    "moonshine": _DECODER,
    "moonshine_streaming": _DECODER,
    "seamless_m4t": "speech_encoder > language_model",
    "seamless_m4t_v2": "speech_encoder > language_model",
    "speech_encoder_decoder": _DECODER,
    "speecht5": _DECODER,
    "pop2piano": _DECODER,
    "canary": _DECODER,
    "cohere_asr": "encoder > proj > language_model",
    "kyutai_speech_to_text": _ONE,
    "omniasr": _HEARING,
    "speecht5_tts": "encoder > language_model, prenet > language_model",
    "fastspeech2_conformer": "encoder > language_model, encoder > duration_predictor > language_model, "
    "encoder > pitch_predictor > language_model, encoder > energy_predictor > language_model, "
    "pitch_embed > language_model, energy_embed > language_model",
    "dia": _DECODER,
    "csm": "codec_model > language_model",
    "musicgen": "text_encoder > enc_to_dec_proj > language_model",
    "musicgen_melody": "text_encoder > enc_to_dec_proj > language_model, audio_enc_to_dec_proj > language_model",
}
"""Family -> its paths, separated by commas; a family that is one component has the path `language_model`."""


def edges_of(paths: str) -> set[tuple[str, str]]:
    """(producer, consumer) of each edge between the components of some paths."""
    return {pair for path in paths.split(", ") for pair in pairwise(path.split(" > "))}


def kinds_of(paths: str) -> dict[str, str]:
    """Component -> its kind, from its place on the paths."""
    names = [path.split(" > ") for path in paths.split(", ")]
    first, last = {path[0] for path in names if len(path) > 1}, "language_model"
    return {
        name: last if name == last else "encoder" if name in first else "projector" for path in names for name in path
    }
