"""The bench of attention backends: its steps are right, wrong results are not timed."""

from collections.abc import Callable, Sequence

import pytest
import torch

from headrace.attention.torch_native import TorchNativeBackend
from headrace.bench.kernels import attention_backends as bench
from headrace.bench.kernels.attention_backends import Case


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(calls: Sequence[Callable[[], object]]) -> float:
        calls[0]()
        return 10.0

    monkeypatch.setattr(bench, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(bench, "time_calls", once)
    monkeypatch.setattr(bench, "copies_of", lambda size: 2)


@pytest.mark.parametrize("decode", [True, False])
def test_a_case_is_checked_and_timed(decode: bool) -> None:
    assert bench.measure("torch_native", Case(rows=2, length=70, decode=decode)) == 10.0


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = TorchNativeBackend.forward
    calls = 0

    def wrong_later(self: TorchNativeBackend, *args: object, **given: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return right(self, *args, **given) * (1.1 if calls > 1 else 1)  # type: ignore[arg-type]

    monkeypatch.setattr(TorchNativeBackend, "forward", wrong_later)
    with pytest.raises(ArithmeticError, match="off by"):
        bench.measure("torch_native", Case(rows=1, length=5, decode=True))


def test_rates() -> None:
    decode = Case(rows=32, length=1024, decode=True, graph=True)
    assert str(decode) == "decode graph 32 x 1024"
    assert bench.rate(decode, 134.217728) == "1.00 TB/s"
    prompts = Case(rows=8, length=1024, decode=False)
    assert bench.rate(prompts, 68719.476736) == "1 TFLOP/s"
