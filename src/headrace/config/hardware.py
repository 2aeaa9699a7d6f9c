"""The machine: detected by the runner, or assumed by name from the table below."""

from dataclasses import dataclass

from headrace.base.errors import ConfigError

GIB = 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device.

    Attributes:
        platform: cuda, rocm, xpu, npu or cpu.
        capability: compute capability (9, 0) on cuda, (0, 0) where the notion is absent.
        memory_bytes: total memory of the device; of the machine on cpu.
        bandwidth: bytes per second of device memory, data sheet; 0 when unknown.
        matrix_rate: dense bfloat16 operations per second, data sheet; 0 when unknown.
        units: multiprocessors on a GPU, cores on a CPU.
        packages: kernel packages found ("triton", ...).
    """

    name: str
    platform: str
    capability: tuple[int, int] = (0, 0)
    memory_bytes: int
    bandwidth: float = 0.0
    matrix_rate: float = 0.0
    units: int = 1
    packages: frozenset[str] = frozenset()
    assumed: bool = False


def _gpu(
    name: str,
    platform: str,
    capability: tuple[int, int],
    gib: float,
    terabytes: float,
    teraflops: float,
    units: int,
) -> Hardware:
    return Hardware(
        name=name,
        platform=platform,
        capability=capability,
        memory_bytes=int(gib * GIB),
        bandwidth=terabytes * 1e12,
        matrix_rate=teraflops * 1e12,
        units=units,
        packages=frozenset({"triton"}),
        assumed=True,
    )


# Memory as the driver reports it; bandwidth and dense bfloat16 rate from the vendors' data sheets.
ASSUMED_HARDWARE = {
    hardware.name: hardware
    for hardware in (
        _gpu("h100-80gb", "cuda", (9, 0), 79.6, 3.35, 989, 132),
        _gpu("h200-141gb", "cuda", (9, 0), 140.4, 4.8, 989, 132),
        _gpu("a100-40gb", "cuda", (8, 0), 39.5, 1.555, 312, 108),
        _gpu("a100-80gb", "cuda", (8, 0), 79.3, 2.039, 312, 108),
        _gpu("l4-24gb", "cuda", (8, 9), 22.5, 0.3, 121, 58),
        _gpu("l40s-48gb", "cuda", (8, 9), 44.7, 0.864, 362, 142),
        _gpu("rtx4090-24gb", "cuda", (8, 9), 23.6, 1.008, 165, 128),
        _gpu("b200-180gb", "cuda", (10, 0), 178.4, 8.0, 2250, 148),
        _gpu("mi300x-192gb", "rocm", (9, 4), 191.7, 5.3, 1307, 304),
        Hardware(
            name="cpu",
            platform="cpu",
            memory_bytes=16 * GIB,
            bandwidth=40e9,
            units=4,
            assumed=True,
        ),
    )
}


def assumed_hardware(name: str) -> Hardware:
    """Look up `name`; a unique beginning ("h200") is enough. Raises `ConfigError`."""
    wanted = name.lower()
    # "l4" means l4-24gb, not l40s-48gb: a whole name, then a whole first part, then a beginning
    found: list[str] = []
    for means in (str.__eq__, lambda key, name: key.startswith(f"{name}-"), str.startswith):
        found = found or [key for key in ASSUMED_HARDWARE if means(key, wanted)]
    if len(found) != 1:
        reason = "is not in the table" if not found else f"could be {' or '.join(found)}"
        raise ConfigError(
            f"Assumed hardware {name!r} {reason}", remedy=f"Known: {', '.join(ASSUMED_HARDWARE)}"
        )
    return ASSUMED_HARDWARE[found[0]]
