"""What a caller gives for many prompts at once, as lists with one entry for each.

All of it raises `RequestError` for what cannot be meant.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, TypeVar

from headrace.base.errors import RequestError, UnknownFieldError
from headrace.base.shown import shown
from headrace.engine.other_words import OPTION_WORDS
from headrace.engine.prompts import Prompt, plain
from headrace.request.pooling_params import PoolingParams
from headrace.request.sampling_params import SamplingParams

Prompts = Prompt | Sequence[Prompt]
Message = Mapping[str, Any]
Made = TypeVar("Made")
Option = TypeVar("Option", SamplingParams, PoolingParams)
Params = SamplingParams | Sequence[SamplingParams]

_PROMPTS = (str, list, tuple)  # a part of one of these kinds is a prompt, not a token
_MESSAGES = "Give a list of messages, dicts with role and content"


def for_each(make: Callable[..., Made], *columns: Iterable[Any]) -> list[Made]:
    """`make` of every prompt and what belongs to it; an error says which prompt it is about."""
    made = []
    for index, line in enumerate(zip(*columns, strict=True)):
        try:
            made.append(make(*line))
        except RequestError as error:
            raise RequestError(
                f"Prompt {index}: {error.what}", why=error.why, remedy=error.remedy
            ) from error
    return made


def check_single(prompt: Prompt) -> None:
    """Refuse several prompts."""
    if isinstance(prompt, list | tuple) and any(isinstance(part, _PROMPTS) for part in prompt):
        raise RequestError(
            f"stream takes one prompt, a text or token ids; this is {shown(prompt)}",
            remedy="Give several to generate",
        )


def listed_prompts(prompts: Prompts) -> list[Prompt]:
    """The prompts of a call; one prompt alone becomes a list of itself."""
    if isinstance(prompts, str | Mapping):  # a dict is told as what one prompt cannot be
        return [prompts]
    listed: list[Any] = _as_list(
        "prompts", plain(prompts), "Give a text, a list of token ids, or a list"
    )
    if listed and hasattr(listed[0], "tolist"):
        listed = [plain(part) for part in listed]  # a list of arrays, or of their numbers
    return [listed] if listed and isinstance(listed[0], Integral) else listed


def listed_messages(messages: Any) -> list[Message]:
    """The messages of one conversation."""
    return _as_list("messages", messages, _MESSAGES)


def listed_conversations(messages: Any) -> list[Sequence[Message]]:
    """The conversations of a call; one alone becomes a list of itself."""
    listed = _as_list("messages", messages, _MESSAGES)
    return [listed] if listed and isinstance(listed[0], Mapping) else listed


def check_template_variables(variables: Iterable[str]) -> None:
    """Refuse options of a request among what goes to the chat template, which would not read them.

    Raises:
        UnknownFieldError: says where each belongs.
    """
    for name in variables:
        if name == "chat_template_kwargs":
            answer = "give its entries as arguments of their own"
        else:
            answer = OPTION_WORDS.exact_answer(name)
        if answer:
            raise UnknownFieldError(f"Unknown argument of chat: {name} ({answer})")


def _as_list(name: str, value: Any, remedy: str) -> list[Any]:
    if not isinstance(value, str | bytes | bytearray | Mapping | set | frozenset):
        try:
            return list(value)
        except TypeError:
            pass  # told below
    raise RequestError(f"{name} is {shown(value)}", remedy=remedy)


def one_each(name: str, params: Any, default: Option, count: int) -> list[Option]:
    """The options of each of `count` prompts; `default` where `params` is `None`."""
    kind = type(default)
    if params is None:
        params = default
    if isinstance(params, kind):
        return [params] * count
    if not isinstance(params, list | tuple):
        raise RequestError(
            f"{name} is {shown(params)}",
            remedy=f"Give a {kind.__name__}, or a list with one per prompt",
        )
    if len(params) != count:
        raise RequestError(
            f"{count} prompts came with {len(params)} {name.replace('_', ' ')}",
            remedy="Give one for all, or one per prompt",
        )
    for index, each in enumerate(params):
        if not isinstance(each, kind):
            raise RequestError(
                f"Prompt {index}: its {name.replace('_', ' ')} are {shown(each)}",
                remedy=f"Give a {kind.__name__}",
            )
    return list(params)
