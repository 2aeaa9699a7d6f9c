"""`--no-refuse-unsupported`: what would be refused though the rest of the request can be answered.

Some clients send every field they know, whether they need it or not; OpenAI's own tests do. An
operator who serves such clients can let those fields have no effect. The log tells each of them
once.
"""

from headrace.base.log import get_logger
from headrace.serving.openai.chat_messages import knows_effort
from headrace.serving.openai.chat_request import ChatRequest
from headrace.serving.openai.refused_fields import REFUSED
from headrace.serving.openai.sampling_fields import SamplingFields

log = get_logger(__name__)


def leave_out_unsupported(
    body: SamplingFields, seen: set[str], template_variables: frozenset[str] = frozenset()
) -> None:
    """Take out of a request what this server cannot honour; the least it can do where a number is
    below that.

    Args:
        body: is changed.
        seen: names that were warned about already; grows, but only by names that are known here.
        template_variables: names that the chat template asks for.
    """
    left_out = [name for name in REFUSED if name in (body.model_extra or {})]
    for name in left_out:
        delattr(body, name)
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
    effort = getattr(body, "reasoning_effort", None)
    if effort not in (None, "none") and not knows_effort(template_variables):
        setattr(body, "reasoning_effort", None)  # noqa: B010, likewise
        left_out.append("reasoning_effort")
    if isinstance(body, ChatRequest) and _leaves_out_tools(body):
        left_out.append("tools")
    if body.logit_bias:
        known = {key: bias for key, bias in body.logit_bias.items() if key.isdecimal()}
        if len(known) < len(body.logit_bias):
            body.logit_bias = known
            left_out.append("logit_bias")
    for name in left_out:
        if name not in seen:
            seen.add(name)
            log.warning(
                "A request asks for what this server cannot do with %s, which is left out, as "
                "refuse_unsupported is off",
                name,
            )


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
