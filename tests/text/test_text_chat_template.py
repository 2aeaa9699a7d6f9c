"""Chat templates: the environment models expect, content forms, refusals."""

import pytest
from text_samples import byte_level_backend

from headrace.base.errors import RequestError
from headrace.text.chat_template import ChatTemplate
from headrace.text.fast_backend import FastBackend
from headrace.text.tokenizer import TOKENIZER_WORDS, Tokenizer

CHATML = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LOOPING = (
    "{% for m in messages %}{% for part in m.content %}[{{ part.type }}:{{ part.text }}]"
    "{% endfor %}{% endfor %}"
)
BOTH = (
    "{% for m in messages %}{% if m.content is string %}S:{{ m.content }}{% else %}"
    "{% for part in m.content %}P:{{ part['text'] }}{% endfor %}{% endif %}{% endfor %}"
)
USER = {"role": "user", "content": "hi"}


def tokenizer(template, **named):
    templates = {"default": template, **named} if template is not None else named
    return Tokenizer(
        FastBackend(byte_level_backend()),
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
        eos_token_ids=frozenset({1}),
        chat_template=ChatTemplate(templates) if templates else None,
    )


def render(template, *messages, **options):
    return tokenizer(template).apply_chat_template(messages or [USER], **options)


def test_a_conversation():
    system = {"role": "system", "content": "Be kind."}
    assert render(CHATML, system, USER) == "<|system|>Be kind.</s>\n<|user|>hi</s>\n<|assistant|>"
    assert render(CHATML, add_generation_prompt=False) == "<|user|>hi</s>\n"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}"
         "{% break %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("{{ strftime_now('%%') }}", "%"),
        ("{{ bos_token }}{{ eos_token }}{{ pad_token }}", "<s></s>"),
        ("  {% if true %}\n  x\n  {% endif %}\n", "  x\n"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hi"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}", "2"),
        ("{{ thinking }}{{ documents is none }}", "onTrue"),
    ],
)  # fmt: skip
def test_what_templates_expect(template, expected):
    assert render(template, thinking="on") == expected


def test_variables_may_have_any_name():
    message = {"role": "user", "content": "a"}
    text = render("{{ self_ }}{{ messages[0].content }}", message, self_=1, self=2, context=3)
    assert text == "1a"


def test_content_as_parts():
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}
    assert render("{{ messages[0].content }}", parts) == "a\nb"
    assert render(LOOPING, parts) == "[text:a][text:b]"
    assert render(LOOPING, USER) == "[text:hi]"
    assert render(BOTH, parts, USER) == "P:aP:bS:hi"
    renamed = LOOPING.replace(
        "{% for part in m.content %}", "{% set c = m['content'] %}{% for part in c %}"
    )
    assert render(renamed, USER) == "[text:hi]"


def test_values_of_none_are_left_out():
    message = {"role": "assistant", "content": None, "tool_calls": None}
    template = "{{ 'content' in messages[0] }}{{ 'tool_calls' in messages[0] }}"
    assert render(template, message) == "FalseFalse"


@pytest.mark.parametrize(
    "message", [{"content": None}, {}, {"content": ""}], ids=["null", "missing", "empty"]
)
def test_content_is_none_where_a_template_asks_for_that(message):
    """As the templates of DeepSeek's distilled models: a turn of tool calls is one without."""
    template = (
        "{% for m in messages %}{% set content = m['content'] %}{% if content is none %}"
        "<calls>{{ m.tool_calls[0].function.name }}{% else %}{{ '<says>' + content }}{% endif %}"
        "{% endfor %}"
    )
    calls = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
    turn = {"role": "assistant", "tool_calls": calls, **message}
    assert render(template, USER, turn) == "<says>hi<calls>f"


