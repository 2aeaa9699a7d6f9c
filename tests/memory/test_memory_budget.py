"""The budget: whole numbers that add up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import CapacityError
from headrace.memory.budget import (
    cpu_spendable_bytes,
    gpu_spendable_bytes,
    plan_kv_tokens,
)


@given(
    free=st.integers(0, 10**12),
    fixed=st.dictionaries(st.sampled_from(["graphs", "rows", "logits"]), st.integers(0, 10**10)),
    per_token=st.integers(1, 10**6),
    page_size=st.integers(1, 128),
    cap=st.none() | st.integers(1, 10**7),
)
def test_the_pool_is_the_largest_that_fits(
    free: int, fixed: dict[str, int], per_token: int, page_size: int, cap: int | None
) -> None:
    spare = free - sum(fixed.values())
    page = per_token * page_size
    if spare < 2 * page:
        with pytest.raises(CapacityError):
            plan_kv_tokens(free, fixed, per_token, page_size, cap)
        return
    budget = plan_kv_tokens(free, fixed, per_token, page_size, cap)
    assert budget.tokens == (budget.pages - 1) * page_size >= page_size
    assert budget.bytes == budget.pages * page <= spare
    one_page_more_fits = budget.bytes + page <= spare
    reaches_cap = cap is not None and budget.tokens >= cap
    assert not one_page_more_fits or reaches_cap
    if cap is not None:
        assert budget.tokens < cap + page_size
    lines = budget.lines
    assert lines[0].bytes == sum(line.bytes for line in lines[1:])


def test_two_pages_fit_exactly_or_not_at_all() -> None:
    assert plan_kv_tokens(2 * 16 * 100 + 7, {"rows": 7}, 100, 16).tokens == 16
    with pytest.raises(CapacityError) as caught:
        plan_kv_tokens(2 * 16 * 100 + 6, {"rows": 7}, 100, 16)
    message = str(caught.value)
    for part in ("3,206 bytes may be spent", "rows 7", "take 3,200", "100 a token"):
        assert part in message
    assert "mem_fraction" in caught.value.remedy


def test_the_reason_says_what_set_the_size() -> None:
    assert plan_kv_tokens(10_000, {}, 10, 4, 100).reason == "capped at 100 tokens; 996 would fit"
    bytes_of_three = 3 * 2**20
    assert plan_kv_tokens(bytes_of_three, {}, 10, 4).reason == "3.0 MiB at 10 bytes a token"
    assert plan_kv_tokens(10_000, {}, 10, 4, 996).reason == "0.0 MiB at 10 bytes a token"


def test_what_is_asked_fits_or_is_refused() -> None:
    asked = plan_kv_tokens(10_000, {}, 10, 4, 993, asked=True)
    assert asked.tokens == 996  # the most that fits: 250 pages, one of them for padding
    with pytest.raises(CapacityError) as caught:
        plan_kv_tokens(10_000, {}, 10, 4, 997, asked=True)
    assert caught.value.what == "max_total_tokens 997 was asked and 996 tokens fit"
    assert "at most 996" in caught.value.remedy
    assert plan_kv_tokens(10_000, {}, 10, 4, 997).tokens == 996


def test_the_table_prints_every_part() -> None:
    lines = str(plan_kv_tokens(3 * 2**20, {"graphs": 2**20}, 1024, 16)).splitlines()
    assert [line.split("MiB")[0].split()[-1] for line in lines] == ["3.0", "1.0", "2.0", "0.0"]
    assert lines[2].endswith("2,032 tokens x 1,024 bytes, 127 + 1 pages of 16")


def test_a_gpu_leaves_its_fraction_of_the_whole_device_free() -> None:
    assert gpu_spendable_bytes(free_after_load=60, total=100, mem_fraction=0.9) == 50
    assert gpu_spendable_bytes(free_after_load=5, total=100, mem_fraction=0.9) == -5
    with pytest.raises(CapacityError, match="-5 bytes may be spent"):
        plan_kv_tokens(-5, {}, 1, 1)


def test_a_cpu_spends_a_share_of_what_is_available() -> None:
    assert cpu_spendable_bytes(available=1001, mem_fraction=0.5) == 500
