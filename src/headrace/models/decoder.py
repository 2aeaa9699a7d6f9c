"""The tree that the families share: embedding, blocks, last norm, head.

Modules carry the names of the checkpoint (`model.layers.0.self_attn...`). What differs between
families is in the traits, and in the block where the wiring differs.
"""

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headrace.batch.forward_batch import ForwardBatch
from headrace.config.persona import ModelTraits
from headrace.config.plan import RopePlan
from headrace.layers.attention import SelfAttention
from headrace.layers.embedding import Embedding, LMHead
from headrace.layers.mlp import GatedMLP
from headrace.layers.moe import SparseMoe
from headrace.layers.norm import RMSNorm
from headrace.layers.rope import RotaryEmbedding, Rotation
from headrace.layers.weights import WeightSpace

StreamTap = Callable[[int, Tensor], None]
"""(i, residual stream [T, H]): 0 the embedding, i behind i layers; the next layer may write it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TappedStream:
    """Somebody who looks at the residual stream.

    Attributes:
        layers: what `tap` is told of, numbered as it is told; `None`: all. Where nobody is told, a
            stream that comes in parts is not added.
    """

    tap: StreamTap
    layers: Container[int] | None


class PreNormBlock(nn.Module):
    """norm, attention, add, norm, MLP or mixture of experts, add (Llama and most since)."""

    def __init__(self, traits: ModelTraits, layer_id: int, *, space: WeightSpace) -> None:
        super().__init__()
        self.operators = space.operators
        self.self_attn = SelfAttention(traits, layer_id, space=space)
        self.mlp = feed_forward(traits, layer_id, space)
        self.input_layernorm = norm(traits, space)
        self.post_attention_layernorm = norm(traits, space)

    def forward(self, x: Tensor, rotation: Rotation, batch: ForwardBatch) -> Tensor:
        """The residual stream, [T, H] -> [T, H], maybe in parts (`Operators`)"""
        attention = self.self_attn
        qkv, x = self.operators.normed_linear(self.input_layernorm, attention.qkv_proj, x)
        x = self.operators.add_linear(attention.o_proj, attention.attend(qkv, rotation, batch), x)
        return self.mlp.add(self.post_attention_layernorm, x)


class Decoder(nn.Module):
    """Token ids to hidden states."""

    taps: tuple[TappedStream, ...] = ()

    def __init__(
        self,
        traits: ModelTraits,
        ropes: dict[str, RopePlan],
        block: type[nn.Module],
        *,
        space: WeightSpace,
    ) -> None:
        super().__init__()
        self.embed_tokens = Embedding(
            traits.vocab_size, traits.hidden_size, scale=traits.embedding_scale, space=space
        )
        self.layers = nn.ModuleList(
            block(traits, index, space=space) for index in range(traits.num_layers)
        )
        self.norm = norm(traits, space)
        self.ropes = nn.ModuleDict(
            {name: RotaryEmbedding(plan, space=space) for name, plan in ropes.items()}
        )
        self.rope_of_layer = tuple(layer.rope for layer in traits.layers)

    def forward(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        """[T], [T] -> [T, H]"""
        x: Tensor = self.embed_tokens(input_ids)
        if self.taps:
            self._tell(0, x)
        x = self.run_layers(x, self.rotations(positions), batch, 0, len(self.layers))
        return self.norm(x)  # type: ignore[no-any-return]

    def rotations(self, positions: Tensor) -> dict[str, Rotation]:
        """positions [T] -> the rotation of each kind of rope."""
        return {name: rope(positions) for name, rope in self.ropes.items()}

    def run_layers(
        self, x: Tensor, rotations: dict[str, Rotation], batch: ForwardBatch, first: int, end: int
    ) -> Tensor:
        """Layers [first, end) on the residual stream, [T, H] -> [T, H], maybe in parts."""
        for index in range(first, end):
            x = self.layers[index](x, rotations[self.rope_of_layer[index]], batch)
            if self.taps:
                self._tell(index + 1, x)
        return x

    def _tell(self, layer: int, x: Tensor) -> None:
        told = [each for each in self.taps if each.layers is None or layer in each.layers]
        if told:
            stream = added(x, self.norm.dtype)
            for each in told:
                each.tap(layer, stream)


class CausalDecoder(nn.Module):
    """A decoder with a head; a family names its block."""

    block: type[nn.Module] = PreNormBlock

    def __init__(
        self, traits: ModelTraits, ropes: dict[str, RopePlan], *, space: WeightSpace
    ) -> None:
        super().__init__()
        self.traits = traits
        self.model = Decoder(traits, ropes, self.block, space=space)
        self.lm_head = LMHead(
            traits.vocab_size,
            traits.hidden_size,
            tied=self.model.embed_tokens if traits.tie_word_embeddings else None,
            soft_cap=traits.final_soft_cap,
            space=space,
        )

    def forward(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        hidden: Tensor = self.model(input_ids, positions, batch)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        return logits

    @contextmanager
    def tapped(self, tap: StreamTap, layers: Container[int] | None = None) -> Iterator[None]:
        """Within: `tap` sees the stream before and behind every layer, or where `layers` says, on
        paths that run the model itself, and in graphs that are captured meanwhile. Whoever taps
        already goes on to see it."""
        decoder = self.model
        before = decoder.taps
        decoder.taps = (*before, TappedStream(tap=tap, layers=layers))
        try:
            yield
        finally:
            decoder.taps = before

    def attention_layers(self) -> list[SelfAttention]:
        return [module for module in self.modules() if isinstance(module, SelfAttention)]

    def moe_layers(self) -> list[SparseMoe]:
        """The mixtures of experts, in the order of the layers."""
        return [module for module in self.modules() if isinstance(module, SparseMoe)]

    def ignored_tensors(self) -> frozenset[str]:
        """Rotary tables that old checkpoints stored, and the head where it is the embedding."""
        names = {"model.rotary_emb.inv_freq"}
        for layer in range(self.traits.num_layers):
            names.add(f"model.layers.{layer}.self_attn.rotary_emb.inv_freq")
        if self.traits.tie_word_embeddings:
            names.add("lm_head.weight")
        return frozenset(names)


def added(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A residual stream that may come in parts (`Operators`), [T, H] in the model's dtype."""
    return x if x.dim() == 2 else x.sum(0).to(dtype)


def norm(traits: ModelTraits, space: WeightSpace) -> RMSNorm:
    """A norm over the residual stream."""
    return RMSNorm(traits.hidden_size, eps=traits.norm_eps, offset=traits.norm_offset, space=space)


def feed_forward(traits: ModelTraits, layer_id: int, space: WeightSpace) -> GatedMLP | SparseMoe:
    """What stands behind attention in this layer."""
    if traits.layers[layer_id].is_moe:
        return SparseMoe(traits, traits.moe_layers.index(layer_id), space=space)
    return gated_mlp(traits, space)


def gated_mlp(traits: ModelTraits, space: WeightSpace) -> GatedMLP:
    return GatedMLP(
        traits.hidden_size,
        traits.intermediate_size,
        act=traits.activation,
        bias=traits.mlp_bias,
        space=space,
    )
