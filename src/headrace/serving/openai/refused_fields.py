"""Fields that clients send and this server has no code for: refused, never ignored in silence.

Three kinds: what would change the answer is refused with the reason; what cannot change it is
taken and has no effect; what nobody here has heard of is taken too, as OpenAI's clients expect of
compatible servers, with a warning in the log.
"""

from collections.abc import Collection

from pydantic import BaseModel

from headrace.base.log import get_logger
from headrace.base.shown import shown
from headrace.request.other_words import ABSENT, FIELD_WORDS
from headrace.serving.errors import invalid

log = get_logger(__name__)

_NOT_HERE = "this version does not have it"
_OF_CHATS = "/v1/chat/completions has it"
_TEXT_ONLY = "this model reads and writes text only"

REFUSED = {
    **ABSENT,
    "audio": _TEXT_ONLY,
    "bootstrap_host": _NOT_HERE,
    "bootstrap_room": _NOT_HERE,
    "container": "code is not run here",
    "chat_template": "templates of requests are not run; the operator names one with the model",
    "documents": "pass them as chat_template_kwargs",
    "function_call": "functions became tools; send tools and tool_choice",
    "functions": "functions became tools; send tools and tool_choice",
    "image_data": _TEXT_ONLY,
    "mcp_servers": "tools are called by the client",
    "mm_processor_kwargs": _TEXT_ONLY,
    "modalities": _TEXT_ONLY,
    "output_format": "send it as output_config.format",
    "prediction": _NOT_HERE,
    "reasoning_effort": "it belongs to chat",
    "return_hidden_states": "/generate, /v1/completions and /v1/chat/completions have it",
    "return_routed_experts": "ask /generate for them",
    "session_id": _NOT_HERE,
    "session_params": _NOT_HERE,
    "suffix": "models here continue text and do not fill in",
    "verbosity": _NOT_HERE,
    "video_data": _TEXT_ONLY,
    "web_search_options": _NOT_HERE,
}
# Values with which a refused field asks for nothing.
NEUTRAL = {
    "modalities": (["text"],),
    "stream_interval": (1,),
    "length_penalty": (1, 1.0),
    "verbosity": ("medium",),
}
WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "spaces_between_special_tokens",
        "store",
        "user",
        "weight_version",
    }
)


def check_extra_fields(
    body: BaseModel,
    seen: set[str],
    *,
    of_chats: Collection[str] = (),
    refuses: bool = True,
) -> None:
    """Refuse or warn of the fields that the request model does not have.

    Args:
        seen: unknown names that were warned about already; grows, up to a bound.
        of_chats: names that another route has.
        refuses: else there is only the warning.

    Raises:
        ApiError: 400 for a field that would change the answer.
    """
    for name, value in (body.model_extra or {}).items():
        if name in WITHOUT_EFFECT:
            continue
        why = REFUSED.get(name, _OF_CHATS if name in of_chats else None)
        if why is None or not refuses:
            if name not in seen and len(seen) < 1000:
                seen.add(name)
                answer = FIELD_WORDS.answer(name, type(body).model_fields)
                log.warning(
                    "A request brings the unknown field %s, which has no effect%s",
                    shown(name),
                    f" ({answer})" if answer else "",
                )
            continue
        asks_nothing = value is None or value is False or value in ([], {}, "")
        if not asks_nothing and value not in NEUTRAL.get(name, ()):
            raise invalid(f"{name} is not supported: {why}", name)
