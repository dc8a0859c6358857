"""The roofline against published measurements: each named, with its error, as the Markdown table of docs/hardware.md.

    python benchmarks/roofline_points.py

Efficiencies and fixed times come from conf/hardware alone, the same for every point of an engine on a device. What a
publication does not say (context, a drafter's size, the depth of a tree) is assumed, and the table says what.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from checkpoints.run import ROOT
from eval.hardware import Device, Parallel, Roofline, all_to_all_seconds, load_hardware, speedup
from eval.hardware_shapes import (
    DrafterShape,
    Stack,
    block_drafter,
    layer_drafter,
    one_layer_drafter,
    target_shape,
)

LLAMA_HEADS, OSS_HEADS, LARGE_HEADS = (32, 8, 128), (64, 8, 64), (64, 8, 128)
ALLOWED = 0.25
H800 = Device("H800", 80, 3350, {"bf16": 989, "fp8": 1979}, link_gbs=160, network_gbs=50)
ALPHA_US = 25.0
PAYLOAD = 128 * 8 * 7168  # one byte each: 128 tokens, 8 experts, width 7168


@dataclass(frozen=True)
class Point:
    """One published figure and what the model says. unit: tok/s, x or us. assumed: what the source leaves open."""

    name: str
    published: float
    computed: float
    unit: str
    assumed: str = ""

    @property
    def error(self) -> float:
        return self.computed / self.published - 1

    @property
    def fits(self) -> bool:
        return abs(self.error) <= ALLOWED

    def row(self) -> str:
        """A row of the Markdown table."""
        digits = 0 if self.unit != "x" else 2
        verdict = "yes" if self.fits else "**no**"
        values = f"{self.published:.{digits}f} {self.unit} | {self.computed:.{digits}f} {self.unit}"
        return f"| {self.name} | {values} | {self.error:+.0%} | {verdict} | {self.assumed} |"


HEAD = "| point | published | computed | error | within 25% | assumed |\n|---|---|---|---|---|---|"


@cache
def model(
    device: str, engine: str, target: Stack, drafter: DrafterShape | None = None, parallel: Parallel | None = None
) -> Roofline:
    """The roofline of conf/hardware/{device}.yaml."""
    return load_hardware(ROOT / "conf" / "hardware" / f"{device}.yaml").roofline(engine, target, drafter, parallel)


def tree_speedup(cost: Roofline, tau: float, rows: int, nodes: int, depth: int, context: float = 500) -> float:
    """Speedup of a tree: `depth` passes of the drafter, `nodes` drafted tokens verified a row."""
    plain = cost.target_seconds(rows, rows, context)
    verify = cost.target_seconds(rows, rows * (nodes + 1), context)
    return tau * plain / (verify + cost.draft_seconds(rows, depth, context) + cost.rest_seconds(rows, depth))


def plain_points() -> Iterator[Point]:
    """Decoding without a drafter."""
    llama, qwen = target_shape("llama-3.1-8b"), target_shape("qwen3-8b")
    rate = 1 / model("h100", "sglang_sync", llama).target_seconds(1, 1, 500)
    yield Point("Llama-3.1-8B, H100, SGLang, bs 1", 158, rate, "tok/s", "context 500")
    rate = 1 / model("b200", "sglang", qwen).target_seconds(1, 1, 1000)
    yield Point("Qwen3-8B, B200, SGLang, bs 1", 230, rate, "tok/s", "context 1000")


def chain_points() -> Iterator[Point]:
    """EAGLE-3 chains of 3 on one H100; the source gives no tau, so that of the same family in SPEED-Bench stands in."""
    llama = target_shape("llama-3.1-8b")
    cost = model("h100", "sglang_sync", llama, one_layer_drafter(llama, 14336, LLAMA_HEADS, 32000))
    for rows, published in ((2, 1.81), (8, 1.62), (24, 1.39), (64, 1.38)):
        name = f"EAGLE-3 chain 3, Llama-3.1-8B, H100, SGLang, bs {rows}"
        yield Point(name, published, speedup(cost, 2.44, rows, 3, 500), "x", "tau 2.44 (SPEED-Bench), context 500")


def block_points() -> Iterator[Point]:
    """DFlash: 5 layers, blocks of 16 (Qwen3-8B) or 10 (Llama-3.1-8B); tau is taken to be the same at c 1 and c 32."""
    qwen, llama = target_shape("qwen3-8b"), target_shape("llama-3.1-8b")
    cost = model("b200", "sglang", qwen, block_drafter(qwen, 12288, LLAMA_HEADS, 5, 5, 15))
    for rows, published in ((1, 5.1), (32, 2.8)):
        said = speedup(cost, 8.01, rows, 15, 1000)
        yield Point(f"DFlash tau 8.01, Qwen3-8B, B200, SGLang, c {rows}", published, said, "x", "context 1000")
    cost = model("h200", "transformers", qwen, block_drafter(qwen, 12288, LLAMA_HEADS, 5, 5, 15))
    name = "DFlash tau 6.49, Qwen3-8B, H200, transformers"
    yield Point(name, 4.86, speedup(cost, 6.49, 1, 15, 500), "x", "context 500")
    cost = model("b200", "sglang", llama, block_drafter(llama, 14336, LLAMA_HEADS, 5, 5, 9))
    for rows, published in ((1, 2.4), (32, 1.6)):
        name = f"DFlash(10) tau 4.32, Llama-3.1-8B, B200, SGLang, c {rows}"
        yield Point(name, published, speedup(cost, 4.32, rows, 9, 500), "x", "context 500")


def tree_points() -> Iterator[Point]:
    """EAGLE-3 trees; depths are not published."""
    qwen, llama = target_shape("qwen3-8b"), target_shape("llama-3.1-8b")
    cost = model("h200", "transformers", qwen, one_layer_drafter(qwen, 12288, LLAMA_HEADS, 32000))
    said = tree_speedup(cost, 3.40, 1, 60, 8)
    yield Point("EAGLE-3 tree 60 tau 3.40, Qwen3-8B, H200, transformers", 2.02, said, "x", "depth 8")
    cost = model("b200", "sglang", llama, one_layer_drafter(llama, 14336, LLAMA_HEADS, 32000))
    for nodes, tau, depth, found in ((10, 3.49, 5, (1.6, 1.0)), (60, 4.55, 7, (1.9, 0.6))):
        for rows, published in zip((1, 32), found, strict=True):
            name = f"EAGLE-3 tree {nodes} tau {tau}, Llama-3.1-8B, B200, SGLang, c {rows}"
            yield Point(name, published, tree_speedup(cost, tau, rows, nodes, depth), "x", f"depth {depth}")


def large_points() -> Iterator[Point]:
    """SPEED-Bench (B200, bs 32, 3 slots), DFlash on a mixture, and DeepSeek-V3's own deployment."""
    large, oss, deep = target_shape("llama-3.3-70b"), target_shape("gpt-oss-120b"), target_shape("deepseek-v3")
    cost = model("b200", "sglang", large.quantised("fp8"), one_layer_drafter(large, 28672, LARGE_HEADS, 32000))
    said = speedup(cost, 2.44, 32, 3, 2000)
    yield Point("EAGLE-3 tau 2.44, Llama-3.3-70B, B200, bs 32", 1.90, said, "x", "one B200, fp8, context 2000")
    cost = model("b200", "sglang", oss, one_layer_drafter(oss, 14336, OSS_HEADS, 32000))
    said = speedup(cost, 2.25, 32, 3, 2000)
    yield Point("EAGLE-3 tau 2.25, gpt-oss-120B, B200, bs 32", 1.34, said, "x", "one B200, context 2000")
    cost = model("b200", "sglang", oss, block_drafter(oss, 8192, OSS_HEADS, 5, 5, 15))
    said = speedup(cost, 5.4, 8, 15, 1000)
    yield Point("DFlash tau 5.4, gpt-oss-120B, B200, c 8", 1.6, said, "x", "one B200, 15 slots, context 1000")
    cost = model("b200", "sglang", deep, layer_drafter(deep, 3), Parallel(tensor=8))
    said = speedup(cost, 2.55, 32, 3, 2000)
    yield Point("MTP tau 2.55, DeepSeek-R1, B200, bs 32", 1.45, said, "x", "8 B200, tensor parallel, context 2000")
    cost = model("h100", "sglang", deep, layer_drafter(deep), Parallel(4, 320))
    cost = replace(cost, device=H800, engine=replace(cost.engine, alltoall_us=ALPHA_US))
    for rows in (8, 128):
        said = speedup(cost, 1.87, 80 * rows, 1, 2000)
        assumed = f"320 H800, tensor 4, {rows} requests a group of 4, tau 1.87, context 2000, no overlap of transfers"
        yield Point(f"MTP-1, DeepSeek-V3, {rows} requests a group", 1.8, said, "x", assumed)


