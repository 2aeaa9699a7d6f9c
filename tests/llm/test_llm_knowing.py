"""What `stats`, `explain`, the log and the progress bar tell."""

import dataclasses
import json
import logging
import re
import sys
from pathlib import Path

import pytest
from tiny_engine import write_checkpoint
from tiny_llm import GREEDY, Reference, ids, make_llm, one, tokens

import headrace
from headrace import LLM, SamplingParams

DEFAULTS = {
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
}


@pytest.fixture(scope="module")
def with_defaults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_checkpoint(tmp_path_factory.mktemp("llm") / "defaults", "llama")
    config = DEFAULTS | {"do_sample": True, "max_length": 20, "transformers_version": "5.0"}
    config |= {"no_repeat_ngram_size": 3, "suppress_tokens": [7], "num_beams": 1, "min_length": 0}
    (folder / "generation_config.json").write_text(json.dumps(config))
    return folder


def test_stats_name_the_path_of_every_step_and_why_not_a_better_one(folder: Path) -> None:
    llm = make_llm(folder, prefill_graph="off", chunked_prefill_size=16)
    (output,) = llm.generate(ids(1, 40), GREEDY, use_tqdm=False)
    stats = llm.stats()
    steps = 3 + 7  # three chunks, the last of which samples, and seven more tokens
    assert output.outputs[0].paths == output.paths == [("eager", steps)]
    assert stats["steps"] == sum(entry["steps"] for entry in stats["paths"]) == steps
    (entry,) = stats["paths"]
    assert entry["path"] == "eager"
    refused = dict(part.split(": ", 1) for part in entry["refused"].split("; "))
    assert set(refused) == {"decode_graph", "prefill_graph", "cpu_graph"}
    assert refused["prefill_graph"] == "asked to be off"
    assert refused["decode_graph"]
    assert stats["prompt_tokens"] == 40
    assert stats["output_tokens"] == 8
    assert stats["finished_length"] == 1
    json.dumps(stats)


def test_stats_tell_what_the_cache_saved(folder: Path) -> None:
    llm = make_llm(folder, page_size=4)
    for _ in range(2):
        (output,) = llm.generate(ids(1, 17), GREEDY, use_tqdm=False)
    stats = llm.stats()
    assert output.cached_tokens == stats["prompt_tokens_cached"] == 16
    assert stats["prompt_tokens_queried"] == 34
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]
    assert stats["pages_cached"] > 0


def test_explain_shows_what_is_in_effect(folder: Path) -> None:
    # Backends, graphs, dtypes and chunk sizes in effect, with the reasons
    llm = make_llm(folder, chunked_prefill_size=16, enable_prefix_cache=False)
    explanation = llm.explain()
    plan = explanation.plan
    assert plan.chunked_prefill_size.value == 16
    assert plan.chunked_prefill_size.asked
    assert plan.prefix_cache.value is False
    assert plan.kv_cache_dtype.value == "float32"
    assert plan.decode_attention.value == "torch_native"
    assert all(decision.reason for decision in (*plan, *explanation.measured))
    assert "kv_tokens" in {decision.name for decision in explanation.measured}
    assert {"weights", "memory pool"} <= {part.name for part in explanation.startup}
    text = str(explanation)
    for decision in (*plan, *explanation.measured, explanation.sampling_defaults):
        assert decision.name in text


def test_the_log_of_a_start_tells_the_plan(
    with_defaults: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="headrace"):
        make_llm(with_defaults)
    assert re.search(r"Ready on cpu .*float32, context 256, KV tokens", caplog.text)
    for words in ("decode_attention = torch_native", "decode_graph = off", "kv_cache_dtype ="):
        assert words in caplog.text
    assert re.search(r"sampling_defaults = .*repetition_penalty 1\.1", caplog.text)
    assert (
        "generation_config.json states no_repeat_ngram_size, suppress_tokens, which" in caplog.text
    )


