"""Structured output of random weights: what ends with "stop" has its form, whatever runs beside."""

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import jsonschema
import pytest
import torch
from structured_schemas import bounded_schema
from tiny_engine import EOS
from tiny_llm import PRINTABLE, assert_nothing_is_held, ids, joined, make_llm, one, tokens

from headrace import LLM, SamplingParams, StructuredOutput
from headrace.base.errors import RequestError
from headrace.engine.outputs import CompletionOutput
from headrace.request.outcome import OF_REQUEST
from headrace.sampling.grammar import xgrammar_backend

PLAIN = SamplingParams(temperature=1.0, seed=11, max_tokens=24, ignore_eos=True)
AGE = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 120}}}
AGE_FORM = StructuredOutput(json_schema=AGE | {"required": ["age"]})


@pytest.fixture(scope="module", params=[False, True], ids=["in turn", "overlap"])
def llm(request: pytest.FixtureRequest, folder: Path) -> Iterator[LLM]:
    with make_llm(folder, enable_overlap=request.param, max_model_len=512) as made:
        yield made


def params(seed: int = 0, **options: Any) -> SamplingParams:
    form = StructuredOutput(**{name: options.pop(name) for name in FORMS if name in options})
    return SamplingParams(**({"seed": seed, "max_tokens": 440} | options), structured=form)


FORMS = ("json_schema", "json_object", "regex", "grammar", "choice", "structural_tag",
         "any_whitespace")  # fmt: skip


def printable(seed: int) -> list[int]:
    """A prompt that does not end within a character: the answer would end it, and show that."""
    return [token % len(PRINTABLE) for token in ids(seed, 1 + seed % 9)]


def check_schemas(llm: LLM, seeds: range) -> list[CompletionOutput]:
    schemas = [bounded_schema(seed) for seed in seeds]
    prompts = [printable(seed) for seed in seeds]
    each = [params(seed, json_schema=schema) for seed, schema in zip(seeds, schemas, strict=True)]
    answers = [result.outputs[0] for result in llm.generate(prompts, each, use_tqdm=False)]
    for answer, schema in zip(answers, schemas, strict=True):
        assert (answer.finish_reason, answer.stop_reason, answer.message) == ("stop", None, "")
        assert answer.token_ids[-1] == EOS
        jsonschema.validate(json.loads(answer.text), schema)
    return answers


def test_answers_validate_and_stop(llm: LLM) -> None:
    check_schemas(llm, range(12))
    assert_nothing_is_held(llm)


@pytest.mark.slow
def test_two_hundred_schemas(llm: LLM) -> None:
    whole = check_schemas(llm, range(200))
    for seed in range(200):
        form = params(seed, json_schema=bounded_schema(seed))
        text, token_ids, _ = joined(list(llm.stream(printable(seed), form)))
        assert (text, token_ids) == (whole[seed].text, whole[seed].token_ids)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
def test_every_kind(llm: LLM, temperature: float) -> None:
    expression = "(?:[a-c]{1,3}-){2}\\d{2}"
    cases = [
        params(regex=expression, temperature=temperature),
        params(choice=["Paris", "Paris, France", 'Lon"don\n'], temperature=temperature),
        params(grammar='root ::= "<" [a-z]{0,5} ">" | "none"', temperature=temperature),
        params(json_schema=AGE_FORM.text, any_whitespace=False, temperature=temperature),
    ]
    prompts = [ids(place, 5) for place in range(len(cases))]
    texts = [
        (result.outputs[0].finish_reason, result.outputs[0].text)
        for result in llm.generate(prompts, cases, use_tqdm=False)
    ]
    assert [reason for reason, _ in texts] == ["stop"] * len(cases)
    expressed, chosen, written, schema = (text for _, text in texts)
    assert re.fullmatch(expression, expressed)
    assert chosen in ("Paris", "Paris, France", 'Lon"don\n')
    assert re.fullmatch("<[a-z]{0,5}>|none", written)
    jsonschema.validate(json.loads(schema), AGE | {"required": ["age"]})


