"""Makes expected_ids.json anew: what transformers gives for the demo GGUF files.

    python tests/text/make_expected_ids.py

Slow (transformers reads a GGUF vocabulary in Python) and only needed when the corpus changes.
transformers does not know the "smollm" pre-tokenizer and falls back to GPT-2's, which keeps
digits together; there the rule of the model's own tokenizer.json (every digit alone, then GPT-2's
expression) is put in before the ids are taken.
"""

import json
from pathlib import Path

from text_samples import corpus
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from headrace.checkpoint.names import resolve_model

EXPECTED = Path(__file__).with_name("expected_ids.json")


def main() -> None:
    expected = {}
    for model in ("smollm2", "gemma3-270m"):
        path = resolve_model(model)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        if model == "smollm2":
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False),
                ]
            )
        expected[model] = [[text, tokenizer.encode(text)] for text in corpus()]
    lines = json.dumps(expected).replace("]], [", "]],\n[")
    EXPECTED.write_text(lines + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
