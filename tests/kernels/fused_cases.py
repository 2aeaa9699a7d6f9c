"""Random arguments for the fused kernels; what a kernel must not read holds NaN."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Against the twin in float64: one rounding of the result, and of the operands of a product.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def draw(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(DEVICE)


def exact(value: object) -> object:
    """The same arguments in float64; what is not a float tensor stays."""
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.double() if floating else value


def strided(x: Tensor) -> Tensor:
    """The same numbers in rows of a wider tensor, whose other columns are NaN."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 24), math.nan, dtype=x.dtype, device=x.device)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def assert_close(out: Tensor, twin: Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), twin.double(), rtol=tolerance, atol=tolerance)


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Arguments of `matvec`. outputs: columns of the result; out_dtype: of that, `dtype` if
    absent."""

    outputs: int
    inputs: int
    dtype: torch.dtype = torch.float32
    out_dtype: torch.dtype | None = None
    norm: bool = False
    bias: bool = False
    residual: bool = False
    activation: str | None = None
    scale: float = 1.0  # of x
    seed: int = 0

    @property
    def name(self) -> str:
        traits = [name for name in ("norm", "bias", "residual") if getattr(self, name)]
        if self.out_dtype:
            traits.append(f"to-{str(self.out_dtype)[6:]}")
        parts = [f"{self.outputs}x{self.inputs}", str(self.dtype)[6:], *traits]
        return "-".join([*parts, *([self.activation] if self.activation else [])])

    def arguments(self) -> dict:
        weight_rows = self.outputs * (2 if self.activation else 1)
        like = {"dtype": self.dtype, "seed": self.seed}
        named = {
            "x": strided(draw(1, self.inputs, **like, scale=self.scale)),
            "weight": draw(weight_rows, self.inputs, **like, scale=self.inputs**-0.5),
            "activation": self.activation,
        }
        if self.norm:
            # Kept in float32, as Gemma's are; another draw than x's.
            kind = torch.float32 if self.bias else self.dtype
            named["norm_weight"] = draw(self.inputs, dtype=kind, seed=1)
            named["eps"] = 1e-6
        if self.bias:
            named["bias"] = draw(weight_rows, dtype=self.dtype, seed=2)
        if self.residual:
            named["residual"] = draw(1, self.outputs, dtype=self.dtype, seed=3)
        return named


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Arguments of `norm_rope_write`."""

    tokens: int
    heads: tuple[int, int] = (4, 2)
    dim: int = 16
    value_dim: int | None = None
    rotary: int | None = None
    page: int = 4
    norm: bool = True
    dtype: torch.dtype = torch.float32
    padding: int = 0  # tokens at the end, of slot 0

    @property
    def name(self) -> str:
        shape = f"{self.tokens}x{self.heads[0]}x{self.heads[1]}x{self.dim}"
        parts = [shape, f"v{self.value_dim}", f"r{self.rotary}", f"page{self.page}"]
        return "-".join([*parts, str(self.dtype)[6:], *(["norm"] if self.norm else [])])

    def arguments(self) -> dict:
        heads, kv_heads = self.heads
        value_dim, rotary = self.value_dim or self.dim, self.rotary or self.dim
        pages = -(-self.tokens // self.page) + 1
        width = (heads + kv_heads) * self.dim + kv_heads * value_dim
        generator = torch.Generator().manual_seed(5)
        angles = torch.randn(97, rotary // 2, generator=generator, dtype=torch.float64)
        order = torch.randperm((pages - 1) * self.page, generator=generator) + self.page
        slots = order[: self.tokens].clone()
        positions = torch.randint(97, (self.tokens,), generator=generator)
        if self.padding:
            slots[-self.padding :] = 0
        cache = {"dtype": self.dtype, "device": DEVICE}
        # A layer of a pool of several: pages of K and V are not side by side.
        k_cache = torch.full((2, pages, self.page, kv_heads, self.dim), math.nan, **cache)
        v_cache = torch.full((2, pages, self.page, kv_heads, value_dim), math.nan, **cache)
        named = {
            "qkv": strided(draw(self.tokens, width, dtype=self.dtype, seed=4, scale=3.0)),
            "cos_sin": torch.cat((angles.cos(), angles.sin()), 1).float().to(DEVICE),
            "positions": positions.to(DEVICE),
            "k_cache": k_cache[1],
            "v_cache": v_cache[1],
            "slots": slots.to(DEVICE),
        }
        if self.norm:
            named["q_norm"] = draw(self.dim, dtype=self.dtype, seed=6)
            named["k_norm"] = draw(self.dim, dtype=self.dtype, seed=7)
            named["eps"] = 1e-5
        return named


def check_product(case: Product, kernel, twin, **options) -> None:
    """The kernel writes all of `out` and agrees with the twin in float64."""
    named = case.arguments()
    kind = case.out_dtype or case.dtype
    out = strided(torch.full((1, case.outputs), math.nan, dtype=kind, device=DEVICE))
    assert kernel(**named, out=out, **options) is out
    expected = twin(**{name: exact(value) for name, value in named.items()})
    assert_close(out, expected, kind)


def check_heads(case: Heads, kernel, twin, **options) -> None:
    """Queries and the whole pool agree, slots that no token has stay NaN; slot 0 is free."""
    named, other = case.arguments(), case.arguments()
    other = {name: exact(value) for name, value in other.items()}
    out = kernel(**named, **options)
    assert_close(out, twin(**other), case.dtype)
    for cache in ("k_cache", "v_cache"):
        ours, theirs = named[cache].flatten(0, 1)[1:], other[cache].flatten(0, 1)[1:]
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert_close(ours.nan_to_num(), theirs.nan_to_num(), case.dtype)
