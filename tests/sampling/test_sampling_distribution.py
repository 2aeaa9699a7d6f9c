"""Draws follow the softmax, and seeds and positions mean what they say."""

from typing import Any

import numpy as np
import pytest
import torch
from sampling_cases import CPU, Case, random_logits, sample, used_rows

from headrace.batch.rows import RowStart
from headrace.kernels.noise import derive_seed
from headrace.request.sampling_params import SamplingParams
from headrace.sampling.requirements import sampling_batch_info
from headrace.sampling.sampler import Sampler

VOCABULARY = 40
DRAWS = 2000


def draw(params: SamplingParams, seeds: list[int], positions: list[int]) -> np.ndarray:
    """Tokens of many draws from one distribution; rows of a batch share the logits."""
    logits = random_logits(VOCABULARY, seed=4, scale=1.0)
    rows = used_rows(VOCABULARY)
    tokens = []
    for start in range(0, len(seeds), 39):
        part = seeds[start : start + 39]
        places = list(range(1, len(part) + 1))
        rows.admit(
            [
                RowStart(
                    row=row,
                    length=0,
                    tokens=[1],
                    prompt_length=1,
                    seed=seed,
                    params=params,
                    stop_ids=(),
                )
                for row, seed in zip(places, part, strict=True)
            ]
        )
        info = sampling_batch_info([params] * len(part), places, places, places, CPU)
        at = torch.tensor(positions[start : start + 39])
        repeated = logits.expand(len(part), -1).contiguous()
        tokens.append(Sampler().sample(repeated, info, rows, at).next_token_ids)
    return torch.cat(tokens).numpy()


def expected_probabilities(temperature: float, keep: int) -> np.ndarray:
    logits = random_logits(VOCABULARY, seed=4, scale=1.0).double().numpy() / temperature
    order = np.argsort(-logits)
    weights = np.exp(logits - logits.max())
    weights[order[keep:]] = 0.0
    return weights / weights.sum()


@pytest.mark.parametrize("varying", ["seed", "position"])
@pytest.mark.parametrize(
    ("options", "keep"),
    [
        ({}, VOCABULARY),
        ({"temperature": 0.5}, VOCABULARY),
        ({"temperature": 1.5}, VOCABULARY),
        ({"top_k": 6}, 6),
        ({"top_p": 0.6, "temperature": 0.8}, None),
        ({"min_p": 0.2}, None),
    ],
)
def test_draws_follow_the_softmax(options: dict[str, Any], keep: int | None, varying: str) -> None:
    """Chi-square of 2000 draws, over seeds at one position or positions of one seed."""
    temperature = options.get("temperature", 1.0)
    if keep is None:
        likely = np.sort(expected_probabilities(temperature, VOCABULARY))[::-1]
        if "top_p" in options:
            keep = int((np.cumsum(likely) - likely < options["top_p"]).sum())
        else:
            keep = int((likely >= options["min_p"] * likely[0]).sum())
    probabilities = expected_probabilities(temperature, keep)
    moving, rest = list(range(DRAWS)), [12] * DRAWS
    seeds, positions = (moving, rest) if varying == "seed" else (rest, moving)
    counts = np.bincount(draw(SamplingParams(**options), seeds, positions), minlength=VOCABULARY)
    kept = probabilities > 0
    assert counts[~kept].sum() == 0
    expected = probabilities[kept] * DRAWS
    freedom = int(kept.sum()) - 1
    statistic = float(((counts[kept] - expected) ** 2 / expected).sum())
    assert (statistic - freedom) / (2 * freedom) ** 0.5 < 4.0


def test_seeds_and_positions_decide() -> None:
    """Equal seeds agree, in one batch too; other seeds and positions differ."""
    params = SamplingParams(temperature=1.5)
    first = draw(params, [42] * 32, list(range(32)))
    assert np.array_equal(first, draw(params, [42] * 32, list(range(32))))
    assert not np.array_equal(first, draw(params, [43] * 32, list(range(32))))
    twins = draw(params, [42, 42] * 16, [position for position in range(16) for _ in range(2)])
    assert np.array_equal(twins[::2], twins[1::2])
    assert np.array_equal(twins[::2], first[:16])
    assert len(set(first.tolist())) > 4


def test_sequences_of_one_request_differ_and_repeat() -> None:
    """n = 2 with a seed gives two different texts, the same two each time."""
    params = SamplingParams(temperature=1.5, n=2)
    texts = [draw(params, [derive_seed(42, index)] * 16, list(range(16))) for index in (0, 1)]
    again = [draw(params, [derive_seed(42, index)] * 16, list(range(16))) for index in (0, 1)]
    assert not np.array_equal(texts[0], texts[1])
    assert np.array_equal(texts, again)


def test_the_row_number_does_not_matter() -> None:
    logits = random_logits(300)
    case = Case(params=SamplingParams(), logits=logits, seed=5)
    tokens = set()
    for row in (1, 2, 17, 39):
        case.row = row
        tokens.add(int(sample(case).next_token_ids))
    assert len(tokens) == 1
