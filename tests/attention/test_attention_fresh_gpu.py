"""cuDNN's attention on a CUDA device: prompts of real size against float64."""

import pytest
import torch

from headrace.attention.cudnn_backend import CudnnBackend
from headrace.attention.torch_native import TorchNativeBackend
from headrace.testing.paged_batches import Case, check, make_scene, run

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, scope="module")
def _device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.mark.parametrize("kind", [CudnnBackend, TorchNativeBackend])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [[(0, 700)] * 3, [(0, 1025)], [(90, 1), (0, 600), (0, 600)]])
def test_long_prompts(kind: type, dtype: torch.dtype, rows: list[tuple[int, int]]) -> None:
    case = Case(rows=rows, heads=(8, 2), dims=(128, 128), page_size=64, dtype=dtype, device="cuda")
    check(case, kind)


def test_cudnn_is_what_runs() -> None:
    """Not one of the kernels behind it in the list."""
    case = Case(
        rows=[(0, 512)] * 2, heads=(8, 2), dims=(128, 128), dtype=torch.bfloat16, device="cuda"
    )
    scene = make_scene(case)
    backend = scene.backend(CudnnBackend)
    run(scene, backend)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run(scene, backend)
    names = [event.key for event in profile.key_averages()]
    assert any("cudnn" in name for name in names), names
