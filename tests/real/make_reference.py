"""Makes the stored logits of the demo models anew, with transformers.

    python tests/real/make_reference.py [smollm2] [gemma3-270m]

Takes a few minutes: transformers reads GGUF vocabularies in Python. Needed when a prompt, a model
file or the format of the reference changes.

The weights are float32, the forwards run in float64: in float32 transformers' own rounding reaches
6e-5 in SmolLM2's logits, a third of what is allowed to us.

transformers' own loading of the GGUF file is the reference. That it is right for these two files
was looked at by hand, and `check_config` holds it: for Gemma 3 it takes 1 off the stored norm
weights (GGUF keeps 1 + w), sets a full layer after every five sliding ones, a window of 512, rope
bases of 1,000,000 and 10,000, and scales queries by 256 ** -0.5; that every weight equals ours is
tested in tests/checkpoint.
"""

import sys
from collections.abc import Sequence

import numpy as np
import torch
from real_reference import (
    CONTINUED,
    LENGTHS,
    NEW_TOKENS,
    PAST_THE_WINDOW,
    STRIDE,
    TOP,
    RealReference,
    checked_positions,
)
from transformers import AutoModelForCausalLM, PreTrainedModel

from headrace.checkpoint import open_checkpoint, resolve_model
from headrace.text.build import build_tokenizer

MODELS = ("smollm2", "gemma3-270m")
OPENINGS = (
    "Water",
    "A headrace is the channel that leads the water of a river to the wheel of the mill, ",
    "def fibonacci(n: int) -> int:\n    return n if n < 2 else ",
    "Überall rauscht das Wasser über die Räder, und der Müller zählt: ",
    "The miller keeps a book in which he writes down what he sees. ",
    "",
)
MODEL_CONFIG = {
    "smollm2": {"rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"}},
    "gemma3-270m": {
        "sliding_window": 512,
        "query_pre_attn_scalar": 256,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
        "rope_parameters": {
            "full_attention": {"rope_theta": 1000000.0, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    },
}


def main(models: Sequence[str]) -> None:
    for name in models or MODELS:
        path = resolve_model(name)
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        check_config(name, model)
        reference = make(model, prompts_of(name), path.stat().st_size)
        reference.save(name)
        print(name, len(reference.places), "positions, smallest gap", reference.gaps.min())


def check_config(name: str, model: PreTrainedModel) -> None:
    for key, expected in MODEL_CONFIG[name].items():
        found = getattr(model.config, key)
        assert found == expected, f"transformers read {key} as {found}, expected {expected}"


def prompts_of(name: str) -> list[list[int]]:
    """Prompts of exactly the lengths wanted, of text that could go on for ever."""
    source = open_checkpoint(resolve_model(name)).tokenizer_source
    assert source is not None
    tokenizer = build_tokenizer(source)
    story = " ".join(
        f"Wheel {number} turns {number * number % 97} times, and {number * 7 % 31} sacks are full."
        for number in range(1, 60)
    )
    lengths = (*LENGTHS, PAST_THE_WINDOW)
    prompts = [
        tokenizer.encode(opening + story)[:length]
        for opening, length in zip(OPENINGS, lengths, strict=True)
    ]
    assert [len(prompt) for prompt in prompts] == list(lengths)
    return prompts


def make(model: PreTrainedModel, prompts: list[list[int]], file_bytes: int) -> RealReference:
    proposed = [_propose(model, prompts[index]) for index in CONTINUED]
    model.double()
    rows = [row for index, prompt in enumerate(prompts) for row in _rows(model, index, prompt)]
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    greedy = [
        _greedy(model, prompts[index], tokens)
        for index, tokens in zip(CONTINUED, proposed, strict=True)
    ]
    tokens, logprobs, gaps = (np.array(part) for part in zip(*greedy, strict=True))
    return RealReference(
        file_bytes=file_bytes,
        prompts=prompts,
        greedy=tokens.astype(np.int32),
        greedy_logprobs=logprobs.astype(np.float32),
        gaps=gaps.astype(np.float32),
        **columns,
    )


def _rows(model: PreTrainedModel, index: int, prompt: list[int]) -> list[dict[str, np.ndarray]]:
    """The stored columns at every checked position of a prompt."""
    rows = []
    hidden = _hidden(model, prompt)
    for position in checked_positions(len(prompt)):
        logits = _head(model, hidden[position])
        top = logits.topk(TOP)
        total = logits.logsumexp(-1).item()
        is_last = position + 1 == len(prompt)
        rows.append(
            {
                "places": np.array([index, position], np.int32),
                "top_ids": top.indices.numpy().astype(np.int32),
                "top_logits": top.values.float().numpy(),
                "other_logits": logits[::STRIDE].float().numpy(),
                "logsumexp": np.float32(total),
                "target_logprobs": np.float32(
                    np.nan if is_last else logits[prompt[position + 1]].item() - total
                ),
            }
        )
    return rows


def _propose(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = model.generate(
        torch.tensor([prompt]),
        do_sample=False,
        min_new_tokens=NEW_TOKENS,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=None,
    )
    tokens: list[int] = ids[0, len(prompt) :].tolist()
    return tokens


def _greedy(
    model: PreTrainedModel, prompt: list[int], tokens: list[int]
) -> tuple[list[int], list[float], list[float]]:
    """Greedy tokens, their logprobs, the gaps below the largest logits.

    `tokens` are only proposed; one forward over all of them says that each is the likeliest, so
    the cache of transformers is no part of the reference.
    """
    logits = _head(model, _hidden(model, prompt + tokens)[len(prompt) - 1 : -1])  # [NEW_TOKENS, V]
    assert logits.argmax(-1).tolist() == tokens, "generate and forward disagree"
    largest, second = logits.topk(2).values.unbind(-1)
    logprobs = largest - logits.logsumexp(-1)
    return tokens, logprobs.tolist(), (largest - second).tolist()


def _hidden(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """[L, H]"""
    with torch.no_grad():
        return model.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0]


def _head(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """[..., H] -> [..., V] float64; neither model caps its logits."""
    with torch.no_grad():
        return model.lm_head(hidden)


if __name__ == "__main__":
    main(sys.argv[1:])
