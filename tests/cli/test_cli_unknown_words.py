"""Verbs, flags and values that there are not: answered with what was meant, by others too."""

import argparse
import re

import pytest

from headrace.cli import bench_serve_flags
from headrace.cli.engine_flags import engine_config
from headrace.cli.main import main
from headrace.cli.other_flags import OF_BENCH_SERVE, ONLY
from headrace.config.engine_config import EngineConfig


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("generat", "m"), "no verb 'generat'; did you mean generate?"),
        (("collectenv",), "no verb 'collectenv'; did you mean collect-env?"),
        (("smollm2",), "no verb 'smollm2'; there are serve, generate, chat, explain,"),
        (("bench", "ofline", "m"), "no benchmark 'ofline'; did you mean offline?"),
        (("verify", "m", "--assume", "pair"), "'pair' is not one of them; did you mean pairs?"),
    ],
)
def test_a_word_that_is_misspelt_is_answered_with_the_nearest(arguments, told, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert told in capsys.readouterr().err


def test_a_misspelt_flag_is_guessed(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "m", "--temprature=0", "--max-token", "3"])
    error = capsys.readouterr().err
    for misspelt, ours in (("--temprature=0", "--temperature"), ("--max-token", "--max-tokens")):
        assert f"{misspelt} (did you mean {ours}?)" in error
    assert "(see headrace generate --help)" in error
    with pytest.raises(SystemExit):
        main(["generate", "m", "--nonsense"])
    assert "unknown: --nonsense (see" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("verb", "flag", "answer"),
    [
        ("generate", "--max-new-tokens", "use --max-tokens"),
        ("explain", "--max-new-tokens", ""),
        ("generate", "--guided-regex", "use --structured regex=..."),
        ("explain", "--model", "MODEL stands without a flag"),
        ("explain", "--skip-tokenizer-init", "token ids go in and come out of any model"),
        ("serve", "--max-log-len", "texts of requests are never logged"),
        ("serve", "--speculative-num-steps", "this version does not have it"),
        ("chat", "-p", "headrace generate has it"),
        ("serve", "--quantization", "weights are taken as the checkpoint has them; "),
        ("generate", "--enable-expert-parallel", "this version runs on one device; leave it out"),
    ],
)
def test_flags_of_other_engines_are_answered(verb, flag, answer, capsys) -> None:
    with pytest.raises(SystemExit):
        main([verb, "m", flag])
    told = f"unknown: {flag} ({answer}" if answer else f"unknown: {flag} (see"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "answer"),
    [
        ("--port", "use --base-url http://HOST:PORT"),
        ("--dataset-name", "prompts are random, or those of --prompt-file"),
        ("--seed", "use --load-seed"),
        ("--disable-ignore-eos", "use --no-ignore-eos"),
    ],
)
def test_flags_of_other_benchmarks_are_answered(flag: str, answer: str, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "serve", flag, "1"])
    assert f"unknown: {flag} ({answer}) 1 (see" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "endpoint"),
    [("chat", "chat"), ("/v1/completions", "completions"), ("/v1/chat/completions", "chat")],
)
def test_the_endpoint_of_a_benchmark_may_be_its_path(typed: str, endpoint: str) -> None:
    parser = argparse.ArgumentParser()
    bench_serve_flags.add_flags(parser)
    assert parser.parse_args(["--endpoint", typed]).endpoint == endpoint


def test_answers_are_for_flags_that_a_benchmark_has_not() -> None:
    parser = argparse.ArgumentParser()
    bench_serve_flags.add_flags(parser)
    flags = parser._option_string_actions
    assert not flags.keys() & OF_BENCH_SERVE.keys()
    named = re.findall(r"--[a-z-]+", " ".join(OF_BENCH_SERVE.values()))
    assert set(named) <= flags.keys()


def test_a_verb_with_an_engine_takes_the_flags_of_other_engines(monkeypatch) -> None:
    found: list[argparse.Namespace] = []
    monkeypatch.setattr("headrace.cli.explain.run", lambda parsed: found.append(parsed) or 0)
    typed = ("--gpu-memory-utilization=0.5", "--enforce-eager", "--tp", "1", "--dtype", "half")
    assert main(["explain", "m", *typed, "--disable_radix_cache"]) == 0
    assert engine_config(found[0]) == EngineConfig(
        model="m",
        mem_fraction=0.5,
        decode_graph="off",
        prefill_graph="off",
        enable_prefix_cache=False,
        dtype="float16",
    )


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (("--tensor-parallel-size", "2"), "--tensor-parallel-size is 2. This version runs on one"),
        (("-tp", "2"), "-tp is 2. This version runs on one device; leave it out."),
        (("--schedule-policy=lpm",), "--schedule-policy is lpm. Requests run by their priority"),
        (("--tp",), "--tp needs a value."),
        (("--cuda-graph-bs",), "--cuda-graph-bs needs a value."),
        (("--max-num-seqs", "4k"), "'4k' is not a whole number like 4096"),
        (("--mem-fraction-static", "90%"), "'90%' is not a number like 0.5"),
    ],
)
def test_a_value_that_is_not_here_is_refused_in_a_line(typed, told, capsys) -> None:
    try:
        status = main(["explain", "m", *typed])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert told in capsys.readouterr().err


def test_a_value_that_is_so_anyway_is_taken(monkeypatch) -> None:
    found: list[argparse.Namespace] = []
    monkeypatch.setattr("headrace.cli.explain.run", lambda parsed: found.append(parsed) or 0)
    for theirs, values in ONLY.items():
        assert [main(["explain", "m", theirs, value]) for value in values] == [0] * len(values)
    assert {engine_config(each) for each in found} == {EngineConfig(model="m")}


@pytest.mark.parametrize(
    "typed", [("--cuda-graph-bs", "1", "2", "4"), ("--cudagraph-capture-sizes=1,2,4",)]
)
def test_sizes_of_graphs_may_be_words_of_their_own(typed, monkeypatch) -> None:
    found: list[argparse.Namespace] = []
    monkeypatch.setattr("headrace.cli.explain.run", lambda parsed: found.append(parsed) or 0)
    assert main(["explain", "m", *typed, "--seed", "3"]) == 0
    assert engine_config(found[0]) == EngineConfig(model="m", decode_graph=(1, 2, 4), seed=3)


def test_a_prompt_without_its_flag_is_answered(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "m", "some", "text"])
    assert "unknown: some text (a prompt comes after -p) (see" in capsys.readouterr().err
