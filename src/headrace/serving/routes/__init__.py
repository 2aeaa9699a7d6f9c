"""One small file per route or pair of routes; `ROUTERS` is what the app takes in.

They are tried in this order, so those that must be quick come first.
"""

from headrace.serving.routes import (
    abort,
    cache,
    chat,
    completions,
    embeddings,
    expert_distribution,
    explain,
    generate,
    health,
    information,
    messages,
    metrics,
    models,
    profile,
    responses,
    score,
    status,
    tokenize,
)

ROUTERS = tuple(
    module.router
    for module in (
        completions,
        chat,
        messages,
        responses,
        health,
        models,
        embeddings,
        generate,
        score,
        tokenize,
        information,
        explain,
        metrics,
        status,
        abort,
        cache,
        profile,
        expert_distribution,
    )
)