def test_any_object_and_free_layout(llm: LLM) -> None:
    for seed in range(4):
        form = params(seed, json_object=True, any_whitespace=seed % 2 == 1, max_tokens=80)
        answer = one(llm, "a", form)
        if answer.finish_reason == "stop":
            assert isinstance(json.loads(answer.text), dict)
        else:
            assert answer.finish_reason == "length"
            assert len(answer.token_ids) == 80


def test_streamed_and_not_are_the_same(llm: LLM) -> None:
    for seed in range(3):
        form = params(seed, json_schema=bounded_schema(seed), logprobs=1)
        answer = one(llm, ids(seed, 7), form)
        pieces = list(llm.stream(ids(seed, 7), form))
        assert joined(pieces) == (answer.text, answer.token_ids, answer.logprobs)
        assert pieces[-1].finish_reason == "stop"


def mixed() -> tuple[list[list[int]], list[SamplingParams]]:
    every = [
        PLAIN,
        params(1, json_schema=bounded_schema(1)),
        replace(PLAIN, temperature=0.0, max_tokens=9),
        params(2, regex="[ab]{8,30}", logit_bias={97: 2.0}, repetition_penalty=1.3),
        params(3, choice=["abc", "abd"], temperature=0.0),
        replace(PLAIN, bad_words=["a", "bc"], min_tokens=3),
        params(4, json_schema=bounded_schema(4), top_k=5, bad_words=["1", "ab"]),
    ]
    return [ids(place, 3 + 7 * place) for place in range(len(every))], every


def test_the_same_alone_and_in_a_batch(llm: LLM) -> None:
    prompts, every = mixed()
    together = tokens(llm, prompts, every)
    alone = [tokens(llm, [prompt], [each])[0] for prompt, each in zip(prompts, every, strict=True)]
    assert together == alone


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
def test_the_same_when_retracted_and_squeezed(folder: Path, overlap: bool) -> None:
    from headrace.engine.engine import Engine

    prompts, every = mixed()
    with make_llm(folder, enable_overlap=overlap, max_model_len=512) as plain:
        expected = tokens(plain, prompts, every)
        small = plain.config
    squeezed = replace(small, max_total_tokens=512, page_size=16, chunked_prefill_size=8)
    engine = Engine(squeezed, retract_every=3)
    handles = [engine.add(prompt, each) for prompt, each in zip(prompts, every, strict=True)]
    while not all(handle.is_finished for handle in handles):
        engine.step()
    engine.settle()
    engine.scheduler.check_integrity()
    assert engine.stats()["retractions"] > 3
    assert [handle.output().outputs[0].token_ids for handle in handles] == expected
    engine.close()


def test_each_of_n_has_a_grammar_of_its_own(llm: LLM) -> None:
    result = llm.generate("a", params(5, regex="[a-h]{3,9}", n=6), use_tqdm=False)[0]
    texts = [output.text for output in result.outputs]
    assert all(re.fullmatch("[a-h]{3,9}", text) for text in texts)
    assert len(set(texts)) > 3


def test_overlap_is_kept_by_the_others(folder: Path) -> None:
    """A row with a grammar runs in every second step, the others in each."""
    with make_llm(folder, enable_overlap=True, max_model_len=512) as llm:
        llm.generate("warm", params(0, regex="a"), use_tqdm=False)
        before = llm.stats().get("steps", 0)
        plain = replace(PLAIN, max_tokens=60)
        tokens(llm, [[1, 2], [3, 4]], [plain, params(0, regex="[ab]{20}")])
        assert llm.stats().get("steps", 0) - before <= 62


# ---- endings


