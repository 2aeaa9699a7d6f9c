"""`--no-refuse-unsupported`: what would be refused though the rest of the request can be answered.

Some clients send every field they know, whether they need it or not; OpenAI's own tests do. An
operator who serves such clients can let those fields have no effect. Fields that no route has are
left out by `check_extra_fields`; here are values.
"""

from collections.abc import Iterator

from headrace.serving.openai.chat_messages import knows_effort
from headrace.serving.openai.chat_request import ChatRequest
from headrace.serving.openai.completion_request import CompletionRequest
from headrace.serving.openai.sampling_fields import SamplingFields
from headrace.serving.service import Service

_LEFT_OUT = "this server cannot do that, and refuse_unsupported is off"


def leave_out_unsupported(body: SamplingFields, service: Service) -> None:
    """Take out of a request what this server cannot do, if its operator lets that have no effect;
    a number of tokens below 1 becomes 1.

    Args:
        body: is changed.
    """
    if service.config.refuse_unsupported:
        return
    for name in _left_out(body, service):
        service.ignored.add(name, _LEFT_OUT)


def _left_out(body: SamplingFields, service: Service) -> Iterator[str]:
    if body.stream_options is not None and not body.stream:
        body.stream_options = None
        yield "stream_options"
    if isinstance(body, CompletionRequest) and body.best_of == 0:
        body.best_of = None
        yield "best_of"
    if body.max_tokens == 0 and not (isinstance(body, CompletionRequest) and body.echo):
        body.max_tokens = 1
        yield "max_tokens"
    if isinstance(body, ChatRequest):
        yield from _left_out_of_chat(body, service)
    if body.logit_bias:
        known = {key: bias for key, bias in body.logit_bias.items() if key.isdecimal()}
        if len(known) < len(body.logit_bias):
            body.logit_bias = known
            yield "logit_bias"


def _left_out_of_chat(body: ChatRequest, service: Service) -> Iterator[str]:
    if body.max_completion_tokens == 0:
        body.max_completion_tokens = 1
        yield "max_completion_tokens"
    tokenizer = service.tokenizer
    variables = frozenset[str]() if tokenizer is None else tokenizer.template_variables
    if body.reasoning_effort not in (None, "none") and not knows_effort(variables):
        body.reasoning_effort = None
        yield "reasoning_effort"
    if _leaves_out_tools(body):
        yield "tools"


def _leaves_out_tools(body: ChatRequest) -> bool:
    """Take out tools that are no functions: agents send those of OpenAI and Anthropic to all."""
    if body.tools is None:
        return False
    functions = [tool for tool in body.tools if tool.get("type", "function") == "function"]
    if functions and len(functions) == len(body.tools):
        return False
    body.tools = functions or None
    if not functions and body.tool_choice == "auto":
        body.tool_choice = None
    return True
