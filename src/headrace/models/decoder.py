"""The tree that the families share: embedding, blocks, last norm, head.

Modules carry the names of the checkpoint (`model.layers.0.self_attn...`). What differs between
families is in the traits, and in the block where the wiring differs.
"""

from typing import Protocol

from torch import Tensor, nn

from headrace.batch.forward_batch import ForwardBatch
from headrace.config.persona import ModelTraits
from headrace.config.plan import RopePlan
from headrace.layers.attention import SelfAttention
from headrace.layers.embedding import Embedding, LMHead
from headrace.layers.mlp import GatedMLP
from headrace.layers.norm import RMSNorm
from headrace.layers.rope import RotaryEmbedding, Rotation
from headrace.layers.weights import WeightSpace


class CausalLM(Protocol):
    """A model as the runner sees it."""

    traits: ModelTraits

    def forward(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        """input_ids, positions [T] int64 -> hidden states [T, H] after the last norm."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[n, H] -> [n, V] float32, final soft cap applied."""
        ...

    def attention_layers(self) -> list[SelfAttention]:
        """In the order of the layers; assembly binds each to the pool of its KV group."""
        ...

    def ignored_tensors(self) -> frozenset[str]:
        """Checkpoint tensors that may be there and are not needed."""
        ...


class PreNormBlock(nn.Module):
    """norm, attention, add, norm, MLP, add (Llama and most since)."""

    def __init__(self, traits: ModelTraits, layer_id: int, *, space: WeightSpace) -> None:
        super().__init__()
        self.operators = space.operators
        self.self_attn = SelfAttention(traits, layer_id, space=space)
        self.mlp = gated_mlp(traits, space)
        self.input_layernorm = norm(traits, space)
        self.post_attention_layernorm = norm(traits, space)

    def forward(self, x: Tensor, rotation: Rotation, batch: ForwardBatch) -> Tensor:
        """The residual stream, [T, H] -> [T, H], maybe in parts (`Operators`)"""
        attention, mlp = self.self_attn, self.mlp
        qkv, x = self.operators.normed_linear(self.input_layernorm, attention.qkv_proj, x)
        x = self.operators.add_linear(attention.o_proj, attention.attend(qkv, rotation, batch), x)
        gated, x = mlp.gate(self.post_attention_layernorm, x)
        return self.operators.add_linear(mlp.down_proj, gated, x)


class Decoder(nn.Module):
    """Token ids to hidden states."""

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
        rotations = {name: rope(positions) for name, rope in self.ropes.items()}
        x: Tensor = self.embed_tokens(input_ids)
        for layer, rope in zip(self.layers, self.rope_of_layer, strict=True):
            x = layer(x, rotations[rope], batch)
        return self.norm(x)  # type: ignore[no-any-return]


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

    def attention_layers(self) -> list[SelfAttention]:
        return [module for module in self.modules() if isinstance(module, SelfAttention)]

    def ignored_tensors(self) -> frozenset[str]:
        """Rotary tables that old checkpoints stored, and the head where it is the embedding."""
        names = {"model.rotary_emb.inv_freq"}
        for layer in range(self.traits.num_layers):
            names.add(f"model.layers.{layer}.self_attn.rotary_emb.inv_freq")
        if self.traits.tie_word_embeddings:
            names.add("lm_head.weight")
        return frozenset(names)


def norm(traits: ModelTraits, space: WeightSpace) -> RMSNorm:
    """A norm over the residual stream."""
    return RMSNorm(traits.hidden_size, eps=traits.norm_eps, offset=traits.norm_offset, space=space)


def gated_mlp(traits: ModelTraits, space: WeightSpace) -> GatedMLP:
    return GatedMLP(
        traits.hidden_size,
        traits.intermediate_size,
        act=traits.activation,
        bias=traits.mlp_bias,
        space=space,
    )
