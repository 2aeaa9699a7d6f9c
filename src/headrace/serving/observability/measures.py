"""What requests went through, counted as it happens in the HTTP process."""

from collections import Counter

from headrace.serving.observability.histogram import FINE_SECONDS, Histogram
from headrace.serving.records import RequestRecord

REASONS = ("stop", "length", "abort", "error", "disconnect")
"""All there is of `finished_reason`."""

_FIRST_TOKEN = (
    *(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8),
    *(1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400),
)
_BETWEEN = (
    *(0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2, 4, 8),
)
_WHOLE = (0.1, 0.2, 0.4, 0.8, 1, 2, 5, 10, 20, 40, 60, 80, 100, 150, 200, 300, 600, 1200, 2400)
_QUEUE = (0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300)
_TOKENS = (1, *(step * 10**power for power in range(1, 6) for step in (1, 2, 5)))


class Measures:
    """Histograms and counts of one server; belongs to its event loop.

    Times are of this process's monotonic clock, but for the queue's, which the engine measures.
    """

    def __init__(self) -> None:
        self.first_token = Histogram(_FIRST_TOKEN, FINE_SECONDS)
        self.between_tokens = Histogram(_BETWEEN, FINE_SECONDS)
        self.whole = Histogram(_WHOLE)
        self.queue = Histogram(_QUEUE)
        self.prompt_tokens = Histogram(_TOKENS)
        self.output_tokens = Histogram(_TOKENS)
        self.endings: Counter[str] = Counter(dict.fromkeys(REASONS, 0))

    def ended(self, record: RequestRecord) -> None:
        """Take in a request that ended, however it ended. Its length in time and tokens counts
        where it got a whole answer."""
        for reason in record.finishes:
            self.endings[reason if reason in REASONS else "error"] += 1
        if record.queue_seconds is not None:
            self.queue.observe(record.queue_seconds)
        if record.finishes and set(record.finishes) <= {"stop", "length"}:
            self.whole.observe(record.seconds or 0.0)
            self.prompt_tokens.observe(record.prompt_tokens)
            self.output_tokens.observe(record.output_tokens)
