"""Run as `python -m headrace.bench.first_token`: from nothing to a first token, and told in JSON.

Reads one JSON object from standard input: `options` (fields of `EngineConfig`), `input_len`, and
`graphs`, whether to go on until every decode graph is captured. Prints one line after the first
token and one after the graphs; who reads them has the clock, so that the start of the interpreter
counts.
"""

import json
import sys
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from headrace.base.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.runner.model_runner import ModelRunner


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
            parts=[[part.name, part.seconds, part.bytes] for part in explanation.startup],
        )
        if graphs:
            _tell(graphs=capture_all(llm.engine.worker.runner))


def capture_all(runner: "ModelRunner") -> int | None:
    """Capture every decode graph; how many there are, `None` where nothing is captured."""
    path = runner.decode_graph
    if path is None:
        return None
    import torch

    with torch.inference_mode():
        path.capture_all()
    torch.cuda.synchronize()
    return len(path.prepare().seconds)


def _tell(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    sys.exit(main())
