"""Speeds of GPUs and their links, from the makers' tables, and which share of that programs reach.

Every figure can be replaced: `parse("h100,network=25e9")`, or a YAML file with the same names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from megatron_rl.base.messages import did_you_mean, errors_named
from megatron_rl.base.plugins import read_yaml
from megatron_rl.config import ConfigError


@dataclass(frozen=True)
class Hardware:
    """One GPU of a cluster. Rates are per GPU and direction; the second half are shares of the first that programs reach,
    and times that do not depend on sizes.

    Attributes:
        bf16, fp8: dense multiply-add operations per second.
        processors: streaming multiprocessors, over which the tiles of a matrix product are spread.
        memory_gib: what a program can allocate.
        memory: bytes per second of the GPU's own memory.
        nvlink: bytes per second to another GPU of the same `domain`.
        domain: GPUs that NVLink joins.
        network: bytes per second between domains.
        host_link: bytes per second to the host's memory.
        host_memory: bytes per second of the host's memory, this GPU's share, for its processors.
        product_share, product_share_fp8: of `bf16` and `fp8`, in large matrix products at the clock that power allows.
        attention_share: of `bf16`, in the forward pass of fused attention; the backward pass takes 2.5 times the operations.
        memory_share, nvlink_share, network_share, host_link_share, host_memory_share: of the bytes per second.
        decode_share: of `memory`, in decoding, whose products have few rows and whose attention reads scattered blocks.
        exchange_share: of the links' bytes per second in all-to-alls, whose messages are small and uneven.
        overlap: how much of communication that runs beside computation is hidden.
        launch: seconds from one kernel's end to the next one's full speed.
        message, network_message: seconds of a message without bytes, within a domain and across; a collective's tree has
            one for each doubling of its ranks.
        host_dense, host_experts: seconds in which the host's program issues a layer's forward pass, of a dense layer and of
            one with experts; where kernels are shorter than that, the GPU waits. Twice as long for the backward pass.
        engine_host, engine_host_sequence: seconds that an engine's host program takes for a decoding step, and for each
            sequence in it.
    """

    name: str
    bf16: float
    fp8: float
    processors: int
    memory_gib: float
    memory: float
    nvlink: float
    domain: int
    network: float
    host_link: float
    host_memory: float
    product_share: float = 0.75
    product_share_fp8: float = 0.62
    attention_share: float = 0.6
    memory_share: float = 0.8
    decode_share: float = 0.6
    nvlink_share: float = 0.75
    network_share: float = 0.8
    exchange_share: float = 0.6
    host_link_share: float = 0.8
    host_memory_share: float = 0.7
    overlap: float = 0.8
    launch: float = 3e-6
    message: float = 4e-6
    network_message: float = 20e-6
    host_dense: float = 0.35e-3
    host_experts: float = 1.0e-3
    engine_host: float = 5e-3
    engine_host_sequence: float = 40e-6


# Blackwell's programs reach less of what is printed, and Grace's cores take half as long again for a program in Python.
_BLACKWELL = {"product_share": 0.65, "decode_share": 0.5}
_GRACE = {"host_dense": 0.5e-3, "host_experts": 1.5e-3, "engine_host": 7.5e-3, "engine_host_sequence": 60e-6}
# NVIDIA's data sheets of the H100 SXM5, H200 SXM, HGX B200 and GB200 NVL72, without sparsity; NVLink per direction is half of
# the figure printed there. `memory_gib` is what the driver reports, rounded down. Network: one port of 400 Gb/s per GPU. Host
# link: PCIe 5.0 x16; GB200: NVLink-C2C, 450 GB/s in each direction for two GPUs. Host memory of NVIDIA's DGX: two processors
# with eight channels of DDR5-4800 (B200: 5600) for eight GPUs; GB200: Grace's LPDDR5X, 512 GB/s for two.
TABLES: Mapping[str, Hardware] = {
    table.name: table
    for table in (
        Hardware("h100", 989e12, 1979e12, 132, 79, 3.35e12, 450e9, 8, 50e9, 64e9, 77e9),
        Hardware("h200", 989e12, 1979e12, 132, 139, 4.8e12, 450e9, 8, 50e9, 64e9, 77e9),
        Hardware("b200", 2250e12, 4500e12, 148, 178, 8e12, 900e9, 8, 50e9, 64e9, 90e9, **_BLACKWELL),
        Hardware("gb200", 2500e12, 5000e12, 148, 184, 8e12, 900e9, 72, 50e9, 225e9, 256e9, **_BLACKWELL, **_GRACE),
    )
}
_VALUES = tuple(field.name for field in fields(Hardware) if field.name != "name")


def parse(text: str) -> Hardware:
    """`h100`, `h200`, `b200`, `gb200`, or a YAML file with `base: h100` and values; then values after commas.

    Raises:
        ConfigError: an unknown name, or a value that is no number above 0.
    """
    name, *items = text.split(",")
    values: dict[str, object] = {}
    if name.endswith((".yaml", ".yml")):
        values = _read(Path(name))
        name = str(values.pop("base", "h100"))
    if name not in TABLES:
        raise ConfigError(
            f"--hardware {name}: known are {', '.join(TABLES)}, or a YAML file{did_you_mean(name, TABLES)}"
        )
    for item in items:
        key, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"--hardware: `{item}` is not NAME=VALUE")
        values[key] = value
    table = TABLES[name]
    for key, given_value in values.items():
        table = replace(table, **{key: _number(key, given_value)})  # type: ignore[arg-type]  # `_number` checks the name
    return table


def _read(path: Path) -> dict[str, object]:
    with errors_named(f"--hardware {path} cannot be read", OSError, ValueError, as_error=ConfigError):
        found = read_yaml(path)
    if not isinstance(found, dict):
        raise ConfigError(f"--hardware {path} does not hold names and values")
    return {str(key): value for key, value in found.items()}


def _number(key: str, value: object) -> float | int:
    if key not in _VALUES:
        raise ConfigError(f"--hardware: unknown value `{key}`{did_you_mean(key, _VALUES)}; known: {', '.join(_VALUES)}")
    try:
        number = float(str(value))
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ConfigError(f"--hardware: `{key}` must be a number above 0, not {value}")
    if key not in ("processors", "domain"):
        return number
    if number != int(number):
        raise ConfigError(f"--hardware: `{key}` must be a whole number, not {value}")
    return int(number)