def test_length_ends_an_answer_that_is_not_complete(llm: LLM) -> None:
    answer = one(llm, "a", params(0, regex="[ab]{50}", max_tokens=7))
    assert (answer.finish_reason, len(answer.token_ids)) == ("length", 7)
    assert re.fullmatch("[ab]{7}", answer.text)


def test_min_tokens_hold_where_the_grammar_can_go_on(llm: LLM) -> None:
    longer = one(llm, "a", params(0, regex="a*", min_tokens=9, logit_bias={EOS: 100.0}))
    assert (longer.text, longer.finish_reason) == ("a" * 9, "stop")
    ended = one(llm, "a", params(0, regex="a{2,4}", min_tokens=9, logit_bias={EOS: 100.0}))
    assert (ended.text, ended.finish_reason) == ("a" * 4, "stop")


def test_stop_token_ids_end_where_the_grammar_may(llm: LLM) -> None:
    z = llm.get_tokenizer().encode("z")[0]
    answer = one(llm, "a", params(0, regex="[xyz]{3}", ignore_eos=True, stop_token_ids=[z]))
    assert re.fullmatch("[xy]{3}", answer.text)
    assert (answer.finish_reason, answer.stop_reason) == ("stop", z)


@pytest.mark.parametrize(
    "options",
    [{"bad_words": ["b"]}, {"allowed_token_ids": [1, 2]}, {"logit_bias": {}, "bad_words": ["a"]}],
    ids=["bad words in the middle", "allowed ids", "bad words at the start"],
)
def test_nothing_left_ends_with_an_error(llm: LLM, options: dict[str, Any]) -> None:
    mate = replace(PLAIN, max_tokens=20)
    expected = tokens(llm, [[5, 6]], mate)[0]
    results = llm.generate([[5, 6], "x"], [mate, params(0, regex="abc", **options)], use_tqdm=False)
    answer = results[1].outputs[0]
    assert answer.finish_reason == "error"
    assert "No token is left" in answer.message
    assert answer.stop_reason == OF_REQUEST
    assert results[0].outputs[0].token_ids == expected
    assert_nothing_is_held(llm)


def test_a_token_against_the_grammar_ends_its_sequence_alone(llm: LLM) -> None:
    """Were a path to pass over the mask, the answer must not pass for a whole one."""
    sampler = llm.engine.worker.runner.sampler
    sample = sampler.sample

    def wrong(logits: Any, info: Any, rows: Any, positions: torch.Tensor) -> Any:
        output = sample(logits, info, rows, positions)
        marked = (
            torch.zeros_like(output.next_token_ids, dtype=torch.bool)
            if info.mask is None
            else torch.zeros_like(output.next_token_ids, dtype=torch.bool).index_fill(
                0, info.mask.index, True
            )
        )
        return replace(output, next_token_ids=torch.where(marked, 7, output.next_token_ids))

    expected = tokens(llm, [[5, 6]], PLAIN)[0]
    with mock.patch.object(sampler, "sample", wrong):
        results = llm.generate(
            [[5, 6], [8, 9]], [PLAIN, params(0, regex="[ab]{9}")], use_tqdm=False
        )
    answer = results[1].outputs[0]
    assert (answer.finish_reason, "Token 7" in answer.message) == ("error", True)
    assert results[0].outputs[0].token_ids == expected


def test_logprobs_are_raw_as_ever(llm: LLM) -> None:
    """The grammar forces an unlikely token; `raw` says so, `processed` says that it was certain."""
    raw = one(llm, "q", params(0, regex="Z", logprobs=0))
    processed = one(llm, "q", params(0, regex="Z", logprobs=0, logprobs_mode="processed"))
    token = raw.token_ids[0]
    assert raw.logprobs[0][token].logprob < -1
    assert processed.logprobs[0][token].logprob == pytest.approx(0.0)


