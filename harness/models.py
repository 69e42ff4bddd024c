"""Makes small random models with a tokenizer, so that end-to-end runs need no model hub."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

_LLAMA = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "pad_token_id": None,  # the embedding of such a token is zero
}
_SHORT = {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads"}


def make_tiny_llama(directory: Path, *, seed: int = 0, **changes: int) -> Path:
    """Write a random model and its tokenizer to ``directory``; return the directory. Every token is one word: ``w17``
    is token 17.

    Equal shapes and seeds give equal weights. ``changes`` replace entries of the config; numbers of layers and heads
    have short names. The weights have a larger standard deviation than transformers' default, so that the output tokens
    depend on the whole prompt.
    """
    shape = {_SHORT.get(name, name): value for name, value in changes.items()}
    return make_tiny(directory, "llama", _LLAMA | shape, seed)


def make_llama_8b_config(directory: Path) -> Path:
    """Write the config of Llama-3.1-8B's shape, with fewer words, and a tokenizer; return the directory. There are no
    weights: SGLang's ``--load-format dummy`` makes random ones."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
        "vocab_size": 32000,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    _save_tokenizer(directory, config["vocab_size"])
    return directory


FAMILIES: dict[str, dict[str, Any]] = {
    "cohere2": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 2048,
        "pad_token_id": 0,
        "logit_scale": 1.0,
    },
    "gemma3_text": {
        "head_dim": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 2048,
        "query_pre_attn_scalar": 32,
        "initializer_range": 0.08,  # its embeddings are tied: with more, it is certain of each token
    },
    "glm4": {"head_dim": 32, "pad_token_id": 0},
    "phi3": {"pad_token_id": 0},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "smollm3": {"no_rope_layers": [1, 0, 1, 1], "pad_token_id": 0},
}
"""Families with full attention, by their names in transformers, and what `make_tiny` adds to a model's config."""


_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_IN_TURN = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 64}
_THREE_OF_FOUR = {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "sliding_window": 64}
_DELTA = {
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
_MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
_LATENT = {
    **_MLA,
    "head_dim": 16,
    "first_k_dense_replace": 4,
    "index_n_heads": 12,
    "index_head_dim": 32,
    "index_topk": 64,
}
OTHER_FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v32": _LATENT,
    "exaone4": {
        "head_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},  # SGLang knows no other, with transformers 5
        **_THREE_OF_FOUR,
    },
    "gemma4_text": {
        "head_dim": 32,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "initializer_range": 0.08,
        **_IN_TURN,
    },
    "glm_moe_dsa": _LATENT,
    "gpt_oss": {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, **_IN_TURN},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * 2,
        "mamba_n_heads": 16,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_chunk_size": 64,
        "num_local_experts": 0,
        "shared_intermediate_size": 64,
    },
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "mlp_layer_types": ["dense"] * 4,
        "linear_num_heads": 4,
        "linear_head_dim": 32,
        **_MLA,
        "q_lora_rank": None,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 32,
    },
    "mimo_v2_flash": {"head_dim": 32, "v_head_dim": 32, "mlp_layer_types": ["dense"] * 4, **_IN_TURN},
    "nemotron_h": {
        "head_dim": 32,
        "layers_block_type": ["mamba", "attention", "mlp", "attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 64,
        "time_step_min": 1e-9,  # transformers takes no smaller steps, and SGLang does
    },
    "olmo3": _THREE_OF_FOUR,
    "phi3": {
        "original_max_position_embeddings": 2048,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1 + 0.1 * i for i in range(16)],
            "long_factor": [4 + 0.4 * i for i in range(16)],
            "original_max_position_embeddings": 2048,
        },
    },
    "qwen3_next": {**_DELTA, "num_experts": 4, "shared_expert_intermediate_size": 32, **_EXPERTS},
}
"""More families, whose layers differ, or which SGLang serves here only in Triton's interpreter, as ``FAMILIES`` has
them. Phi-3 has another rotation than there."""

_PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "exaone4": {"sliding_window_pattern": "LLLG"},
    "gemma4_text": {"swa_num_key_value_heads": 2},
    "kimi_linear": {
        "linear_attn_config": {
            "kda_layers": [1, 3],
            "full_attn_layers": [2, 4],
            "num_heads": 4,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
        },
        "first_k_dense_replace": 4,
        "mla_use_nope": True,
    },
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [1, 0] * 2,
        "sliding_window_size": 63,  # without the token itself
        "moe_layer_freq": [0] * 4,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 32,
        "swa_v_head_dim": 32,
        "swa_rope_theta": 1e4,
        "rope_theta": 5e6,
        "partial_rotary_factor": 0.334,
        "layernorm_epsilon": 1e-5,
    },
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp", "attention"], "mamba_n_groups": 2},
    "olmo3": {"rope_theta": 5e5},
}
"""What SGLang reads in a model's config, and transformers does not write there."""


_SMALL: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
"""What the config of a random model says, unless its family needs something else."""


def make_tiny(directory: Path, family: str, changes: Mapping[str, Any] | None = None, seed: int = 0) -> Path:
    """Write a random model of one of ``FAMILIES`` and a tokenizer; return the directory. ``changes``: what to add to
    its config in place of what those have."""
    from transformers import AutoConfig, AutoModelForCausalLM

    own = FAMILIES[family] if changes is None else changes
    config = AutoConfig.for_model(family, **_SMALL | {"pad_token_id": 0} | dict(own))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).float()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):  # SGLang has them in bfloat16, whatever the model's dtype
            parameter.data = parameter.data.bfloat16().float()
    model.save_pretrained(directory)
    _save_tokenizer(directory, config.vocab_size)
    if family == "kimi_linear":
        _rename_dense_layers(directory / "model.safetensors")
    if published := _PUBLISHED.get(family):
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | published))
    return directory


def _rename_dense_layers(file: Path) -> None:
    """Name dense layers as published checkpoints do, and SGLang. Transformers writes the name of sparse ones."""
    from safetensors.torch import load_file, save_file

    weights = load_file(file)
    save_file({name.replace(".block_sparse_moe.", ".mlp."): weight for name, weight in weights.items()}, file)


MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
_ENCODER = {"depth": 2, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128}
_MARKS = {3: "<|image_pad|>", 4: "<|video_pad|>", 5: "<|vision_start|>", 6: "<|vision_end|>"}
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
"""Where an image is in the text of a prompt."""

