"""Floor 2: tokenizer, chat template, detokeniser, stop strings."""
