"""Headrace: an engine that executes large language models and shows its work.

The names below are imported when they are first used, so that `import headrace` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headrace.version import __version__

if TYPE_CHECKING:
    from headrace.config.engine_config import EngineConfig
    from headrace.engine.outputs import CompletionOutput, EmbeddingOutput, Piece, RequestOutput
    from headrace.llm import LLM
    from headrace.request.pooling_params import PoolingParams
    from headrace.request.sampling_params import SamplingParams
    from headrace.request.structured_output import StructuredOutput

__all__ = [
    "LLM",
    "CompletionOutput",
    "EmbeddingOutput",
    "EngineConfig",
    "Piece",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutput",
    "__version__",
]

_HOMES = {
    "LLM": "headrace.llm",
    "CompletionOutput": "headrace.engine.outputs",
    "EmbeddingOutput": "headrace.engine.outputs",
    "EngineConfig": "headrace.config.engine_config",
    "Piece": "headrace.engine.outputs",
    "PoolingParams": "headrace.request.pooling_params",
    "RequestOutput": "headrace.engine.outputs",
    "SamplingParams": "headrace.request.sampling_params",
    "StructuredOutput": "headrace.request.structured_output",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
