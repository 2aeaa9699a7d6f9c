"""A tied model whose file stores a head as well."""

import torch

from headrace.checkpoint.interface import Checkpoint
from headrace.config.persona import ModelTraits

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def stores_another_head(traits: ModelTraits, checkpoint: Checkpoint) -> bool:
    """Whether the config ties the head to the embedding and the file holds a different head.

    Some tools store the shared table twice; then the second one says nothing. Where the two differ
    the config is wrong, and the stored head is the one that was trained: transformers takes it
    too (since version 5). Reads both tensors, where there are two.
    """
    stored = checkpoint.tensors
    if not traits.tie_word_embeddings or HEAD not in stored or EMBEDDING not in stored:
        return False
    if stored[HEAD].shape != stored[EMBEDDING].shape:
        return True
    embedding, head = checkpoint.read(EMBEDDING), checkpoint.read(HEAD)
    return not torch.equal(head, embedding.to(head.dtype))
