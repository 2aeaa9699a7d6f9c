"""Fields that clients send and this server has no code for: refused, never ignored in silence.

What would change the answer is refused with the reason, or the name it has here; so is a name that
is nearly one of ours. What cannot change the answer is taken. What nobody here has heard of is
taken too, as clients of other servers expect, and the answer names it.
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from pydantic import BaseModel

from headrace.base.unknown_names import NOT_HERE, TEXT_ONLY
from headrace.request.other_words import ABSENT, FIELD_WORDS, SAMPLING_WORDS
from headrace.serving.errors import invalid
from headrace.serving.ignored_fields import MOST_TOLD
from headrace.serving.service import Service

OF_CHATS = "/v1/chat/completions has it"

REFUSED = {
    **ABSENT,
    **{name: f"use {ours}" for name, ours in FIELD_WORDS.renamed.items()},
    **{name: SAMPLING_WORDS.advice[name] for name in ("do_sample", "eos_token_id", "max_length")},
    "audio": TEXT_ONLY,
    "bootstrap_host": NOT_HERE,
    "bootstrap_room": NOT_HERE,
    "container": "code is not run here",
    "chat_template": "templates of requests are not run; the server takes --chat-template",
    "documents": "pass them as chat_template_kwargs",
    "enable_thinking": "pass it as chat_template_kwargs",
    "extra_body": "its fields stand beside the others; OpenAI's Python client puts them there",
    "format": "use response_format",
    "function_call": "functions became tools; send tools and tool_choice",
    "functions": "functions became tools; send tools and tool_choice",
    "grammar": "use ebnf",
    "guided_whitespace_pattern": "JSON comes in one line, or as structured_outputs says",
    "image_data": TEXT_ONLY,
    "mcp_servers": "tools are called by the client",
    "mm_processor_kwargs": TEXT_ONLY,
    "modalities": TEXT_ONLY,
    "output_format": "send it as output_config.format",
    "options": "its fields stand beside the others",
    "prediction": NOT_HERE,
    "reasoning": "use reasoning_effort",
    "reasoning_effort": "it belongs to chat",
    "return_hidden_states": "/generate, /v1/completions and /v1/chat/completions have it",
    "return_routed_experts": "ask /generate for them",
    "session_id": NOT_HERE,
    "session_params": NOT_HERE,
    "suffix": "models here continue text and do not fill in",
    "thinking": "pass what the template knows as chat_template_kwargs",
    "verbosity": NOT_HERE,
    "video_data": TEXT_ONLY,
    "web_search_options": NOT_HERE,
}
# Values with which a refused field asks for nothing.
NEUTRAL = {
    **dict.fromkeys(
        (
            *("dry_multiplier", "dynatemp_range", "epsilon_cutoff", "eta_cutoff", "mirostat"),
            *("smoothing_factor", "top_a", "xtc_probability"),
        ),
        (0,),
    ),
    **dict.fromkeys(("best_of", "repeat_penalty", "tfs", "tfs_z", "typical_p"), (1,)),
    "do_sample": (True,),
    "modalities": (["text"],),
    "stream_interval": (1,),
    "length_penalty": (1,),
    "top_n_sigma": (-1, 0),
    "verbosity": ("medium",),
}
_NEAR = 0.9  # of difflib: temprature, maxTokens; not top_a, which is another filter than top_p
_LONGEST = 64  # characters of a name that is compared with ours

WITHOUT_EFFECT = frozenset(
    {
        "guided_decoding_backend",
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
    body: BaseModel, service: Service, *, elsewhere: Mapping[str, str] | None = None
) -> None:
    """Refuse, or let be without effect, the fields that the request model does not have.

    Args:
        elsewhere: names that another route has -> why they are none of this one.

    Raises:
        ApiError: 400 for a field that would change the answer, or is misspelt.
    """
    for place, (name, value) in enumerate((body.model_extra or {}).items()):
        if name in WITHOUT_EFFECT or _asks_nothing(name, value):
            continue
        why = (elsewhere or {}).get(name) or REFUSED.get(name)
        if why is None and place < MOST_TOLD:  # a body may have any number of fields
            why = _misspelt(name, type(body).model_fields)
        if why is None:
            service.ignored.add(name, "nobody here knows it")
        elif service.config.refuse_unsupported:
            raise invalid(f"{name} is not supported: {why}", name)
        else:
            service.ignored.add(name, why)


def _misspelt(name: str, known: Iterable[str]) -> str | None:
    """Of a name that differs from a field in a letter, or in how it joins words, which is meant."""
    fields = {_letters(field): field for field in known}
    close = get_close_matches(_letters(name[:_LONGEST]), fields, n=1, cutoff=_NEAR)
    return f"did you mean {fields[close[0]]}?" if close else None


def _letters(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _asks_nothing(name: str, value: object) -> bool:
    if value is False:
        return name not in ("do_sample", "enable_thinking")
    return value is None or value in ([], {}, "") or value in NEUTRAL.get(name, ())
