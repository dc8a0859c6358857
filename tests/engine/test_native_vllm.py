"""Native heads in vLLM: a target without one becomes a MiMo model, and each convention is a 0% / 100% test, in our
harness and in the engine."""

import json
from pathlib import Path

import pytest
import torch

from checkpoints.engine_run import Run, Served, serve
from checkpoints.engines import Source, export_engine
from checkpoints.folder import load_drafter, read_drafter, save_drafter
from tests.engine.kit import NEW_TOKENS, SLOTS, expected, parts
from tests.engine.kit_native import ELSEWHERE, NATIVE_CASES, SINGLE, NativeCase, native_target, token
from tests.engine.test_conformance import engine_or_skip, near, own_alpha

BY_NAME = {case.name: case for case in NATIVE_CASES}
FIRST_ZERO, OTHER_THETA = "first_embedding_zero", "fault_theta"
STARTS = {
    **BY_NAME,
    FIRST_ZERO: NativeCase(FIRST_ZERO, token, prompts=SINGLE),
    OTHER_THETA: NativeCase(OTHER_THETA, BY_NAME["behind"].build, (0, 0, 0), BY_NAME["behind"].prompts),
}


@pytest.mark.parametrize("case", NATIVE_CASES, ids=lambda case: case.name)
def test_own_harness(case: NativeCase, tmp_path: Path) -> None:
    model = native_target()
    target = parts(model)
    folder = save_drafter(tmp_path / "drafter", case.build(target), target_identity=target.identity or {})
    near(own_alpha(case, load_drafter(folder, target), model), case.alpha)


@pytest.mark.parametrize("name", list(ELSEWHERE))
def test_the_faults_are_right_under_other_conventions(name: str) -> None:
    model = native_target()
    near(own_alpha(BY_NAME[name], ELSEWHERE[name](parts(model)), model), (1,) * SLOTS)


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Served]:
    """Every selected case, in one engine process."""
    python = engine_or_skip()
    root, model = tmp_path_factory.mktemp("native"), native_target()
    target = parts(model)
    model.save_pretrained(root / "target")
    own = [item for item in request.session.items if item.path == Path(__file__)]
    asked = [item.callspec.params for item in own if hasattr(item, "callspec")]
    found = [params["label"] for params in asked if "label" in params]

    def run(label: str) -> Run:
        case = STARTS[label]
        own = save_drafter(root / f"own-{label}", case.build(target), target_identity=target.identity or {})
        source = Source(read_drafter(own), str(root / "target"), torch.float32)
        folder = export_engine(source, "vllm", root / label).folder
        if label == OTHER_THETA:
            config = json.loads((folder / "config.json").read_text())
            config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 1_000_000.0
            (folder / "config.json").write_text(json.dumps(config))
        draft = {"method": "mtp", "num_speculative_tokens": SLOTS}
        return Run(label, str(folder), case.prompts, NEW_TOKENS, 64, draft, "float32", 4, ignore_eos=True)

    runs = [run(label) for label in dict.fromkeys(found) if label in STARTS]
    return {result.name: result for result in serve(runs, python, threads=1, timeout_s=3600)}


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("label", [*BY_NAME, OTHER_THETA])
def test_vllm(label: str, served: dict[str, Served]) -> None:
    result, case = served[label], STARTS[label]
    assert result.error is None, result.error
    assert result.outputs == [expected(prompt) for prompt in case.prompts], "the head changed the greedy text"
    near([count / result.drafts for count in result.accepted_per_slot], case.alpha)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("label", [FIRST_ZERO])
def test_vllm_zeroes_the_embedding_of_position_0(label: str, served: dict[str, Served]) -> None:
    """After a prompt of one token the first row stands at position 0: it drafts wrong, once a prompt, as here."""
    result = served[label]
    assert result.error is None, result.error
    assert result.outputs == [expected(prompt) for prompt in SINGLE]
    assert result.drafts - result.accepted_per_slot[0] == len(SINGLE)


@pytest.mark.parametrize(("zero_first", "alpha"), [(True, 0.75), (False, 1.0)])
def test_own_harness_zeroes_it_too(zero_first: bool, alpha: float) -> None:
    """Anchors 1, 2, 6, 10 with the first round lost, else 1, 5, 9, 13."""
    model = native_target()
    found = own_alpha(STARTS[FIRST_ZERO], token(parts(model), zero_first=zero_first), model)
    assert found == [alpha] * SLOTS
