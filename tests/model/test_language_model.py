"""Language models inside of multimodal checkpoints, beside the multimodal class of transformers itself."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quantkit.errors import InputError
from quantkit.model.inspect import inspect, inspect_source
from quantkit.model.language_model import LANGUAGE_MODELS
from quantkit.model.load import open_source
from quantkit.model.reference import reference_logits
from quantkit.model.weights.open import open_weights

TEXT = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION = {
    "depth": 1,
    "embed_dim": 16,
    "hidden_size": 32,
    "num_heads": 2,
    "mlp_ratio": 2,
    "patch_size": 14,
    "out_hidden_size": 32,
    "intermediate_size": 32,
    "fullatt_block_indexes": [0],
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
AUDIO = {
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "d_model": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "hidden_size": 16,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
PERCEIVER = {
    "hidden_size": 32,
    "resampler_n_latents": 2,
    "resampler_depth": 1,
    "resampler_n_heads": 2,
    "resampler_head_dim": 8,
    "num_key_value_heads": 2,
}
CLIP = {"vision_config": {**VISION, "model_type": "clip_vision_model"}}
SIGLIP = {"vision_config": {**VISION, "model_type": "siglip_vision_model"}}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
OLD_SECTIONS = {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}, "rope_theta": 10000.0}
NEW_SECTIONS = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [2, 1, 1]}


def text(model_type: str, **changes) -> dict:
    return {"text_config": {**TEXT, "model_type": model_type, **changes}}


MODELS = {  # model type -> (class, config)
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {**text("gemma3_text", head_dim=8, sliding_window=8, query_pre_attn_scalar=8), **SIGLIP}
        | {"mm_tokens_per_image": 4, "image_token_index": 90},
    ),
    "llava": ("LlavaForConditionalGeneration", {**text("llama"), **CLIP, **UNTIED}),
    "llava_next": ("LlavaNextForConditionalGeneration", {**text("mistral"), **CLIP, **UNTIED}),
    "llava_onevision": (
        "LlavaOnevisionForConditionalGeneration",
        {**text("qwen2", **TIED), **SIGLIP, **TIED},
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        {**text("mistral", head_dim=8), "vision_config": {**VISION, "model_type": "pixtral"}, **UNTIED},
    ),
    "idefics2": (
        "Idefics2ForConditionalGeneration",
        {**text("mistral"), "vision_config": VISION, "perceiver_config": PERCEIVER, **UNTIED},
    ),
    "idefics3": (
        "Idefics3ForConditionalGeneration",
        {**text("llama"), "vision_config": VISION, "scale_factor": 2, **UNTIED},
    ),
    "smolvlm": (
        "SmolVLMForConditionalGeneration",
        {**text("llama", **TIED), "vision_config": VISION, "scale_factor": 2, **TIED},
    ),
    "internvl": (
        "InternVLForConditionalGeneration",
        {
            **text("qwen2"),
            "vision_config": {**VISION, "image_size": [28, 28], "patch_size": [14, 14]},
            **UNTIED,
        },
    ),
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        {**text("qwen2_vl_text", **OLD_SECTIONS), "vision_config": QWEN_VISION, **UNTIED},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        {**text("qwen2_5_vl_text", **OLD_SECTIONS, **TIED), "vision_config": QWEN_VISION, **TIED},
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        {
            **text("qwen3_vl_text", head_dim=8, rope_scaling=NEW_SECTIONS),
            "vision_config": QWEN_VISION,
            **UNTIED,
        },
    ),
    "qwen2_audio": (
        "Qwen2AudioForConditionalGeneration",
        {**text("qwen2"), "audio_config": AUDIO, **UNTIED},
    ),
    "voxtral": ("VoxtralForConditionalGeneration", {**text("llama"), "audio_config": AUDIO}),
    "paligemma": (
        "PaliGemmaForConditionalGeneration",
        {**text("gemma", head_dim=8), **SIGLIP, "projection_dim": 32, "hidden_size": 32},
    ),
}


def saved(model_type, folder):
    class_name, config = MODELS[model_type]
    cls = getattr(transformers, class_name)
    torch.manual_seed(0)
    model = cls(cls.config_class(**config)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return model


def ids_and_logits(model):
    ids = torch.randint(3, 80, (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return ids, model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.float().numpy()


def change_config(folder, change):
    path = folder / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


@pytest.mark.parametrize("model_type", LANGUAGE_MODELS)
def test_logits_are_those_of_the_whole_model(model_type, tmp_path):
    model = saved(model_type, tmp_path)
    ids, logits = ids_and_logits(model)
    source = open_source(tmp_path)
    model_map = inspect_source(source)
    assert model_map.family
    assert any("multimodal model: its language model" in note for note in model_map.notes)
    assert not any("missing" in note for note in model_map.notes)
    assert abs(reference_logits(source)(ids.numpy()) - logits).max() <= 1e-6 * abs(logits).max()
    stored = model.get_input_embeddings().weight.detach().numpy()
    weights = open_weights(source, model_map, random_weights=False)
    (table,) = (entry.name for entry in model_map.embeddings)
    assert (weights.read(f"{table}.weight") == stored).all()


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl"])
def test_configs_with_text_fields_at_the_top(model_type, tmp_path):
    """As Qwen2-VL and Qwen2.5-VL were published."""
    ids, logits = ids_and_logits(saved(model_type, tmp_path))

    def flatten(config):
        inner = {**config.pop("text_config"), "model_type": config["model_type"]}
        for key in ("rope_parameters", "layer_types", "architectures"):
            inner.pop(key, None)
        return {**inner, **config, **OLD_SECTIONS}

    change_config(tmp_path, flatten)
    source = open_source(tmp_path)
    assert abs(reference_logits(source)(ids.numpy()) - logits).max() <= 1e-6 * abs(logits).max()


@pytest.mark.parametrize(
    "old, new", [("model.language_model.", "language_model.model."), ("lm_head", "lm_head")]
)
def test_names_of_either_version(old, new, tmp_path):
    ids, logits = ids_and_logits(saved("llava", tmp_path))
    path = tmp_path / "model.safetensors"
    renamed = {
        name.replace("language_model.model.", "model.language_model.").replace(
            "language_model.lm_head", "lm_head"
        ): t
        for name, t in load_file(path).items()
    }
    save_file({name.replace(old, new): t for name, t in renamed.items()}, path, metadata={"format": "pt"})
    source = open_source(tmp_path)
    assert not any("missing" in note for note in inspect_source(source).notes)
    assert abs(reference_logits(source)(ids.numpy()) - logits).max() <= 1e-6 * abs(logits).max()


def test_a_model_that_reads_prompts_in_both_directions_is_refused(tmp_path):
    model = saved("paligemma", tmp_path)
    ids, logits = ids_and_logits(model)
    changed = ids.clone()
    changed[0, -1] = 5
    with torch.inference_mode():
        later = model(input_ids=changed, attention_mask=torch.ones_like(ids)).logits.numpy()
    assert abs(later - logits)[0, :-1].max() > 1e-3, "it would be causal"
    with pytest.raises(InputError, match="reads a prompt in both directions"):
        inspect(tmp_path)


def test_others_are_refused_by_name(tmp_path):
    saved("llava", tmp_path)
    change_config(
        tmp_path, lambda c: {**c, "model_type": "blip-2", "architectures": ["Blip2ForConditionalGeneration"]}
    )
    with pytest.raises(InputError, match="blip-2 is a multimodal model"):
        inspect(tmp_path)
