"""``zeroladder plan``: what each rung would need and take, from numbers. Loads neither torch nor DeepSpeed."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lightning_zeroladder.costmodel.hardware import ACHIEVED, GPUS, gpu_named, is_gpu
from lightning_zeroladder.costmodel.job import OPTIMIZERS, PRECISIONS, Cluster, Model, Training, Transformer
from lightning_zeroladder.costmodel.links import Links
from lightning_zeroladder.costmodel.links_file import read_links
from lightning_zeroladder.costmodel.planning import FSDP_NAMES, OWNERS, Plan, make_plan
from lightning_zeroladder.versions import collect_versions

__all__ = ["plan_to_json", "run_plan"]

_LOG_WIDTH = 120

_ACROSS_BYTES_PER_S = 10e9
"""Bandwidth across nodes where none is given."""

_LATENCY_S = 30e-6
"""Latency of a collective where none is given."""


def run_plan(args: list[str]) -> int:
    """Run ``zeroladder plan``; returns 1 when no rung fits."""
    options = _parser().parse_args(args)
    model, training, cluster = _job(options)
    plan = make_plan(model, training, cluster, headroom=options.headroom, textbook=options.textbook)
    if options.json:
        print(json.dumps(plan_to_json(plan), indent=2))
        return 0 if plan.choice is not None else 1
    console = Console()
    if not console.is_terminal:
        console = Console(width=_LOG_WIDTH)
    console.print(_table(plan))
    if options.terms:
        console.print(_terms(plan))
    if any(OWNERS in row.name for row in plan.rows):
        console.print(f"{OWNERS}: use_multi_rank_bucket_allreduce: false in zero_optimization", style="dim")
    console.print(" ".join(plan.reasons))
    console.print(_assumptions(options, training, cluster), style="dim")
    return 0 if plan.choice is not None else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zeroladder plan", description="Predict memory, traffic and throughput of each ZeRO stage from numbers."
    )
    model = parser.add_argument_group("model")
    model.add_argument("--params", type=_count, required=True, metavar="N", help="trained parameters, such as 13e9")
    model.add_argument("--frozen", type=_count, default=0, metavar="N", help="frozen parameters (default: none)")
    model.add_argument("--layers", type=int, metavar="N", help="transformer blocks; with --hidden activations count")
    model.add_argument("--hidden", type=int, metavar="N", help="width of a transformer")
    model.add_argument("--vocab", type=int, default=0, metavar="N", help="tokens of its output layer")
    training = parser.add_argument_group("training")
    training.add_argument("--micro-batch", type=int, default=1, metavar="N", help="samples per micro-batch and GPU")
    training.add_argument("--seq-len", type=int, default=1, metavar="N", help="tokens per sample")
    training.add_argument("--accumulate", type=int, default=1, metavar="K", help="micro-batches per optimizer step")
    training.add_argument("--precision", default="bf16", help=f"one of {', '.join(PRECISIONS)} (default: bf16)")
    training.add_argument("--optimizer", default="adamw", help=f"one of {', '.join(OPTIMIZERS)} (default: adamw)")
    training.add_argument("--activations", type=float, metavar="BYTES", help="of a micro-batch per GPU, if measured")
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--gpus", type=int, required=True, metavar="N", help="GPUs in all")
    cluster.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="(default: 8)")
    cluster.add_argument("--gpu", metavar="NAME", help=f"one of {', '.join(GPUS)}")
    cluster.add_argument("--hbm", type=float, metavar="BYTES", help="memory of a GPU, such as 80e9")
    cluster.add_argument("--flops", type=float, metavar="FLOP/S", help="achieved by a GPU, such as 400e12")
    cluster.add_argument("--bandwidth", type=float, metavar="BYTES/S", help="per GPU in collectives across nodes")
    cluster.add_argument("--inside-bandwidth", type=float, metavar="BYTES/S", help="the same inside a node")
    cluster.add_argument("--latency", type=float, metavar="S", help="of a collective (default: 30e-6)")
    cluster.add_argument("--links", type=Path, metavar="FILE", help="what zeroladder bench measured: links.json")
    parser.add_argument("--headroom", type=float, default=0.10, help="share of memory to stay free (default: 0.10)")
    parser.add_argument("--textbook", action="store_true", help="traffic of the ZeRO paper, not of deepspeed 0.19")
    parser.add_argument("--terms", action="store_true", help="also show what makes up each peak")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def _count(text: str) -> int:
    return int(float(text))


def _job(options: argparse.Namespace) -> tuple[Model, Training, Cluster]:
    """Put the numbers together.

    Raises:
        OSError: If there is no file of links.
        ValueError: If the GPU is neither named nor described, or the links are not its.
    """
    gpu = gpu_named(options.gpu) if options.gpu else None
    if gpu is None and (options.hbm is None or options.flops is None):
        raise ValueError(f"give --gpu (one of {', '.join(GPUS)}), or --hbm and --flops of one GPU.")
    if (options.layers is None) != (options.hidden is None):
        raise ValueError("--layers and --hidden go together: activations follow from both.")
    if not 0 <= options.headroom < 1:
        raise ValueError(f"headroom={options.headroom}: must be from 0 to below 1.")
    shapes = Transformer(options.layers, options.hidden, options.vocab) if options.layers else None
    largest = options.params // options.layers if options.layers else 0
    measured = int(options.activations) if options.activations is not None else None
    inside = options.inside_bandwidth or (gpu.inside_bytes_per_s if gpu else options.bandwidth or _ACROSS_BYTES_PER_S)
    cluster = Cluster(
        world_size=options.gpus,
        per_node=min(options.gpus_per_node, options.gpus),
        memory_bytes=int(options.hbm if options.hbm is not None else gpu.memory_bytes if gpu else 0),
        flops=options.flops if options.flops is not None else ACHIEVED * gpu.peak_flops if gpu else 0.0,
        inside_bytes_per_s=inside,
        across_bytes_per_s=options.bandwidth if options.bandwidth is not None else _ACROSS_BYTES_PER_S,
        latency_s=options.latency if options.latency is not None else _LATENCY_S,
        links=_links(options),
    )
    training = Training(
        micro_batch=options.micro_batch,
        sequence=options.seq_len,
        accumulate=options.accumulate,
        precision=options.precision,
        optimizer=options.optimizer,
        activation_bytes=measured,
    )
    return Model(options.params, options.frozen, largest, shapes), training, cluster


def _links(options: argparse.Namespace) -> Links | None:
    """Read what was measured, if it can be what the plan is about.

    Raises:
        OSError: If there is no such file.
        ValueError: If it is damaged, has wrong results, is of another GPU, or would have to agree with a number.
    """
    if options.links is None:
        return None
    numbers = ("bandwidth", "inside_bandwidth", "latency")
    given = [f"--{name.replace('_', '-')}" for name in numbers if getattr(options, name) is not None]
    given += ["--textbook"] if options.textbook else []
    if given:
        raise ValueError(f"--links and {given[0]} both say how fast the links are: give one of them.")
    links = read_links(options.links)
    wrong = links.wrong()
    if wrong:
        raise ValueError(
            f"{options.links}: {wrong[0].collective} of {wrong[0].nbytes} bytes {wrong[0].where} gave a wrong result. "
            "Find out why (zeroladder bench shows it) before you plan with it."
        )
    device = links.machine.device
    if options.gpu and not is_gpu(options.gpu, device):
        raise ValueError(f"{options.links} was measured on {device}, --gpu is {options.gpu}: measure on such GPUs.")
    return links


def _other_than_measured(links: Links, training: Training, cluster: Cluster) -> list[str]:
    """Say in what the plan differs from where its links were measured."""
    measured = links.machine
    said = []
    if cluster.per_node != measured.per_node:
        said.append(f"{measured.per_node} GPUs per node, the plan has {cluster.per_node}")
    if cluster.nodes > measured.nodes:
        said.append(f"{measured.nodes} nodes, the plan has {cluster.nodes}")
    if training.precision != measured.precision:
        said.append(f"{measured.precision}, the plan is for {training.precision}")
    installed = collect_versions()["torch"]
    if installed != measured.torch:
        said.append(f"torch {measured.torch}, installed is {installed}")
    return said


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Return a plan as what JSON can carry, with the sums of each row."""
    rows = [
        {
            **asdict(row),
            "peak_bytes": row.peak_bytes,
            "fsdp": FSDP_NAMES[row.rung.stage],
            "tokens_per_s_best": plan.tokens_per_s(row, best=True),
            "tokens_per_s_expected": plan.tokens_per_s(row),
        }
        for row in plan.rows
    ]
    return {"rows": rows, "choice": plan.choice, "reasons": list(plan.reasons), "limit_bytes": plan.limit_bytes}


