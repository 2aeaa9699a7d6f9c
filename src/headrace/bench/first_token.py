"""Run as `python -m headrace.bench.first_token`: from nothing to a first token, and told in JSON.

Reads one JSON object from standard input: `options` (fields of `EngineConfig`), `input_len`, and
`graphs`, whether to go on until every graph is captured. Prints one line after the first
token and one after the graphs; who reads them has the clock, so that the start of the interpreter
counts.
"""

import json
import sys
import time
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from headrace.base.decision import Decision
from headrace.base.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.runner.forward_paths import ForwardPaths


def main() -> int:
    asked = json.load(sys.stdin)
    try:
        _run(asked["options"], asked["input_len"], asked["graphs"])
    except HeadraceError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _run(options: dict[str, Any], input_len: int, graphs: bool) -> None:
    marks = [time.perf_counter()]
    from headrace.llm import LLM
    from headrace.request.sampling_params import SamplingParams

    marks.append(time.perf_counter())
    if isinstance(options.get("decode_graph"), list):
        options["decode_graph"] = tuple(options["decode_graph"])
    with LLM(**options) as llm:
        marks.append(time.perf_counter())
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        (result,) = llm.generate([[1] * input_len], params, use_tqdm=False)
        marks.append(time.perf_counter())
        output = result.outputs[0]
        if not output.token_ids:
            raise HeadraceError("The first step failed", why=output.message)
        explanation = llm.explain()
        names = ("import", "load and assemble", "first token")
        _tell(
            hardware=explanation.hardware.name,
            dtype=explanation.plan.dtype.value,
            phases={
                name: stop - start
                for name, (start, stop) in zip(names, pairwise(marks), strict=True)
            },
            kernels=_kernels(explanation.measured),
            parts=[[part.name, part.seconds, part.bytes] for part in explanation.startup],
        )
        if graphs:
            _tell(graphs=capture_all(llm.engine.worker.runner.paths))


def capture_all(paths: "ForwardPaths") -> int | None:
    """Capture every graph, but those with filters, which come at need; how many there are, `None`
    where nothing is captured."""
    graphs = [path for path in (paths.decode_graph, paths.prefill_graph) if path is not None]
    if not graphs:
        return None
    import torch

    with torch.inference_mode():
        paths.capture_all()
    torch.cuda.synchronize()
    return sum(len(path.prepare().seconds) for path in graphs)


def _kernels(measured: Iterable[Decision[Any]]) -> str:
    """How many kernels were compiled ahead, and how long that took; empty where none are."""
    return next((each.reason for each in measured if each.name == "kernels"), "")


def _tell(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    sys.exit(main())
