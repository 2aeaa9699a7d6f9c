"""The tools of a request and how it may call them, checked."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.base.errors import RequestError
from headrace.base.shown import first_of
from headrace.request.checks import bad_value

MOST_TOOLS = 512
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
CHOICES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function the model may call.

    Attributes:
        parameters: JSON schema of an object; any object if the request gave none.
        strict: the arguments must follow the schema.
    """

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRequest:
    """What a request says of tools.

    Attributes:
        choice: none, auto or required.
        only: the one tool that must be called, if the request names it; `choice` is required then.
        parallel: more than one call is welcome.
    """

    tools: tuple[Tool, ...]
    choice: str = "auto"
    only: str | None = None
    parallel: bool = True

    @classmethod
    def of(
        cls, tools: object, tool_choice: object = None, parallel_tool_calls: object = None
    ) -> "ToolRequest | None":
        """Read the three fields of a chat request, in OpenAI's form.

        Returns:
            `None` if there are no tools.

        Raises:
            RequestError: a field is not valid; the message begins with its name.
        """
        if parallel_tool_calls is not None and not isinstance(parallel_tool_calls, bool):
            raise bad_value("parallel_tool_calls", parallel_tool_calls, "true or false")
        if tools is None:
            if tool_choice not in (None, "none"):
                raise bad_value("tool_choice", tool_choice, "none, as the request has no tools")
            return None
        checked = _tools(tools)
        choice, only = _choice(tool_choice, [tool.name for tool in checked])
        return cls(
            tools=checked, choice=choice, only=only, parallel=parallel_tool_calls is not False
        )

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """Name of each tool -> schema of its parameters."""
        return {tool.name: tool.parameters for tool in self.tools}

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """Those that the choice leaves."""
        if self.only is not None:
            return tuple(tool for tool in self.tools if tool.name == self.only)
        return () if self.choice == "none" else self.tools


def _tools(tools: object) -> tuple[Tool, ...]:
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes) or not tools:
        raise bad_value("tools", tools, "a list of at least one tool, or leave it out")
    if len(tools) > MOST_TOOLS:
        raise RequestError(
            f"tools has {len(tools)} entries", remedy=f"Allowed: at most {MOST_TOOLS}"
        )
    checked = tuple(_tool(each, f"tools[{index}]") for index, each in enumerate(tools))
    names = [tool.name for tool in checked]
    for name in names:
        if names.count(name) > 1:
            raise bad_value("tools", name, "each name once")
    return checked


def _tool(tool: object, place: str) -> Tool:
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        raise bad_value(place, tool, 'an object with type "function" and a function')
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise bad_value(f"{place}.function", function, "an object with a name")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise bad_value(
            f"{place}.function.name", name, "1 to 64 letters, digits, underscores and hyphens"
        )
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise bad_value(f"{place}.function.description", description, "a string")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise bad_value(f"{place}.function.strict", strict, "true or false")
    if parameters is None:
        parameters = {"type": "object"}
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise bad_value(f"{place}.function.parameters", parameters, "a JSON schema of type object")
    if not isinstance(parameters.get("properties", {}), Mapping):
        raise bad_value(
            f"{place}.function.parameters.properties",
            parameters["properties"],
            "an object with a schema for each property",
        )
    return Tool(name=name, parameters={"type": "object", **parameters}, strict=strict is True)


def _choice(choice: object, names: Sequence[str]) -> tuple[str, str | None]:
    if choice is None:
        return "auto", None
    if isinstance(choice, str):
        if choice not in CHOICES:
            raise bad_value(
                "tool_choice", choice, f"{', '.join(CHOICES)} or the object that names a function"
            )
        return choice, None
    is_function = isinstance(choice, Mapping) and choice.get("type", "function") == "function"
    function = choice.get("function") if is_function and isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise bad_value(
            "tool_choice",
            choice,
            f'{", ".join(CHOICES)} or {{"type": "function", "function": {{"name": ...}}}}',
        )
    if name not in names:
        raise bad_value(
            "tool_choice", name, f"the name of a tool of the request: {first_of(names, 10)}"
        )
    return "required", name
