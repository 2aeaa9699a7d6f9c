"""Where an output ends and what of it is shown: stop ids and strings, streams, characters."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny_engine import EOS, write_checkpoint
from tiny_llm import GREEDY, PRINTABLE, assert_nothing_is_held, joined, make_llm, one, scripted

from headrace import LLM, EngineConfig, SamplingParams
from headrace.base.errors import ConfigError, RequestError, UnknownFieldError
from headrace.engine.outputs import Piece
from headrace.serving.prompts import load_tokenizer

PROMPT = "The prompt"
TEXT = "a stop comes here: [END] and not there"


def spell(llm: LLM, text: str) -> list[int]:
    return llm.get_tokenizer().encode(text)


def said(llm: LLM, script: Sequence[int], **options: Any) -> Any:
    """One output of these tokens, found to be the same when it is streamed."""
    params = SamplingParams(**({"max_tokens": len(script), "temperature": 0.0} | options))
    with scripted(llm, script, len(spell(llm, PROMPT))):
        output = one(llm, PROMPT, params)
        pieces = list(llm.stream(PROMPT, params))
    text, token_ids, _ = joined(pieces)
    assert (text, token_ids) == (output.text, output.token_ids)
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    last = pieces[-1]
    assert (last.finish_reason, last.stop_reason) == (output.finish_reason, output.stop_reason)
    assert_nothing_is_held(llm)
    return output


# ---- stop strings


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", ["[END]", ["zzz", "[END]", "ND] and"], ":", ["p"]])
def test_a_stop_string_over_many_tokens(llm: LLM, stop: Any, include: bool) -> None:
    # Nothing of the stop string shows, streamed or not
    output = said(llm, spell(llm, TEXT), stop=stop, include_stop_str_in_output=include)
    found = "[END]" if "[END]" in stop else stop[0]
    end = TEXT.index(found)
    assert output.text == TEXT[: end + len(found) * include]
    assert output.finish_reason == "stop"
    assert output.stop_reason == found
    assert len(output.token_ids) == end + len(found)  # a token is a character here


def test_no_piece_shows_a_part_of_the_stop(llm: LLM) -> None:
    script = spell(llm, TEXT)
    params = SamplingParams(max_tokens=len(script), stop="[END]")
    shown = ""
    with scripted(llm, script, len(spell(llm, PROMPT))):
        for piece in llm.stream(PROMPT, params):
            shown += piece.text
            assert "[" not in shown


def test_the_start_of_a_stop_that_never_completes_arrives(llm: LLM) -> None:
    output = said(llm, spell(llm, TEXT + " [EN"), stop=["[END]!", "there [ENZZ"])
    assert output.text == TEXT + " [EN"
    assert output.finish_reason == "length"


def test_a_stop_completed_by_the_last_token_is_a_stop(llm: LLM) -> None:
    output = said(llm, spell(llm, "ab[END]"), stop="[END]")
    assert (output.text, output.finish_reason, output.stop_reason) == ("ab", "stop", "[END]")


def test_stops_of_a_batch_are_each_their_own(llm: LLM) -> None:
    script = spell(llm, TEXT)
    params = [
        SamplingParams(max_tokens=len(script), temperature=0.0, stop=stop)
        for stop in ("stop", "here", "never", "[")
    ]
    with scripted(llm, script, len(spell(llm, PROMPT))):
        outputs = llm.generate([PROMPT] * 4, params, use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    assert texts == [TEXT[: TEXT.find(stop)] for stop in ("stop", "here")] + [
        TEXT,
        TEXT[: TEXT.find("[")],
    ]


def test_min_tokens_hold_for_stop_strings(llm: LLM) -> None:
    script = spell(llm, "ab ab ab")
    assert said(llm, script, stop="ab", min_tokens=2).text == "ab "
    assert said(llm, script, stop="ab", min_tokens=4).text == "ab ab "


# ---- stop ids


@pytest.fixture(scope="module")
def many_ends(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """End tokens in config (257), generation config (258, and one that does not exist) and
    tokenizer (259)."""
    folder = write_checkpoint(tmp_path_factory.mktemp("llm") / "ends", "llama")
    config = {"eos_token_id": [258, 99999]}
    (folder / "generation_config.json").write_text(json.dumps(config))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["eos_token"] = "<special1>"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_every_stated_end_token_ends(many_ends: Path, caplog: pytest.LogCaptureFixture) -> None:
    # The union of all three files that state them; a request's own params do not drop them
    with make_llm(many_ends) as llm:
        assert "99999" in caplog.text
        assert llm.get_tokenizer().decode([259], skip_special_tokens=False) == "<special1>"
        for token in (257, 258, 259):
            output = one(llm, PROMPT, SamplingParams(temperature=0.3, logit_bias={token: 1e4}))
            assert output.token_ids == [token]
            assert (output.text, output.finish_reason, output.stop_reason) == ("", "stop", None)
        output = one(llm, PROMPT, SamplingParams(logit_bias={260: 1e4}, max_tokens=3))
        assert output.finish_reason == "length"


def test_min_tokens_mask_every_end_token(many_ends: Path) -> None:
    # Ids outside the vocabulary must not reach the mask
    with make_llm(many_ends) as llm:
        bias = {257: 1e3, 258: 1e3, 259: 1e3, 65: 1e3}
        params = SamplingParams(logit_bias=bias, stop_token_ids=[65], min_tokens=6, max_tokens=50)
        output = one(llm, PROMPT, params)
        assert len(output.token_ids) == 7
        assert not set(output.token_ids[:6]) & {65, 257, 258, 259}
        assert output.token_ids[6] in {65, 257, 258, 259}


def test_own_stop_ids_end_and_are_named(llm: LLM) -> None:
    script = spell(llm, "abcXdef")
    output = said(llm, script, stop_token_ids=[script[3], 70])
    assert (output.text, output.finish_reason) == ("abc", "stop")
    assert output.stop_reason == script[3]
    assert output.token_ids == script[:4]


@pytest.mark.parametrize(("skip", "shown"), [(True, "ab"), (False, "ab</s>")])
def test_stop_tokens_show_where_stops_are_included(llm: LLM, skip: bool, shown: str) -> None:
    """As vLLM's include_stop_str_in_output and SGLang's no_stop_trim have it."""
    options = {"include_stop_str_in_output": True, "skip_special_tokens": skip}
    script = spell(llm, "abXc")
    output = said(llm, script, stop_token_ids=[script[2]], **options)
    assert (output.text, output.stop_reason) == ("abX", script[2])
    assert said(llm, [*spell(llm, "ab"), EOS, EOS], **options).text == shown


def test_ignore_eos_leaves_own_stop_ids(llm: LLM) -> None:
    script = [*spell(llm, "ab"), EOS, *spell(llm, "cX")]
    assert said(llm, script).text == "ab"
    output = said(llm, script, ignore_eos=True, stop_token_ids=[script[-1]])
    assert (output.text, output.stop_reason) == ("abc", script[-1])


# ---- characters


def test_special_tokens_show_when_asked(llm: LLM) -> None:
    script = [*spell(llm, "a"), 258, *spell(llm, "b")]
    assert said(llm, script).text == "ab"
    assert said(llm, script, skip_special_tokens=False).text == "a<special0>b"


def test_characters_are_never_cut(llm: LLM) -> None:
    text = "né 日本 👩‍👧 fin"
    script = spell(llm, text)
    params = SamplingParams(max_tokens=len(script))
    with scripted(llm, script, len(spell(llm, PROMPT))):
        pieces = list(llm.stream(PROMPT, params))
    assert all("\ufffd" not in piece.text for piece in pieces)
    assert joined(pieces)[0] == text
    assert len(pieces) == len(script)


def test_half_a_character_at_the_end_shows_once(llm: LLM) -> None:
    script = spell(llm, "a👩")[:-1]
    assert said(llm, script).text == "a\ufffd"


def test_a_character_begun_by_the_prompt_is_given_whole(llm: LLM) -> None:
    whole = spell(llm, "é")
    with scripted(llm, whole[1:], 1):
        assert one(llm, whole[:1], SamplingParams(max_tokens=1)).text == "é"


# ---- streams and outputs


def test_a_stream_of_several_continuations(llm: LLM) -> None:
    params = SamplingParams(
        n=3, seed=1, max_tokens=15, ignore_eos=True, allowed_token_ids=PRINTABLE, stop="#"
    )
    (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    parts: dict[int, list[Piece]] = {0: [], 1: [], 2: []}
    for piece in llm.stream(PROMPT, params):
        parts[piece.index].append(piece)
    for each in output.outputs:
        text, token_ids, _ = joined(parts[each.index])
        assert (text, token_ids) == (each.text, each.token_ids)
        *before, last = parts[each.index]
        assert last.finish_reason == each.finish_reason
        assert all(piece.finish_reason is None for piece in before)
    assert len({tuple(each.token_ids) for each in output.outputs}) == 3


def test_each_continuation_ends_once_in_a_stream(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=2, max_tokens=12, stop_token_ids=[*range(60)])
    pieces = list(llm.stream(PROMPT, params))
    counts = {
        index: sum(len(piece.token_ids) for piece in pieces if piece.index == index)
        for index in range(4)
    }
    assert len(set(counts.values())) > 1  # some end earlier, while the others go on
    endings = [piece.index for piece in pieces if piece.finish_reason is not None]
    assert sorted(endings) == [0, 1, 2, 3]
    assert all(piece.token_ids or piece.finish_reason for piece in pieces)


def test_chat_is_the_template_and_the_rest(folder: Path) -> None:
    llm = make_llm(folder, max_model_len=40)
    messages = [{"role": "user", "content": "Hi"}]
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    (output,) = llm.chat(messages, params, use_tqdm=False)
    assert output.prompt == "<user>Hi</s><assistant>"
    assert list(output.prompt_token_ids) == spell(llm, output.prompt)
    assert EOS in output.prompt_token_ids
    assert len(output.outputs[0].token_ids) == 40 - len(output.prompt_token_ids)
    assert joined(list(llm.stream_chat(messages, params)))[1] == output.outputs[0].token_ids
    both = llm.chat([messages, messages], params, use_tqdm=False)
    assert [each.outputs[0].token_ids for each in both] == [output.outputs[0].token_ids] * 2
    (open_ended,) = llm.chat(messages, params, use_tqdm=False, add_generation_prompt=False)
    assert open_ended.prompt == "<user>Hi</s>"


def test_chat_with_a_template_of_the_caller(folder: Path) -> None:
    """As vLLM's LLM.chat takes one; it had been one more variable, and nobody read it."""
    llm = make_llm(folder)
    messages = [{"role": "user", "content": "Hi"}]
    given = {"chat_template": "{{ messages[0].content }}{{ mark }}{{ eos_token }}", "mark": "!"}
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False, **given)
    assert output.prompt == "Hi!</s>"
    assert list(output.prompt_token_ids) == spell(llm, output.prompt)
    streamed = joined(list(llm.stream_chat(messages, GREEDY, **given)))
    assert streamed[1] == output.outputs[0].token_ids
    assert llm.chat(messages, GREEDY, use_tqdm=False)[0].prompt == "<user>Hi</s><assistant>"
    with pytest.raises(RequestError, match="chat template cannot render"):
        llm.chat(messages, GREEDY, chat_template="{% if %}")


