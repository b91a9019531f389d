"""Hugging Face models of random weights and a vocabulary of 50, most with one layer: loss inside and outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from external import transformers_rows  # isort: skip  # noqa: F401  (before peft, which imports transformers)

import peft
import torch
from torch import nn

from external.program import Program
from external.transformers_rows import (
    BERT,
    CLASS,
    GROUPED,
    NARROW,
    TOKENS,
    UNDROPPED,
    B,
    H,
    Inputs,
    T,
    V,
    ids,
    labelled,
    padded,
    pixels,
    positioned,
    row,
    tokens,
    typed,
)


def encoders() -> list[Program]:
    roberta = {**BERT, "pad_token_id": 1, "max_position_embeddings": 20}
    distil = {
        "vocab_size": V, "dim": H, "hidden_dim": 24, "n_layers": 1, "n_heads": 2, "max_position_embeddings": 16,
        "dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0, "num_labels": 3,
    }  # fmt: skip
    deberta = {
        **BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4,
        "max_relative_positions": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True,
    }  # fmt: skip
    return [
        row("bert/outside", "BertModel", {**BERT, "num_hidden_layers": 2}, typed),
        row("bert/mlm", "BertForMaskedLM", BERT, padded, TOKENS),
        row("bert/classes-sdpa", "BertForSequenceClassification", {**BERT, "num_labels": 3}, typed, CLASS,
            attention="sdpa"),
        row("bert/regression", "BertForSequenceClassification", {**BERT, "num_labels": 1}, padded,
            {"labels": lambda: torch.randn(B, dtype=torch.float64)}),
        row("bert/spans", "BertForQuestionAnswering", BERT, padded,
            {"start_positions": lambda: torch.tensor([0, 1, 2]), "end_positions": lambda: torch.tensor([3, 2, 2])}),
        row("roberta/mlm", "RobertaForMaskedLM", roberta, padded, TOKENS),
        row("roberta/outside-sdpa", "RobertaForSequenceClassification", {**roberta, "num_labels": 3}, padded,
            attention="sdpa"),
        row("distilbert/classes", "DistilBertForSequenceClassification", distil, padded, CLASS),
        row("distilbert/outside-sdpa", "DistilBertForSequenceClassification", distil, padded, attention="sdpa"),
        row("electra/pretraining", "ElectraForPreTraining", {**BERT, "embedding_size": 8}, tokens,
            {"labels": lambda: torch.randint(2, (B, T))}),
        row("electra/pretraining-padded", "ElectraForPreTraining", {**BERT, "embedding_size": 8}, padded,
            {"labels": lambda: torch.randint(2, (B, T))}, refused="a mask picks a number of rows"),
        row("deberta-v2/classes", "DebertaV2ForSequenceClassification", {**deberta, "num_labels": 3}, padded, CLASS,
            refused="values of a tensor"),
        row("deberta-v2/outside", "DebertaV2Model", deberta, padded),
        row("albert/mlm", "AlbertForMaskedLM", {**BERT, "embedding_size": 8}, padded, TOKENS, attention="sdpa"),
        row("modernbert/mlm", "ModernBertForMaskedLM",
            {**NARROW, "num_hidden_layers": 2, "local_attention": 4,
             "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2,
             "bos_token_id": 1, "eos_token_id": 2}, padded, TOKENS, attention="sdpa"),
    ]  # fmt: skip


def decoders() -> list[Program]:
    gpt2 = {
        "vocab_size": V, "n_embd": H, "n_layer": 1, "n_head": 2, "n_positions": 16, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    neox = {**NARROW, "rotary_pct": 0.5, "bos_token_id": 1, "eos_token_id": 2}
    opt = {
        "vocab_size": V, "hidden_size": H, "word_embed_proj_dim": H, "ffn_dim": 24, "num_hidden_layers": 1,
        "num_attention_heads": 2, "max_position_embeddings": 16, "dropout": 0.0, "attention_dropout": 0.0,
        "pad_token_id": 0,
    }  # fmt: skip
    bloom = {"vocab_size": V, "hidden_size": H, "n_layer": 1, "n_head": 2, "pad_token_id": 0}
    gemma = {**GROUPED, "head_dim": 4}
    mamba = {"vocab_size": V, "hidden_size": 8, "state_size": 3, "num_hidden_layers": 1, "time_step_rank": 2}
    return [
        row("gpt2/lm", "GPT2LMHeadModel", gpt2, padded, TOKENS),
        row("gpt2/outside-sdpa", "GPT2LMHeadModel", gpt2, tokens, attention="sdpa"),
        row("gpt2/cache", "GPT2LMHeadModel", {**gpt2, "use_cache": True}, positioned, TOKENS, attention="sdpa"),
        row("gpt2/outside-cache", "GPT2LMHeadModel", {**gpt2, "use_cache": True}, padded),
        row("gpt2/checkpointed", "GPT2LMHeadModel", {**gpt2, "n_layer": 2, "use_cache": False}, padded, TOKENS,
            prepare=checkpointed),
        row("gpt2/classes", "GPT2ForSequenceClassification", {**gpt2, "pad_token_id": 0, "num_labels": 3}, padded,
            CLASS),
        row("llama/lm", "LlamaForCausalLM", {**GROUPED, "num_hidden_layers": 2}, padded, TOKENS),
        row("llama/lm-sdpa", "LlamaForCausalLM", GROUPED, positioned, TOKENS, attention="sdpa"),
        row("llama/outside-sdpa", "LlamaForCausalLM", {**GROUPED, "use_cache": False}, padded, attention="sdpa"),
        row("llama/tied", "LlamaForCausalLM", {**GROUPED, "tie_word_embeddings": True}, tokens, TOKENS),
        row("qwen2/lm", "Qwen2ForCausalLM", GROUPED, padded, TOKENS, attention="sdpa"),
        row("qwen3/lm", "Qwen3ForCausalLM", {**GROUPED, "head_dim": 4}, padded, TOKENS),
        row("gemma/lm", "GemmaForCausalLM", gemma, padded, TOKENS),
        row("gemma2/lm", "Gemma2ForCausalLM", {**gemma, "num_hidden_layers": 2, "sliding_window": 3}, padded, TOKENS),
        row("gemma3/lm-sdpa", "Gemma3ForCausalLM", {**gemma, "sliding_window": 3}, padded, TOKENS, attention="sdpa"),
        row("mistral/lm", "MistralForCausalLM", {**GROUPED, "sliding_window": 3}, padded, TOKENS),
        row("mistral/outside-sdpa", "MistralForCausalLM", {**GROUPED, "use_cache": False}, padded, attention="sdpa"),
        row("opt/lm", "OPTForCausalLM", opt, padded, TOKENS),
        row("bloom/lm", "BloomForCausalLM", {**bloom, "hidden_dropout": 0.0, "attention_dropout": 0.0}, padded, TOKENS),
        row("gpt-neox/lm", "GPTNeoXForCausalLM", {**neox, "hidden_dropout": 0.0, "attention_dropout": 0.0}, padded,
            TOKENS),
        row("phi/lm", "PhiForCausalLM", {**NARROW, "partial_rotary_factor": 0.5}, padded, TOKENS, attention="sdpa"),
        row("phi3/lm", "Phi3ForCausalLM", {**GROUPED}, padded, TOKENS),
        row("falcon/lm", "FalconForCausalLM",
            {"vocab_size": V, "hidden_size": H, "num_hidden_layers": 1, "num_attention_heads": 2, "pad_token_id": 0},
            padded, TOKENS),
        row("olmo2/lm", "Olmo2ForCausalLM", GROUPED, padded, TOKENS, attention="sdpa"),
        row("cohere/lm", "CohereForCausalLM", GROUPED, padded, TOKENS),
        row("mamba/lm", "MambaForCausalLM", mamba, tokens, TOKENS),
        row("mamba2/lm", "Mamba2ForCausalLM",
            {"vocab_size": V, "hidden_size": 8, "state_size": 4, "num_hidden_layers": 1, "num_heads": 4, "head_dim": 4,
             "n_groups": 2, "chunk_size": 4}, tokens, TOKENS),
    ]  # fmt: skip


def checkpointed(model: Any) -> nn.Module:
    model.gradient_checkpointing_enable()
    return model  # type: ignore[no-any-return]


def pairs() -> list[Program]:
    t5 = {
        "vocab_size": V, "d_model": H, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0,
        "decoder_start_token_id": 0, "pad_token_id": 0, "relative_attention_num_buckets": 8,
    }  # fmt: skip
    bart = {
        "vocab_size": V, "d_model": H, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 16,
        "dropout": 0.0, "attention_dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 2,
    }  # fmt: skip
    whisper = {**bart, "num_mel_bins": 4, "max_source_positions": 5, "max_target_positions": 16}
    del whisper["max_position_embeddings"]
    return [
        row("t5/lm", "T5ForConditionalGeneration", t5, padded, TOKENS),
        row("t5/outside", "T5ForConditionalGeneration", {**t5, "use_cache": False},
            lambda: {**padded(), "decoder_input_ids": ids(4)}),
        row("bart/lm-sdpa", "BartForConditionalGeneration", bart, padded, TOKENS, attention="sdpa"),
        row("marian/lm", "MarianMTModel", bart, padded, TOKENS),
        row("whisper/lm", "WhisperForConditionalGeneration", whisper,
            lambda: {"input_features": torch.randn(B, 4, 10, dtype=torch.float64)}, TOKENS),
    ]  # fmt: skip


def towers() -> list[Program]:
    image = {"image_size": 8, "patch_size": 4, "num_channels": 3}
    vit = {**{k: v for k, v in BERT.items() if k not in ("vocab_size", "max_position_embeddings")}, **image}
    swin = {
        **image, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 2,
        "drop_path_rate": 0.0, "num_labels": 3,
    }  # fmt: skip
    convnext = {"depths": [1, 1], "hidden_sizes": [4, 8], "num_stages": 2, "patch_size": 2, "num_labels": 3}
    clip_text = {**NARROW, "projection_dim": 8, "bos_token_id": 1, "eos_token_id": 2}
    clip_image = {**image, "hidden_size": H, "intermediate_size": 24, "num_hidden_layers": 1,
                  "num_attention_heads": 2, "projection_dim": 8}  # fmt: skip
    wav = {
        **{k: v for k, v in NARROW.items() if k != "max_position_embeddings"}, "conv_dim": [4, 4],
        "conv_kernel": [3, 3], "conv_stride": [2, 2], "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0,
        "activation_dropout": 0.0, "layerdrop": 0.0, "final_dropout": 0.0, "apply_spec_augment": False,
    }  # fmt: skip
    sound = {"input_values": lambda: torch.randn(B, 40, dtype=torch.float64)}
    return [
        row("vit/classes", "ViTForImageClassification", {**vit, "num_labels": 3}, pixels(), CLASS),
        row("vit/outside-sdpa", "ViTForImageClassification", {**vit, "num_labels": 3}, pixels(), attention="sdpa"),
        row("swin/classes", "SwinForImageClassification", swin, pixels(), CLASS),
        row("convnext/classes", "ConvNextForImageClassification", convnext, pixels(), CLASS),
        row("dinov2/outside", "Dinov2Model", vit, pixels(), attention="sdpa"),
        row("clip-text/outside", "CLIPTextModelWithProjection", clip_text, padded),
        row("clip-image/outside", "CLIPVisionModelWithProjection", clip_image, pixels(), attention="sdpa"),
        row("siglip-image/outside", "SiglipVisionModel", clip_image, pixels()),
        row("resnet/classes", "ResNetForImageClassification",
            {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "layer_type": "basic", "num_labels": 3},
            pixels(16), CLASS, train=False),
        row("wav2vec2/outside", "Wav2Vec2Model", wav,
            labelled(dict, **sound)),
        row("wav2vec2/ctc", "Wav2Vec2ForCTC", {**wav, "ctc_loss_reduction": "mean"}, labelled(dict, **sound),
            {"labels": lambda: torch.tensor([[3, 4, 5], [6, 7, -100], [8, -100, -100]])}),
    ]  # fmt: skip


def with_images(count: int) -> Inputs:
    """Tokens of which so many of each sample stand for its image, in other places for each."""

    def make() -> dict[str, Any]:
        tokens = ids(T + count).clamp(max=IMAGE - 1)
        for k, sample in enumerate(tokens):
            sample[(torch.arange(count) + k) % len(sample)] = IMAGE
        return {"input_ids": tokens, **pixels()(), "attention_mask": torch.ones_like(tokens)}

    return make


IMAGE = V - 1


def typed_images() -> dict[str, Any]:
    """Four places for each image, which attend to one another in both directions."""
    made = with_images(4)()
    return {**made, "token_type_ids": (made["input_ids"] == IMAGE).long()}


def images_and_text() -> list[Program]:
    """Features of images in place of the tokens that stand for them."""
    image = {"image_size": 8, "patch_size": 4, "hidden_size": H, "intermediate_size": 24, "num_hidden_layers": 1,
             "num_attention_heads": 2}  # fmt: skip
    clip = {"model_type": "clip_vision_model", **image, "projection_dim": H}
    siglip = {"model_type": "siglip_vision_model", **image, "vision_use_head": False}
    llama = {"model_type": "llama", **GROUPED, "use_cache": False}
    opt = {"model_type": "opt", "vocab_size": V, "hidden_size": H, "word_embed_proj_dim": H, "ffn_dim": 24,
           "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16, "dropout": 0.0,
           "pad_token_id": 0, "use_cache": False}  # fmt: skip
    queries = {**NARROW, **UNDROPPED, "encoder_hidden_size": H}
    all_layers = {"text_config": llama, "image_token_index": IMAGE, "vision_feature_layer": -1}
    one_of_four = {**all_layers, "vision_config": siglip, "downsample_factor": 2, "alignment_intermediate_size": 24}
    gemma = {"vision_config": siglip, "text_config": {**GROUPED, "head_dim": 8, "use_cache": False},
             "image_token_index": IMAGE, "mm_tokens_per_image": 4}  # fmt: skip
    qwen = {"model_type": "qwen2", **GROUPED, "use_cache": False}
    internvl = {"vision_config": {**image, "image_size": [8, 8], "patch_size": [4, 4]}, "text_config": qwen,
                "image_token_id": IMAGE, "downsample_ratio": 0.5}  # fmt: skip
    return [
        row("llava/outside", "LlavaForConditionalGeneration",
            {**all_layers, "vision_config": clip}, with_images(4)),
        row("blip2/outside", "Blip2ForConditionalGeneration",
            {"vision_config": image, "qformer_config": queries, "text_config": opt, "num_query_tokens": 3,
             "image_token_index": IMAGE}, with_images(3)),
        row("aya-vision/outside", "AyaVisionForConditionalGeneration", one_of_four, with_images(1)),
        row("gemma3/outside", "Gemma3ForConditionalGeneration", gemma, typed_images),
        row("internvl/outside", "InternVLForConditionalGeneration", internvl, with_images(1)),
    ]  # fmt: skip


def lora(**options: Any) -> Callable[[Any], nn.Module]:
    def prepare(model: Any) -> nn.Module:
        return peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, **options))

    return prepare


def adapted() -> list[Program]:
    """Adapters: only their parameters are trained."""
    query = {"target_modules": ["q_proj", "v_proj"]}
    bert = {**BERT, "num_labels": 3}
    return [
        row("peft/lora-llama", "LlamaForCausalLM", GROUPED, padded, TOKENS, prepare=lora(**query)),
        row("peft/dora-llama", "LlamaForCausalLM", GROUPED, padded, TOKENS, prepare=lora(use_dora=True, **query)),
        row("peft/lora-outside", "LlamaForCausalLM", {**GROUPED, "use_cache": False}, padded, attention="sdpa",
            prepare=lora(**query)),
        row("peft/lora-bert-head", "BertForSequenceClassification", bert, padded, CLASS,
            prepare=lora(target_modules=["query"], modules_to_save=["classifier"])),
        row("peft/lora-embedding", "LlamaForCausalLM", GROUPED, padded, TOKENS,
            prepare=lora(target_modules=["embed_tokens"])),
        row("peft/ia3", "LlamaForCausalLM", GROUPED, padded, TOKENS, prepare=lambda m: peft.get_peft_model(
            m, peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]))),
        row("peft/prompt", "LlamaForCausalLM", {**GROUPED, "use_cache": False}, padded, TOKENS,
            prepare=lambda m: peft.get_peft_model(
                m, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))),
    ]  # fmt: skip


def experts() -> list[Program]:
    """Mixtures of experts, by each way in which the library computes the experts."""
    mixtral = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
    qwen = {
        **GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8, "decoder_sparse_step": 1,
    }  # fmt: skip

    def by(way: str) -> Callable[[Any], nn.Module]:
        def prepare(model: Any) -> nn.Module:
            model.set_experts_implementation(way)
            return model  # type: ignore[no-any-return]

        return prepare

    balanced = {**mixtral, "output_router_logits": True}
    return [
        row("mixtral/eager", "MixtralForCausalLM", mixtral, padded, TOKENS, prepare=by("eager")),
        row("mixtral/batched", "MixtralForCausalLM", mixtral, padded, TOKENS, prepare=by("batched_mm")),
        row("mixtral/batched-outside", "MixtralForCausalLM", {**mixtral, "use_cache": False}, padded,
            prepare=by("batched_mm")),
        row("mixtral/balanced", "MixtralForCausalLM", balanced, padded, TOKENS, prepare=by("batched_mm"),
            mixes="writes the rows of all samples"),
        row("qwen2-moe/batched", "Qwen2MoeForCausalLM", qwen, padded, TOKENS, prepare=by("batched_mm")),
    ]  # fmt: skip


def programs() -> list[Program]:
    """All of the family."""
    return [*encoders(), *decoders(), *pairs(), *towers(), *adapted(), *experts(), *images_and_text()]
