"""What vLLM and SGLang call methods, arguments and results of an `LLM`, and what there is here."""

from headrace.base.unknown_names import NOT_HERE, TEXT_ONLY, OtherWords
from headrace.request.other_words import SAMPLING_WORDS
from headrace.request.sampling_params import SamplingParams

_STATS = "use stats() or explain()"
_EMBED = "use embed(prompts, PoolingParams(pooling=...))"
_PIECES = "use stream() or stream_chat(), in a thread of its own for each request; or a server"

OPTION_WORDS = OtherWords(
    advice={
        **SAMPLING_WORDS.advice,
        **{name: f"use SamplingParams({name}=...)" for name in SamplingParams.__dataclass_fields__},
        **{
            theirs: f"use SamplingParams({ours}=...)"
            for theirs, ours in SAMPLING_WORDS.renamed.items()
        },
    }
)
"""Options of a request where they do not belong, among the arguments of a method."""

GENERATE_WORDS = OtherWords(
    renamed={"input": "prompts", "prompt": "prompts", "text": "prompts"},
    advice={
        **OPTION_WORDS.advice,
        **dict.fromkeys(("input_ids", "prompt_token_ids"), "prompts may be lists of token ids"),
        **dict.fromkeys(("image_data", "multi_modal_data"), TEXT_ONLY),
        "lora_request": NOT_HERE,
        "priority": "prompts of a call run in their order; a server has it",
        "return_logprob": "use SamplingParams(logprobs=...)",
    },
)
"""Arguments of `generate`."""

LLM_WORDS = OtherWords(
    advice={
        **dict.fromkeys(("async_generate", "generate_async"), _PIECES),
        **dict.fromkeys(("classify", "encode", "reward"), _EMBED),
        **dict.fromkeys(("get_metrics", "get_server_info", "model_config", "llm_engine"), _STATS),
        **dict.fromkeys(("sleep", "wake_up", "release_memory_occupation"), NOT_HERE),
        "beam_search": "this version does not have beam search",
        "reset_prefix_cache": "use flush_cache()",
        "score": "/v1/score of the server has it",
        "shutdown": "use close()",
        "tokenizer": "use get_tokenizer()",
    }
)
"""Attributes of `LLM`."""

OUTPUT_WORDS = OtherWords(
    renamed={"num_cached_tokens": "cached_tokens"},
    advice={
        **dict.fromkeys(("text", "token_ids"), "those of a continuation: outputs[0]"),
        "metrics": "none for a request; stats() of the LLM, /metrics of the server",
    },
)
"""Attributes of `RequestOutput`."""

EMBEDDING_WORDS = OtherWords(
    renamed={"num_cached_tokens": "cached_tokens"},
    advice=dict.fromkeys(("data", "outputs"), "use embedding"),
)
"""Attributes of `EmbeddingOutput`."""
