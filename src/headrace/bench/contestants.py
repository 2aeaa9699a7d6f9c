"""What is measured: an engine that makes a fixed number of tokens for each prompt, greedily."""

from typing import TYPE_CHECKING, Protocol

import torch

from headrace.base.errors import HeadraceError, UnsupportedError
from headrace.bench.load import Prompts, Tokens
from headrace.checkpoint.interface import Checkpoint
from headrace.request.sampling_params import SamplingParams

if TYPE_CHECKING:
    from headrace.llm import LLM


class Contestant(Protocol):
    """One engine with a model loaded."""

    name: str

    def warm_prefix(self, prefix: list[int]) -> None:
        """Let it see a prefix that later prompts share, if it keeps such things."""

    def run(self, prompts: Prompts, output_len: int) -> Tokens:
        """Make `output_len` tokens for each prompt, all prompts as one batch; wait for the end."""


class Headrace:
    """Our own engine through its offline face."""

    name = "headrace"

    def __init__(self, llm: "LLM") -> None:
        self._llm = llm

    def warm_prefix(self, prefix: list[int]) -> None:
        self.run([prefix], 1)

    def run(self, prompts: Prompts, output_len: int) -> Tokens:
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        results = self._llm.generate(prompts, params, use_tqdm=False)
        for result in results:
            if result.outputs[0].finish_reason == "error":
                raise HeadraceError("A step failed", why=result.outputs[0].message)
        tokens = [result.outputs[0].token_ids for result in results]
        assert all(len(made) == output_len for made in tokens), "every prompt gets as many tokens"
        return tokens


def require_transformers() -> None:
    """Raise `UnsupportedError` when the peer cannot be imported; cheap, so ask before loading."""
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            "There is no transformers to compare with",
            why=str(error),
            remedy="pip install 'headrace[bench]', or in a clone scripts/setup_venv.sh bench",
        ) from None


class TransformersPeer:
    """transformers' `generate` on a left-padded batch, with the very weights we run.

    The tensors come from our reader (packed ones unpacked), so that both do the same arithmetic and
    neither is timed while it loads. Importing the model classes is allowed here, where they are the
    thing to compare with, and in tests.
    """

    name = "transformers"

    def __init__(self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> None:
        """Raises `UnsupportedError` when the package is missing or does not know the model."""
        require_transformers()
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(**checkpoint.config)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        weights = {name: checkpoint.read(name).to(dtype) for name in checkpoint.tensors}
        missing, unexpected = model.load_state_dict(weights, strict=False)
        left = set(missing) - set(model._tied_weights_keys or ())
        if left or unexpected:
            raise UnsupportedError(
                "transformers' model and the checkpoint do not fit together",
                why=f"missing: {sorted(left)[:3]}, unexpected: {sorted(unexpected)[:3]}",
            )
        model.tie_weights()
        self._model = model.to(device).eval()
        self._device = device

    def warm_prefix(self, prefix: list[int]) -> None:
        """generate keeps nothing between calls."""

    def run(self, prompts: Prompts, output_len: int) -> Tokens:
        from transformers import GenerationConfig

        longest = max(map(len, prompts))
        padded = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        settings = GenerationConfig(
            max_new_tokens=output_len, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        with torch.inference_mode():
            made = self._model.generate(
                input_ids=torch.tensor(padded, device=self._device),  # [B, L]
                attention_mask=torch.tensor(mask, device=self._device),
                generation_config=settings,
            )
        assert made.shape == (len(prompts), longest + output_len), (
            "every prompt gets as many tokens"
        )
        tokens: Tokens = made[:, longest:].tolist()  # waits for the device
        return tokens
