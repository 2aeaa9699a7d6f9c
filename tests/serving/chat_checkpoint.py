"""Tiny checkpoints whose chat template writes tools and reasoning as a family of models does."""

import json
from pathlib import Path

from tiny_engine import write_checkpoint
from tokenizers import AddedToken, Tokenizer

_HISTORY = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content or '' }}"
)
HERMES = (
    "{% if tools %}Tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}\n{% endif %}"
    + _HISTORY
    + "{% for call in m.tool_calls %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
MISTRAL = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}"
    + _HISTORY
    + "{% for call in m.tool_calls %}[TOOL_CALLS]{{ call.function.name }}[ARGS]"
    "{{ call.function.arguments }}{% endfor %}</s>{% endfor %}"
    "{# [THINK] reasons [/THINK] #}{% if add_generation_prompt %}<assistant>{% endif %}"
)
LLAMA = (
    "{# <|start_header_id|> ipython #}" + _HISTORY + "{% for call in m.tool_calls %}"
    '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}'
    "{% endfor %}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TEMPLATES = {"hermes": HERMES, "mistral": MISTRAL, "llama3_json": LLAMA}
# As their checkpoints have them: Qwen's are added tokens that are not special, Mistral's are.
TOKENS = {
    "hermes": (["<tool_call>", "</tool_call>", "<think>", "</think>"], False),
    "mistral": (["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"], True),
    "llama3_json": (["<|python_tag|>"], True),
}


def write_chat_checkpoint(folder: Path, family: str, *, all_special: bool = False) -> Path:
    """A llama with random weights that is told of tools as `family` is.

    Args:
        all_special: markers are special tokens whatever the family has.
    """
    write_checkpoint(folder, "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts, special = TOKENS[family]
    special |= all_special
    added = [AddedToken(text, special=special, normalized=False) for text in texts]
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    assert tokenizer.get_vocab_size() <= 272
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "</s>", "chat_template": TEMPLATES[family]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
