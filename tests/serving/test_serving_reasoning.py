"""Reasoning of chat: what a client sees of what a model thinks."""

from tool_chat import HELLO, collected

from headrace.text.tokenizer import Tokenizer


def test_reasoning_has_two_names(chat) -> None:
    asked = chat("hermes")
    asked.says("<thi", "nk>\nWell", ".\n</think>", "\n\nYes")
    message = asked.message()
    assert message["content"] == "Yes"
    assert message["reasoning"] == message["reasoning_content"] == "Well."
    deltas = [chunk["delta"] for chunk in asked.chunks()]
    assert deltas[1] == {"reasoning": "Well", "reasoning_content": "Well"}
    assert deltas[-1] == {"content": "Yes"}


def test_how_reasoning_is_shown(chat) -> None:
    asked = chat("hermes")
    asked.says("<think>", "We", "ll", "</think>", "Yes")
    raw = asked.message(separate_reasoning=False)
    assert raw["content"] == "<think>Well</think>Yes"
    assert "reasoning" not in raw
    hidden = asked.message(include_reasoning=False)
    assert hidden == {"role": "assistant", "content": "Yes", "refusal": None}
    assert not any("reasoning" in chunk["delta"] for chunk in asked.chunks(include_reasoning=False))
    at_once = [chunk["delta"] for chunk in asked.chunks(stream_reasoning=False)]
    assert at_once[1]["reasoning"] == "Well"
    off = chat("hermes", reasoning_parser="none")
    assert off.message()["content"] == "<think>Well</think>Yes"


def test_reasoning_that_never_ends(chat) -> None:
    asked = chat("hermes")
    asked.says("<think>", "We", "ll", reason="length")
    for asks in ({}, {"stream_reasoning": False}):
        (choice,) = asked.choices(**asks)
        assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")
        assert choice["message"]["reasoning"] == "Well"
        assert collected(asked.chunks(**asks))["reasoning"] == "Well"


def test_effort_as_the_template_takes_it(chat) -> None:
    asked = chat("hermes")
    for asks, thinks in (
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "high"}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        # What is said to the template itself counts.
        ({"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}, True),
    ):
        asked.reply(**asks)
        prompt = asked.engine.submits[-1].prompt_text
        assert prompt.endswith("<assistant>" if thinks else "</think>\n\n")
    told = chat("mistral").refused(reasoning_effort="low")["message"]
    assert "knows neither it nor enable_thinking" in told
    chat("mistral").reply(reasoning_effort="none")  # no reasoning is asked for, and none comes
    chat("mistral", refuse_unsupported=False).reply(reasoning_effort="low")
    assert chat("hermes", refuse_unsupported=False).refused(reasoning_effort="x")["param"]


def test_a_message_that_is_continued_in_its_reasoning(chat) -> None:
    asked = chat("hermes")
    asked.says(" and so", "</think>", "Yes")
    begun = [*HELLO, {"role": "assistant", "content": "<think>Well"}]
    message = asked.message(messages=begun, continue_final_message=True)
    assert (message["reasoning"], message["content"]) == ("and so", "Yes")
    asked.says(", it is")
    begun = [*HELLO, {"role": "assistant", "content": "<think>Well</think>Yes"}]
    message = asked.message(messages=begun, continue_final_message=True)
    assert message["content"] == ", it is"


def test_reasoning_tokens(chat, tokenizers: dict[str, Tokenizer]) -> None:
    """The fake engine has a token per character; here the markers are given their own."""
    asked = chat("hermes")
    begin, end = (tokenizers["hermes"].token_id(each) for each in ("<think>", "</think>"))
    plain = asked.engine._delta

    def with_markers(submit, place, word, index):
        delta = plain(submit, place, word, index)
        marker = {"<think>": begin, "</think>": end}.get(word)
        delta.token_ids = delta.token_ids if marker is None else [marker]
        return delta

    asked.engine._delta = with_markers
    asked.says("<think>", "Well", "</think>", "Yes")
    details = asked.reply()["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": 6}
    assert asked.reply(n=2)["usage"]["completion_tokens_details"] == {"reasoning_tokens": 12}
    asked.says("Yes")
    assert asked.reply()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    asked.says("<think>", "Well", reason="length")
    assert asked.reply()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}
    asked.says("<thi", "nk>Well", "</think>", "Yes")  # spelled out: not known
    assert "completion_tokens_details" not in asked.reply()["usage"]
    asked.says("<think>", "Well</thi", "nk>", "Yes")
    assert "completion_tokens_details" not in asked.reply()["usage"]


def test_decisions_are_told(chat) -> None:
    asked = chat("mistral", stream_tool_arguments=True)
    told = {each["name"]: each for each in asked.http.get("/explain").json()["serving"]}
    assert told["tool_call_parser"]["value"] == "mistral"
    assert "[TOOL_CALLS]" in told["tool_call_parser"]["reason"]
    assert told["reasoning_parser"]["value"] == "mistral"
    assert (told["stream_tool_arguments"]["value"], told["stream_tool_arguments"]["asked"]) == (
        True,
        True,
    )
