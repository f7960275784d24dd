# SPDX-License-Identifier: Apache-2.0
"""Megatron's GPT with the sizes of a model, and attention over packed documents without Transformer Engine."""

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from dlrover.python.rl.engine.api.settings import Layout
from dlrover.python.rl.engine.megatron.conversion import TransformerShape, pad_vocab
from dlrover.python.rl.engine.model.attention import Documents, attend


def make_packed_params(documents: Documents) -> PackedSeqParams:
    longest = max(documents.lengths)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=documents.bounds,
        cu_seqlens_kv=documents.bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    params.documents = documents
    return params


class Norm(torch.nn.RMSNorm):
    """RMSNorm in sequence parallel, which megatron-core's wrapper of PyTorch's does not support: Megatron sums the
    gradient of a marked weight over the ranks that share a row."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel


class PackedAttention(MegatronModule):
    """Replaces ``core_attention`` in a layer's specification."""

    def __init__(self, config: Any, **unused: Any) -> None:
        super().__init__(config=config)

    def forward(  # noqa: PLR0913 - Megatron's signature
        self,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        attn_mask_type: Any = None,
        attention_bias: Any = None,
        packed_seq_params: Any = None,
    ) -> Any:
        """Compute causal attention within each document: ``query`` ``[tokens, heads, dim]`` of this rank's heads,
        ``key`` and ``value`` ``[tokens, key-value heads, dim]``; returns ``[tokens, heads * dim]``."""
        queries, keys, values = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        return attend(queries, keys, values, packed_seq_params.documents)[0].flatten(1)


def build_gpt(
    shape: TransformerShape, layout: Layout, place: Layout, precision: torch.dtype, checkpointing: bool, device: str
) -> Any:
    """Build a module in which this rank's weights have memory and no values yet. Its forward pass takes
    ``packed_seq_params`` and returns logits ``[1, tokens, vocab / tensor]`` on the last stage."""
    config = _config(shape, layout, precision, checkpointing, on_host=torch.device(device).type == "cpu")
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    module = GPTModel(
        config,
        TransformerBlockSubmodules([layer] * get_num_layers_to_build(config), Norm),
        vocab_size=pad_vocab(shape.vocab, layout.tensor),
        max_sequence_length=shape.max_positions,
        pre_process=place.pipeline == 0,
        post_process=place.pipeline == layout.pipeline - 1,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        rope_scaling=shape.rope_factor is not None,
        rope_scaling_factor=shape.rope_factor or 1.0,
    )
    if module.post_process and shape.head == "token":
        module.output_layer = ScoreHead(shape.hidden, 1)
    elif module.post_process:
        module.output_layer.sequence_parallel = False  # its inputs are whole rows
    return module.to(device=device, dtype=precision)


def _config(
    shape: TransformerShape, layout: Layout, precision: torch.dtype, checkpointing: bool, on_host: bool
) -> TransformerConfig:
    recomputing = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    fusions = ("gradient_accumulation", "masked_softmax", "bias_activation", "bias_dropout")
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        layernorm_epsilon=shape.norm_eps,
        normalization="RMSNorm",
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tensor,
        sequence_parallel=layout.tensor > 1,
        pipeline_model_parallel_size=layout.pipeline,
        pipeline_dtype=precision,
        variable_seq_lengths=True,  # packed micro-batches differ in length
        moe_token_dispatcher_type="alltoall",  # required by variable lengths, even for dense models
        params_dtype=precision,
        bf16=precision == torch.bfloat16,
        calculate_per_token_loss=True,  # the loss carries its normaliser: nothing is divided
        perform_initialization=False,
        use_cpu_initialization=on_host,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        **{f"{fusion}_fusion": False for fusion in fusions},
        **(recomputing if checkpointing else {}),
    )


class ScoreHead(torch.nn.Linear):
    """A score for each token in place of the vocabulary projection."""

    def forward(self, hidden: Any, weight: Any = None, runtime_gather_output: bool | None = None) -> tuple[Any, None]:
        """Return scores ``[tokens, batch, 1]``, with the signature of Megatron's output layer."""
        return super().forward(hidden), None
