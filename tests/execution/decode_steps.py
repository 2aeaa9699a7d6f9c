"""A runner over a tiny model of a family, and decode steps of its rows on a path of choice."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.batch.facts import BatchFacts, Bucket
from headrace.batch.forward_batch import ForwardBatch, HostBounds
from headrace.batch.forward_mode import ForwardMode
from headrace.config.engine_config import EngineConfig
from headrace.execution.cpu_graph import CpuGraphPath
from headrace.execution.eager import EagerPath
from headrace.execution.eager_ends import EagerEnds
from headrace.execution.path import ForwardPath
from headrace.execution.preparation import BatchPreparation
from headrace.runner.assembly import assemble, settle
from headrace.runner.model_runner import ModelRunner

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
QWEN3 = LLAMA | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 16,
    "tie_word_embeddings": True,
}
GEMMA3 = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "head_dim": 16,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "tie_word_embeddings": True,
}
FAMILIES = {"llama": LLAMA, "qwen3": QWEN3, "gemma3": GEMMA3}
PAGES = 6  # of a row


class Steps:
    """Rows 1, 2, ... with pages of their own in mixed order and random keys and values."""

    def __init__(self, folder: Path, family: str, *, rows: int, **asked: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(FAMILIES[family]))
        options = {"device": "cpu", "dtype": "float32", "cpu_graph": "off"} | asked
        config = EngineConfig(
            model=str(folder),
            load_format="dummy",
            max_running_requests=rows,
            max_total_tokens=(rows * PAGES + 1) * 16,
            **options,
        )
        self.runner: ModelRunner = assemble(settle(config)).runner
        self.count = rows
        pool, runner = self.runner.req_to_token_pool, self.runner
        pages = torch.randperm(rows * PAGES, generator=torch.Generator().manual_seed(0)) + 1
        for place in range(rows):
            row = pool.allocate_row()
            assert row == place + 1
            pool.stage(row, 0, pages[place * PAGES : (place + 1) * PAGES].tolist())
            runner.rows.active[row] = True
            runner.rows.last_token[row] = 7 * row
        pool.flush()
        self.fill_pool()

    def fill_pool(self) -> None:
        """Random keys and values, NaN in page 0."""
        draw = torch.Generator().manual_seed(1)
        traits = self.runner.persona.traits
        for layer in range(traits.num_layers):
            for part in self.runner.token_to_kv_pool.key_value(layer):
                part.copy_(torch.randn(part.shape, generator=draw))
                part[0] = float("nan")

    def path(self, kind: type[EagerPath] | type[CpuGraphPath], **options: Any) -> Any:
        model = self.runner.model
        ends = self.ends(lambda hidden, batch: model.compute_logits(hidden))
        if kind is EagerPath:
            return EagerPath(model.forward, ends)
        layers = model.attention_layers()
        return CpuGraphPath(model=model, layers=layers, groups=self.groups, ends=ends, **options)

    def ends(self, logits: Callable[[Tensor, ForwardBatch], Any]) -> EagerEnds:
        runner = self.runner
        tables = {name: runner.req_to_token_pool.table(name) for name in self.groups}
        return EagerEnds(
            preparation=BatchPreparation(runner.rows, tables, runner.plan.page_size.value),
            backends=tuple(runner.backends.values()),
            logits=logits,
        )

    @property
    def groups(self) -> dict[str, int]:
        """Page size of each KV group."""
        runner = self.runner
        return dict.fromkeys(runner.req_to_token_pool.groups, runner.plan.page_size.value)

    @torch.inference_mode()
    def step(self, path: ForwardPath, lengths: Sequence[int]) -> Tensor:
        """Logits [B, V] of rows 1 .. B with so many tokens each, and what the step wrote."""
        facts = decode_facts(len(lengths))
        if isinstance(path, CpuGraphPath):
            path.make_ready(facts)
        bucket = path.admits(facts)
        assert isinstance(bucket, Bucket), bucket
        rows = list(range(1, len(lengths) + 1))
        self.runner.rows.length[1 : len(lengths) + 1] = torch.tensor(lengths, dtype=torch.int32)
        batch = ForwardBatch(
            mode=ForwardMode.DECODE,
            rows=torch.tensor(rows),
            bounds=HostBounds(
                seq_lens=[length + 1 for length in lengths],
                extend_lens=[1] * len(lengths),
                rows=rows,
            ),
            facts=facts,
        )
        logits: Any = path.run(batch, bucket)
        return logits  # type: ignore[no-any-return]

    def written(self, row: int, length: int) -> Tensor:
        """Keys and values [layers, 2, K, D] of a row's token at a position."""
        pool, runner = self.runner.req_to_token_pool, self.runner
        layers = runner.model.attention_layers()
        page = int(pool.table(layers[0].kv_group)[row, length // 16])
        parts = [
            torch.stack(
                [part[page, length % 16] for part in layer.pool.key_value(layer.pool_layer)]
            )
            for layer in layers
        ]
        return torch.stack(parts)


def decode_facts(rows: int, mode: ForwardMode = ForwardMode.DECODE) -> BatchFacts:
    return BatchFacts(mode=mode, tokens=rows, live_tokens=rows, sequences=rows, max_length=64)


def assert_equal_to_eager(steps: Steps, path: CpuGraphPath, lengths: Sequence[int]) -> None:
    """Logits and what was written, within the tolerance of float32 on a CPU."""
    steps.fill_pool()
    expected = steps.step(steps.path(EagerPath), lengths)
    wrote = [steps.written(row + 1, length) for row, length in enumerate(lengths)]
    steps.fill_pool()
    found = steps.step(path, lengths)
    assert expected.isfinite().all()
    assert 0.2 < expected.std() < 5
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(steps.written(row + 1, length), wrote[row], atol=2e-4, rtol=0)
