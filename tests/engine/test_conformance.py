"""The conformance kit in our own harness and in every engine installed: each convention is a 0% / 100% test."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from checkpoints.engine_run import PYTHON, Run, Served, engine_python, serve
from checkpoints.engines import PROVENANCE, Source, export_engine
from checkpoints.folder import load_drafter, read_drafter, save_drafter
from checkpoints.target_files import target_head
from drafters.sampling import Sampling
from tests.engine.kit import CASES as EAGLE_CASES
from tests.engine.kit import NEW_TOKENS, SLOTS, Case, copy_target, expected, parts, save_target
from tests.engine.kit_block import BLOCK_CASES, FIRST_ONLY, sequential
from tests.engine.kit_heads import HEAD_CASES

CASES = EAGLE_CASES + BLOCK_CASES + HEAD_CASES
BY_NAME = {case.name: case for case in CASES}
REQUIRED = os.environ.get("HEADSTART_REQUIRE_ENGINE") == "1"


def features_of(model: Any, tokens: torch.Tensor, layers: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of the layers themselves, by hooks [1, T, L, D], and the last hidden state [1, T, D]."""
    kept: dict[int, torch.Tensor] = {}
    hooks = [
        model.model.layers[i].register_forward_hook(
            lambda _m, _i, out, i=i: kept.__setitem__(i, out[0] if isinstance(out, tuple) else out)
        )
        for i in layers
    ]
    last = model.model(tokens).last_hidden_state
    for hook in hooks:
        hook.remove()
    aux = [kept[i].view(1, tokens.shape[1], -1) for i in layers]
    return torch.stack(aux, 2) if aux else last[:, :, None][:, :, :0], last


@torch.inference_mode()
def own_alpha(case: Case, drafter: Any, model: Any) -> list[float]:
    """Acceptance of each slot when our drafter drafts along the target's known greedy text, by the contract alone."""
    accepted, rounds = [0] * SLOTS, 0
    for prompt in case.prompts:
        text = torch.tensor([prompt + expected(prompt)])
        aux, last = features_of(model, text, drafter.needs.layers)
        state, read, anchor = drafter.begin(1, text.shape[1] + 8), 0, len(prompt)
        drafter.start(state, text[:, 0])
        while anchor + SLOTS < text.shape[1]:
            fresh = slice(read, anchor)
            following = text[:, read + 1 : anchor + 1]
            drafter.observe(state, following, aux[:, fresh], last[:, fresh], torch.tensor([anchor - read]))
            read = anchor
            drafted = drafter.propose(state, SLOTS, Sampling(), torch.zeros(1, dtype=torch.int64)).tokens[0]
            right = (drafted == text[0, anchor + 1 : anchor + 1 + SLOTS]).long().cumprod(0)
            accepted = [a + int(b) for a, b in zip(accepted, right, strict=True)]
            rounds, anchor = rounds + 1, anchor + 1 + int(right.sum())
    return [a / rounds for a in accepted]


def near(found: list[float], alpha: tuple[int, ...]) -> None:
    """100% is exact; 0% leaves room for a token met by chance (2 of 64 answers look alike to a blind head)."""
    for got, wanted in zip(found, alpha, strict=True):
        assert got == 1.0 if wanted else got <= 0.1, f"acceptance by slot {found}, wanted {alpha}"


