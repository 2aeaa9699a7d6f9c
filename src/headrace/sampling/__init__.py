"""Floor 6: from logits to tokens and their logprobs."""
