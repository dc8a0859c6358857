"""A prepared folder of a tiny target, and the overrides that train on it: what the smoke tests of training share."""

import csv
from pathlib import Path

from checkpoints.files import write_json
from data.conversations import Conversation, write_conversations
from data.features import capture
from data.target import Target
from tests import checks
from tests.doubles import save_tiny
from training.train import run

LAYERS = [0, 2, 3]


def prepare_tiny(folder: Path, **model: int) -> Path:
    """A folder as prepare leaves it: a tiny target (model: keys of its config), 12 random conversations and their
    features."""
    save_tiny(folder / "target", **model)
    target = Target.load(str(folder / "target"), dtype="float32")
    texts = [(n, checks.random_text(target, 10 + n, seed=n)) for n in range(12)]
    conversations = [Conversation(f"c{n}", "test", text, [0] * 4 + [1] * (len(text) - 4)) for n, text in texts]
    write_conversations(folder / "conversations.jsonl", conversations)
    capture(target, conversations, LAYERS, folder / "features", dtype="float32")
    write_json(folder / "prepare.json", {"thinking": None})
    lines = [
        f'{{"id": "h{n}", "domain": "d{n % 2}", "messages": [{{"role": "user", "content": "ab {n}"}}]}}'
        for n in range(4)
    ]
    (folder / "heldout.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def overrides(prepared: Path, /, **more: object) -> list[str]:
    """Hydra's words for a short run."""
    base = {
        "target": "any",
        "target.name": prepared / "target",
        "target.dtype": "float32",
        "prepared": prepared,
        "drafter.model.num_slots": 3,
        "drafter.model.layers": LAYERS,
        "drafter.vocabulary": 48,
        "data@heldout": "jsonl",
        "heldout.path": prepared / "heldout.jsonl",
        "trainer.max_steps": 12,
        "trainer.checkpoint_every": 4,
        "trainer.progress": False,
        "trainer.log_every": 1,
        "trainer.precision": "32-true",
        "batch.rows": 2,
        "acceptance.every": 6,
        "acceptance.prompts": 4,
        "acceptance.max_new_tokens": 8,
    } | more
    return [f"{key}={value}" for key, value in base.items()]


def train(prepared: Path, out: Path, /, **more: object) -> dict:
    """Train in this process."""
    out.mkdir(parents=True, exist_ok=True)
    return run(checks.compose_config("train", *overrides(prepared, **more)), out)


def trace(out: Path) -> list[tuple[str, str]]:
    """(step, loss) of every optimizer step, in the files of all runs in this folder; a resumed run logs the steps after
    its checkpoint again."""
    rows: dict[str, str] = {}
    for path in sorted(out.glob("metrics*.csv")):  # metrics-001.csv ... and the newest, metrics.csv
        with open(path) as handle:
            rows |= {row["step"]: row["loss"] for row in csv.DictReader(handle) if row.get("loss")}
    return sorted(rows.items(), key=lambda item: int(item[0]))