@pytest.mark.parametrize("given", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("known", ["reasoning_content", "thinking"])
def test_reasoning_goes_by_every_name(given, known):
    """As in transformers: an answer of a server is sent back under the name that it gave it."""
    turn = {"role": "assistant", "content": "4", given: "2 and 2"}
    template = "{% for m in messages %}[{{ m.KNOWN }}]{{ m.content }}{% endfor %}"
    assert render(template.replace("KNOWN", known), USER, turn) == "[]hi[2 and 2]4"


def test_the_tool_template_is_taken_when_tools_are_given():
    chat = tokenizer("plain", tool_use="{{ tools[0].name }}")
    assert chat.apply_chat_template([USER]) == "plain"
    assert chat.apply_chat_template([USER], tools=[]) == "plain"
    assert chat.apply_chat_template([USER], tools=[{"name": "clock"}]) == "clock"


def test_continuing_the_last_message():
    begun = {"role": "assistant", "content": "Once "}
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(CHATML, USER, begun, **options) == "<|user|>hi</s>\n<|assistant|>Once "
    trimming = CHATML.replace("message['content']", "message['content'] | trim")
    assert render(trimming, USER, begun, **options).endswith("<|assistant|>Once")
    parts = {"role": "assistant", "content": [{"type": "text", "text": "Once"}]}
    assert render(LOOPING, parts, **options) == "[text:Once"
    assert begun["content"] == "Once "


@pytest.mark.parametrize(
    ("template", "messages", "options", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", [USER], {}, "Roles must alternate"),
        ("{{ raise_exception('x' * 5000) }}", [USER], {}, "xxx ..."),
        ("{% for %}", [USER], {}, "cannot render"),
        ("{{ messages[0].content + 1 }}", [USER], {}, "cannot render"),
        ("{{ messages.append(1) }}", [USER], {}, "cannot render"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", [USER], {}, "cannot render"),
        (CHATML, [], {}, "no messages"),
        (CHATML, ["hi"], {}, "message 0 is str"),
        (CHATML, [USER, {"content": "x"}], {}, "message 1 has no role"),
        (CHATML, [{"role": "user", "content": 3}], {}, "content of message 0 is int"),
        (CHATML, [{"role": "user", "content": [{"type": "image_url"}]}], {}, "'image_url'"),
        (CHATML, [USER], {"continue_final_message": True}, "both set"),
        ("no messages at all", [USER],
         {"continue_final_message": True, "add_generation_prompt": False}, "leaves out"),
        (CHATML, [{"role": "assistant"}],
         {"continue_final_message": True, "add_generation_prompt": False}, "no content"),
    ],
)  # fmt: skip
def test_refusals_are_bounded_request_errors(template, messages, options, words):
    with pytest.raises(RequestError) as caught:
        tokenizer(template).apply_chat_template(messages, **options)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 800


def test_ids_are_not_asked_of_a_template_in_silence():
    """transformers gives them by default; tokenize=True had been a variable that nobody read."""
    given = tokenizer("{{ messages[0].content }}")
    assert given.apply_chat_template([USER], tokenize=False, return_tensors=None) == "hi"
    for name in ("tokenize", "return_tensors"):
        with pytest.raises(RequestError, match=rf"has no {name}\. It gives the text\. Give"):
            given.apply_chat_template([USER], **{name: True})
    assert tokenizer("{{ tokenize }}").apply_chat_template([USER], tokenize="read") == "read"


def test_attributes_of_transformers_are_answered():
    plain = tokenizer(None)
    for name in (*TOKENIZER_WORDS.renamed, *TOKENIZER_WORDS.advice):
        with pytest.raises(AttributeError, match=rf"^Tokenizer has no attribute {name} \("):
            getattr(plain, name)
    assert all(hasattr(plain, ours) for ours in TOKENIZER_WORDS.renamed.values())


def test_without_a_template_chat_is_refused_with_the_way_to_give_one():
    plain = tokenizer(None)
    assert not plain.has_chat_template
    with pytest.raises(RequestError, match=r"has no chat template.*option chat_template"):
        plain.apply_chat_template([USER])
    assert plain.encode("hi")


def test_named_templates_without_a_default_are_refused():
    with pytest.raises(RequestError, match="no default chat template"):
        tokenizer(None, tool_use="x").apply_chat_template([USER])


@pytest.mark.parametrize(
    ("written", "rendered"),
    [
        ("{{ c.function.arguments | tojson }}", '{"a": "é"}'),
        ("{{ c.function | tojson }}", '{"name": "f", "arguments": {"a": "é"}}'),
        ("{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}", "a=é"),
        (
            "{% set a = c.function.arguments %}{% for k, v in a.items() %}{{ k }}{% endfor %}",
            "a",
        ),
        (
            "{% if c.function.arguments is string %}text{% else %}object{% endif %}",
            "object",
        ),
        ("{{ '<' + c['function']['arguments'] + '>' }}", '<{"a": "é"}>'),
        ("{% set args = c.function.arguments %}{{ args }}", '{"a": "é"}'),
    ],
)
@pytest.mark.parametrize("arguments", ['{"a": "é"}', {"a": "é"}], ids=["text", "object"])
def test_arguments_of_tool_calls_as_the_template_takes_them(written, rendered, arguments):
    template = f"{{% for c in messages[0].tool_calls %}}{written}{{% endfor %}}"
    call = {"function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert render(template, message) == rendered
    assert call["function"]["arguments"] == arguments  # the caller's own stays


def test_what_a_template_asks_for():
    several = tokenizer("{% if thinks %}{{ messages }}{% endif %}", other="{{ x }}")
    assert several.template_variables == {"thinks", "messages", "x"}
    assert several.template_text == "{% if thinks %}{{ messages }}{% endif %}\n{{ x }}"
    assert tokenizer("{% if %}").template_variables == set()
    assert tokenizer("{{ messages | no_such_filter }}").template_variables == set()
    assert tokenizer(None).template_text is None
