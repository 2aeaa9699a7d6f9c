"""On a CUDA device: after the start nothing is compiled; idle moments capture what is missing."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from same_answer import Comparison
from tiny_engine import make_engine, run_all, run_alone

from headrace.engine.engine import Engine
from headrace.request.sampling_params import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCAB = 2048
# Wide enough for the products of few rows, each of which has kernels by the number of rows.
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 1024,
    "intermediate_size": 1536,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
KINDS = (
    GREEDY,
    SamplingParams(temperature=0.9, max_tokens=9, ignore_eos=True, seed=1),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=40, min_p=0.01, max_tokens=14, seed=2),
    SamplingParams(temperature=0.0, max_tokens=7, logprobs=3, prompt_logprobs=2, ignore_eos=True),
    SamplingParams(
        temperature=1.1, presence_penalty=0.4, logit_bias={5: 1.0}, max_tokens=8, seed=3
    ),
    SamplingParams(temperature=0.7, top_p=0.8, max_tokens=6, logprobs=1, logprobs_mode="processed"),
)


def wide_engine(tmp_path: Path, **options: object) -> Engine:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    settings = {
        "device": "cuda",
        "dtype": "bfloat16",
        "max_model_len": 1024,
        "max_running_requests": 160,
        "max_total_tokens": 64 * 1024,
        "chunked_prefill_size": 512,
    }
    return make_engine(tmp_path, **(settings | options))


def prompts(count: int, longest: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    lengths = [draw.choice((1, 2, 3, 17, 40, 100, longest)) for _ in range(count)]
    return [[draw.randrange(VOCAB) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("options", [{}, {"decode_graph": (1, 8), "prefill_graph": "off"}])
def test_no_kernel_is_compiled_after_the_start(tmp_path: Path, options: dict[str, object]) -> None:
    from headrace.kernels.compile_ahead_triton import watched_compilations

    engine = wide_engine(tmp_path, **options)
    (kernels,) = [each for each in engine.worker.runner.measured if each.name == "kernels"]
    assert kernels.value > 0 or "0 compiled, 0 found" in kernels.reason  # compiled in this process
    with watched_compilations() as asked:
        for seed, count in enumerate((1, 2, 7, 20, 40, 70, 130, 160)):
            params = [KINDS[(seed + place) % len(KINDS)] for place in range(count)]
            batch = prompts(count, 900 if count < 40 else 130, seed)
            outputs = run_all(engine, batch, params)
            assert all(output.outputs[0].finish_reason != "error" for output in outputs)
    assert asked == []
    paths = {entry["path"] for entry in engine.stats()["paths"]}
    assert {"decode_graph", "eager"} <= paths


def test_idle_moments_capture_every_graph_within_the_memory_reserved(tmp_path: Path) -> None:
    engine = wide_engine(tmp_path)
    runner = engine.worker.runner
    handle = engine.add([1, 2, 3], GREEDY)
    assert not engine.prepare_in_idle()  # somebody waits
    while not handle.is_finished:
        engine.step()
    pages = runner.token_to_kv_pool.key_value(0)[0].data_ptr()
    turns = 0
    while engine.prepare_in_idle():
        turns += 1
    reserved = {each.name: each.value for each in runner.measured}
    captured = 0
    for path in (runner.paths.decode_graph, runner.paths.prefill_graph):
        assert path is not None
        report = path.prepare()
        plain = [bucket for bucket in report.seconds if not bucket.variant]
        assert len(plain) == len(path.sizes)
        assert sum(report.bytes.values()) <= reserved[f"{path.name}_bytes"]
        captured += len(plain)
    assert 0 < turns < captured
    assert runner.token_to_kv_pool.key_value(0)[0].data_ptr() == pages


@pytest.mark.usefixtures("exact_float32")
def test_answers_after_idle_captures_are_those_of_eager(llama_folder: Path) -> None:
    settings = {"device": "cuda", "page_size": 16, "max_total_tokens": 8192}
    batch, params = prompts(9, 200, 0), [replace(GREEDY, logprobs=2)] * 9
    batch = [[token % 256 for token in prompt] for prompt in batch]
    eager = make_engine(llama_folder, decode_graph="off", prefill_graph="off", **settings)
    comparison = Comparison(run_all(eager, batch, params), tolerance=1e-3)
    engine = make_engine(llama_folder, **settings)
    run_all(engine, batch[:3], params[:3])  # some are captured because steps ask
    while engine.prepare_in_idle():
        pass
    comparison.check(run_all(engine, batch, params))
    comparison.check(run_alone(engine, batch, params))


def test_an_engine_starts_beside_another_of_which_it_knows_some_kernels(tmp_path: Path) -> None:
    """The dry steps of the second must launch none of them: what they read is not written."""
    first = wide_engine(tmp_path, decode_graph="off", prefill_graph="off", enable_overlap=False)
    batch, params = prompts(3, 40, 3), [KINDS[3], KINDS[4], KINDS[2]]
    run_all(first, batch, params)
    second = wide_engine(tmp_path, max_running_requests=24)
    torch.cuda.synchronize()
    for each in (first, second):
        outputs = run_all(each, batch, params)
        assert all(output.outputs[0].finish_reason != "error" for output in outputs)
