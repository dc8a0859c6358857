"""notebooks/evaluate.ipynb runs from the first cell to the last on a tiny target and an exported head."""

import json
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient

from checkpoints.engine_entry import Source
from checkpoints.engines import export_engine
from checkpoints.folder import read_drafter, save_drafter
from checkpoints.foreign import open_head
from data.target import Target
from drafters.eagle3 import Eagle3
from tests.doubles import save_tiny

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("text/markdown", "text/plain")


def test_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_tiny(tmp_path / "target")
    target = Target.load(str(source), dtype="float32")
    drafter = Eagle3(target.parts, None, num_slots=2, layers=[0, 2, 4])
    save_drafter(tmp_path / "head", drafter, target_identity=target.identity)
    exported = export_engine(
        Source(read_drafter(tmp_path / "head"), str(source), torch.float32), "vllm", tmp_path / "vllm"
    )
    ours, again = (dict(open_head(tmp_path / name, target.parts).named_parameters()) for name in ("head", "vllm"))
    assert ours.keys() == again.keys()
    assert all(torch.equal(again[name], ours[name]) for name in ours)
    row = {"id": "a", "domain": "toy", "messages": [{"role": "user", "content": "give me a json object"}]}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(row) + "\n")
    for name, value in {
        "TARGET": source,
        "DRAFTER": exported.folder,
        "PROMPTS": tmp_path / "prompts.jsonl",
        "OUT": tmp_path / "out",
        "MAX_NEW_TOKENS": 6,
    }.items():
        monkeypatch.setenv(f"HEADSTART_{name}", str(value))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "notebooks" / "evaluate.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "the notebook is kept without outputs"
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}).execute()
    assert json.loads((tmp_path / "out" / "report.json").read_text())["greedy_identical"] is True
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    # tau, alpha, time split, latency and, from the estimator, reliability.
    assert sum("image/png" in output.get("data", {}) for output in shown) == 5
    said = "\n".join(str(output.get("data", {}).get(kind, "")) for output in shown for kind in KINDS)
    for title in ("Acceptance", "Speed and time", "Latency", "Confidences", "Sizes", "Environment"):
        assert f"### {title}" in said
    assert "LOSSY          a draft stands where" in said
    assert (tmp_path / "out" / "report.html").exists()
