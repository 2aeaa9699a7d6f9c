"""Logits of tiny random models against transformers, and that every trait matters."""

from collections.abc import Callable

import pytest
import torch
from model_cases import BREAKAGES, CASES, Breakage
from model_driver import Driver
from reference_models import TOLERANCE, Reference, make_reference

DECODED = 20


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


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda b: f"{b.case}: {b.trait}")
def test_a_wrong_trait_shows(breakage: Breakage, reference: Callable[[str], Reference]) -> None:
    expected = reference(breakage.case)
    model = expected.broken(breakage.change(expected.traits()), breakage.length)
    driver = Driver(model, max_length=256, sequences=len(expected.prompts))
    assert expected.difference(driver.whole(*expected.prompts)) > 10 * TOLERANCE