IMAGE_TEXT: dict[str, dict[str, dict[str, Any]]] = {
    "qwen2_5_vl": {"text": {}, "vision": {"fullatt_block_indexes": [1]}},
    "qwen3_vl": {
        "text": {"head_dim": 32, "rope_parameters": MROPE | {"mrope_interleaved": True}},
        "vision": {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    },
}
"""Families that take images as well, and what `make_tiny_image_text` adds to the configs of their two parts."""

_PATCHES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 16,
    "image_size": 64,
}
OTHER_IMAGE_TEXT: dict[str, dict[str, dict[str, Any]]] = {
    "gemma3": {"text": {"head_dim": 32, "pad_token_id": 0, **_IN_TURN}, "vision": _PATCHES},
    "glm4v": {
        "text": {
            "rope_parameters": MROPE | {"mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5},
            "pad_token_id": 0,
        },
        "vision": _ENCODER | {"image_size": 64, "patch_size": 16},
    },
    "internvl": {
        "text": {"model_type": "qwen2"},
        "vision": _PATCHES | {"image_size": [64, 64], "patch_size": [16, 16]},
    },
    "llama4": {
        "text": {
            "head_dim": 32,
            "attention_chunk_size": 64,
            "intermediate_size_mlp": 256,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "pad_token_id": 0,
        },
        "vision": _PATCHES | {"vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64},
    },
    "mistral3": {
        "text": {"model_type": "mistral", "head_dim": 32},
        "vision": _PATCHES | {"model_type": "pixtral", "head_dim": 32},
    },
    "step3p7": {
        "text": {"head_dim": 32, **_IN_TURN},
        "vision": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
    },
}
"""More of them, with the whole config of the encoder. SGLang was not run with these."""


def make_tiny_image_text(directory: Path, family: str) -> Path:
    """Write a random model of one of both tables with its encoder, and a tokenizer; return the directory. One of
    ``IMAGE_TEXT`` has what SGLang needs to take images."""
    import transformers

    tokens: dict[str, int] = {}
    if is_served := family in IMAGE_TEXT:
        text, vision = {"rope_parameters": MROPE} | IMAGE_TEXT[family]["text"], _ENCODER | IMAGE_TEXT[family]["vision"]
        names = "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"
        tokens = dict(zip(names, _MARKS, strict=True))
    else:
        text, vision = OTHER_IMAGE_TEXT[family]["text"], OTHER_IMAGE_TEXT[family]["vision"]
    parts = {"text_config": _SMALL | text, "vision_config": vision}
    config = transformers.AutoConfig.for_model(family, **parts, tie_word_embeddings=False, **tokens)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.AutoModelForImageTextToText.from_config(config).float().save_pretrained(directory)
    _save_tokenizer(directory, _SMALL["vocab_size"], _MARKS)
    if is_served:
        images = transformers.Qwen2VLImageProcessor(patch_size=config.vision_config.patch_size)
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        of_videos, of_all = transformers.Qwen3VLVideoProcessor, transformers.Qwen3VLProcessor
        if family == "qwen2_5_vl":
            of_videos, of_all = transformers.Qwen2VLVideoProcessor, transformers.Qwen2_5_VLProcessor
        of_all(images, tokenizer, of_videos()).save_pretrained(directory)
    return directory


_WITHOUT_PAD = {"pad_token_id": None}  # the embedding of such a token is zero
_DEEPSEEK: dict[str, Any] = {
    **_WITHOUT_PAD,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 3,
    **_MLA,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 10000.0, "beta_fast": 32, "beta_slow": 1, "factor": 4.0},
        **{"original_max_position_embeddings": 1024, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
}


def make_tiny_deepseek(directory: Path) -> Path:
    """Write a random model with DeepSeek V3's attention (MLA), without its mixture of experts; return the directory."""
    return make_tiny(directory, "deepseek_v3", _DEEPSEEK)


def make_tiny_lfm2(directory: Path, layer_types: Sequence[str] = ("conv", "full_attention") * 2) -> Path:
    """Write a random model with LFM2's short convolutions beside attention; return the directory."""
    layers = {"num_hidden_layers": len(layer_types), "layer_types": [*layer_types]}
    return make_tiny(directory, "lfm2", {**layers, "block_auto_adjust_ff_dim": False, "conv_L_cache": 3})


def make_tiny_qwen3_5(directory: Path) -> Path:
    """Write a random model with Qwen3.5's gated delta rule beside attention; return the directory."""
    return make_tiny(directory, "qwen3_5_text", _WITHOUT_PAD | _DELTA)


def make_tiny_mellum(directory: Path, window: int) -> Path:
    """Write a random model whose layers attend to ``window`` tokens and to all tokens in turn; return the directory."""
    windows = _IN_TURN | {"sliding_window": window, "mlp_layer_types": ["dense"] * 4, "head_dim": 32}
    return make_tiny(directory, "mellum", {**_WITHOUT_PAD, **windows, "num_experts": 4, **_EXPERTS})


def make_adapter(directory: Path, model: Path, seed: int) -> Path:
    """Write a random LoRA adapter of all attention projections of the model in ``model``, in PEFT's format; return its
    directory. Its weights are large enough that answers depend on it."""
    from safetensors.torch import load_file, save_file

    projections, rank = ["q_proj", "k_proj", "v_proj", "o_proj"], 4
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, weight in load_file(model / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in projections:
            rows, columns = weight.shape
            for matrix, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                values = 0.2 * torch.randn(shape, generator=generator)
                weights[f"base_model.model.{layer}.lora_{matrix}.weight"] = values
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": projections}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def _save_tokenizer(directory: Path, vocab_size: int, marks: Mapping[int, str] | None = None) -> None:
    """Write a tokenizer whose every token is a word. ``marks``: tokens that need no space before and behind them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    marks = marks or {}
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {marks.get(i, f"w{i}"): i for i in range(3, vocab_size)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens([*marks.values()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.save_pretrained(directory)
