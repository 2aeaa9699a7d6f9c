"""The bar of a call that waits for many requests."""

import sys
import time
from collections.abc import Iterable
from typing import Self

from tqdm import tqdm

from headrace.engine.requests import RequestHandle


class Progress:
    """Counts requests that ended and shows prompt and output tokens per second, as vLLM does.

    Args:
        total: requests to wait for.
        shown: draw the bar on stderr, where there is one: a service may have none.
    """

    def __init__(self, total: int, *, shown: bool) -> None:
        is_drawn = shown and total > 0 and sys.stderr is not None
        self._bar = tqdm(total=total, desc="Processed prompts", disable=not is_drawn)
        self._started = time.perf_counter()
        self._prompt_tokens = self._output_tokens = 0

    def count(self, ended: Iterable[RequestHandle]) -> None:
        """Take in requests that ended."""
        number = 0
        for handle in ended:
            number += 1
            self._prompt_tokens += len(handle.request.prompt_token_ids)
            self._output_tokens += handle.output_tokens
        if not number or self._bar.disable:
            return
        seconds = max(time.perf_counter() - self._started, 1e-9)
        self._bar.set_postfix_str(
            f"est. speed input: {self._prompt_tokens / seconds:.2f} toks/s, "
            f"output: {self._output_tokens / seconds:.2f} toks/s",
            refresh=False,
        )
        self._bar.update(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
