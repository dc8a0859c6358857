"""The serving simulation: by hand, under load, its traces and its hints."""

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_module

from checkpoints.files import read_json, write_json
from checkpoints.run import ROOT
from eval.decoder import Generation
from eval.hardware import Parallel, load_hardware
from eval.hardware_measured import Measured, StepTable
from eval.hardware_shapes import layer_drafter, target_shape
from eval.plots import png
from eval.scheduler import build
from eval.serving import SimulateSettings, plot_depth, run
from eval.simulate import Served, Simulation, Traffic, best_by_concurrency, engine_hints, pareto, ranges
from eval.traces import Traces
from tests.unit.test_hardware import slower_network
from tests.unit.test_scheduler import Line, h200

ALPHA = [0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5]
LAST = 512.0


def served(name: str, load: float, requests: int, answer: int) -> Served:
    cost, traffic = h200(), Traffic("concurrency", requests, prompt=200, answer=answer, max_rows=512)
    traces = Traces.synthetic(ALPHA, rounds=1024)
    return Simulation(cost, build(name, cost, 7), traces, traffic, load).run(name)


def test_one_request_by_hand() -> None:
    """A prompt of 2 s, then rounds of 1.5 s (2 tokens each): 4 more tokens in two rounds."""
    traces = Traces(torch.tensor([1]), torch.tensor([[0.9]], dtype=torch.float64), torch.tensor([0]))

    class Known(Line):
        def target_seconds(self, rows: float, tokens: float, context: float) -> float:
            return 2.0 if tokens > 4 else 1.0

    cost = Known(0.0, 0.0, 0.5)
    simulation = Simulation(cost, build("static", cost, 1), traces, Traffic("concurrency", 1, 100, 5), 1)
    (request,) = simulation.waiting
    request.answer = 5
    found = simulation.run("static")
    assert request.times == [(2.0, 1), (3.5, 2), (5.0, 2)]
    assert found.user_speed == pytest.approx(4 / 3)
    assert found.latency["p50"] == pytest.approx(0.75)
    assert found.first_token["p50"] == pytest.approx(2.0)
    assert (found.mean_depth, found.mean_length, found.efficiency) == (1, 1, 1)
    assert found.seconds == 5.0


def test_requests_wait_for_room_and_arrive_at_the_rate() -> None:
    cost = Line(0.01, 0.0)
    traces = Traces.synthetic([0.5], rounds=64)
    found = Simulation(cost, build("plain", cost, 1), traces, Traffic("rate", 200, 8, 8, max_rows=4), 1000).run()
    assert found.mean_rows <= 4
    assert found.first_token["p99"] > 0.5, "more come than four rows can serve"
    calm = Simulation(cost, build("plain", cost, 1), traces, Traffic("rate", 200, 8, 8), 2.0)
    assert calm.waiting[-1].arrives == pytest.approx(100, rel=0.25)
    assert calm.run().first_token["p99"] < 0.2
    with pytest.raises(ValueError, match="load must be positive"):
        Simulation(cost, build("plain", cost, 1), traces, Traffic(), 0)


@pytest.mark.parametrize(("load", "requests", "answer"), [(1, 8, 160), (16, 40, 80), (96, 192, 40), (LAST, 700, 24)])
def test_the_hardware_aware_scheduler_is_never_far_from_the_best(load: float, requests: int, answer: int) -> None:
    names = ("plain", "static", "prefix", "prefix_late")
    found = {name: served(name, load, requests, answer).throughput for name in names}
    better = max(found["plain"], found["static"])
    for name in ("prefix", "prefix_late"):
        assert found[name] >= 0.98 * better, found
    if load == LAST:
        assert found["prefix"] > 1.05 * found["static"], "static K = 7 loses at high load"
    if load == 1:
        assert found["static"] > found["plain"], "and wins at low load"


def test_slow_expert_parallel_networks_deepen_the_drafts() -> None:
    target = target_shape("deepseek-v3")
    hardware = load_hardware(ROOT / "conf" / "hardware" / "h200.yaml")
    near = hardware.roofline("sglang", target, layer_drafter(target, 7), Parallel(8, 16))
    traces = Traces.synthetic([0.75, 0.6, 0.5, 0.45, 0.4, 0.35, 0.3], rounds=1024)
    depths = []
    for cost in (near, slower_network(near, 10)):
        simulation = Simulation(cost, build("prefix", cost, 7), traces, Traffic("concurrency", 6, 500, 120), 2)
        depths.append(simulation.run().mean_length)
    assert depths[1] > 1.15 * depths[0]


def test_best_slots_and_hints() -> None:
    best = best_by_concurrency(h200(), ALPHA, [1, 8, 64, 512], 500)
    assert list(best.values()) == sorted(best.values(), reverse=True)
    hints = engine_hints({1: 5, 8: 5, 64: 2, 512: 0}, 600)
    assert hints["vllm"] == {
        "num_speculative_tokens": 5,
        "num_speculative_tokens_per_batch_size": [[1, 63, 5], [64, 511, 2], [512, 600, 0]],
    }
    sglang = hints["sglang"]
    assert isinstance(sglang, dict)
    assert sglang["adaptive_config"] == {
        "1": {"candidate_steps": [5]},
        "64": {"candidate_steps": [2]},
        "512": {"candidate_steps": [0]},
    }
    assert sglang["arguments"]["speculative-num-draft-tokens"] == 6
    assert engine_hints({1: 0}, 1)["vllm"] is None
    with pytest.raises(ValueError, match="begin at 1"):
        ranges({2: 1}, 4)


