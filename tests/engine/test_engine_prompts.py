import pytest

from headrace.base.errors import RequestError
from headrace.engine.options import check_allowed
from headrace.request.sampling_params import SamplingParams

ENDS = frozenset({7, 8})


@pytest.mark.parametrize("allowed", [[7], [7, 8, 7]])
def test_end_tokens_alone_cannot_wait_for_min_tokens(allowed: list[int]) -> None:
    check_allowed(SamplingParams(allowed_token_ids=allowed), ENDS)
    check_allowed(SamplingParams(allowed_token_ids=[*allowed, 1], min_tokens=2), ENDS)
    check_allowed(SamplingParams(min_tokens=2), ENDS)
    with pytest.raises(RequestError, match="allowed_token_ids has end tokens only"):
        check_allowed(SamplingParams(allowed_token_ids=allowed, min_tokens=2), ENDS)
