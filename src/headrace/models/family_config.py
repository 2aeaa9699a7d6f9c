"""What the configs of the Llama-like families have in common."""

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.base.errors import CheckpointError, UnsupportedError
from headrace.config.persona import AttentionTraits, LayerTraits, ModelTraits, RopeTraits
from headrace.layers.mlp import activation
from headrace.models import config_reader as read
from headrace.models.rope_config import context_length, read_rope, rope_section

DTYPES = ("float32", "bfloat16", "float16")
FULL, SLIDING = "full_attention", "sliding_attention"


def read_heads(
    config: Mapping[str, Any],
    *,
    default_head_dim: int | None = None,
    scale: float | None = None,
    **habits: Any,
) -> AttentionTraits:
    """Heads and their sizes; `habits` are further fields of `AttentionTraits`.

    Args:
        default_head_dim: size of a head when the config names none; hidden / heads if None.
        scale: factor on q.k; 1 / sqrt(head size) if None.
    """
    heads = read.whole(config, "num_attention_heads")
    kv_heads = read.whole(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"The model's config has {heads} attention heads and {kv_heads} key-value heads",
            why="each key-value head must serve the same number of heads",
        )
    derived = default_head_dim or read.whole(config, "hidden_size") // heads
    head_dim = read.whole(config, "head_dim", derived)
    return AttentionTraits(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        scale=head_dim**-0.5 if scale is None else scale,
        **habits,
    )


def read_layers(
    config: Mapping[str, Any],
    *,
    window: int | None,
    default_kinds: Sequence[str],
    ropes: Mapping[str, str] | None = None,
) -> tuple[LayerTraits, ...]:
    """One entry per layer, of the kinds that `layer_types` states.

    Args:
        window: keys that a query of a sliding layer sees, itself included; None: all, and sliding
            layers are full ones.
        default_kinds: the kinds when the config has no `layer_types`.
        ropes: kind of layer -> name of its rope, where that differs.
    """
    kinds = read.texts(config, "layer_types") or tuple(default_kinds)
    count = read.whole(config, "num_hidden_layers")
    if len(kinds) != count or not set(kinds) <= {FULL, SLIDING}:
        raise CheckpointError(
            f"layer_types in the model's config is {list(kinds)}",
            why=f"{count} entries are needed, each {FULL} or {SLIDING}",
        )
    layers = []
    for kind in kinds:
        slides = kind == SLIDING and window is not None
        layers.append(
            LayerTraits(
                kv_group="window" if slides else "full",
                window=window if slides else None,
                rope="default" if ropes is None else ropes[kind],
            )
        )
    return tuple(layers)


def read_window(config: Mapping[str, Any], default: int) -> int | None:
    """`sliding_window`, keys that a query sees, itself included: null and 0 mean none, and
    `default` holds for a config that has no key, as in transformers."""
    return read.optional_whole({"sliding_window": default, **config}, "sliding_window")


def read_traits(
    config: Mapping[str, Any],
    *,
    family: str,
    attention: AttentionTraits,
    layers: tuple[LayerTraits, ...],
    ropes: dict[str, RopeTraits] | None = None,
    max_position: int | None = None,
    tied: bool = False,
    act_key: str = "hidden_act",
    act: str = "silu",
    **more: Any,
) -> ModelTraits:
    """The fields that every family reads alike; `more` are further fields of `ModelTraits`.

    Args:
        ropes: by name; one for all layers if None.
        max_position: length of the context; what that one rope was made for if None.
        tied: whether head and embedding share weights when the config does not say.
        act_key: name of the activation's key; `act`: the activation when the config names none.
    """
    _check_causal(config)
    dtype = read.text(config, "dtype", read.text(config, "torch_dtype", "float32"))
    if dtype not in DTYPES:
        raise UnsupportedError(
            f"Weights of dtype {dtype!r} are not supported",
            remedy=f"Supported: {', '.join(DTYPES)}",
        )
    act = read.text(config, act_key, act)
    activation(act)  # refuses an unknown one before any weight is read
    if ropes is None:
        ropes = {"default": read_rope(config, rope_section(config), head_dim=attention.head_dim)}
    if max_position is None:
        max_position = context_length(ropes["default"])
    return ModelTraits(
        family=family,
        hidden_size=read.whole(config, "hidden_size"),
        intermediate_size=read.whole(config, "intermediate_size"),
        vocab_size=read.whole(config, "vocab_size"),
        attention=attention,
        layers=layers,
        ropes=ropes,
        norm_eps=read.number(config, "rms_norm_eps", 1e-6),
        activation=act,
        tie_word_embeddings=read.flag(config, "tie_word_embeddings", tied),
        max_position=max_position,
        dtype=dtype,
        **more,
    )


def _check_causal(config: Mapping[str, Any]) -> None:
    """Refuse what models for embedding state whose tokens see those behind them; transformers heeds
    both keys in every family."""
    if read.flag(config, "is_causal", True) and not read.flag(
        config, "use_bidirectional_attention", False
    ):
        return
    raise UnsupportedError(
        "A model with bidirectional attention is not supported",
        why="its tokens see those behind them, and its states would be others here",
    )
