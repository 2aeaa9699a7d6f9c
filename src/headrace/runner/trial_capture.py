"""What graphs will take, measured before the KV pool is sized."""

from headrace.base.decision import Decision
from headrace.runner.forward_paths import has_graphs
from headrace.runner.model_runner import ModelRunner


def trial_capture(runner: ModelRunner, *, progress: bool = False) -> dict[str, int]:
    """Bytes that graphs take, by line of the budget, measured over a pool of page 0 alone.

    What is captured is thrown away: graphs that serve hold the addresses of the real pool. What is
    compiled for it, and for all other steps, stays.

    Args:
        runner: with its model loaded. progress: a bar while kernels are compiled.
    """
    if not has_graphs(runner.plan):
        return {}
    runner.make_pools(1)
    runner.init_attention_backend()
    runner.init_forward_paths()
    _compile_kernels(runner, progress=progress)
    with runner.part("trial capture"):
        reserves = runner.paths.trial()
    runner.drop_pools()
    runner.measured += reserves.values()
    return {title: reserve.value for title, reserve in reserves.items()}


def _compile_kernels(runner: ModelRunner, *, progress: bool) -> None:
    from headrace.runner.dry_steps import compile_kernels  # needs Triton, as graphs do

    with runner.part("kernels"):
        kernels = compile_kernels(
            runner.paths,
            runner.step_sampler.kernels,
            runner.plan,
            runner.model,
            runner.device,
            progress=progress,
        )
    runner.measured.append(
        Decision(name="kernels", value=kernels.count, reason=f"measured: {kernels}")
    )
