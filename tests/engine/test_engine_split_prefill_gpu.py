"""On a CUDA device: prompts in parts between replays of decode graphs equal whole ones."""

import random
from pathlib import Path

import pytest
import torch
from same_answer import Comparison
from tiny_engine import make_engine, run_alone

from headrace.engine.engine import Engine
from headrace.request.sampling_params import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("exact_float32"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
STREAM = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True, logprobs=2)
LENGTHS = (300, 450, 380, 490)


def cuda_engine(folder: Path, **options: object) -> Engine:
    settings = {"device": "cuda", "page_size": 16, "max_total_tokens": 16384, "max_model_len": 512}
    return make_engine(folder, **(settings | options))


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_equal_to_the_whole_between_replays(family: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(f"{family}_folder")
    draw = random.Random(3)
    prompts = [[draw.randrange(256) for _ in range(length)] for length in (5, 9, *LENGTHS)]
    params = [STREAM, STREAM, *[GREEDY] * len(LENGTHS)]
    eager = cuda_engine(folder, decode_graph="off", prefill_graph="off", enable_overlap=False)
    comparison = Comparison(run_alone(eager, prompts, params), tolerance=1e-3)
    engine = cuda_engine(
        folder, split_prefill_layers=1, decode_graph=(1, 2, 4, 8), max_running_requests=8,
        prefill_graph="off", chunked_prefill_size=512,
    )  # fmt: skip
    handles = [engine.add(*each) for each in zip(prompts[:2], params[:2], strict=True)]
    for prompt, each in zip(prompts[2:], params[2:], strict=True):
        while min(handle.output_tokens for handle in handles[:2]) < 3:
            engine.step()
        handles.append(engine.add(prompt, each))
        for _ in range(15):
            engine.step()
    while engine.has_work:
        engine.step()
    engine.scheduler.check_integrity()
    comparison.check([handle.output() for handle in handles])
    steps = {each["path"]: each["steps"] for each in engine.stats()["paths"]}
    assert steps["split_prefill"] >= 2
    assert steps["decode_graph"] >= 50