def point(speed: float, throughput: float) -> Served:
    return Served(1.0, "x", throughput, speed, {}, {}, 1, 1, 1, 1, 1)


def test_pareto_by_hand() -> None:
    points = [point(1, 10), point(2, 8), point(3, 9), point(4, 1), point(4, 2)]
    assert [(p.user_speed, p.throughput) for p in pareto(points)] == [(1, 10), (3, 9), (4, 2)]


def test_traces_of_recorded_answers(tmp_path: Path) -> None:
    sure = [[0.9, 0.8], [0.7, 0.6], [0.5, 0.4]]
    # The last round kept both drafts before the answer's end cut it to one token.
    drafted = Generation([1], [3, 2, 1], [2, 1, 1], [2, 2, 1], [2, 1, 2], confidences=sure)
    bare = Generation([1], [1], [0], [2], [0])
    traces = Traces.of([drafted], 2)
    assert traces.kept.tolist() == [2, 1, 2], "the round that the answer's end cut counts as it was verified"
    assert traces.confidences.tolist() == sure
    assert traces.alpha == pytest.approx([1, 2 / 3])
    assert traces.tau == pytest.approx(1 + 5 / 3)
    scheduled = Generation([1], [3, 2], [2, 1], [2, 1], [2, 1], lengths=[2, 1])
    with pytest.raises(ValueError, match="a schedule chose"):
        Traces.of([drafted, scheduled], 2)
    assert Traces.of([bare, Generation([1], [3], [2], [2], [2])], 2).confidences.tolist() == [[0.5, 1.0]] * 2
    again = Traces.load(traces.save(tmp_path / "traces.json"))
    assert torch.equal(again.kept, traces.kept)
    assert torch.equal(again.confidences, traces.confidences)
    with pytest.raises(ValueError, match="no whole round"):
        Traces.of([bare], 3)
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(ValueError, match="neither traces nor"):
        Traces.load(tmp_path / "x.json")


def test_synthetic_traces_are_honest(tmp_path: Path) -> None:
    traces = Traces.synthetic([0.8, 0.6], rounds=8000)
    assert traces.confidences.mean(0).tolist() == pytest.approx([0.8, 0.6], abs=0.02)
    first = (traces.kept >= 1).double()
    high = traces.confidences[:, 0] > 0.9
    assert float(first[high].mean()) == pytest.approx(float(traces.confidences[high, 0].mean()), abs=0.02)
    assert float(first[~high].mean()) == pytest.approx(float(traces.confidences[~high, 0].mean()), abs=0.02)
    write_json(tmp_path / "report.json", {"alpha": [0.7, 0.0], "trials": [10, 0]})
    assert Traces.load(tmp_path / "report.json").num_slots == 1
    with pytest.raises(ValueError, match="inside"):
        Traces.synthetic([1.0])


def test_the_command_writes_its_files(tmp_path: Path) -> None:
    steps = StepTable([1, 4], [1, 4], [[1.0, 1.2], [1.1, 1.6]])
    table = Measured(steps, StepTable([1, 4], [1, 3], [[0.05, 0.1], [0.05, 0.1]]), None, 8).save(
        tmp_path / "steps.json"
    )
    small = ["alpha=[0.8,0.6,0.5]", "loads=[1,4]", "schedulers=[plain,prefix]"]
    small += ["traffic.requests=6", "traffic.answer=12", "traffic.prompt=16", "traffic.max_rows=8"]
    with initialize_config_module("conf", version_base="1.3"):
        config = compose(
            "simulate", [*small, "hardware=cpu_measured", f"hardware.table={table}", "hardware_engine=transformers"]
        )
    report = run(config, tmp_path / "out")
    assert len(report["runs"]) == 4
    for name in ("pareto.png", "depth.png"):
        assert (tmp_path / "out" / name).read_bytes()[:4] == b"\x89PNG"
    assert read_json(tmp_path / "out" / "simulate.json") == report
    assert set(read_json(tmp_path / "out" / "hints.json")) >= {"vllm", "sglang"}
    assert png(plot_depth, [point(1, 2)], "x")[:4] == b"\x89PNG"


def test_settings_refuse_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="traces or alpha"):
        SimulateSettings("sglang", "qwen3-8b", [1], ["plain"])
    with pytest.raises(ValueError, match="drafter_kind"):
        SimulateSettings("sglang", "qwen3-8b", [1], ["plain"], alpha=[0.5], drafter_kind="tree")
    with pytest.raises(ValueError, match="slots of the traces"):
        SimulateSettings("sglang", "qwen3-8b", [1], ["plain"], alpha=[0.5], num_slots=2).rounds()
    with pytest.raises(ValueError, match="rate or concurrency"):
        Traffic("burst")
    with pytest.raises(ValueError, match=r"a whole number from 1 on, got 0\.5"):
        SimulateSettings("sglang", "qwen3-8b", [1, 0.5], ["plain"], alpha=[0.5], traffic={"kind": "concurrency"})
    assert SimulateSettings("sglang", "qwen3-8b", [0.5], ["plain"], alpha=[0.5], traffic={"kind": "rate"})


@pytest.mark.parametrize("load", [0.5, 1.9])
def test_requests_in_flight_are_whole(load: float) -> None:
    """Half a request in flight let nobody in and never ended; 1.9 ran as 1."""
    cost, traces = Line(0.01, 0.0), Traces.synthetic([0.5], rounds=64)
    with pytest.raises(ValueError, match=f"a whole number from 1 on, got {load}"):
        Simulation(cost, build("plain", cost, 1), traces, Traffic("concurrency"), load)
