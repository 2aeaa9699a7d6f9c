"""`reinit_attention_backend`: layers and paths follow, and a running sequence goes on."""

from pathlib import Path

from tiny_engine import make_engine, run_all

from headrace.attention.backend import AttentionBackend
from headrace.request.sampling_params import SamplingParams
from headrace.runner.model_runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def test_backends_are_made_anew_between_two_steps(gemma_folder: Path) -> None:
    engine = make_engine(gemma_folder)
    (expected,) = run_all(engine, [[5, 6, 7]], [GREEDY])
    runner = engine.scheduler.worker.runner
    backends, paths = runner.backends, runner.paths
    handle = engine.add([5, 6, 7], GREEDY)
    while handle.output_tokens < 4:
        engine.step()
    engine.settle()
    runner.reinit_attention_backend()
    while not handle.is_finished:
        engine.step()
    assert runner.paths is not paths
    assert backends.keys() == runner.backends.keys()
    assert not {id(each) for each in backends.values()} & {id(each) for each in bound(runner)}
    now = {id(each) for each in runner.backends.values()}
    assert {id(each) for each in bound(runner)} == now
    assert handle.output().outputs[0].token_ids == expected.outputs[0].token_ids


def bound(runner: ModelRunner) -> list[AttentionBackend]:
    return [layer.backend for layer in runner.model.attention_layers()]
