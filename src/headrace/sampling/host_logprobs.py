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
        logprobs: of S tokens, on the CPU.
        chosen_ids: the tokens.
        tops: n of each row (the tensors hold the largest n); `None`: the row asked for none and
            gets `None`.
        extra_ids: ids each row asked by name, in the order of `logprobs.extra`.
        decode: text of a token id.
    """
    chosen = logprobs.chosen.tolist()
    ranks = logprobs.rank.tolist()
    top_values, top_ids = logprobs.top_values.tolist(), logprobs.top_ids.tolist()
    count = len(chosen)
    extra = logprobs.extra.tolist() if logprobs.extra is not None else [[]] * count
    extra_rank = logprobs.extra_rank.tolist() if logprobs.extra_rank is not None else [[]] * count
    dicts: list[dict[int, Logprob] | None] = []
    for place, top in enumerate(tops):
        if top is None:
            dicts.append(None)
            continue
        ids = extra_ids[place]
        assert len(ids) <= len(extra[place]), "ids asked by name travel with the batch"
        entries = [
            *zip(top_ids[place][:top], top_values[place], range(1, top + 1), strict=False),
            (chosen_ids[place], chosen[place], ranks[place]),
            *zip(ids, extra[place], extra_rank[place], strict=False),
        ]
        found: dict[int, Logprob] = {}
        for token, value, rank in entries:
            if token not in found:
                found[token] = Logprob(logprob=value, rank=rank, decoded_token=decode(token))
        dicts.append(found)
    return dicts
