"""Chat templates: Jinja text from a checkpoint, rendered in a sandbox.

Templates are written against the environment of transformers (`chat_template_utils`); the names
and filters here are the ones found there.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn, TypeVar

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.base.errors import RequestError
from headrace.text.tool_history import with_arguments

Result = TypeVar("Result")

_LONGEST_MESSAGE = 300
_OF_OBJECTS = ("tojson", "items", "dictsort", "keys", "mapping", "string")  # done to objects too
_REASONING = ("reasoning_content", "reasoning", "thinking")  # each template knows one of them
_OPEN_END = (
    "<<headrace: the text goes on here>> "  # its last space shows whether the template trims
)


class ChatTemplate:
    """One or several named templates; "tool_use" is taken when tools are given, else "default"."""

    def __init__(self, templates: Mapping[str, str]) -> None:
        self._templates = {name: _Template(source) for name, source in templates.items()}
        self.text = "\n".join(templates.values())

    def compile(self) -> None:
        """Raises `RequestError` for what is no Jinja; else that shows at the first use."""
        _guarded(lambda: [each.compiled for each in self._templates.values()])

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names that a template asks for; empty where one cannot be read."""
        try:
            return frozenset[str]().union(*(each.variables for each in self._templates.values()))
        except RequestError:
            return frozenset()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
    ) -> str:
        template = self._choose(tools)
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "add_generation_prompt and continue_final_message are both set",
                why="One opens a new turn, the other leaves the last one open",
                remedy="Set one of them",
            )
        prepared = [_prepared(message, index, template) for index, message in enumerate(messages)]
        if not prepared:
            raise RequestError("there are no messages", remedy="Send at least one")
        if continue_final_message:
            prepared[-1] = _opened(prepared[-1])
        text = template.render(
            {
                "documents": None,
                **variables,
                "messages": prepared,
                "tools": list(tools) if tools else None,
                "add_generation_prompt": add_generation_prompt,
            }
        )
        return _cut_open_end(text) if continue_final_message else text

    def _choose(self, tools: Sequence[Mapping[str, Any]] | None) -> "_Template":
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise RequestError(
                "this model has no default chat template",
                why=f"It names: {', '.join(sorted(self._templates))}",
                remedy="Name a file with one (chat_template)",
            )
        return self._templates[name]


class _Template:
    """One template, compiled when first used, so that a broken one harms chat only."""

    def __init__(self, source: str) -> None:
        self._source = source

    def render(self, variables: Mapping[str, Any]) -> str:
        return _guarded(lambda: self.compiled.render(variables))

    @cached_property
    def compiled(self) -> jinja2.Template:
        return _environment().from_string(self._source)

    @cached_property
    def wants_parts(self) -> bool:
        """Whether content must be a list of parts: it is looped over and never asked if a string.

        Templates that never loop over content want a string; those that ask take both.
        """
        return self.takes_parts and not any(
            test.name == "string" for test in self._tree.find_all(nodes.Test)
        )

    @cached_property
    def takes_parts(self) -> bool:
        names = self._names_of("content")
        loops = self._tree.find_all(nodes.For)
        return any(_is_part(loop.iter, "content", names) for loop in loops)

    @cached_property
    def asks_for_none(self) -> bool:
        """Whether content that is not there must be None: the template tells turns of tool calls
        by that, as DeepSeek's do. Clients send an empty text in its place too."""
        names = self._names_of("content")
        tests = self._tree.find_all(nodes.Test)
        return any(test.name == "none" and _is_part(test.node, "content", names) for test in tests)

    @cached_property
    def wants_argument_text(self) -> bool:
        """Whether arguments of tool calls must be JSON text: the template writes them itself, and
        never as something that an object can be. Most want the object."""
        tree, names = self._tree, self._names_of("arguments")
        written = [
            node
            for kind in (nodes.Getattr, nodes.Getitem)
            for node in tree.find_all(kind)
            if _is_part(node, "arguments", names)
        ]
        takers: list[nodes.Node | None] = [loop.iter for loop in tree.find_all(nodes.For)]
        takers += [each.node for each in tree.find_all(nodes.Filter) if each.name in _OF_OBJECTS]
        takers += [each.node for each in tree.find_all(nodes.Test) if each.name in _OF_OBJECTS]
        takers += [each.node for each in tree.find_all(nodes.Getattr) if each.attr in _OF_OBJECTS]
        return bool(written) and not any(
            _is_part(node, "arguments", names) for node in takers if node is not None
        )

    @cached_property
    def variables(self) -> set[str]:
        return _guarded(lambda: meta.find_undeclared_variables(self._tree))

    def _names_of(self, part: str) -> set[str]:
        """Names under which a part of messages goes."""
        names = {part}
        for assignment in self._tree.find_all(nodes.Assign):
            target = assignment.target
            if isinstance(target, nodes.Name) and _is_part(assignment.node, part, names):
                names.add(target.name)
        return names

    @cached_property
    def _tree(self) -> nodes.Template:
        return _guarded(lambda: _environment().parse(self._source))


