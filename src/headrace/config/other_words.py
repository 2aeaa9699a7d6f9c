"""What vLLM and SGLang call the options of an engine, and what stands for them here."""

from headrace.base.unknown_names import NOT_HERE, OtherWords

ONE_DEVICE = "this version runs on one device; leave it out"
_EAGER = {"decode_graph": "off", "prefill_graph": "off"}
_GRAPH_SIZES = "decode_graph takes the sizes themselves, as 1, 2, 4"
_POOL_SIZE = "max_total_tokens sets the KV pool in tokens, mem_fraction as a share of memory"
_AS_STORED = "weights are taken as the checkpoint has them; GGUF files are unpacked to dtype"
_ORDER = "requests run by their priority, then as they come"
_ON_SERVER = "headrace serve has it"
_COMPILED = "cpu_graph and prefill_graph='piecewise' compile"

DTYPE_NAMES = {
    "bf16": "bfloat16",
    "float": "float32",
    "fp16": "float16",
    "fp32": "float32",
    "half": "float16",
}
"""Other names of dtypes -> ours."""

ONE_ONLY = (
    "data_parallel_size",
    "dp_size",
    "ep_size",
    "nnodes",
    "pipeline_parallel_size",
    "pp_size",
    "tensor_parallel_size",
    "tp",
    "tp_size",
)
"""Sizes of groups: 1 is what there is."""

ENGINE_WORDS = OtherWords(
    renamed={
        "block_size": "page_size",
        "chunked_prefill_tokens": "chunked_prefill_size",
        "context_length": "max_model_len",
        "cuda_graph_bs": "decode_graph",
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
        "disable_cuda_graph": _EAGER,
        "disable_overlap_schedule": {"enable_overlap": False},
        "disable_radix_cache": {"enable_prefix_cache": False},
        "enable_deterministic_inference": {"deterministic": True},
        "enable_prefix_caching": {"enable_prefix_cache": True},
        "enforce_eager": _EAGER,
        "no_enable_prefix_caching": {"enable_prefix_cache": False},
    },
    advice={
        **dict.fromkeys((*ONE_ONLY, "distributed_executor_backend"), ONE_DEVICE),
        **dict.fromkeys(("enable_dp_attention", "enable_expert_parallel"), ONE_DEVICE),
        **dict.fromkeys(("quantization", "quantization_config"), _AS_STORED),
        **dict.fromkeys(("cuda_graph_max_bs", "max_seq_len_to_capture"), _GRAPH_SIZES),
        **dict.fromkeys(("num_gpu_blocks_override", "kv_cache_memory_bytes"), _POOL_SIZE),
        **dict.fromkeys(("schedule_policy", "scheduling_policy"), _ORDER),
        **dict.fromkeys(("compilation_config", "enable_torch_compile"), _COMPILED),
        **dict.fromkeys(("grammar_backend", "guided_decoding_backend"), "there is one, xgrammar"),
        **dict.fromkeys(("is_embedding", "task"), "every model generates, and every model embeds"),
        **dict.fromkeys(("api_key", "max_logprobs", "served_model_name"), _ON_SERVER),
        **dict.fromkeys(
            (
                "cpu_offload_gb",
                "disaggregation_mode",
                "enable_hierarchical_cache",
                "enable_lora",
                "enable_memory_saver",
                "enable_sleep_mode",
                "kv_transfer_config",
                "lora_paths",
                "speculative_algorithm",
                "speculative_config",
                "speculative_draft_model_path",
                "swap_space",
            ),
            NOT_HERE,
        ),
        "chat_template": "LLM.chat takes one, by default the checkpoint's own",
        "download_dir": "HF_HOME in the environment says where the hub's files go",
        "enable_chunked_prefill": "prompts are always chunked; chunked_prefill_size says how long",
        "enable_mixed_chunk": "steps always hold prompts and running sequences together",
        "enable_return_hidden_states": "requests ask for them, nothing is switched on beforehand",
        "hf_token": "HF_TOKEN in the environment is the hub's key",
        "limit_mm_per_prompt": "models here read and write text only",
        "log_level": "the command line reads HEADRACE_LOG_LEVEL; the logger is called headrace",
        "max_prefill_tokens": "chunked_prefill_size is what one step reads of prompts",
        "skip_tokenizer_init": "token ids go in and come out of any model",
        "trust_remote_code": "code that comes with a checkpoint is never run",
    },
)
