"""What the results of a step mean for its sequences: tokens, logprobs, endings."""

from headrace.request.outcome import OF_REQUEST, Finished, Logprob
from headrace.runner.worker import HostResults
from headrace.sampling.host_logprobs import Decode, logprob_dicts
from headrace.sampling.requirements import wanted_logprobs
from headrace.scheduler.sequence import Sequence
from headrace.scheduler.step_work import StepWork

NOT_FINITE = (
    "The model gave no finite logits for this sequence: its weights overflow in this dtype. Try "
    "dtype bfloat16 or float32."
)
NOTHING_ALLOWED = (
    "No token is left for this sequence: its grammar, bad_words, allowed_token_ids and logit_bias "
    "together forbid every one (end tokens count), or the model gave no finite logits."
)


def take_token(
    sequence: Sequence, token: int, finite: bool, logprobs: dict[int, Logprob] | None
) -> Finished | None:
    """Append a processed token; return the ending that it brings, if any."""
    if not finite:
        return _no_token(sequence)
    sequence.proven_finite = True
    sequence.tokens.append(token)
    stop_string = sequence.sink.token(token, logprobs)
    if token in sequence.stop_ids:
        named = token in sequence.request.params.stop_token_ids
        return Finished("stop", stop_reason=token if named else None)
    if stop_string is not None:
        return Finished("stop", stop_reason=stop_string)
    if len(sequence.tokens) >= sequence.max_length:
        return Finished("length")
    return None


def _no_token(sequence: Sequence) -> Finished:
    """The ending of a sequence without finite logits: the fault of its options, or the model's."""
    mask = sequence.host_mask
    if mask is None and not sequence.request.params.has_bias:
        return Finished("error", message=NOT_FINITE)
    told = "" if mask is None else mask.failure
    return Finished("error", stop_reason=OF_REQUEST, message=told or NOTHING_ALLOWED)


def sampled_logprobs(
    work: StepWork, results: HostResults, decode: Decode
) -> list[dict[int, Logprob] | None]:
    """One entry per sampling share; `None` where the request asked for no logprobs."""
    if results.logprobs is None:
        return [None] * len(work.sampling)
    params = [share.sequence.request.params for share in work.sampling]
    return logprob_dicts(
        results.logprobs,
        results.tokens,
        [wanted_logprobs(each) for each in params],
        [each.logprob_token_ids for each in params],
        decode,
    )


def take_prompt_logprobs(work: StepWork, results: HostResults, decode: Decode) -> None:
    """Append the prompt logprobs that a step brings."""
    if results.prompt_logprobs is None:
        return
    targets: list[int] = []
    tops: list[int | None] = []
    for span in work.prompt_spans:
        targets += span.sequence.tokens[span.first : span.first + span.count]
        tops += [span.sequence.request.params.prompt_logprobs] * span.count
    entries = logprob_dicts(results.prompt_logprobs, targets, tops, [()] * len(targets), decode)
    for span in work.prompt_spans:
        own, entries = entries[: span.count], entries[span.count :]
        # A sequence that was retracted meanwhile scores its prompt anew.
        if len(span.sequence.prompt_entries) == span.first:
            span.sequence.prompt_entries += own
