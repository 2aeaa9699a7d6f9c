"""The backend of docs/add-a-backend.md is complete: its text runs, serves a model and conforms."""

import json
import re
from pathlib import Path

import pytest

from headrace import LLM, SamplingParams
from headrace.attention.registry import ATTENTION_BACKENDS
from headrace.base.errors import UnsupportedError
from headrace.testing.attention import check_attention_backend

PAGE = Path(__file__).parents[2] / "docs" / "add-a-backend.md"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "eos_token_id": 2,
}
PROMPTS = [[5, 6, 7], list(range(3, 40)), [9]]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture
def naive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first Python text of the page, run."""
    monkeypatch.setattr(ATTENTION_BACKENDS, "_entries", dict(ATTENTION_BACKENDS._entries))
    source = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)[0]
    exec(compile(source, str(PAGE), "exec"), {"__name__": "add_a_backend"})


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def answers(model: str, backend: str, **options: object) -> list[list[int]]:
    settings = {"load_format": "dummy", "device": "cpu", "chunked_prefill_size": 16, **options}
    with LLM(model, attention_backend=backend, **settings) as llm:
        assert llm.explain().plan.decode_attention.value == backend
        results = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        return [result.outputs[0].token_ids for result in results]


@pytest.mark.usefixtures("naive")
def test_it_serves_a_model(model: str) -> None:
    assert answers(model, "naive") == answers(model, "torch_native")
    with pytest.raises(UnsupportedError, match="no kernel for bfloat16"):
        answers(model, "naive", dtype="bfloat16")


@pytest.mark.usefixtures("naive")
def test_it_keeps_its_claims() -> None:
    report = check_attention_backend("naive", "cpu", thorough=False)
    report.check()
    assert {"ended rows"} <= {each.subject for each in report.findings if each.verdict == "ok"}