def test_a_chat_template_of_the_operator_is_taken_or_refused_at_the_start(
    folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages[0].content }}!{{ eos_token }}")
    messages = [{"role": "user", "content": "Hi"}]
    (output,) = make_llm(folder, chat_template=file).chat(messages, GREEDY, use_tqdm=False)
    assert output.prompt == "Hi!</s>"
    served = load_tokenizer(EngineConfig(model=str(folder), chat_template=file))
    assert served is not None
    assert served.apply_chat_template(messages) == "Hi!</s>"
    file.write_text("{% if %}")
    with pytest.raises(ConfigError, match=r"mine\.jinja is no chat template\. Expected an expr"):
        make_llm(folder, chat_template=file)


def test_tools_that_the_template_does_not_show_are_refused(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    for chat in (llm.chat, llm.stream_chat):
        with pytest.raises(RequestError, match=r"template does not show .* Leave them out"):
            chat(messages, GREEDY, tools=tools)
    (output,) = llm.chat(
        messages,
        GREEDY,
        use_tqdm=False,
        tools=tools,
        chat_template="{{ tools[0].function.name }}",
    )
    assert output.prompt == "f"


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("temperature", "use SamplingParams(temperature=...)"),
        ("max_new_tokens", "use SamplingParams(max_tokens=...)"),
        ("chat_template_kwargs", "give its entries as arguments of their own"),
    ],
)
def test_options_that_no_template_reads_are_refused(llm: LLM, name: str, answer: str) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    for chat in (llm.chat, llm.stream_chat):
        with pytest.raises(UnknownFieldError) as caught:
            chat(messages, **{name: {}})
        assert str(caught.value) == f"Unknown argument of chat: {name} ({answer})."


@pytest.mark.parametrize(("length", "made"), [(10, 128), (200, 56), (255, 1)])
def test_without_max_tokens_the_context_is_kept(llm: LLM, length: int, made: int) -> None:
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    output = one(llm, [7] * length, params)
    assert len(output.token_ids) == made
    assert output.finish_reason == "length"


def test_min_tokens_raise_the_default_length(llm: LLM) -> None:
    output = one(llm, [7] * 10, SamplingParams(min_tokens=150, seed=0))
    assert len(output.token_ids) >= 150