def transfer_points() -> Iterator[Point]:
    """DeepEP's low-latency all-to-all on H800: 128 tokens, 8 experts, width 7168, fp8 out and bf16 back."""
    assumed = f"alpha_0 {ALPHA_US:g} us, link 160 GB/s, network 50 GB/s"
    published: dict[tuple[int, bool], tuple[float, float]] = {
        (8, True): (163, 318),
        (256, True): (194, 360),
        (8, False): (77, 114),
        (16, False): (118, 195),
        (32, False): (155, 273),
        (64, False): (173, 314),
        (128, False): (192, 369),
    }
    for (ranks, network), figures in published.items():
        for word, size, figure in zip(("dispatch", "combine"), (1, 2), figures, strict=True):
            seconds = all_to_all_seconds(size * PAYLOAD, ranks, H800, ALPHA_US, network)
            route = "network only" if network else "links and network"
            yield Point(f"DeepEP {word}, EP {ranks}, {route}", figure, 1e6 * seconds, "us", assumed)


SETS: tuple[Callable[[], Iterator[Point]], ...] = (
    plain_points,
    chain_points,
    block_points,
    tree_points,
    large_points,
    transfer_points,
)


def points() -> list[Point]:
    """Every published point that can be computed."""
    return [point for each in SETS for point in each()]


def table() -> str:
    """The Markdown table."""
    return "\n".join([HEAD, *(point.row() for point in points())])


if __name__ == "__main__":
    print(table())
