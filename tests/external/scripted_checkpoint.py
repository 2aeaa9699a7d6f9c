"""A model that says what it is told: its chat template picks one of the answers it knows.

A suite about tool calls needs a model that calls the right tool, on any machine, at once. Here the
chat template, a small program by nature, looks at the conversation and ends the prompt with the
special token of an answer; the weights are a chain that leads from that token through the answer's
pieces to the end of the text. Everything between is the real thing: template, tokenizer, engine,
sampling under grammars, parsers, streams.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random

import torch
from tiny_engine import LLAMA
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

HIDDEN = 512
CERTAINTY = 40.0  # logit of the piece that comes next; the others are noise around 0
END = "</s>"
HISTORY = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}</s>{% endfor %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`when` is a Jinja condition on `last` (text of the last message), `tools` and `messages`."""

    when: str
    text: str


def write_scripted(folder: Path, answers: Sequence[Answer]) -> Path:
    """Weights, tokenizer and template in `folder`. The first answer whose condition holds is given;
    the last one should always hold."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {text: at for at, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    random = Random(0)
    scripts: list[list[int]] = []
    for answer in answers:
        pieces = cut(answer.text, set(vocabulary), random)
        vocabulary |= {piece: len(vocabulary) + at for at, piece in enumerate(pieces)}
        scripts.append([vocabulary[piece] for piece in pieces])
    starts = [f"<|answer-{at}|>" for at in range(len(answers))]
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END, *starts])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": END, "chat_template": template(answers, starts)}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    end = tokenizer.token_to_id(END)
    follows: dict[int, int] = {}
    for start, script in zip(starts, scripts, strict=True):
        chain = [tokenizer.token_to_id(start), *script, end]
        follows |= dict(pairwise(chain))
    save_chain(folder, follows, tokenizer.get_vocab_size(), end)
    return folder


def cut(text: str, taken: set[str], random: Random) -> list[str]:
    """Pieces of a few bytes, cut anywhere, that are in no answer twice: each has one successor."""
    ((letters, _),) = pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(text)
    pieces: list[str] = []
    begin = 0
    while begin < len(letters):
        end = min(begin + random.randint(2, 5), len(letters))
        while letters[begin:end] in taken and end < len(letters):
            end += 1
        piece = letters[begin:end]
        while piece in taken:  # the text ends here, so it can only grow to the left
            if not pieces:
                raise ValueError(f"the answer {text!r} is a piece of another")
            taken.remove(pieces[-1])
            piece = pieces.pop() + piece
        pieces.append(piece)
        taken.add(piece)
        begin = end
    return pieces


def template(answers: Sequence[Answer], starts: Sequence[str]) -> str:
    """Shows the conversation, and behind it the special token of the answer."""
    chosen = "".join(
        f"{{% {'elif' if at else 'if'} {answer.when} %}}{start}"
        for at, (answer, start) in enumerate(zip(answers, starts, strict=True))
    )
    last = "{% set last = messages[-1].content | string %}"
    return f"{HISTORY}{last}{{% if add_generation_prompt %}}{chosen}{{% endif %}}{{% endif %}}"


def save_chain(folder: Path, follows: dict[int, int], vocabulary: int, end: int) -> None:
    """A Llama whose layers add nothing: the head knows the successor of each embedding."""
    sizes = {"vocab_size": vocabulary, "hidden_size": HIDDEN, "num_hidden_layers": 1}
    limits = {"eos_token_id": end, "max_position_embeddings": 4096, "dtype": "float32"}
    model = LlamaForCausalLM(LlamaConfig(**(LLAMA | sizes | limits)))
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (vocabulary, HIDDEN), generator=generator) * 2.0 - 1.0
    head = torch.zeros(vocabulary, HIDDEN)
    for token, successor in follows.items():
        head[successor] += signs[token] * (CERTAINTY / HIDDEN)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(signs)
        model.lm_head.weight.copy_(head)
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
    model.save_pretrained(folder)
