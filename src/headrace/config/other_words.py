"""What vLLM and SGLang call the options of an engine, and what stands for them here."""

from headrace.base.unknown_names import NOT_HERE, TEXT_ONLY, OtherWords

ONE_DEVICE = "this version runs on one device; leave it out"
_EAGER = {"decode_graph": "off", "prefill_graph": "off"}
_GRAPH_SIZES = "decode_graph takes the sizes themselves, as 1, 2, 4"
_POOL_SIZE = "max_total_tokens sets the KV pool in tokens, mem_fraction as a share of memory"
_AS_STORED = "weights are taken as the checkpoint has them; GGUF files are unpacked to dtype"
_ORDER = "requests run by their priority, the highest first, then as they come"
_ON_SERVER = "headrace serve has it"
_GIVEN_BACK = "pages are taken as sequences grow; when there are none, one gives its own back"
_ONE_GRAMMAR = "there is one, xgrammar"
_EVERY_MODEL = "every model generates, and every model embeds"
_ONE_STEP = "results are read after every step"
_DEFAULTS = "what a request leaves out is as the checkpoint's generation_config.json says"
_CONFIG = "change config.json in a copy of the checkpoint's folder"
_COMPILED = "cpu_graph and prefill_graph='piecewise' compile"

DTYPE_NAMES = {
    "bf16": "bfloat16",
    "float": "float32",
    "fp16": "float16",
    "fp32": "float32",
    "half": "float16",
}
"""Other names of dtypes -> ours."""

ATTENTION_NAMES = {
    "FLASHINFER": "flashinfer",
    "FLASH_ATTN": "fa3",
    "TORCH_SDPA": "torch_native",
    "TRITON_ATTN": "triton",
}
"""vLLM's names of attention backends -> ours."""

_ONE_ONLY = (
    "api_server_count",
    "data_parallel_size",
    "dp",
    "dp_size",
    "ep",
    "ep_size",
    "expert_parallel_size",
    "nnodes",
    "pipeline_parallel_size",
    "pp",
    "pp_size",
    "tensor_parallel_size",
    "tp",
    "tp_size",
)

AS_HERE = {
    **dict.fromkeys(_ONE_ONLY, ("1",)),
    "cpu_offload_gb": ("0",),
    "disaggregation_mode": ("null",),
    "generation_config": ("auto",),
    "grammar_backend": ("xgrammar",),
    "guided_decoding_backend": ("auto", "xgrammar"),
    "model_impl": ("auto",),
    "num_continuous_decode_steps": ("1",),
    "num_scheduler_steps": ("1",),
    "radix_eviction_policy": ("lru",),
    "runner": ("auto", "generate"),
    "sampling_defaults": ("model",),
    "schedule_policy": ("fcfs",),
    "scheduling_policy": ("fcfs",),
    "stream_interval": ("1",),
    "swap_space": ("0",),
    "task": ("auto", "generate"),
    "tokenizer_mode": ("auto",),
}
"""Their options -> the values that ask for what is so here anyway; for others there is advice."""

