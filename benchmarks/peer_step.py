"""A training step of ours beside vLLM's speculators, for the drafters that both have, on one machine in one run.

    pip install --no-deps speculators hs-connectors loguru pydantic-settings openai jiter distro python-dotenv
    python benchmarks/peer_step.py [--tokens 256] [--slots 5] [--anchors 64] [--vocabulary 6144] [--repeats 2]

One row of `tokens` (an eighth prompt, then one answer), random features and target of SmolLM2's sizes, forward and
backward of each side's own model and default losses with equal draft vocabulary, slots, layers and anchors. Their
attention and losses run as `--draft-attn-impl eager --loss-implementation eager`: their fused losses need Triton, their
FlexAttention is uncompiled on a CPU. Both run under bf16 autocast where the machine multiplies bf16. Each side runs in
a process of its own.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from hydra import initialize_config_module
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, Qwen3Config

from checkpoints.run import machine
from eval.bench import SHAPE, StepSettings
from training.bench import Job, Step, apart, autocast, jobs, measure

HEAD_DIM, LAYERS = 64, {"eagle3": 1, "peagle": 2, "dflash": 2, "dspark": 2}


def ours(name: str, how: StepSettings, anchors: int, vocabulary: int) -> Job:
    """Our drafter at the sizes that both sides get."""
    with initialize_config_module("conf", version_base="1.3"):
        (job,) = jobs(replace(how, drafters=[name]))
    model = dict(job.model)
    if "block" in model:
        model["block"] = {**model["block"], "anchors": anchors, "depth": LAYERS[name]}
    if "keep" in model:
        model["keep"] = 1.0  # every anchor has all its slots, as theirs
    if "depth" in model:
        model["depth"] = LAYERS[name]
    return replace(job, model=model, vocabulary=vocabulary)


def theirs(name: str, how: StepSettings, anchors: int, vocabulary: int) -> Step:
    """Their step, in this process."""
    torch.manual_seed(0)
    model, arguments = _peer(name, how, anchors, vocabulary)
    model.train()
    width, size = how.shape["hidden_size"], how.shape["vocab_size"]
    captured = len(model.target_layer_ids)
    prompt = how.tokens // 8
    mask = (torch.arange(how.tokens) >= prompt)[None].long()
    batch = {
        "hidden_states": torch.randn(1, how.tokens, captured * width),
        "input_ids": torch.randint(0, size - 1, (1, how.tokens)),
        "document_ids": torch.zeros(1, how.tokens, dtype=torch.long),
        "loss_mask": mask,
        "verifier_last_hidden_states": torch.randn(1, how.tokens, width),
        "position_ids": torch.arange(how.tokens)[None],
    }

    def step() -> None:
        with autocast(torch.device("cpu")):
            _, loss, _ = model(**batch, **arguments)
        if not torch.isfinite(loss):
            raise RuntimeError(f"{name}: loss {float(loss)}")
        loss.backward()
        model.zero_grad()

    step()
    return Step(0, int(mask.sum()), min(_seconds(step) for _ in range(how.repeats)), 0, 0)


def _peer(name: str, how: StepSettings, anchors: int, vocabulary: int) -> tuple[Any, dict[str, Any]]:
    """Their model with random weights, and the arguments that their trainer calls it with."""
    from speculators.models.dflash.core import DFlashDraftModel
    from speculators.models.dspark.core import DSparkDraftModel
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.models.peagle.core import PEagleDraftModel

    classes = {
        "eagle3": Eagle3DraftModel,
        "peagle": PEagleDraftModel,
        "dflash": DFlashDraftModel,
        "dspark": DSparkDraftModel,
    }
    cls, block = classes[name], name in ("dflash", "dspark")
    cls.load_verifier_weights = lambda self: None  # random weights below
    depth, size = how.shape["num_hidden_layers"], how.shape["vocab_size"]
    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(**how.shape).save_pretrained(folder)
        layer = (Qwen3Config if block else LlamaConfig)(
            **{**how.shape, "num_hidden_layers": LAYERS[name]}, head_dim=HEAD_DIM
        )
        kept = torch.arange(size) < vocabulary
        given = {
            "verifier_name_or_path": folder,
            "draft_vocab_size": vocabulary,
            "target_layer_ids": [1, depth // 2, depth - 3],
            "draft_attn_impl": "eager",
            "mask_token_id": size - 1,
            "norm_before_residual": False,
            "ttt_steps": how.num_slots,
            "num_depths": how.num_slots,
            "block_size": how.num_slots + (name == "dflash"),
            "loss_fn": "kl_div" if name != "dspark" else '{"ce": 0.1, "tv": 0.9}',
            "loss_implementation": "eager",
            "ttt_step_loss_decay": 1.0,
            "max_anchors": anchors,
        }
        reduced = vocabulary < size
        maps = {"t2d": kept, "d2t": torch.zeros(vocabulary, dtype=torch.long)} if reduced else {}
        model = cls.from_training_args(layer, **maps, **given)
    for value in model.parameters():
        if not torch.isfinite(value).all():
            torch.nn.init.normal_(value.data, std=0.02)
    arguments, _ = cls.get_trainer_kwargs(**given)
    return model, arguments


def _seconds(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def main() -> None:
    """Measure both sides of every drafter and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"tokens": 256, "slots": 5, "anchors": 64, "vocabulary": 6144, "repeats": 2}
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--drafters", nargs="+", default=list(LAYERS), choices=list(LAYERS))
    chosen = parser.parse_args()
    how = StepSettings(None, chosen.slots, 1, chosen.tokens, chosen.repeats, False, dict(SHAPE))
    table = Table(title=f"answer tokens/s, {machine()['threads']} threads", title_justify="left")
    for column in ("drafter", "ours", "speculators", "ratio"):
        table.add_column(column, justify="left" if column == "drafter" else "right")
    for name in chosen.drafters:
        mine = apart(measure, ours(name, how, chosen.anchors, chosen.vocabulary), "ours")
        peer = apart(theirs, name, how, chosen.anchors, chosen.vocabulary)
        rates = [step.tokens / step.seconds for step in (mine, peer)]
        table.add_row(name, f"{rates[0]:,.0f}", f"{rates[1]:,.0f}", f"{rates[0] / rates[1]:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
