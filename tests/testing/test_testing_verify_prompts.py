"""Prompts of one's own: what they cannot show is left out with its reason, and never fails."""

from collections.abc import Sequence
from typing import Any

import pytest

from headrace.base.errors import RequestError
from headrace.config.engine_config import EngineConfig
from headrace.testing.verify import verify
from headrace.testing.verify_report import VerifyReport
from headrace.testing.workload import OwnPrompt


def run(model: str, prompts: Sequence[Any]) -> VerifyReport:
    config = EngineConfig(
        model=model,
        load_format="dummy",
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        cpu_graph="off",
        max_model_len=256,  # far more than the prompts: the pool must hold as much
        page_size=16,
        chunked_prefill_size=16,
        enable_prefix_cache=False,
        enable_overlap=False,
    )
    return verify(config, prompts=prompts)


@pytest.mark.parametrize(
    ("prompts", "refused"),
    [
        ([[5]], set()),
        ([[6, 7], [5] * 160], set()),  # read by itself for longer than the other one decodes
        ([OwnPrompt(prompt=[5], max_tokens=2)], {"retraction"}),
        ([OwnPrompt(prompt=[5], max_tokens=1)], {"retraction", "decode_graph", "cpu_graph"}),
    ],
    ids=["alone", "one after the other", "two tokens", "one token"],
)
def test_prompts_that_hardly_meet(model: str, prompts: Sequence[Any], refused: set[str]) -> None:
    report = run(model, prompts)
    assert report.passed, str(report)
    retracted = {each.configuration.retraction for each in report.results}
    assert retracted == ({False} if "retraction" in refused else {False, True})
    told = {each.subject for each in report.refused if "no prompt makes more than" in each.reason}
    assert told == refused


def test_a_prompt_that_is_none_is_named(model: str) -> None:
    with pytest.raises(RequestError, match="Prompt 1: The prompt holds token id 9999"):
        run(model, [[1], [9999]])
