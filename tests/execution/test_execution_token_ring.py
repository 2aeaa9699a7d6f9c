"""What a step sends to the host arrives, and what lies side by side by one copy."""

import pytest
import torch

from headrace.execution import token_ring
from headrace.execution.token_ring import TokenRing, host_copies
from headrace.kernels.one_storage import one_storage


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each copy."""
    sizes: list[int] = []
    copy = token_ring._copy

    def counted(tensor: torch.Tensor, pinned: bool) -> torch.Tensor:
        sizes.append(tensor.nbytes)
        return copy(tensor, pinned)

    monkeypatch.setattr(token_ring, "_copy", counted)
    return sizes


def a_step() -> dict[str, torch.Tensor]:
    """As behind a graph: fronts of static buffers, logprobs as columns, and a large tensor."""
    tokens, finite = one_storage(
        torch.device("cpu"), (torch.int64, (50,)), (torch.bool, (50,)), zeroed=True
    )
    tokens.copy_(torch.arange(50))
    finite[::3] = True
    ids, values = one_storage(
        torch.device("cpu"), (torch.int64, (3, 7)), (torch.float32, (3, 7)), zeroed=True
    )
    ids.copy_(torch.arange(21).view(3, 7))
    values.copy_(torch.arange(21).view(3, 7) / 8)
    hidden = torch.arange(100_000.0).view(100, 1000)
    return {
        "tokens": tokens[:5],
        "finite": finite[:5],
        "rank": ids[:, 0],
        "top_ids": ids[:, 2:],
        "top_values": values[:, 2:],
        "alone": torch.arange(4.0),
        "hidden": hidden[3:, ::2],
        "empty": torch.empty(0, 3),
    }


def test_tensors_arrive_by_one_copy_of_each_small_storage(copied: list[int]) -> None:
    step = a_step()
    host = host_copies(step, pinned=False)
    assert list(host) == list(step)
    for name, tensor in step.items():
        assert host[name].dtype == tensor.dtype
        assert torch.equal(host[name], tensor), name
        if tensor.numel():
            assert host[name].untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
    assert copied == [
        *(400 + 64, 176 + 96, 16),
        *(97 * 500 * 4, 0),
    ], "static buffers, logprobs, the single one; of large storages only what was asked"


def test_the_next_step_does_not_show_in_what_was_sent() -> None:
    step = a_step()
    host = host_copies(step, pinned=False)
    step["tokens"].fill_(77)
    assert host["tokens"].tolist() == [0, 1, 2, 3, 4]


def test_side_by_side_tensors_begin_where_kernels_like_it() -> None:
    parts = one_storage(
        torch.device("cpu"), (torch.bool, (3,)), (torch.int64, (2, 2)), (torch.float32, (0, 4))
    )
    base = parts[0].data_ptr()
    assert [part.data_ptr() - base for part in parts[:2]] == [0, 16]
    assert [tuple(part.shape) for part in parts] == [(3,), (2, 2), (0, 4)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_sends_without_making_the_host_wait(copied: list[int]) -> None:
    tokens, finite = one_storage(
        torch.device("cuda"), (torch.int64, (9,)), (torch.bool, (9,)), zeroed=True
    )
    tokens.fill_(5)
    torch.cuda.set_sync_debug_mode("error")
    try:
        flight = TokenRing(tokens.device).send({"tokens": tokens[:2], "finite": finite[:2]})
    finally:
        torch.cuda.set_sync_debug_mode("default")
    host = flight.wait()
    assert (host["tokens"].tolist(), host["finite"].tolist()) == ([5, 5], [False, False])
    assert host["tokens"].untyped_storage().is_pinned("cuda")
    assert len(copied) == 1
