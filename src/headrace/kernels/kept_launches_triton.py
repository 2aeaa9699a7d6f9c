"""Launches of one kernel again and again, without Triton's search for the compiled one.

Triton looks at every argument of a launch to find the variant it takes: some 15 us, in which a GPU
multiplies a short prompt by a layer's weights. A caller that knows what its variants depend on says
so in a key, and Triton is asked once for each key.
"""

# mypy: disable-error-code="misc"

from collections.abc import Hashable, Mapping
from typing import Any

from torch import Tensor
from triton.runtime._async_compile import active_mode


class KeptLaunches:
    """Launches of a kernel on one device whose constants stay the same.

    Args:
        kernel: the `triton.jit` function; its `tl.constexpr` parameters come last.
        constants: values of those, in their order.
        options: number of warps and the like.
    """

    def __init__(self, kernel: Any, constants: Mapping[str, Any], **options: Any) -> None:
        assert kernel.arg_names[len(kernel.arg_names) - len(constants) :] == list(constants)
        self._kernel, self._named = kernel, {**constants, **options}
        self._constants = tuple(constants.values())
        self._kept: dict[Hashable, Any] = {}

    def __call__(self, key: Hashable, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Launch.

        Args:
            key: differs wherever Triton would take another variant for `arguments`: by dtypes,
                absence, alignment of tensors (`aligned`), and integers that it specialises.
        """
        kernel = self._kept.get(key)
        if kernel is not None and not launches_are_noted():
            kernel[grid](*arguments, *self._constants)
            return
        kernel = self._kernel[grid](*arguments, **self._named)
        if kernel is not None:  # as in the interpreter, or while launches are only noted
            self._kept[key] = kernel


def launches_are_noted() -> bool:
    """Whether this thread's launches are noted for the compiler and left out: `compile_ahead`."""
    return active_mode.get() is not None


def aligned(*tensors: Tensor | None) -> tuple[bool | None, ...]:
    """For a key: which of the tensors are there, and whether they begin at a multiple of 16."""
    return tuple(None if x is None else x.data_ptr() % 16 == 0 for x in tensors)
