"""How the parts of an error are joined."""

import pytest

from headrace.base.errors import ConfigError


@pytest.mark.parametrize(
    ("parts", "shown"),
    [
        (("It broke", "the reason", "mend it"), "It broke. The reason. Mend it."),
        (("page_size is 3", "", "Use one of: 1, 2"), "page_size is 3. Use one of: 1, 2."),
        (("A", "max_tokens is 5 (so)", "B!"), "A. max_tokens is 5 (so). B!"),
        (("A", "", "pip install 'headrace[cuda]'"), "A. pip install 'headrace[cuda]'."),
        (("A", "triton: does not run on cpu", ""), "A. triton: does not run on cpu."),
        (("A", "it's so", ""), "A. It's so."),
        (("A", "  ", "B."), "A. B."),
    ],
)
def test_sentences_begin_large_and_end_with_a_stop(parts: tuple[str, str, str], shown: str) -> None:
    what, why, remedy = parts
    error = ConfigError(what, why=why, remedy=remedy)
    assert str(error) == shown
    assert (error.what, error.why, error.remedy) == parts
