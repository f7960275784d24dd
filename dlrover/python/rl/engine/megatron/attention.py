"""Attention of Megatron's layers over packed documents, which its own needs Transformer Engine for."""

from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule

from dlrover.python.rl.engine.torch.attention import Documents, attend


def packed(documents: Documents) -> PackedSeqParams:
    """How a packed row divides, as Megatron's layers hand it on."""
    longest = max(documents.lengths)
    told = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=documents.bounds,
        cu_seqlens_kv=documents.bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    told.documents = documents
    return told


class PackedAttention(MegatronModule):
    """Takes the place of ``core_attention`` in a layer's specification."""

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
        """Causal attention within each document.

        Args:
            query: ``[tokens, heads, dim]``, of this rank's heads.
            key: ``[tokens, key-value heads, dim]``.
            value: as ``key``.
            attention_mask: None.
            attn_mask_type: not used: always causal.
            attention_bias: None.
            packed_seq_params: made by :func:`packed`.

        Returns:
            ``[tokens, heads * dim]``.
        """
        queries, keys, values = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        return attend(queries, keys, values, packed_seq_params.documents)[0].flatten(1)
