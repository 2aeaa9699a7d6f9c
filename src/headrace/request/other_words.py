"""What vLLM, SGLang and transformers call options of a request, and what stands for them here."""

from headrace.base.unknown_names import NOT_HERE, OtherWords

_NO_CODE = "code of requests is not run"
_NO_BEAMS = "it belongs to beam search, which this version does not have"
_BY_FILTERS = "top_k, top_p and min_p are the filters there are"

SGLANG_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "sampling_seed": "seed",
}
"""SGLang's names of fields of `SamplingParams` -> ours."""

FORMS = {
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "guided_choice": "choice",
}
"""SGLang's fields for the form of an answer, and vLLM's older ones -> those of `StructuredOutput`.
"""

ABSENT = {
    **dict.fromkeys(
        ("custom_logit_processor", "custom_params", "logits_processor", "logits_processors"),
        _NO_CODE,
    ),
    **dict.fromkeys(
        (
            *("dry_multiplier", "dynatemp_range", "epsilon_cutoff", "eta_cutoff", "mirostat"),
            *("smoothing_factor", "tfs", "tfs_z", "top_a", "top_n_sigma", "typical_p"),
            "xtc_probability",
        ),
        _BY_FILTERS,
    ),
    "input_embeds": NOT_HERE,
    "length_penalty": _NO_BEAMS,
    "lora_path": NOT_HERE,
    "prompt_embeds": NOT_HERE,
    "repetition_detection": NOT_HERE,
    "stop_regex": "use stop or stop_token_ids",
    "stream_interval": "every step is sent as it comes",
    "thinking_token_budget": NOT_HERE,
    "truncate_prompt_tokens": "prompts are never truncated; send a shorter one",
    "use_beam_search": "this version does not have beam search",
}
"""Fields of requests that no face has -> why."""

FIELD_WORDS = OtherWords(
    renamed={
        **SGLANG_NAMES,
        "max_completion_tokens": "max_tokens",
        "n_predict": "max_tokens",
        "num_return_sequences": "n",
        "repeat_penalty": "repetition_penalty",
        "stop_sequences": "stop",
        "top_logprobs": "logprobs",
    }
)
"""Names that mean the same in Python and in bodies of HTTP."""

SAMPLING_WORDS = OtherWords(
    renamed=FIELD_WORDS.renamed,
    advice={
        **{name: f"use structured=StructuredOutput({form}=...)" for name, form in FORMS.items()},
        **dict.fromkeys(
            ("guided_decoding", "response_format", "structured_outputs"),
            "use structured=StructuredOutput(json_schema=...), or another of its forms",
        ),
        **ABSENT,
        **dict.fromkeys(("early_stopping", "num_beams"), _NO_BEAMS),
        "best_of": "use n and logprobs=0, and keep the sequences that you like best",
        "detokenize": "text is made wherever there is a tokenizer",
        "do_sample": "temperature=0 takes the likeliest token, any other draws",
        "eos_token_id": "use stop_token_ids, a list",
        "lora_request": NOT_HERE,
        "max_length": "max_tokens counts the output alone",
        "output_kind": "LLM.generate gives whole outputs, LLM.stream pieces",
        "spaces_between_special_tokens": "tokenizers here put none there",
        "stream": "use LLM.stream or LLM.stream_chat",
    },
)

STRUCTURED_WORDS = OtherWords(
    renamed={"ebnf": "grammar", "json": "json_schema"},
    advice={
        "backend": "there is one, xgrammar",
        "disable_any_whitespace": "any_whitespace is its contrary, and off",
        "whitespace_pattern": "any_whitespace lets JSON be laid out freely",
    },
)

POOLING_WORDS = OtherWords(
    renamed={"normalise": "normalize", "pooling_type": "pooling"},
    advice={"truncate_prompt_tokens": ABSENT["truncate_prompt_tokens"]},
)
