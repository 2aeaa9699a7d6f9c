"""lm-eval: perplexity and accuracy over HTTP are those of `--model hf` on the same weights."""

import json
import math
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from random import Random

from served import serving
from suite import Case, Outcome, Suite, Workplace
from tiny_checkpoint import CONTEXT, write_tiny_llama

# Ten times closer than four digits, and blind to where rounding falls.
RELATIVE_DIFFERENCE = 1e-5
# lm-eval cuts a text that is longer than max_length into windows of max_length tokens for hf, but
# of two fewer for an API (a token to be generated, and one before the first): the same windows.
HF_LENGTH, API_LENGTH = CONTEXT - 2, CONTEXT
SIDES = ("hf", "local-completions")
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
TEXT = """
Water that runs downhill can do work on its way. A mill takes a part of the stream, leads it along
the slope in a channel that falls less than the river does, and lets it drop on the wheel. The
channel before the wheel is the headrace; what leaves below it is the tailrace. Between the two
stands a gate, and whoever minds the gate decides how fast the stones turn. In a dry summer the pond
is filled at night. In winter ice has to be broken before the first sack is ground. Old mills often
kept several wheels, each for a kind of work: one for grain, one for the saw, one for the hammer. 水
"""
MULTIPLE_CHOICE = """
task: tiny_choice
dataset_path: json
dataset_kwargs:
  data_files: {test: CHOICES}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
metadata: {version: 1}
"""
PERPLEXITY = """
task: tiny_perplexity
dataset_path: json
dataset_kwargs:
  data_files: {test: TEXTS}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: word_perplexity}
  - {metric: byte_perplexity}
  - {metric: bits_per_byte}
metadata: {version: 1}
"""


def words(random: Random, count: int) -> str:
    return " ".join(random.choices(TEXT.split(), k=count))


def questions(count: int) -> Iterator[dict[str, object]]:
    """Questions of many lengths, with four answers of different lengths."""
    random = Random(1)
    for _ in range(count):
        choices = [f" {words(random, random.randint(1, 6))}" for _ in range(4)]
        question = words(random, random.randint(2, 40))
        yield {"question": question, "choices": choices, "answer": random.randrange(4)}


def texts(count: int) -> Iterator[dict[str, object]]:
    """Some are longer than the context: those are scored in windows."""
    random = Random(2)
    for index in range(count):
        yield {"text": words(random, 600 if index == 0 else random.randint(5, 120))}


def write_tasks(folder: Path, *, fast: bool) -> Path:
    folder.mkdir(exist_ok=True)
    data = {
        "CHOICES": ("tiny_choice", MULTIPLE_CHOICE, questions(10 if fast else 100)),
        "TEXTS": ("tiny_perplexity", PERPLEXITY, texts(3 if fast else 20)),
    }
    for placeholder, (name, task, rows) in data.items():
        lines = folder / f"{name}.jsonl"
        lines.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        (folder / f"{name}.yaml").write_text(task.replace(placeholder, str(lines)))
    return folder


def evaluate(place: Workplace, side: str, model_args: dict[str, object]) -> dict[str, float]:
    """`task metric` -> value."""
    out = place.folder / side
    for old in out.rglob("results_*.json"):
        old.unlink()
    command = [
        "lm_eval",
        f"--model={side}",
        f"--model_args={','.join(f'{key}={value}' for key, value in model_args.items())}",
        "--tasks=tiny_choice,tiny_perplexity",
        f"--include_path={place.folder / 'tasks'}",
        f"--output_path={out}",
        "--batch_size=1" if side == "hf" else "--batch_size=4",
    ]
    if side == "hf":
        command.append("--device=cpu")
    log = place.folder / f"{side}.log"
    status = place.environment.run(
        command,
        log=log,
        seconds=600,
        cwd=place.folder,
        variables=OFFLINE | {"HF_HOME": str(place.folder / "cache")},
    )
    if status:
        raise RuntimeError(f"lm_eval --model {side} ended with status {status}; see {log}")
    (report,) = out.rglob("results_*.json")
    return {
        f"{task} {metric.removesuffix(',none')}": value
        for task, metrics in json.loads(report.read_text())["results"].items()
        for metric, value in metrics.items()
        if metric.endswith(",none") and isinstance(value, float) and "stderr" not in metric
    }


def run(place: Workplace) -> list[Case]:
    model = write_tiny_llama(place.folder / "tiny")
    write_tasks(place.folder / "tasks", fast=place.fast)
    own = {"pretrained": model, "dtype": "float32", "max_length": HF_LENGTH}
    reference = evaluate(place, "hf", own)
    flags = ("--max-model-len", str(CONTEXT))
    with serving(model, *flags, log=place.folder / "server.log") as url:
        own = {
            "model": "default",
            "base_url": f"{url}/v1/completions",
            "tokenizer_backend": "huggingface",
            "tokenizer": model,
            "num_concurrent": 4,
            "max_length": API_LENGTH,
        }
        served = evaluate(place, "local-completions", own)
    return [compare(name, reference.get(name), served.get(name)) for name in reference | served]


def compare(name: str, reference: float | None, served: float | None) -> Case:
    same = (
        reference is not None
        and served is not None
        and math.isclose(reference, served, rel_tol=RELATIVE_DIFFERENCE)
    )
    detail = f"hf {reference}, over HTTP {served}"
    return Case(name=name, outcome=Outcome.PASSED if same else Outcome.FAILED, detail=detail)


SUITE = Suite(
    name="lm-eval",
    what="perplexity and accuracy over HTTP are those of hf, to 4 digits",
    requirements=(
        f"torch=={version('torch').partition('+')[0]}",
        f"transformers=={version('transformers')}",
        "lm-eval[api]==0.4.13",
        "accelerate>=1.0",
    ),
    run=run,
)
