"""One small file per route or pair of routes; `ROUTERS` is what the app takes in."""

from headrace.serving.routes import (
    abort,
    cache,
    chat,
    completions,
    embeddings,
    explain,
    generate,
    health,
    information,
    metrics,
    models,
    profile,
    status,
    tokenize,
)

ROUTERS = tuple(
    module.router
    for module in (
        health,
        models,
        completions,
        chat,
        embeddings,
        generate,
        tokenize,
        information,
        explain,
        metrics,
        status,
        abort,
        cache,
        profile,
    )
)
