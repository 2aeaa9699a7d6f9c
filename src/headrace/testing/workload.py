"""What `verify` runs: prompts around the borders of pages, with shared prefixes, in two waves."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.request.sampling_params import SamplingParams

# One token, both sides of pages of 16 and 64, several chunks and pages.
LENGTHS = (1, 15, 16, 17, 33, 64, 65, 100, 130)
GPU_LENGTHS = (*LENGTHS, 257, 1025, 4097)
SAMPLED_LENGTH = 300  # of a prompt of the sampled wave: what follows prompts does not follow length
TEXT = """\
A mill on a river needs three things: water, a fall, and a channel between them. The channel is
called the headrace. It leaves the river above the weir, follows the slope with as little loss as
the ground allows, and brings the water to the wheel at the height where it is worth most. In the
morning the miller opens the gate by a hand's breadth, listens to the stones, and opens it further
when the grain comes. Nobody visits the headrace. It is cleaned in autumn, when 4 men with rakes
walk it from end to end and take out leaves, branches, and once a door. "What do you do when it
freezes?" asked the child. "We wait," said the miller, "and we sharpen the stones." Below the wheel
the water is called the tailrace; it has done its work, and goes back to the river a little slower
than before.
"""
SHARED = 40  # leading tokens that the three longest prompts have in common
NEW_TOKENS = 10
TOP = 4  # logprobs compared at each place, beside that of the token itself


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPrompt:
    """A prompt that somebody brings: a text, token ids, or a conversation for the chat template.

    Attributes:
        max_tokens: tokens to make; `None`: as many as of our own prompts.
    """

    prompt: str | Sequence[int] = ""
    messages: Sequence[Mapping[str, Any]] | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrompt:
    """A prompt as it runs."""

    ids: list[int]
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """Requests that run at the same time. `prompts` and `params` are of one length."""

    name: str
    prompts: list[list[int]]
    params: list[SamplingParams]

    @property
    def most_outputs(self) -> int:
        """Tokens that a prompt makes, at most."""
        return max(output for _, output in self._lengths())

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, its output included."""
        return max(map(sum, self._lengths()))

    def pool_tokens(self, page_size: int) -> int:
        """Tokens of the pages that all sequences fill together."""
        return sum(-(-sum(pair) // page_size) * page_size for pair in self._lengths())

    def _lengths(self) -> list[tuple[int, int]]:
        return [
            (len(prompt), params.max_tokens or 0)
            for prompt, params in zip(self.prompts, self.params, strict=True)
        ]


def prompts_of(ids: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Prompts from different places of a text, read in a circle; the three longest share a prefix.

    The longest come first: the last ones then start while others run, which retraction needs. It
    takes the latest again and again, so that one, the third in length, should have several pages.

    Args:
        ids: tokens of the text.
    """
    count = len(lengths)
    prompts = [
        [ids[(place * len(ids) // count + step) % len(ids)] for step in range(length)]
        for place, length in enumerate(sorted(lengths))
    ]
    for prompt in prompts[-3:-1]:
        shared = min(SHARED, len(prompt))
        prompt[:shared] = prompts[-1][:shared]
    latest = prompts.pop(-3) if len(prompts) > 2 else prompts.pop(0)
    return [*prompts[::-1], latest]


def random_ids(vocab_size: int, count: int, seed: int) -> list[int]:
    """Seeded token ids, for checkpoints without tokenizer. Trained weights are better served with
    text: nonsense takes them to places where float32 itself is uncertain in the fourth digit."""
    draw = random.Random(seed)
    return [draw.randrange(vocab_size) for _ in range(count)]


def waves(prompts: Sequence[TokenPrompt]) -> tuple[Wave, Wave]:
    """The greedy wave, which keeps to the plain variant of every graph, and the sampled one.

    Outputs have different lengths, so that rows end while others go on. Long prompts, of hundreds
    of steps where chunks are small, are in the greedy wave alone; the sampled one has short ones.
    """
    short = [prompt for prompt in prompts if len(prompt.ids) <= SAMPLED_LENGTH] or prompts
    return _wave("greedy", prompts, _greedy), _wave("sampled", short, _sampled)


def _wave(
    name: str, prompts: Sequence[TokenPrompt], params_of: Callable[[int], SamplingParams]
) -> Wave:
    params = [
        replace(params_of(index), max_tokens=prompt.max_tokens or NEW_TOKENS - index % 4)
        for index, prompt in enumerate(prompts)
    ]
    return Wave(name=name, prompts=[prompt.ids for prompt in prompts], params=params)


def _greedy(index: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        ignore_eos=True,
        logprobs=TOP,
        prompt_logprobs=1 if index % 4 == 3 else None,
    )


def _sampled(index: int) -> SamplingParams:
    """Every filter and penalty, alone and together with others.

    A few biased tokens come again and again, so that their counts decide what is chosen.
    """
    return SamplingParams(
        temperature=0.6 + 0.1 * (index % 5),
        top_p=0.9 if index % 2 else 1.0,
        top_k=40 if index % 3 == 0 else -1,
        min_p=0.02 if index % 4 == 1 else 0.0,
        presence_penalty=0.5 if index % 2 else 0.0,
        frequency_penalty=1.0 if index % 4 == 0 else 0.3 if index % 3 == 1 else 0.0,
        repetition_penalty=1.2 if index % 4 == 2 else 1.0,
        logit_bias={7: 8.0, 11: 8.0, 13: 8.0} if index % 4 == 0 else None,
        seed=index,
        ignore_eos=True,
        logprobs=TOP,
    )
