"""A mixture of experts: of E gated MLPs, k work on each token, chosen by a router.

(Shazeer et al., "Outrageously large neural networks", 2017; in this form, softmax before the
choice, Qwen and others.) Tokens are sorted by expert, so that two grouped products serve all
experts. No shape depends on the choice, and the host does not learn it: a capture holds for every
routing. There is no capacity: a token never loses an expert, and padding takes none away.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.config.persona import ModelTraits, MoeTraits
from headrace.layers.mlp import activation
from headrace.layers.norm import RMSNorm
from headrace.layers.weights import WeightSlot, WeightSpace

RoutingTap = Callable[[int, Tensor], None]
"""(place among the layers with experts, ids of the chosen experts [T, k] int64), the first the one
with the largest weight."""


class Router(nn.Module):
    """Chooses the experts of every token; in float32, since the choice is a comparison."""

    def __init__(self, moe: MoeTraits, hidden: int, *, space: WeightSpace) -> None:
        super().__init__()
        self.count, self.normed = moe.num_experts_per_tok, moe.norm_topk_prob
        self.weight = space.parameter(moe.num_experts, hidden, dtype=torch.float32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] -> ids of experts [T, k] int64 and their weights [T, k] float32, largest first;
        of equal ones the lowest id."""
        logits = F.linear(x.float(), self.weight)  # [T, E]
        ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, : self.count]
        weights = logits.softmax(-1).gather(1, ids)
        return ids, weights / weights.sum(-1, keepdim=True) if self.normed else weights

    def slots(self, path: str) -> Iterator[WeightSlot]:
        yield WeightSlot(name=f"{path}.weight", destination=self.weight)


class Experts(nn.Module):
    """The matrices of all experts, stacked: gate and up [E, 2 I, H], down [E, H, I]."""

    def __init__(self, moe: MoeTraits, hidden: int, *, act: str, space: WeightSpace) -> None:
        super().__init__()
        self.operators = space.operators
        self.act_name, self.act = act, activation(act)
        self.intermediate = moe.intermediate_size
        self.gate_up = space.parameter(moe.num_experts, 2 * self.intermediate, hidden)
        self.down = space.parameter(moe.num_experts, hidden, self.intermediate)
        self.numbers = torch.arange(moe.num_experts, device=space.arena.device)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor) -> Tensor:
        """residual + the weighted sum of the experts' answers to x: all [T, H]."""
        count = ids.shape[1]
        chosen, order = ids.flatten().sort(stable=True)  # [T k]
        ends = torch.searchsorted(chosen, self.numbers, right=True, out_int32=True)  # [E]
        gated = self.operators.expert_gate(self, x[order // count], ends)  # [T k, I]
        down = self.operators.expert_down(self, gated, ends)  # [T k, H]
        # Back in the order of the tokens, each token's by falling weight: one order of its sum.
        answers = torch.empty_like(down).index_copy_(0, order, down).view(-1, count, x.shape[1])
        weights = weights.to(x.dtype)[:, None]  # [T, 1, k]
        return torch.baddbmm(residual[:, None], weights, answers).squeeze(1)

    def slots(self, path: str) -> Iterator[WeightSlot]:
        size = self.intermediate
        for expert in range(self.gate_up.shape[0]):
            gate_up, name = self.gate_up[expert], f"{path}.{expert}"
            yield WeightSlot(name=f"{name}.gate_proj.weight", destination=gate_up[:size])
            yield WeightSlot(name=f"{name}.up_proj.weight", destination=gate_up[size:])
            yield WeightSlot(name=f"{name}.down_proj.weight", destination=self.down[expert])


class SparseMoe(nn.Module):
    """Router and experts in the place of an MLP.

    Args:
        place: among the layers with experts.
    """

    tap: RoutingTap | None = None

    def __init__(self, traits: ModelTraits, place: int, *, space: WeightSpace) -> None:
        super().__init__()
        moe, hidden = traits.moe, traits.hidden_size
        assert moe is not None, "a layer with experts has the model's traits of them"
        self.operators, self.place = space.operators, place
        self.gate = Router(moe, hidden, space=space)
        self.experts = Experts(moe, hidden, act=traits.activation, space=space)

    def add(self, norm: RMSNorm, x: Tensor) -> Tensor:
        """x + experts(norm(x)): the residual stream, [T, H], which may come in parts."""
        normed, x = self.operators.normed(norm, x)
        ids, weights = self.gate(normed)
        if self.tap is not None:
            self.tap(self.place, ids)
        added: Tensor = self.experts(normed, ids, weights, x)
        return added
