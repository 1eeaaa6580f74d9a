"""Twenty families of Hugging Face `transformers`, tiny and with random weights, in a session: forward identical, the
gradient's error within bounds, memory given back."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8hooks
from fp8hooks import gradients

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

# Error over all parameters, and the least share of saved bytes to be given back.
ERROR, SAVINGS = 0.02, 0.5

Family = tuple[nn.Module, dict[str, Tensor]]
# Names that configs share: hidden 64, two layers, four heads.
SIZES = {
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def tokens(batch: int = 4, length: int = 64) -> Tensor:
    return torch.randint(3, 512, (batch, length))


def text(kind: str, **settings: Any) -> Callable[[], Family]:
    """A causal or masked language model by the common part of its classes' names."""

    def build() -> Family:
        name, head = kind.split()
        config = getattr(transformers, f"{name}Config")(**{**SIZES, **settings})
        inputs = tokens()
        return getattr(transformers, f"{name}For{head}")(config), {"input_ids": inputs, "labels": inputs}

    return build


def image(kind: str, classes: int = 10, size: int = 32, **settings: Any) -> Callable[[], Family]:
    def build() -> Family:
        config = getattr(transformers, f"{kind}Config")(num_labels=classes, **settings)
        model = getattr(transformers, f"{kind}ForImageClassification")(config)
        return model, {"pixel_values": torch.randn(8, 3, size, size), "labels": torch.randint(classes, (8,))}

    return build


def whisper() -> Family:
    config = transformers.WhisperConfig(
        vocab_size=512, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, num_mel_bins=16, max_source_positions=64,
        max_target_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    inputs = {"input_features": torch.randn(4, 16, 128), "labels": tokens(4, 32)}
    return transformers.WhisperForConditionalGeneration(config), inputs


def wav2vec2() -> Family:
    config = transformers.Wav2Vec2Config(
        vocab_size=32, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        conv_dim=(32, 32, 32), conv_stride=(5, 2, 2), conv_kernel=(10, 3, 3), num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4, mask_time_prob=0.0, layerdrop=0.0, ctc_loss_reduction="mean",
    )  # fmt: skip
    inputs = {"input_values": torch.randn(2, 4000), "labels": torch.randint(1, 32, (2, 20))}
    return transformers.Wav2Vec2ForCTC(config), inputs


def t5() -> Family:
    config = transformers.T5Config(
        vocab_size=512, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config), {"input_ids": tokens(), "labels": tokens(4, 32)}


def segformer() -> Family:
    config = transformers.SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[32, 64], num_attention_heads=[1, 2],
        patch_sizes=[7, 3], strides=[4, 2], mlp_ratios=[2, 2], decoder_hidden_size=64, num_labels=8,
    )  # fmt: skip
    inputs = {"pixel_values": torch.randn(4, 3, 64, 64), "labels": torch.randint(8, (4, 64, 64))}
    return transformers.SegformerForSemanticSegmentation(config), inputs


def gpt(kind: str, **settings: Any) -> Callable[[], Family]:
    common = {"vocab_size": 512, "bos_token_id": 1, "eos_token_id": 2}

    def build() -> Family:
        config = getattr(transformers, f"{kind}Config")(**common, **settings)
        inputs = tokens()
        suffix = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
        return getattr(transformers, f"{kind}{suffix}")(config), {"input_ids": inputs, "labels": inputs}

    return build


FAMILIES: dict[str, Callable[[], Family]] = {
    "Llama": text("Llama CausalLM", num_key_value_heads=2),
    "Qwen3": text("Qwen3 CausalLM", num_key_value_heads=2, head_dim=16),
    "Mixtral": text("Mixtral CausalLM", num_key_value_heads=2, num_local_experts=4),
    "Gemma2": text("Gemma2 CausalLM", num_key_value_heads=2, head_dim=16),
    "Phi3": text("Phi3 CausalLM", num_key_value_heads=2),
    "GPTNeoX": text("GPTNeoX CausalLM"),
    "BLOOM": gpt("Bloom", hidden_size=64, n_layer=2, n_head=4),
    "DeepSeek-V3": text(
        "DeepseekV3 CausalLM", num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=16, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
        n_group=1, topk_group=1, first_k_dense_replace=1,
    ),
    "BERT": text("Bert MaskedLM"),
    "DeBERTa": text("DebertaV2 MaskedLM"),
    "GPT-2": gpt("GPT2", n_embd=64, n_layer=2, n_head=4, n_positions=128),
    "OPT": gpt("OPT", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, ffn_dim=128,
               max_position_embeddings=128, word_embed_proj_dim=64),
    "T5": t5,
    "Whisper": whisper,
    "wav2vec2": wav2vec2,
    "Mamba": gpt("Mamba", hidden_size=64, num_hidden_layers=2, state_size=8),
    "ViT": image("ViT", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
                 image_size=32, patch_size=4),
    "Swin": image("Swin", embed_dim=32, depths=[1, 1], num_heads=[2, 4], window_size=4, image_size=32, patch_size=2),
    "ConvNext": image("ConvNext", hidden_sizes=[32, 64], depths=[1, 1], num_stages=2),
    "ResNet": image("ResNet", embedding_size=16, hidden_sizes=[32, 64], depths=[1, 1], layer_type="basic"),
    "SegFormer": segformer,
}  # fmt: skip


def step(model: nn.Module, inputs: dict[str, Tensor], context: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one step in `context`, and its gradients; both steps of a test draw the same random numbers."""
    losses = []

    def loss() -> Tensor:
        torch.manual_seed(1)
        losses.append(model(**inputs).loss)
        return losses[0]

    found = gradients.of_step(model, loss, context)
    return losses[0].detach(), found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_family(family: str) -> None:
    torch.manual_seed(0)
    model, inputs = FAMILIES[family]()
    model.train()
    loss, exact = step(model, inputs, contextlib.nullcontext())
    session = fp8hooks.compress()
    same, got = step(model, inputs, session)
    assert torch.equal(loss, same)
    error = gradients.overall(got, exact).error
    print(f"{family}: error {error:.4f}, savings {session.stats.savings:.2f}")
    assert error <= ERROR
    assert session.stats.savings >= SAVINGS
    assert session.held_bytes == 0
