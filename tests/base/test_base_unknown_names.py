"""A keyword that a class does not have is answered with what was meant."""

import copy
import inspect
import pickle
from collections.abc import Collection
from dataclasses import dataclass, replace

import pytest

from headrace.base.errors import ConfigError, UnknownOptionError
from headrace.base.unknown_names import (
    OtherWords,
    arguments_answered,
    attributes_answered,
    names_answered,
)

WORDS = OtherWords(
    renamed={"max_num_seqs": "rows"},
    switches={"enforce_eager": {"graph": "off", "pages": 1}, "enable_metrics": {}},
    advice={"quantization": "weights are as they are", "no_lora": "there is none"},
    families={"lora": "it has none"},
)


@names_answered(WORDS, "option of the mill", UnknownOptionError)
@dataclass(frozen=True, slots=True, kw_only=True)
class Mill:
    rows: int = 1
    pages: int = 2
    graph: str = "auto"


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("max_num_seqs", "use rows"),
        ("enforce_eager", "use graph='off', pages=1"),
        ("enable_metrics", "it is always so; leave it out"),
        ("quantization", "weights are as they are"),
        ("max_lora_rank", "it has none"),
        ("--lora-paths", "it has none"),
        ("no_lora", "there is none"),
        ("explorable", ""),
        ("pagse", "did you mean pages?"),
        ("quantisation", "as for quantization: weights are as they are"),
        ("enforc_eager", "as for enforce_eager: use graph='off', pages=1"),
        ("colour", ""),
        ("pages" * 10**6, ""),
    ],
)
def test_answers(name: str, answer: str) -> None:
    known: Collection[str] = ("rows", "pages", "graph")
    assert WORDS.answer(name, known) == answer


@pytest.mark.parametrize("kind", [UnknownOptionError, ConfigError, ValueError, TypeError])
def test_an_unknown_keyword_is_our_error_and_pythons(kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        Mill(pagse=3)  # type: ignore[call-arg]
    assert str(caught.value) == "Unknown option of the mill: pagse (did you mean pages?)."


def test_all_unknown_keywords_are_told_at_once() -> None:
    with pytest.raises(UnknownOptionError) as caught:
        Mill(quantization="fp8", rows=3, colour="red")  # type: ignore[call-arg]
    assert str(caught.value) == (
        "Unknown options of the mill: quantization (weights are as they are), colour. "
        "There are rows, pages, graph."
    )


def test_the_class_is_as_it_was_otherwise() -> None:
    assert list(inspect.signature(Mill).parameters) == ["rows", "pages", "graph"]
    assert replace(Mill(rows=5), pages=7) == Mill(rows=5, pages=7)
    with pytest.raises(TypeError, match="positional"):
        Mill(1)  # type: ignore[misc]


@attributes_answered(WORDS)
@dataclass(frozen=True, slots=True, kw_only=True)
class Flour:
    grams: int = 1

    @arguments_answered(WORDS, "argument of sift", UnknownOptionError)
    def sift(self, mesh: int, *, rows: int = 2) -> int:
        return self.grams * mesh * rows


def test_an_unknown_argument_of_a_method_is_answered() -> None:
    assert Flour().sift(3) == Flour().sift(mesh=3, rows=2) == 6
    assert list(inspect.signature(Flour.sift).parameters) == ["self", "mesh", "rows"]
    with pytest.raises(UnknownOptionError, match=r"^Unknown argument of sift: max_num_seqs \(use"):
        Flour().sift(3, max_num_seqs=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="missing 1 required"):
        Flour().sift()  # type: ignore[call-arg]


def test_an_unknown_attribute_is_answered_and_stays_an_attribute_error() -> None:
    flour = Flour(grams=2)
    with pytest.raises(AttributeError) as caught:
        flour.quantization  # type: ignore[attr-defined]  # noqa: B018
    assert str(caught.value) == "Flour has no attribute quantization (weights are as they are)"
    assert (caught.value.name, caught.value.obj) == ("quantization", flour)
    with pytest.raises(AttributeError, match=r"^Flour has no attribute colour$"):
        flour.colour  # type: ignore[attr-defined]  # noqa: B018
    assert pickle.loads(pickle.dumps(flour)) == copy.deepcopy(flour) == flour
