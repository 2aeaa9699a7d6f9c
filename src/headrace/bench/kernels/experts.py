"""Times of a mixture of experts of Qwen3-30B-A3B's size, beside floor and torch's grouped product.

    python -m headrace.bench.kernels.experts

A line is a number of tokens; each call has a routing of its own, so that it finds cold experts.
"""

import argparse
from functools import partial

import torch
from torch import Tensor

from headrace.bench.kernels.products import DTYPE, check
from headrace.bench.kernels.timing import copy_rate, time_calls
from headrace.config.persona import MoeTraits
from headrace.kernels.grouped_product import grouped_product as twin
from headrace.layers.moe import Experts, Router
from headrace.layers.triton_operators import TritonOperators
from headrace.layers.weights import WeightSpace
from headrace.memory.arena import Arena

HIDDEN = 2048
MOE = MoeTraits(num_experts=128, num_experts_per_tok=8, intermediate_size=768, norm_topk_prob=True)
TOKENS = (1, 8, 32, 128, 512, 4096)
ROUTINGS = 8


def layer() -> tuple[Router, Experts]:
    """With random weights, on the device."""
    operators = TritonOperators(pdl=True)
    space = WeightSpace(dtype=DTYPE, arena=Arena("cuda"), operators=operators)
    made = (Router(MOE, HIDDEN, space=space), Experts(MOE, HIDDEN, act="silu", space=space))
    for module in made:
        for parameter in module.parameters():
            parameter.data.normal_(0, parameter.shape[-1] ** -0.5)
    return made


def sorted_rows(experts: Experts, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """What the first grouped product is given."""
    chosen, order = ids.flatten().sort(stable=True)
    ends = torch.searchsorted(chosen, experts.numbers, right=True, out_int32=True)
    return x[order // ids.shape[1]], ends


def line(router: Router, experts: Experts, tokens: int, rate: float) -> tuple[str, bool]:
    """A line of the table, and whether what it shows is right."""
    from headrace.kernels.grouped_product_triton import grouped_product

    inputs = [torch.randn(tokens, HIDDEN, dtype=DTYPE, device="cuda") for _ in range(ROUTINGS)]
    routings = [router(x) for x in inputs]
    grouped = [sorted_rows(experts, x, ids) for x, (ids, _) in zip(inputs, routings, strict=True)]
    weight = experts.gate_up
    read = sum(len(ids.unique()) for ids, _ in routings) / ROUTINGS
    floor = read * weight[0].nbytes / rate * 1e6
    right = all(
        check(f"{tokens} tokens", grouped_product(x, weight, ends), twin(x, weight, ends))
        for x, ends in grouped
    )
    ours = time_calls([partial(grouped_product, x, weight, ends) for x, ends in grouped])
    library = time_calls([partial(twin, x, weight, ends) for x, ends in grouped])

    def whole(x: Tensor) -> Tensor:
        ids, weights = router(x)
        out: Tensor = experts(x, ids, weights, x)
        return out

    everything = time_calls([partial(whole, x) for x in inputs])
    cells = (read, floor, ours, library, 1.5 * floor, everything)
    return f"{tokens:7}" + "".join(f"{cell:12.1f}" for cell in cells), right


@torch.inference_mode()
def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}, copy {rate / 1e12:.2f} TB/s; microseconds, bfloat16")
    names = ("experts read", "floor", "gate up", "torch's", "layer floor", "layer")
    print(" tokens" + "".join(f"{name:>12}" for name in names))
    router, experts = layer()
    all_right = True
    for tokens in TOKENS:
        try:
            told, right = line(router, experts, tokens, rate)
        except Exception as error:  # the other lines are worth having
            told, right = f"{tokens:7}  {type(error).__name__}: {error}", False
        print(told, flush=True)
        all_right = all_right and right
    return 0 if all_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
