"""Which Hugging Face models Megatron's GPT can be, and their numbers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from dlrover.python.rl.common.errors import EngineError

TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""``model_type`` of the configurations that are known to be this transformer: pre-norm RMSNorm, rotary positions,
grouped-query attention, SwiGLU."""


@dataclass(frozen=True)
class TransformerShape:
    """The numbers of one model.

    Attributes:
        head_dim: width of one attention head.
        kv_heads: key-value heads, each shared by ``heads / kv_heads`` query heads.
        tied: the language-model head is the input embedding.
        qkv_bias: the query, key and value projections have biases.
        qk_norm: queries and keys are normalised by head (Qwen3).
        rope_factor: Llama 3's stretching of the rotary frequencies; None leaves them.
        head: what comes after the last norm: a vocabulary projection, or one score for each token.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_factor: float | None
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    head: Literal["causal", "token"]

    @classmethod
    def of(cls, config: Any, head: Literal["causal", "token"]) -> "TransformerShape":
        """Read a Hugging Face configuration.

        Raises:
            EngineError: Megatron's GPT cannot compute this model; lists everything that keeps it from it.
        """
        if faults := list(_faults(config)):
            raise EngineError(f"megatron cannot run this model: {'; '.join(faults)}")
        kind, heads = config.model_type, config.num_attention_heads
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=heads,
            kv_heads=config.num_key_value_heads or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocab=config.vocab_size,
            max_positions=config.max_position_embeddings,
            norm_eps=config.rms_norm_eps,
            rope_theta=float(config.rope_parameters["rope_theta"]),
            rope_factor=_rope_factor(config),
            tied=bool(config.tie_word_embeddings) and head == "causal",
            qkv_bias=kind == "qwen2",
            qk_norm=kind == "qwen3",
            head=head,
        )

    def check_split(self, tensor: int, pipeline: int) -> None:
        """Refuse sizes that do not divide the model.

        Raises:
            EngineError: gives the numbers.
        """
        for what, number in (("key-value heads", self.kv_heads), ("MLP columns", self.intermediate)):
            if number % tensor:
                raise EngineError(f"{number} {what} cannot be divided by tensor_parallel_size {tensor}")
        if self.layers % pipeline:
            raise EngineError(f"{self.layers} layers cannot be divided by pipeline_parallel_size {pipeline}")


def _faults(config: Any) -> Iterator[str]:
    if config.model_type not in TYPES:
        yield f"its type is '{config.model_type}', and known are {', '.join(TYPES)}"
        return
    if config.hidden_act != "silu":
        yield f"its activation is '{config.hidden_act}', not 'silu'"
    for name in ("attention_bias", "mlp_bias"):
        if getattr(config, name, False):
            yield f"it has {name}"
    windowed = getattr(config, "use_sliding_window", config.model_type == "mistral")
    if windowed and getattr(config, "sliding_window", None) is not None:
        yield f"its attention slides over a window of {config.sliding_window} tokens"
    rope = config.rope_parameters
    if rope.get("rope_type", "default") not in ("default", "llama3"):
        yield f"its rotary positions are of type '{rope['rope_type']}'"
    elif rope.get("rope_type") == "llama3" and _llama3_numbers(rope) != (1.0, 4.0, 8192):
        yield "its llama3 rotary positions have other bounds than Llama 3's (1, 4, 8192)"


def _llama3_numbers(rope: Any) -> tuple[float, float, int]:
    return rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]


def _rope_factor(config: Any) -> float | None:
    rope = config.rope_parameters
    return float(rope["factor"]) if rope.get("rope_type") == "llama3" else None