def test_defaults_of_the_checkpoint_are_used_and_shown(with_defaults: Path) -> None:
    # Never in use without a word; a request's own values win
    llm = make_llm(with_defaults)
    defaults = llm.get_default_sampling_params()
    assert {name: getattr(defaults, name) for name in DEFAULTS} == DEFAULTS
    assert llm.explain().sampling_defaults.value == DEFAULTS
    assert "not suppress_tokens: generation_config.json asks for it" in str(llm.explain())
    prompt = ids(1, 12)
    seeded = dataclasses.replace(defaults, seed=5, max_tokens=12)
    llm.engine.default_params = seeded  # so that what None stands for can be seen
    assert one(llm, prompt).token_ids == one(llm, prompt, seeded).token_ids
    assert joined_ids(llm, prompt) == one(llm, prompt, seeded).token_ids
    own = SamplingParams(seed=5, max_tokens=12, logprobs=0, logprobs_mode="processed")
    assert one(llm, prompt, own).token_ids != one(llm, prompt, seeded).token_ids
    # top_k of the defaults would leave 20 tokens; the request's own value leaves them all.
    wide = dataclasses.replace(own, logprobs=100, max_tokens=1)
    assert min(entry.logprob for entry in one(llm, prompt, wide).logprobs[0].values()) > -50


def joined_ids(llm: LLM, prompt: list[int]) -> list[int]:
    return [token for piece in llm.stream(prompt) for token in piece.token_ids]


def test_a_checkpoint_that_does_not_sample_is_greedy(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama")
    (folder / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6}')
    llm = make_llm(folder)
    assert llm.explain().sampling_defaults.value == {"temperature": 0.0}
    prompt = ids(1, 9)
    own = SamplingParams(temperature=0.0, max_tokens=128)
    assert tokens(llm, prompt, None) == tokens(llm, prompt, own)


def test_the_progress_bar_shows_speeds(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([ids(1, 9), ids(2, 9)], GREEDY)
    bar = capsys.readouterr().err
    assert "2/2" in bar
    assert re.search(r"est\. speed input: [\d.]+ toks/s, output: [\d.]+ toks/s", bar)
    llm.generate(ids(1, 9), GREEDY, use_tqdm=False)
    llm.generate([])
    assert capsys.readouterr().err == ""


def test_without_stderr_there_is_no_bar(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a service of Windows, or under pythonw (tqdm#1523)."""
    monkeypatch.setattr(sys, "stderr", None)
    stored = {"load_format": "auto", "show_progress": True}
    with make_llm(reference.folder, **stored) as llm:
        assert len(llm.generate(ids(1, 9), GREEDY)[0].outputs[0].token_ids) == 8


def test_outputs_have_the_names_of_the_field(llm: LLM) -> None:
    (output,) = llm.generate("Hello", SamplingParams(max_tokens=2, logprobs=0, n=2), use_tqdm=False)
    assert output.finished
    assert output.prompt == "Hello"
    assert output.prompt_token_ids == llm.get_tokenizer().encode("Hello")
    assert output.prompt_logprobs is output.hidden_states is output.routed_experts is None
    for each in output.outputs:
        assert each.cumulative_logprob < 0
        assert each.finish_reason in ("stop", "length")
    assert headrace.LLM is LLM


def test_the_prefix_cache_is_flushed(folder: Path) -> None:
    llm = make_llm(folder)
    llm.generate(ids(1, 40), GREEDY, use_tqdm=False)
    assert llm.generate(ids(1, 40), GREEDY, use_tqdm=False)[0].cached_tokens == 32
    assert llm.flush_cache() > 0
    assert llm.generate(ids(1, 40), GREEDY, use_tqdm=False)[0].cached_tokens == 0


def test_outputs_are_names_of_the_package(folder: Path) -> None:
    (output,) = make_llm(folder).generate(ids(1, 4), GREEDY, use_tqdm=False)
    assert isinstance(output, headrace.RequestOutput)
    assert isinstance(output.outputs[0], headrace.CompletionOutput)
    assert set(headrace.__all__) == {name for name in headrace.__all__ if hasattr(headrace, name)}
