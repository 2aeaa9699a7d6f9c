"""torch_native against the float64 reference; NaN lies wherever no query may look."""

import pytest
import torch
from paged_batches import Case, make_scene

from headrace.attention.torch_native import TorchNativeBackend

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
LENGTHS = [1, 15, 16, 17, 200]
DECODE = [(length - 1, 1) for length in LENGTHS]
FRESH = [(0, length) for length in LENGTHS]
MIXED = [(0, 17), (199, 1), (16, 15), (0, 1), (31, 2), (5, 200), (64, 1)]
STEPS = {"decode": DECODE, "fresh": FRESH, "mixed": MIXED}


def check(case: Case, *, with_lse: bool = False) -> None:
    scene = make_scene(case)
    backend = scene.backend(TorchNativeBackend)
    backend.prepare_metadata(scene.batch)
    lse = torch.full((case.tokens, case.heads[0]), 7.0) if with_lse else None
    out = backend.forward(scene.q, scene.layer, scene.batch, lse=lse)
    tolerance = TOLERANCE[case.dtype]
    assert out.dtype == case.dtype
    assert out.isfinite().all()
    torch.testing.assert_close(
        out[scene.live].double(), scene.expected[scene.live], rtol=tolerance, atol=tolerance
    )
    if lse is not None:
        torch.testing.assert_close(
            lse[scene.live].double(), scene.expected_lse[scene.live], rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("window", [1, 16, None])
def test_page_sizes_and_windows(step: str, page_size: int, window: int | None) -> None:
    check(Case(rows=STEPS[step], decode=step == "decode", page_size=page_size, window=window))
