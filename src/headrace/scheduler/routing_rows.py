"""The experts of every token that a sequence keeps for its request."""

from headrace.request.packed_routing import PackedRouting
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