def _table(plan: Plan) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("rung", overflow="fold")
    table.add_column("FSDP")
    for header in (
        "model state\nGB",
        "peak\nGB",
        "comm.\ns",
        "compute\ns",
        "best\ntokens/s/GPU",
        "expected\ntokens/s/GPU",
    ):
        table.add_column(header, justify="right")
    table.add_column("fits")
    for index, row in enumerate(plan.rows):
        chosen = index == plan.choice
        table.add_row(
            f"{'> ' if chosen else '  '}{row.name}",
            FSDP_NAMES[row.rung.stage],
            f"{row.state_bytes / 1e9:,.1f}",
            f"{row.peak_bytes / 1e9:,.1f}",
            f"{row.time.communication_s:.2f}",
            f"{row.time.compute_s:.2f}",
            f"{plan.tokens_per_s(row, best=True):,.0f}",
            f"{plan.tokens_per_s(row):,.0f}",
            "yes" if row.fits else f"no, {(row.peak_bytes - plan.limit_bytes) / 1e9:,.1f} GB over",
            style="bold" if chosen else "" if row.fits else "dim",
        )
    return table


def _terms(plan: Plan) -> Table:
    names = list(dict.fromkeys(term.name for row in plan.rows for term in row.terms))
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, title="peak in GB", title_justify="left")
    table.add_column("rung", overflow="fold")
    for name in names:
        table.add_column(name.replace(" ", "\n"), justify="right")
    for row in plan.rows:
        size = {term.name: term.nbytes for term in row.terms}
        table.add_row(row.name, *(f"{size[name] / 1e9:.1f}" if name in size else "-" for name in names))
    return table


def _assumptions(options: argparse.Namespace, training: Training, cluster: Cluster) -> str:
    said = [f"{cluster.flops / 1e12:.0f} TFLOP/s per GPU" + ("" if options.flops else f" ({ACHIEVED:.0%} of its peak)")]
    speed = f"{cluster.bytes_per_s / 1e9:.3g} GB/s per GPU in collectives"
    given = options.bandwidth if cluster.nodes > 1 else options.inside_bandwidth
    if cluster.links is not None:
        others = _other_than_measured(cluster.links, training, cluster)
        said.append(f"{speed} (measured{' with ' + '; '.join(others) if others else ''})")
    else:
        said.append(speed + ("" if given else " (assumed: measure yours)"))
    if options.layers is None and training.activation_bytes is None:
        said.append("activations not counted (give --layers and --hidden, or --activations)")
    return f"Counted with {', '.join(said)}."
