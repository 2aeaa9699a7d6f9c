"""Logprobs of a step, back on the host, as one small dict per token."""

from collections.abc import Callable, Sequence

from headrace.batch.outputs import TokenLogprobs
from headrace.request.outcome import Logprob

Decode = Callable[[int], str | None]


def logprob_dicts(
    logprobs: TokenLogprobs,
    chosen_ids: Sequence[int],
    tops: Sequence[int | None],
    extra_ids: Sequence[Sequence[int]],
    decode: Decode,
) -> list[dict[int, Logprob] | None]:
    """Token id -> `Logprob` for each of S tokens.

    A dict holds the row's own top n by rank, then the chosen token and the ids asked by name where
    they are not among them. Values may be -inf (a token that masks or filters forbid).

    Args:
        logprobs: of those of the S tokens that have a top n, on the CPU.
        chosen_ids: the tokens.
        tops: n of each row (the tensors hold the largest n); `None`: the row asked for none,
            has no line in the tensors and gets `None`.
        extra_ids: ids each row asked by name, in the order of `logprobs.extra`.
        decode: text of a token id.
    """
    chosen = logprobs.chosen.tolist()
    ranks = logprobs.rank.tolist()
    top_values, top_ids = logprobs.top_values.tolist(), logprobs.top_ids.tolist()
    count = len(chosen)
    assert count == sum(top is not None for top in tops), "a line for each row that asked"
    extra = logprobs.extra.tolist() if logprobs.extra is not None else [[]] * count
    extra_rank = logprobs.extra_rank.tolist() if logprobs.extra_rank is not None else [[]] * count
    dicts: list[dict[int, Logprob] | None] = []
    lines = iter(range(count))
    for token_id, top, ids in zip(chosen_ids, tops, extra_ids, strict=True):
        if top is None:
            dicts.append(None)
            continue
        line = next(lines)
        assert len(ids) <= len(extra[line]), "ids asked by name travel with the batch"
        entries = [
            *zip(top_ids[line][:top], top_values[line], range(1, top + 1), strict=False),
            (token_id, chosen[line], ranks[line]),
            *zip(ids, extra[line], extra_rank[line], strict=False),
        ]
        found: dict[int, Logprob] = {}
        for token, value, rank in entries:
            if token not in found:
                found[token] = Logprob(logprob=value, rank=rank, decoded_token=decode(token))
        dicts.append(found)
    return dicts
