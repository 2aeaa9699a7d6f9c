"""Logits of tiny random models against transformers, and that every trait matters."""

from collections.abc import Callable

import pytest
import torch
from model_cases import BREAKAGES, CASES, Breakage
from model_driver import Driver
from reference_models import TOLERANCE, Reference, make_reference

from headrace.layers.weight_formats import WEIGHT_FORMATS, choose_weight_format
from headrace.layers.weights import finish_weights

CPU = torch.device("cpu")

DECODED, GREEDY_STEPS = 20, 64


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    made: dict[str, Reference] = {}

    def of(name: str) -> Reference:
        if name not in made:
            made[name] = make_reference(CASES[name], tmp_path_factory.mktemp(name))
        return made[name]

    return of


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str, reference: Callable[[str], Reference]) -> None:
    """All prompts in one batch: whole, and with the last tokens decoded one by one."""
    expected = reference(name)
    deviation = torch.cat(expected.logits).std().item()
    assert 0.5 < deviation < 2, "the tolerance is meant for logits of this size"
    driver = Driver(expected.ours(), max_length=256, sequences=len(expected.prompts))
    assert expected.difference(driver.whole(*expected.prompts)) <= TOLERANCE
    decoded = driver.decoded(*expected.prompts, tail=DECODED)
    assert expected.difference(decoded) <= TOLERANCE


@pytest.mark.parametrize("name", [name for name in CASES if "within" not in name])
def test_greedy_tokens_are_those_of_transformers(
    name: str, reference: Callable[[str], Reference]
) -> None:
    """64 tokens chosen step by step; transformers reads the result and would choose the same."""
    expected = reference(name)
    driver = Driver(expected.ours(), max_length=256)
    tokens = list(expected.prompts[3])
    first = len(tokens)
    (logits,) = driver.whole(tokens)
    for _ in range(GREEDY_STEPS):
        tokens.append(int(logits[-1].argmax()))
        (logits,) = driver.step({0: tokens[-1:]}, decode=True)
    theirs = expected.run(tokens)[first - 1 : -1]  # [GREEDY_STEPS, V]
    chosen = torch.tensor(tokens[first:])
    lost = theirs.max(-1).values - theirs.gather(1, chosen[:, None])[:, 0]
    assert lost.max().item() <= 2 * TOLERANCE, "another token was better by more than an error"


@pytest.mark.parametrize("name", ["llama-biased", "qwen3", "gemma3"])
@pytest.mark.parametrize("format_name", WEIGHT_FORMATS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, TOLERANCE), (torch.bfloat16, 0.2), (torch.float16, 0.05)],
    ids=str,
)
def test_dtypes_and_weight_formats(
    name: str,
    format_name: str,
    dtype: torch.dtype,
    tolerance: float,
    reference: Callable[[str], Reference],
) -> None:
    if format_name == "onednn" and choose_weight_format(CPU, dtype).value != "onednn":
        pytest.skip(f"this CPU has no onednn format of {dtype}")
    expected = reference(name)
    model = expected.ours(dtype, WEIGHT_FORMATS[format_name])
    finish_weights(model)
    driver = Driver(model, max_length=256, sequences=len(expected.prompts))
    for logits in (
        driver.whole(*expected.prompts),
        driver.decoded(*expected.prompts, tail=DECODED),
    ):
        assert all(part.dtype == torch.float32 for part in logits)
        assert expected.difference(logits) <= tolerance


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "gemma3"])
@pytest.mark.parametrize("format_name", WEIGHT_FORMATS)
def test_a_step_without_tokens_runs(
    name: str, format_name: str, reference: Callable[[str], Reference]
) -> None:
    """An idle rank joins the others with nothing to do."""
    model = reference(name).ours(weight_format=WEIGHT_FORMATS[format_name])
    finish_weights(model)
    driver = Driver(model, max_length=256)
    driver.whole([1, 2, 3])
    idle, none = driver.idle(), torch.empty(0, dtype=torch.int64)
    with torch.inference_mode():
        hidden = model(none, none, idle)
        assert hidden.shape == (0, 60)
        assert model.compute_logits(hidden).shape == (0, 128)


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda b: f"{b.case}: {b.trait}")
def test_a_wrong_trait_shows(breakage: Breakage, reference: Callable[[str], Reference]) -> None:
    expected = reference(breakage.case)
    model = expected.broken(breakage.change(expected.traits()), breakage.length)
    driver = Driver(model, max_length=256, sequences=len(expected.prompts))
    assert expected.difference(driver.whole(*expected.prompts)) > 10 * TOLERANCE
