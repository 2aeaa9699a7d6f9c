"""guidellm: load with streams; every request has to end well, with the counts it asked for."""

import json
from importlib.metadata import version
from typing import Any

from served import serving
from suite import Case, Outcome, Suite, Workplace
from tiny_checkpoint import write_tiny_llama

PROMPT_TOKENS, OUTPUT_TOKENS = 32, 8
PROFILES = {
    "synchronous": "kind=synchronous",
    "concurrent": "kind=concurrent,streams=4",
    "constant": "kind=constant,rate=10",
}


def run(place: Workplace) -> list[Case]:
    model = write_tiny_llama(place.folder / "tiny")
    requests = 6 if place.fast else 40
    cases = []
    with serving(model, log=place.folder / "server.log") as url:
        for name, profile in PROFILES.items():
            report = place.folder / f"{name}.json"
            report.unlink(missing_ok=True)
            log = place.folder / f"{name}.log"
            status = place.environment.run(
                [
                    "guidellm",
                    "run",
                    f"--backend=kind=openai_http,target={url},model=default",
                    f"--profile={profile}",
                    f"--constraint=kind=max_requests,count={requests}",
                    f"--tokenizer=kind=hf_auto,model={model}",
                    "--data=kind=synthetic_text,"
                    f"prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
                    f"--output=kind=json,path={report}",
                    "--disable-progress",
                ],
                log=log,
                seconds=300,
                cwd=place.folder,
                variables={"HF_HUB_OFFLINE": "1", "HF_HOME": str(place.folder / "cache")},
            )
            if status or not report.exists():
                detail = f"guidellm ended with status {status}; see {log}"
                cases.append(Case(name=name, outcome=Outcome.FAILED, detail=detail))
                continue
            for benchmark in json.loads(report.read_text())["benchmarks"]:
                for what, holds in checks(benchmark, requests).items():
                    outcome = Outcome.PASSED if holds else Outcome.FAILED
                    cases.append(Case(name=f"{name}: {what}", outcome=outcome, detail=str(report)))
    return cases


def checks(benchmark: dict[str, Any], requests: int) -> dict[str, bool]:
    """What a load tester's report has to show of a server without fault."""
    ended = benchmark["requests"]["successful"]
    return {
        "all requests end well": [len(ended), benchmark["metrics"]["request_totals"]["errored"]]
        == [requests, 0],
        "every answer has the tokens asked for": all(
            each["output_tokens"] == OUTPUT_TOKENS for each in ended
        ),
        "usage counts the whole prompt": all(
            each["prompt_tokens"] >= PROMPT_TOKENS for each in ended
        ),
        "answers have text": all(each["output"] for each in ended),
        "answers have ids of their own": len({each["response_id"] for each in ended}) == requests,
        "first tokens come before the last": all(
            each["time_to_first_token_ms"] / 1000 < each["request_latency"] for each in ended
        ),
        # A busy machine may join the pieces of some.
        "most answers come in several pieces": sum(
            each["info"]["timings"]["token_iterations"] > 1 for each in ended
        )
        > requests / 2,
    }


SUITE = Suite(
    name="guidellm",
    what="load with streams, every count right",
    requirements=(f"torch=={version('torch').partition('+')[0]}", "guidellm==0.8.1"),
    run=run,
)
