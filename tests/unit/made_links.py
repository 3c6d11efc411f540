"""Links with a latency and a bandwidth, as if they had been measured on two nodes of eight GPUs."""

from __future__ import annotations

from lightning_zeroladder.costmodel.links import Links, Machine, Overlap, Sample, Where, ring_bytes
from lightning_zeroladder.costmodel.traffic import Collective

MACHINE = Machine("NVIDIA H100 80GB HBM3", "nccl", 2, 8, "bf16", "2.13.0")


def line(collective: Collective, where: Where, ranks: int, latency_s: float, bytes_per_s: float) -> list[Sample]:
    """Samples of links with a latency and a bandwidth."""
    return [
        Sample(
            collective, where, ranks, size, latency_s + ring_bytes(collective, size, ranks) / bytes_per_s, 0.0, 10, True
        )
        for size in (2**10, 2**16, 2**22, 2**28)
    ]


LINKS = Links(
    MACHINE,
    tuple(
        sample
        for collective in Collective
        for where, ranks, rate in ((Where.INSIDE, 8, 200e9), (Where.ACROSS, 16, 40e9))
        for sample in line(collective, where, ranks, 20e-6, rate)
    ),
    (Overlap(Where.ACROSS, 2**22, 2e-3, 1e-3, 1.5e-3, 2.25e-3),),
)
