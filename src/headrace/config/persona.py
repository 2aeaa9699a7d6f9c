"""What a runner *is*: traits of its model, its role and its coordinates among the ranks.

A model family reads a checkpoint's config into `ModelTraits`; nothing here is chosen, all of it
is stated by the checkpoint or by the launch.
"""

from dataclasses import dataclass, field
from enum import StrEnum


class KvKind(StrEnum):
    """How a layer remembers: all tokens, the last `window` tokens, a latent, a fixed state."""

    FULL = "full"
    WINDOW = "window"
    LATENT = "latent"
    STATE = "state"


class Role(StrEnum):
    TARGET = "target"
    DRAFT = "draft"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeTraits:
    """A rotary embedding as the checkpoint states it.

    Attributes:
        kind: default, linear, dynamic, yarn, llama3, longrope.
        theta: base of the frequencies.
        rotary_dim: leading dimensions of a head that rotate (partial rope when < head_dim).
        factor, original_max_position, ...: parameters of the kinds that scale; `None` when unset.
    """

    kind: str
    theta: float
    rotary_dim: int
    max_position: int
    factor: float | None = None
    original_max_position: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTraits:
    """Shape and habits shared by the attention layers of a model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    soft_cap: float | None = None
    sinks: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeTraits:
    """Shape and habits shared by the mixtures of experts of a model.

    Attributes:
        num_experts_per_tok: experts that work on a token.
        intermediate_size: of one expert; `ModelTraits.intermediate_size` is that of dense layers.
        norm_topk_prob: the weights of a token's experts are made to sum to 1.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    norm_topk_prob: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTraits:
    """One layer: the KV group it belongs to, its window in tokens, the rope it uses, and whether
    its MLP is a mixture of experts."""

    kv_group: str
    window: int | None = None
    rope: str = "default"
    is_moe: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KvGroupTraits:
    """Layers that share page tables: same kind of memory."""

    name: str
    kind: KvKind
    window: int | None
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTraits:
    """What a checkpoint's config says about its model, in one vocabulary for every family."""

    family: str
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    attention: AttentionTraits
    layers: tuple[LayerTraits, ...]
    ropes: dict[str, RopeTraits]
    norm_eps: float
    activation: str
    tie_word_embeddings: bool
    max_position: int
    mlp_bias: bool = False
    norm_offset: float = 0.0
    """Norms multiply by norm_offset + stored weight; 1 in Gemma."""
    final_soft_cap: float | None = None
    embedding_scale: float | None = None
    is_generation: bool = True
    moe: MoeTraits | None = None
    """Of the layers that are mixtures of experts; `None` for a dense model."""
    dtype: str = "float32"

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers whose MLP is a mixture of experts, in order."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.is_moe)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kv_groups(self) -> tuple[KvGroupTraits, ...]:
        """Groups in order of first use; a dense model has one, `full`."""
        members: dict[str, list[int]] = {}
        for index, layer in enumerate(self.layers):
            members.setdefault(layer.kv_group, []).append(index)
        return tuple(
            KvGroupTraits(
                name=name,
                kind=KvKind.FULL if self.layers[indices[0]].window is None else KvKind.WINDOW,
                window=self.layers[indices[0]].window,
                layers=tuple(indices),
            )
            for name, indices in members.items()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """Place of this runner among the ranks."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Persona:
    traits: ModelTraits
    role: Role = Role.TARGET
    coordinates: Coordinates = field(default_factory=Coordinates)
