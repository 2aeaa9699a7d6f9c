"""The merges a sentencepiece vocabulary implies: it has scores, BPE in `tokenizers` wants pairs.

Sentencepiece joins the two neighbours whose union has the best score, so every way to cut a piece
into two pieces is a merge, ranked by the score of the whole; of the ways to cut one piece the
longer left part ranks first (as transformers has it).

Most of these pairs never happen, and leaving them out halves what has to be loaded each time. While
a text is merged, what happens inside a stretch that ends as one piece depends on that stretch
alone: no merge crossed its borders, and inside them the best pair is the same as when the stretch
is merged by itself. So a piece is always made by the same last pair, the one that merging it alone
ends with.
"""

from collections.abc import Sequence
from itertools import pairwise

_NEVER = 1 << 62
_BITS = 32  # of an id within the key of a pair


def merges_from_scores(tokens: Sequence[str], best_first: Sequence[int]) -> list[tuple[str, str]]:
    """The pairs that can happen, best first.

    Args:
        tokens: text of every id.
        best_first: ids of the pieces that may be made from text or be parts of such, by score.
    """
    ids = {tokens[token_id]: token_id for token_id in best_first}
    ranks: dict[int, int] = {}  # key of a pair -> its place among all pairs
    made: list[int] = []  # that place -> id of the whole
    cuts: list[tuple[str, str]] = []
    starts = [0]  # places of one piece stand side by side
    for token_id in best_first:
        piece = tokens[token_id]
        for cut in range(len(piece) - 1, 0, -1):
            left = ids.get(piece[:cut])
            if left is None:
                continue
            right = ids.get(piece[cut:])
            if right is not None:
                ranks[left << _BITS | right] = len(made)
                made.append(token_id)
                cuts.append((tokens[left], tokens[right]))
        starts.append(len(made))
    merges = []
    for start, end in pairwise(starts):
        if end - start == 1:
            merges.append(cuts[start])
        elif end > start:
            last = _last_merge(tokens[made[start]], ids, ranks, made)
            if last is not None:
                merges.append(cuts[last])
    return merges


def _last_merge(
    piece: str, ids: dict[str, int], ranks: dict[int, int], made: list[int]
) -> int | None:
    """The place of the pair that `piece`, merged by itself, ends with; None if it gets stuck."""
    if any(character not in ids for character in piece):
        return None
    parts = [ids[character] for character in piece]
    rank = ranks.get
    places = [rank(left << _BITS | right, _NEVER) for left, right in pairwise(parts)]
    while len(places) > 1:
        best = min(places)
        if best == _NEVER:
            return None
        at = places.index(best)
        whole = made[best]
        parts[at : at + 2] = [whole]
        del places[at]
        if at > 0:
            places[at - 1] = rank(parts[at - 1] << _BITS | whole, _NEVER)
        if at < len(places):
            places[at] = rank(whole << _BITS | parts[at + 1], _NEVER)
    return places[0]
