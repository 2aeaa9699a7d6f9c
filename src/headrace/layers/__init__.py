"""Floor 6: what models are made of: linear, norm, rope, MLP, attention, embedding, logits."""