def test_copy_target_is_the_known_cycle() -> None:
    model = copy_target()
    for prompt in BY_NAME["layer"].prompts:
        tokens = torch.tensor([prompt])
        for token in expected(prompt):
            best = model(tokens).logits[0, -1].argmax()
            assert int(best) == token
            tokens = torch.cat([tokens, best.view(1, 1)], 1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_own_harness(case: Case, tmp_path: Path) -> None:
    model = copy_target()
    target = parts(model)
    folder = save_drafter(tmp_path / "drafter", case.build(target), target_identity=target.identity or {})
    near(own_alpha(case, load_drafter(folder, target), model), case.alpha)


# vLLM
# ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A fault planted in an exported folder, and the acceptance that must show it."""

    name: str
    case: str
    config: Callable[[dict[str, Any]], Any] | None = None
    tensors: Callable[[dict[str, torch.Tensor]], Any] | None = None
    alpha: tuple[int, ...] = (0,) * SLOTS
    engine: str = "vllm"
    lost: str | None = None


def _outputs_as_ids(config: dict[str, Any]) -> None:
    config["eagle_aux_hidden_state_layer_ids"] = [i - 1 for i in config["eagle_aux_hidden_state_layer_ids"]]


def _block_ids_less_one(config: dict[str, Any]) -> None:
    config["dflash_config"]["target_layer_ids"] = [i - 1 for i in config["dflash_config"]["target_layer_ids"]]


def _block_outputs_as_ids(config: dict[str, Any]) -> None:
    config["aux_hidden_state_layer_ids"] = [i - 1 for i in config["aux_hidden_state_layer_ids"]]


def _other_mask(config: dict[str, Any]) -> None:
    config["dflash_config"]["mask_token_id"] += 2


def _rolled(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return tensors["lm_head.weight"].roll(1, 0)


def _other_theta(config: dict[str, Any]) -> None:
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 1_000_000.0


FAULTS = [
    Fault("ids_as_outputs", "layer", config=_outputs_as_ids),
    Fault("missing_d2t", "vocabulary", tensors=lambda tensors: tensors["d2t"].zero_()),
    Fault("absolute_d2t", "vocabulary", tensors=lambda tensors: tensors["d2t"].add_(torch.arange(32)).remainder_(32)),
    Fault("lost_norm_output", "recycled_after_norm", config=lambda c: c.update(norm_output=False), alpha=FIRST_ONLY),
    Fault("lost_residual_switch", "residual_after_norm", config=lambda c: c.update(norm_before_residual=False)),
    Fault("lost_theta", "rope", config=_other_theta),
    Fault("parallel_lost_mask_hidden", "parallel_layer", tensors=lambda t: t["mask_hidden"].zero_(), alpha=FIRST_ONLY),
    Fault("parallel_other_mask", "parallel_layer", config=lambda c: c.update(mask_token_id=2), alpha=FIRST_ONLY),
    Fault("medusa_other_rows", "medusa_vocabulary", tensors=lambda t: t["lm_head.weight"].copy_(_rolled(t))),
    Fault("block_ids_less_one", "block_layer", config=_block_ids_less_one),
    Fault("block_outputs_as_ids", "block_layer", config=_block_outputs_as_ids, engine="vllm_speculators"),
    Fault("block_other_mask", "block_layer", config=_other_mask),
    Fault("block_lost_theta", "block_layer", config=_other_theta),
    Fault("block_missing_d2t", "block_vocabulary", tensors=lambda tensors: tensors["d2t"].zero_()),
    Fault("block_lost_mask_file", "block_trained_mask", lost="mask_embedding.pt"),
    Fault("block_lost_window", "block_windowed", config=lambda c: c.update(layer_types=["full_attention"])),
    Fault("block_short_window", "block_windowed", config=lambda c: c.update(sliding_window=SLOTS + 1)),
    Fault(
        "block_lost_causality",
        "block_windowed",
        config=lambda c: c.pop("sliding_window_non_causal"),
        engine="vllm_speculators",
    ),
]
# Weights with a fault show the harness that it would see one; the engine's own faults are those above.
NOT_SERVED = ("fault_block_swapped_layer", "fault_parallel_swapped_layer", "fault_medusa_heads_off_by_one")
IN_SPECULATORS = (
    *("layer", "vocabulary", "residual_after_norm", "four_layers", "parallel_layer"),
    *("block_layer", "block_vocabulary", "block_trained_mask", "block_windowed"),
)


@dataclass(frozen=True)
class Start:
    """One engine start: a case as an engine gets it, with or without a fault."""

    case: Case
    engine: str
    alpha: tuple[int, ...]
    fault: Fault | None = None


STARTS = {f"vllm-{case.name}": Start(case, "vllm", case.alpha) for case in CASES if case.name not in NOT_SERVED}
STARTS |= {
    f"vllm_speculators-{name}": Start(BY_NAME[name], "vllm_speculators", BY_NAME[name].alpha) for name in IN_SPECULATORS
}
STARTS |= {fault.name: Start(BY_NAME[fault.case], fault.engine, fault.alpha, fault) for fault in FAULTS}
ALONE, REFUSED = "target_alone", "refused_by_runner"


def engine_or_skip() -> Path:
    """vLLM's python; without one the test is skipped, or fails where HEADSTART_REQUIRE_ENGINE=1 says it must be
    there."""
    try:
        return engine_python()
    except ValueError as error:
        if REQUIRED:
            pytest.fail(f"HEADSTART_REQUIRE_ENGINE=1, but {error}")
        pytest.skip(str(error))


def plant(folder: Path, fault: Fault) -> None:
    if fault.config is not None:
        config = json.loads((folder / "config.json").read_text())
        fault.config(config)
        (folder / "config.json").write_text(json.dumps(config))
    if fault.tensors is not None:
        tensors = load_file(folder / "model.safetensors")
        fault.tensors(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if fault.lost is not None:
        (folder / fault.lost).unlink()


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Served]:
    """Every selected case and fault, in one engine process."""
    python = engine_or_skip()
    root = tmp_path_factory.mktemp("engine")
    target, model = save_target(root / "target"), parts(copy_target())

    def exported(case: Case, engine: str, label: str) -> Path:
        own = save_drafter(root / f"own-{label}", case.build(model), target_identity=model.identity or {})
        source = Source(read_drafter(own), str(target), torch.float32, lambda: target_head(str(target)))
        return export_engine(source, engine, root / label).folder

    def run(label: str, case: Case, folder: Path | None) -> Run:
        # The way to serve it comes from the export itself, as in `export verify`.
        way = folder and json.loads((folder / PROVENANCE).read_text())["speculative"]
        draft = folder and {**way, "model": str(folder), "num_speculative_tokens": SLOTS}
        return Run(
            label, str(target), case.prompts, NEW_TOKENS, 64, draft, "float32", len(case.prompts), ignore_eos=True
        )

    runs = []
    for label in _selected(request.session):
        if label == ALONE:
            runs.append(run(label, BY_NAME["layer"], None))
            continue
        start = STARTS.get(label) or Start(Case(label, sequential), "vllm", ())
        folder = exported(start.case, start.engine, label)
        if start.fault is not None:
            plant(folder, start.fault)
        runs.append(run(label, start.case, folder))
    return {result.name: result for result in serve(runs, python, threads=1, timeout_s=3600)}


def _selected(session: pytest.Session) -> list[str]:
    """Labels of the engine tests that this session runs: a start costs seconds, so no other is made."""
    own = [item for item in session.items if item.path == Path(__file__)]
    found = [item.callspec.params["label"] for item in own if item.get_closest_marker("engine")]
    return list(dict.fromkeys(found))


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("label", [ALONE])
def test_vllm_target_alone(label: str, served: dict[str, Served]) -> None:
    result = served[label]
    assert result.error is None, result.error
    assert result.outputs == [expected(prompt) for prompt in BY_NAME["layer"].prompts]


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("label", list(STARTS))
def test_vllm(label: str, served: dict[str, Served]) -> None:
    _check(served[label], STARTS[label].case, STARTS[label].alpha)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("label", [REFUSED])
def test_vllm_on_the_cpu_refuses_what_needs_its_other_runner(label: str, served: dict[str, Served]) -> None:
    assert "dspark" in str(served[label].error)


def _check(result: Served, case: Case, alpha: tuple[int, ...]) -> None:
    assert result.error is None, result.error
    assert result.outputs == [expected(prompt) for prompt in case.prompts], "the drafter changed the greedy text"
    near([count / result.drafts for count in result.accepted_per_slot], alpha)


# transformers
# ------------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "shift"),
    [("block_layer", 0), ("block_four_layers_two_deep", 0), ("block_anchor", 0), ("block_layer", -1)],
)
def test_transformers_accepts_as_we_do(name: str, shift: int, tmp_path: Path) -> None:
    """generate(speculation_type="dflash"): the target's text, in as few passes as the acceptance gives; with layer ids
    shifted by one, in one pass a token."""
    model, case = copy_target(), BY_NAME[name]
    target = parts(model)
    own = save_drafter(tmp_path / "own", case.build(target), target_identity=target.identity or {})
    folder = export_engine(Source(read_drafter(own), "target", torch.float32), "transformers", tmp_path / "out").folder
    config = json.loads((folder / "config.json").read_text())
    config["target_layer_ids"] = [layer + shift for layer in config["target_layer_ids"]]
    (folder / "config.json").write_text(json.dumps(config))
    assistant = AutoModel.from_pretrained(folder, dtype=torch.float32)
    passes: list[int] = []
    model.register_forward_hook(lambda *_: passes.append(1))
    prompt = torch.tensor([case.prompts[0]])
    made = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        position_ids=torch.arange(prompt.shape[1])[None],
        assistant_model=assistant,
        speculation_type="dflash",
        max_new_tokens=NEW_TOKENS + 1,
        do_sample=False,
    )
    assert made[0, prompt.shape[1] :].tolist() == expected(case.prompts[0], NEW_TOKENS + 1)
    # The first pass gives one token, every other its accepted ones and one more.
    accepted = 0 if shift else sum(case.alpha)
    assert len(passes) == 1 + -(-NEW_TOKENS // (1 + accepted))


def test_missing_engine_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PYTHON, raising=False)
    with pytest.raises(ValueError, match=PYTHON):
        engine_python()
