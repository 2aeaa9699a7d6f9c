"""What a `GrammarTrial` runs: `python -m ... DESCRIPTOR SECONDS BYTES`.

Over the connection come the tokens, once, then forms; an answer says that one has been compiled. A
form that takes too much ends this process, by its own clock, so that nothing goes on computing when
nobody is left to end it.
"""

import os
import random
import resource
import signal
import sys
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.request.structured_output import StructuredOutput
from headrace.sampling.grammar.trial import OUT_OF_MEMORY, TokenBytes
from headrace.sampling.grammar.xgrammar_backend import MAX_VOCABULARIES, XgrammarVocabulary
from headrace.sampling.host_mask import mask_words

NICENESS = 10  # steps go first
IDLE_SECONDS = 300.0  # after which it ends, with all the memory it holds
STEPS = 16  # of an answer: a mask that takes for ever would hold up everybody


def main(descriptor: int, seconds: float, size_bytes: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # supervisors signal all; we end with our parent
    connection: Any = Connection(descriptor)
    try:
        tokens: TokenBytes = connection.recv()
        vocabulary = lru_cache(MAX_VOCABULARIES)(
            lambda shown: XgrammarVocabulary(tokens.texts(shown), tokens.vocab_size)
        )
        vocabulary(frozenset())
        os.nice(max(0, NICENESS - os.nice(0)))  # of a thread that is so, where those have their own
        if sys.platform == "linux":  # elsewhere there is no such limit
            _limit_memory(size_bytes)
        while connection.poll(IDLE_SECONDS):
            structured, shown = connection.recv()
            _try(vocabulary(shown), structured, tokens.vocab_size, seconds)
            connection.send(None)
    except (EOFError, ConnectionError):
        return  # nobody asks any more


def _try(
    vocabulary: XgrammarVocabulary, structured: StructuredOutput, vocab_size: int, seconds: float
) -> None:
    signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends this process
    try:
        _walk(vocabulary.compile(structured).matcher(), vocab_size)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except Exception as error:  # what is no grammar is found again, where it can be told
        if "bad_alloc" in str(error):
            os._exit(OUT_OF_MEMORY)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _walk(matcher: Any, vocab_size: int) -> None:
    """Begin an answer at random."""
    draw = random.Random(0)
    line = torch.empty(mask_words(vocab_size), dtype=torch.int32)
    for _ in range(STEPS):
        matcher.allowed(line)
        allowed = np.flatnonzero(np.unpackbits(line.numpy().view(np.uint8), bitorder="little"))
        if not len(allowed) or not matcher.accept(int(draw.choice(allowed))):
            return


def _limit_memory(more_bytes: int) -> None:
    """Let this process take so many bytes more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