def _is_part(node: nodes.Node, part: str, names: set[str]) -> bool:
    if isinstance(node, nodes.Filter) and node.node is not None:
        return _is_part(node.node, part, names)
    if isinstance(node, nodes.Getattr):
        return node.attr == part
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == part
    return isinstance(node, nodes.Name) and node.name in names


def _guarded(action: Callable[[], Result]) -> Result:
    """Whatever fails in a template is told to the one who asked, in bounded length."""
    try:
        return action()
    except RequestError:
        raise
    except Exception as error:
        reason = str(error) or type(error).__name__
        if len(reason) > _LONGEST_MESSAGE:
            reason = reason[:_LONGEST_MESSAGE] + " ..."
        raise RequestError(
            "the chat template cannot render these messages",
            why=reason,
            remedy="Check roles, their order and the content",
        ) from error


def _prepared(message: Mapping[str, Any], index: int, template: _Template) -> dict[str, Any]:
    """A copy as the template wants it: content a string or a list of text parts, reasoning under
    every name it goes by, and no None but for content where the template asks for that."""
    if not isinstance(message, Mapping):
        raise RequestError(f"message {index} is {type(message).__name__}, not an object")
    if not isinstance(message.get("role"), str):
        raise RequestError(f"message {index} has no role", remedy="Give system, user, assistant")
    copy = {key: value for key, value in message.items() if value is not None}
    thoughts = [copy[name] for name in _REASONING if isinstance(copy.get(name), str)]
    if any(thoughts):
        copy |= dict.fromkeys(_REASONING, next(filter(None, thoughts)))
    if copy.get("tool_calls"):
        copy["tool_calls"] = with_arguments(
            copy["tool_calls"], index, as_text=template.wants_argument_text
        )
    content = copy.get("content")
    if template.asks_for_none and (content is None or (not content and copy.get("tool_calls"))):
        return {**copy, "content": None}
    if content is None:
        return copy
    if isinstance(content, str):
        if template.wants_parts:
            copy["content"] = [{"type": "text", "text": content}]
        return copy
    texts = _texts(content, index)
    if template.takes_parts:
        copy["content"] = [{"type": "text", "text": text} for text in texts]
    else:
        copy["content"] = "\n".join(texts)
    return copy


def _texts(content: Any, index: int) -> list[str]:
    if not isinstance(content, Sequence):
        raise RequestError(
            f"the content of message {index} is {type(content).__name__}",
            remedy="Send a string or a list of text parts",
        )
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(
                f"message {index} has a content part of type {kind!r}"[:_LONGEST_MESSAGE],
                why="This model reads text only",
                remedy='Send parts like {"type": "text", "text": "..."}',
            )
    return texts


def _opened(message: dict[str, Any]) -> dict[str, Any]:
    """The message with a mark at its end, where the rendered text will be cut."""
    content = message.get("content")
    if not content:
        raise RequestError("continue_final_message is set but the last message has no content")
    if isinstance(content, str):
        return {**message, "content": content + _OPEN_END}
    *before, last = content
    return {**message, "content": [*before, {**last, "text": last["text"] + _OPEN_END}]}


def _cut_open_end(text: str) -> str:
    position = text.rfind(_OPEN_END.rstrip())
    if position < 0:
        raise RequestError(
            "continue_final_message is set but the chat template leaves out the last message",
            remedy="Send a last message that the template writes as it is",
        )
    trimmed = not text.startswith(_OPEN_END, position)
    return text[:position].rstrip() if trimmed else text[:position]


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is a plain block."""

    tags = {"generation"}  # noqa: RUF012 - the attribute that jinja reads

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
