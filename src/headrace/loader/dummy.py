"""Random weights of a sane scale, for benchmarks and tests without a checkpoint.

Every weight is a pure function of seed, tensor name and place in the tensor, computed where the
tensor lies: eight billion of them take a second or less on a GPU, and a laptop gets the same bits.
The numbers come from a counter in place of a generator (Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", 2011), in two rounds of integer mixing, the first of which is done once: good
enough to look random to a model, not to a statistician.
"""

import hashlib

import torch
from torch import Tensor, nn

from headrace.layers.weights import weight_slots

BLOCK = 1 << 22
"""Elements that share a key. Part of what the weights are, unlike the size of a slice."""

# Elements worked on at a time: on a CPU what its cache holds, elsewhere a whole block.
_SLICE = {"cpu": 1 << 18}
_FACTORS = (0x7FEB352D, 0x846CA68B)  # "lowbias32", found by Chris Wellons' hash prospector
_SHIFTS = (16, 15)
_UNIFORM = 3.0**0.5 / 2**31  # signed 32-bit numbers to uniform ones of standard deviation 1
_SPREAD = 0.02  # of biases, and of norm weights around 1


def fill_dummy(model: nn.Module, seed: int, *, slice_elements: int | None = None) -> None:
    """Fill every parameter from `seed`: the same bits on every device.

    Matrices get a standard deviation of 1 / sqrt(columns), so that activations and logits keep a
    size of about 1; vectors get 1 (norms) or 0 (biases) and a little noise.

    Args:
        slice_elements: elements worked on at a time, at most `BLOCK`; `None` suits the device.
    """
    slots = weight_slots(model)
    targets = {name: slot.destination for name, slot in slots.items()}
    largest = max(targets.values(), key=Tensor.numel)
    noise = _Noise(largest.device, seed, largest.numel(), slice_elements)
    with torch.no_grad():
        for name, target in targets.items():
            is_norm = target.dim() == 1 and not name.endswith(".bias")
            deviation = target.shape[-1] ** -0.5 if target.dim() > 1 else _SPREAD
            noise.fill(target, name, float(is_norm), deviation)


class _Noise:
    """Uniform numbers on one device, for tensors of up to `largest` elements."""

    def __init__(
        self, device: torch.device, seed: int, largest: int, slice_elements: int | None
    ) -> None:
        self.seed = seed
        lanes = min(BLOCK, largest)
        self.step = min(lanes, slice_elements or _SLICE.get(device.type, BLOCK))
        self.lanes = torch.arange(lanes, dtype=torch.int32, device=device)
        self.scratch = torch.empty(self.step, dtype=torch.int32, device=device)
        for start in range(0, lanes, self.step):
            self._mix(self.lanes[start : start + self.step], 0)

    def fill(self, target: Tensor, name: str, mean: float, deviation: float) -> None:
        """Numbers of this mean and standard deviation into a contiguous tensor."""
        flat = target.view(-1)
        bits, floats = torch.empty_like(self.scratch), self.scratch.view(torch.float32)
        for start in range(0, flat.numel(), BLOCK):
            block = flat[start : start + BLOCK]
            key = _key(self.seed, name, start // BLOCK)
            for offset in range(0, block.numel(), self.step):
                part = block[offset : offset + self.step]
                count = part.numel()
                lanes = self.lanes[offset : offset + count]
                self._mix(torch.bitwise_xor(lanes, key, out=bits[:count]), 1)
                numbers = floats[:count].copy_(bits[:count])
                part.copy_(numbers.mul_(_UNIFORM * deviation).add_(mean))

    def _mix(self, bits: Tensor, turn: int) -> None:
        """One round in place: shift, exclusive or, multiply."""
        shifted = self.scratch[: bits.numel()]
        shift, factor = _SHIFTS[turn], _FACTORS[turn]
        torch.bitwise_right_shift(bits, shift, out=shifted)
        # torch's right shift keeps the sign: what it moved in is masked away.
        bits.bitwise_xor_(shifted.bitwise_and_((1 << (32 - shift)) - 1)).mul_(_signed(factor))


def _key(seed: int, name: str, block: int) -> int:
    """A signed 32-bit number of its own for each block of each tensor."""
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little", signed=True)


def _signed(word: int) -> int:
    """The signed 32-bit number with the same bits."""
    return word - (1 << 32) if word >> 31 else word
