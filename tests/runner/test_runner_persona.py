"""Who a runner is, from a checkpoint's config."""

import pytest
from plan_cases import FAMILIES, GEMMA3, LLAMA

from headrace.base.errors import CheckpointError, UnsupportedError
from headrace.config.persona import Coordinates, KvKind, Role
from headrace.runner.persona import persona_of


@pytest.mark.parametrize("family", FAMILIES)
def test_family_role_and_place(family: str) -> None:
    persona = persona_of(FAMILIES[family])
    assert persona.traits.family == family
    assert persona.role is Role.TARGET
    assert persona.coordinates == Coordinates()


def test_role_and_place_are_kept() -> None:
    place = Coordinates(tp_rank=1, tp_size=2)
    persona = persona_of(LLAMA, role=Role.DRAFT, coordinates=place)
    assert (persona.role, persona.coordinates) == (Role.DRAFT, place)


def test_window_layers_are_a_group_of_their_own() -> None:
    groups = persona_of(GEMMA3).traits.kv_groups
    assert {(group.kind, len(group.layers)) for group in groups} == {
        (KvKind.WINDOW, 5),
        (KvKind.FULL, 1),
    }


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, UnsupportedError, "MambaForCausalLM"),
        ({"quantization_config": {"quant_method": "awq"}}, UnsupportedError, "awq"),
        ({"rope_scaling": {"rope_type": "spiral"}}, UnsupportedError, "spiral"),
        ({"hidden_size": None}, CheckpointError, "hidden_size"),
    ],
)
def test_what_cannot_run_is_refused_by_name(changes, error, named: str) -> None:
    with pytest.raises(error, match=named):
        persona_of(LLAMA | changes)
