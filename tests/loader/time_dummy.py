"""Times dummy weights of Qwen3-8B's shape on the GPU.

python tests/loader/time_dummy.py
"""

import time

import torch

from headrace.config.plan import RopePlan
from headrace.loader.dummy import fill_dummy
from headrace.models.registry import build_model, read_model_traits

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}


def main() -> None:
    traits = read_model_traits(QWEN3_8B)
    ropes = {name: RopePlan(traits=rope, length=2048) for name, rope in traits.ropes.items()}
    model = build_model(traits, ropes, torch.bfloat16, "cuda")
    count = sum(parameter.numel() for parameter in model.parameters())
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        fill_dummy(model, 0)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        print(f"{count / 1e9:.2f}e9 parameters: {seconds:.2f} s, {count / seconds / 1e9:.1f}e9 a s")
    peak = torch.cuda.max_memory_allocated() - count * 2
    print(f"{torch.cuda.get_device_name()}: {peak / 2**20:.0f} MiB besides the weights at the peak")


if __name__ == "__main__":
    main()
