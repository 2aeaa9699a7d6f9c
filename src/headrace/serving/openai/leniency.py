"""`--no-refuse-unsupported`: what would be refused though the rest of the request can be answered.

Some clients send every field they know, whether they need it or not; OpenAI's own tests do. An
operator who serves such clients can let those fields have no effect. Fields that no route has are
left out by `check_extra_fields`; here are values.
"""

from collections.abc import Iterator

from headrace.serving.openai.chat_messages import knows_effort
from headrace.serving.openai.chat_request import ChatRequest
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
    left_out = []
    if body.stream_options is not None and not body.stream:
        body.stream_options = None
        left_out.append("stream_options")
    if getattr(body, "best_of", None) == 0:
        setattr(body, "best_of", None)  # noqa: B010, only one of the requests has it
        left_out.append("best_of")
    for name in ("max_tokens", "max_completion_tokens"):
        if getattr(body, name, None) == 0 and not getattr(body, "echo", None):
            setattr(body, name, 1)
            left_out.append(name)
    if isinstance(body, ChatRequest):
        left_out += _leave_out_of_chat(body, service)
    if body.logit_bias:
        known = {key: bias for key, bias in body.logit_bias.items() if key.isdecimal()}
        if len(known) < len(body.logit_bias):
            body.logit_bias = known
            left_out.append("logit_bias")
    for name in left_out:
        service.ignored.add(name, _LEFT_OUT)


def _leave_out_of_chat(body: ChatRequest, service: Service) -> Iterator[str]:
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
