"""A path that this server has not, answered with the one that was meant, or why there is none."""

from collections.abc import Collection

from headrace.base.unknown_names import NOT_HERE, TEXT_ONLY, OtherWords

PATH_WORDS = OtherWords(
    renamed={
        "/api/chat": "/v1/chat/completions",
        "/api/generate": "/v1/completions",
        "/encode": "/v1/embeddings",
        "/get_load": "/status.json",
        "/load": "/status.json",
        "/pooling": "/v1/embeddings",
        "/rerank": "/v1/score",
        "/reset_prefix_cache": "/flush_cache",
        "/v1/rerank": "/v1/score",
        "/v2/rerank": "/v1/score",
    },
    advice={
        **dict.fromkeys(("/classify", "/sleep", "/v1/moderations", "/wake_up"), NOT_HERE),
        **dict.fromkeys(("/v1/audio/speech", "/v1/audio/transcriptions"), TEXT_ONLY),
        "/v1/images/generations": TEXT_ONLY,
    },
    families=dict.fromkeys(("lora", "memory", "weights"), NOT_HERE),
)
"""Routes of vLLM, SGLang, OpenAI and Ollama."""


def meant(asked: str, paths: Collection[str]) -> str:
    """What to do about a path that there is not: mostly a part is missing, or there twice.

    Args:
        paths: those that there are.
    """
    asked = asked.rstrip("/")
    if exact := PATH_WORDS.exact_answer(asked):
        return exact
    near = [
        path
        for path in paths
        if asked and (path.endswith(asked) or asked.endswith(path) or asked.startswith(f"{path}/"))
    ]
    if near:
        return f"did you mean {min(near, key=len)}?"
    return PATH_WORDS.answer(asked, paths) or "/docs lists what there is"