# ---- refusals


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json_schema": {"$ref": "#"}}, "Circular"),
        ({"regex": "(a"}, "not closed"),
        ({"regex": "(?=a)"}, "look-around"),
        ({"grammar": "root ::= missing"}, "not a grammar"),
        ({"structural_tag": {"type": "x"}}, "structural_tag"),
    ],
)
def test_bad_grammars_are_refused_before_anything_runs(
    llm: LLM, form: dict[str, Any], why: str
) -> None:
    steps = llm.stats().get("steps", 0)
    with pytest.raises(RequestError, match="Prompt 1: ") as caught:
        llm.generate(["a", "b"], [PLAIN, params(0, **form)], use_tqdm=False)
    assert why in str(caught.value)
    with pytest.raises(RequestError):
        llm.stream("a", params(0, **form))
    with pytest.raises(RequestError):
        llm.chat([{"role": "user", "content": "a"}], params(0, **form), use_tqdm=False)
    assert llm.stats().get("steps", 0) == steps


def test_an_answer_needs_an_ending(llm: LLM) -> None:
    with pytest.raises(RequestError, match="needs a token that ends"):
        one(llm, "a", params(0, regex="a", ignore_eos=True))


def test_without_tokenizer(plain_folder: Path) -> None:
    with make_llm(plain_folder) as llm, pytest.raises(RequestError, match="no tokenizer"):
        llm.generate([[1, 2]], params(0, regex="a"), use_tqdm=False)


def test_without_xgrammar(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xgrammar_backend, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match="pip install 'headrace\\[grammar\\]'"):
        one(llm, "a", params(0, regex="a"))


# ---- beside the loop


def test_others_run_while_a_grammar_is_compiled(llm: LLM) -> None:
    """Straight at the engine, as a server does: submit at once, and let it wait in the queue."""
    engine = llm.engine
    may_end = threading.Event()
    compile_form = xgrammar_backend.XgrammarBackend.compile

    def slow(self: Any, form: StructuredOutput) -> Any:
        assert may_end.wait(30)
        return compile_form(self, form)

    with mock.patch.object(xgrammar_backend.XgrammarBackend, "compile", slow):
        waiting = engine.add("a", params(0, regex="held[0-9]"))
        refused = engine.add("a", params(0, regex="held(a"))
        aborted = engine.add("a", params(0, regex="held[a-z]"), request_id="leaves")
        plain = engine.add("a", PLAIN)
        while not plain.is_finished:
            engine.step()
        assert not waiting.is_finished
        assert engine.stats()["waiting"] == 3
        engine.abort(["leaves"])
        assert aborted.is_finished
        may_end.set()
        while not (waiting.is_finished and refused.is_finished):
            engine.step()
    assert re.fullmatch("held[0-9]", waiting.output().outputs[0].text)
    ending = refused.output().outputs[0]
    assert (ending.finish_reason, "not closed" in ending.message) == ("error", True)
    assert_nothing_is_held(llm)


@pytest.mark.usefixtures("grammars_tried")
def test_what_takes_for_ever_ends_its_request_alone(folder: Path) -> None:
    """vllm#54003: 60 short rules, all of each other, which no library is done with in minutes."""
    rules = [" | ".join(f"r{j} r{(i + j) % 60}" for j in range(60)) for i in range(60)]
    hostile = "root ::= r0\n" + "\n".join(f"r{i} ::= {each} | [^y]" for i, each in enumerate(rules))
    with make_llm(folder, max_model_len=512) as llm:
        assert one(llm, "a", params(0, regex="[ab]{3}")).finish_reason == "stop"
        llm.engine.grammars._loaded()._trial._seconds = 0.3  # type: ignore[attr-defined]
        endless, plain = llm.engine.add("a", params(0, grammar=hostile)), llm.engine.add("a", PLAIN)
        while not (endless.is_finished and plain.is_finished):
            llm.engine.step()
        output = endless.output().outputs[0]
        assert (output.finish_reason, "0.3 s to compile" in output.message) == ("error", True)
        assert len(plain.output().outputs[0].token_ids) == 24
