"""The experts of every token that a sequence keeps for its request."""

from headrace.config.persona import ModelTraits
from headrace.request.packed_routing import PackedRouting
from headrace.request.request import Request
from headrace.scheduler.token_rows import TokenRows


class RoutingRows(TokenRows):
    """A row holds int32 numbers of experts, [layers, chosen]; the first one is that of position 0.

    Args:
        layers: how many have experts. chosen: experts of a token.
    """

    def __init__(self, layers: int, chosen: int) -> None:
        super().__init__(0, 4 * layers * chosen)
        self._layers, self._chosen = layers, chosen

    def packed(self) -> PackedRouting:
        """All rows. No more may be added."""
        return PackedRouting(
            data=self._data, rows=self.next_position, layers=self._layers, chosen=self._chosen
        )


def routing_rows_of(request: Request, traits: ModelTraits) -> RoutingRows | None:
    """Where a sequence keeps what its request asks for, if it does."""
    if not request.params.return_routed_experts or traits.moe is None:
        return None
    return RoutingRows(len(traits.moe_layers), traits.moe.num_experts_per_tok)
