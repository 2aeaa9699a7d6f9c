"""Dry steps on a GPU that is not there, then steps of all kinds; prints as JSON what they compiled.

Run in a process of its own, since Triton must not be interpreting, with `tests/kernels` on the path
and the folders of dummy models as arguments; behind `--deterministic` those of that mode follow.
The compiler is faked: which variants a launch asks for is decided before it, and is all that counts
here.
"""

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faked_gpu
import torch
import triton

GPU = faked_gpu.install()
COMPILED: list[str] = []


class Nothing(SimpleNamespace):
    """A compiled kernel that does nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: None


def compile_nothing(src: Any, **_: Any) -> Any:
    COMPILED.append(src.name)
    return Nothing(
        src=src,
        metadata=None,
        _init_handles=lambda: None,
        launch_metadata=lambda *_: None,
        run=lambda *_: None,
        function=None,
        packed_metadata=None,
    )


def product(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    return x.new_zeros(x.shape[0], weight.shape[1], dtype=out_dtype)


# What cuBLAS does is beside the point, and takes a CPU long.
torch.mm = product
torch.Tensor.addmm_ = lambda total, *_: total
torch.nn.functional.linear = lambda x, weight, bias=None: product(x, weight.t(), x.dtype)
triton.compiler.compile = compile_nothing
torch.cuda.graph_pool_handle = lambda: None
torch.cuda.Stream = lambda: None

from headrace.attention import triton_backend  # noqa: E402
from headrace.base.decision import Decision  # noqa: E402
from headrace.batch.facts import Bucket  # noqa: E402
from headrace.batch.forward_mode import ForwardMode  # noqa: E402
from headrace.batch.sampling_batch_info import LogprobRequest  # noqa: E402
from headrace.config.engine_config import EngineConfig  # noqa: E402
from headrace.kernels import (  # noqa: E402
    decode_attention_triton,
    extend_attention_triton,
    invariant_attention_triton,
    invariant_product_triton,
    sampling_triton,
)
from headrace.layers.deterministic_triton_operators import (  # noqa: E402
    DeterministicTritonOperators,
)
from headrace.layers.triton_operators import TritonOperators  # noqa: E402
from headrace.layers.weight_formats import InvariantFormat  # noqa: E402
from headrace.runner import dry_steps, model_runner  # noqa: E402
from headrace.runner.assembly import settle  # noqa: E402
from headrace.runner.choices.decode_graph import decode_sizes  # noqa: E402
from headrace.runner.model_runner import ModelRunner  # noqa: E402
from headrace.sampling.kernel_sampler import KernelSampler  # noqa: E402

ROWS = 256
DECODING = (1, 2, 3, 5, 16, 17, 31, 50, 64, 65, 100, 128, 129, 200, 256)
CHUNKS = (1, 2, 5, 15, 33, 70, 200, 500, 900)


def fake_choices(deterministic: bool) -> None:
    for module in (
        triton_backend,
        decode_attention_triton,
        invariant_product_triton,
        sampling_triton,
    ):
        module.multiprocessors = lambda device: faked_gpu.MULTIPROCESSORS
    for module in (extend_attention_triton, invariant_attention_triton):
        module.shared_memory = lambda device: faked_gpu.SHARED
    dense = Decision(name="weight_format", value="dense", reason="what kernels read")
    model_runner.choose_weight_format = lambda device, dtype: dense
    kernels = Decision(name="operators", value="triton", reason="what is tested")
    model_runner.choose_operators = lambda device, form, deterministic: (
        kernels,
        (DeterministicTritonOperators if deterministic else TritonOperators)(pdl=True),
    )
    model_runner.deterministic_format = lambda *given: InvariantFormat(pdl=True)


def runner_of(folder: Path, deterministic: bool) -> ModelRunner:
    """A runner with graphs and a pool of few pages, as for the trial."""
    config = EngineConfig(
        model=str(folder),
        load_format="dummy",
        device="cpu",
        dtype="bfloat16",
        attention_backend="triton",
        max_running_requests=ROWS,
        page_size=64,
        max_total_tokens=64 * 20,
        chunked_prefill_size=8 * max(CHUNKS),
        deterministic=deterministic,
        kv_canary="log" if folder.name == "gemma3" else "off",
    )
    settled = settle(config)
    plan = settled.plan
    graphs = replace(plan.decode_graph, value=decode_sizes(ROWS))
    plan = replace(plan, decode_graph=graphs)
    runner = ModelRunner(config, settled.persona, plan, lambda model: None)
    runner.initialize(None)
    runner.make_pools(1)
    runner.init_attention_backend()
    runner.init_forward_paths()
    runner.paths.eager.ends.preparation.use_kernels(pdl=True)
    runner.step_sampler.kernels = KernelSampler(runner.rows, ROWS, pdl=True)
    if runner.kv_canary is not None:
        runner.kv_canary.use_kernels()
    return runner


@torch.inference_mode()
def all_steps(runner: ModelRunner, draw: random.Random) -> None:
    graph = runner.paths.decode_graph
    for size in graph.sizes:
        for variant in ("", dry_steps.FILTERS):
            graph.rehearse(Bucket(tokens=size, sequences=size, variant=variant))
    if runner.kv_canary is not None:
        runner.kv_canary.sweep(torch.zeros(3, 7, dtype=torch.int32))
    for _ in range(120):
        mode, new, before = a_step(draw)
        lengths = [tokens + length for tokens, length in zip(new, before, strict=True)]
        batch = dry_steps._batch(mode, new, lengths, runner.device)
        samples = torch.zeros(draw.randint(1, len(new)), dtype=torch.int64)
        batch.sampling = replace(
            batch.sampling,
            rows=samples,
            sequence_index=samples,
            token_index=samples,
            any_filters=draw.random() < 0.5,
            logprobs=some_logprobs(draw, samples),
        )
        output = runner.paths.eager.run(batch, Bucket(tokens=sum(new), sequences=len(new)))
        runner.sample(output, batch)
        output.next_token_ids, output.finite = graph._inputs.tokens, graph._inputs.finite
        runner.sample(output, batch)  # as behind a graph


def some_logprobs(draw: random.Random, samples: torch.Tensor) -> LogprobRequest | None:
    """For some of the rows that sample."""
    asking = draw.randint(0, len(samples))
    if asking == 0:
        return None
    named = draw.choice((0, 1, 2, 16, 31))
    return LogprobRequest(
        places=tuple(range(asking)),
        index=samples[-asking:],
        top=draw.choice((0, 1, 5, 16, 32)),
        token_ids=torch.zeros(asking, named, dtype=torch.int64) if named else None,
    )


def a_step(draw: random.Random) -> tuple[ForwardMode, list[int], list[int]]:
    """Mode, new tokens and length before the step of each sequence."""
    mode = draw.choice([ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.MIXED])
    if mode is ForwardMode.DECODE:
        rows, most = draw.choice(DECODING), draw.choice((60, 1000))
        return mode, [1] * rows, [draw.randrange(most) for _ in range(rows)]
    if mode is ForwardMode.EXTEND:
        new = [draw.choice(CHUNKS) for _ in range(draw.choice((1, 1, 2, 8)))]
        return mode, new, [draw.choice((0, 7, 64)) for _ in new]
    new = [1] * draw.choice((1, 2, 30)) + [draw.randint(1, 300)]
    return mode, new, [draw.randrange(500) for _ in new]


def main(folders: list[str]) -> None:
    told: dict[str, Any] = {}
    deterministic = False
    for folder in map(Path, folders):
        if str(folder) == "--deterministic":
            deterministic = True
            continue
        fake_choices(deterministic)
        runner = runner_of(folder, deterministic)
        layers = list(runner.model.model.layers)
        kernels = dry_steps.compile_kernels(
            runner.paths, runner.step_sampler.kernels, runner.plan, runner.model, runner.device
        )
        assert kernels.count == 0, "the faked compiler tells no listener"
        ahead, COMPILED[:] = list(COMPILED), []
        assert list(runner.model.model.layers) == layers
        all_steps(runner, random.Random(0))
        name = f"{folder.name}{' deterministic' if deterministic else ''}"
        told[name] = {"ahead": ahead, "later": list(COMPILED)}
        COMPILED.clear()
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1:])