ENGINE_WORDS = OtherWords(
    renamed={
        "block_size": "page_size",
        "chunked_prefill_tokens": "chunked_prefill_size",
        "context_length": "max_model_len",
        "cuda_graph_bs": "decode_graph",
        "cuda_graph_sizes": "decode_graph",
        "cudagraph_capture_sizes": "decode_graph",
        "gpu_memory_utilization": "mem_fraction",
        "kv_cache_type": "kv_cache_dtype",
        "max_num_batched_tokens": "chunked_prefill_size",
        "max_num_seqs": "max_running_requests",
        "mem_fraction_static": "mem_fraction",
        "model_path": "model",
        "random_seed": "seed",
        "tokenizer_path": "tokenizer",
    },
    switches={
        "async_scheduling": {"enable_overlap": True},
        "disable_cuda_graph": _EAGER,
        "disable_custom_all_reduce": {},
        "disable_overlap_schedule": {"enable_overlap": False},
        "disable_radix_cache": {"enable_prefix_cache": False},
        "enable_chunked_prefill": {},
        "enable_deterministic_inference": {"deterministic": True},
        "enable_mixed_chunk": {},
        "enable_piecewise_cuda_graph": {"prefill_graph": "piecewise"},
        "enable_prefix_caching": {"enable_prefix_cache": True},
        "enable_priority_scheduling": {},
        "enable_return_hidden_states": {},
        "enforce_eager": _EAGER,
        "no_async_scheduling": {"enable_overlap": False},
        "no_enable_prefix_caching": {"enable_prefix_cache": False},
    },
    advice={
        **dict.fromkeys((*_ONE_ONLY, "distributed_executor_backend"), ONE_DEVICE),
        **dict.fromkeys(("quantization", "quantization_config"), _AS_STORED),
        **dict.fromkeys(("cuda_graph_max_bs", "max_seq_len_to_capture"), _GRAPH_SIZES),
        **dict.fromkeys(("num_gpu_blocks_override", "kv_cache_memory_bytes"), _POOL_SIZE),
        **dict.fromkeys(("schedule_policy", "scheduling_policy"), _ORDER),
        "schedule_low_priority_values_first": _ORDER,
        **dict.fromkeys(("compilation_config", "enable_torch_compile"), _COMPILED),
        **dict.fromkeys(("grammar_backend", "guided_decoding_backend"), _ONE_GRAMMAR),
        **dict.fromkeys(("is_embedding", "runner", "task"), _EVERY_MODEL),
        **dict.fromkeys(("api_key", "max_logprobs", "served_model_name"), _ON_SERVER),
        **dict.fromkeys(("num_continuous_decode_steps", "num_scheduler_steps"), _ONE_STEP),
        **dict.fromkeys(("generation_config", "override_generation_config"), _DEFAULTS),
        **dict.fromkeys(("preferred_sampling_params", "sampling_defaults"), _DEFAULTS),
        **dict.fromkeys(("hf_overrides", "json_model_override_args"), _CONFIG),
        **dict.fromkeys(
            (
                "cpu_offload_gb",
                "enable_hierarchical_cache",
                "enable_lmcache",
                "enable_memory_saver",
                "enable_sleep_mode",
                "kv_events_config",
                "kv_transfer_config",
                "swap_space",
            ),
            NOT_HERE,
        ),
        "allow_auto_truncate": "prompts are never truncated",
        "base_gpu_id": "CUDA_VISIBLE_DEVICES in the environment says which GPU",
        "decode_log_interval": "a line of figures comes every ten seconds while there is work",
        "disable_log_stats": "--log-level warning, or HEADRACE_LOG_LEVEL, leaves out such lines",
        "download_dir": "HF_HOME in the environment says where the hub's files go",
        "hf_token": "HF_TOKEN in the environment is the hub's key",
        "log_level": "the command line reads HEADRACE_LOG_LEVEL; the logger is called headrace",
        "logits_processors": "code of requests is not run",
        "max_log_len": "texts of requests are never logged",
        "max_prefill_tokens": "chunked_prefill_size is what one step reads of prompts",
        "model_impl": "models are those of headrace/models; none comes from transformers",
        "no_enable_chunked_prefill": "prompts are always chunked; chunked_prefill_size says how",
        "radix_eviction_policy": "what was used least recently is given up first",
        "sampling_backend": "there is one sampler",
        "schedule_conservativeness": _GIVEN_BACK,
        "skip_tokenizer_init": "token ids go in and come out of any model",
        "stream_interval": "every step is sent as it comes",
        "tokenizer_mode": "a checkpoint's own tokenizer is the only one",
        "tokenizer_revision": "revision holds for model and tokenizer",
        "trust_remote_code": "code that comes with a checkpoint is never run",
        "watchdog_timeout": "stall_seconds of headrace serve answers 503 when the engine is silent",
    },
    families={
        **dict.fromkeys(("dist", "dp", "eplb", "nccl", "parallel", "rank"), ONE_DEVICE),
        **dict.fromkeys(("disaggregation", "hicache", "speculative"), NOT_HERE),
        **dict.fromkeys(("lora", "loras"), NOT_HERE),
        **dict.fromkeys(("mm", "multimodal"), TEXT_ONLY),
        "moe": "there is one way to run experts",
    },
)
