"""Run by the engine's own python, never imported: serves targets with and without drafters in vLLM and writes what it
saw.

    python vllm_runner.py job.json result.json

job: {"runs": [{"name", "model", "speculative": dict | null, "prompts": [[ids]], "max_tokens", "dtype", "max_model_len",
"max_num_seqs", "stop_token_ids": [ids], "ignore_eos": bool, "warmup": bool, "revision": str | null,
"trust_remote_code": bool}]}. result: {"engine", "version", "runs":
[{"name", "outputs": [[ids]], "seconds", "start_seconds", "drafts", "drafted", "accepted", "accepted_per_slot": []} or
{"name", "error"}]}. A run that fails does not stop the others. Imports nothing of this project.
"""

import gc
import json
import os
import sys
import time
import traceback
from typing import Any

# One process: no second start for each run, and no orphan worker when this one is killed.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def counters(llm: Any) -> dict[str, Any]:
    """Speculative counters since the engine started; zeros without a drafter."""
    found: dict[str, Any] = {"drafts": 0, "drafted": 0, "accepted": 0, "accepted_per_slot": []}
    names = {
        "vllm:spec_decode_num_drafts": "drafts",
        "vllm:spec_decode_num_draft_tokens": "drafted",
        "vllm:spec_decode_num_accepted_tokens": "accepted",
        "vllm:spec_decode_num_accepted_tokens_per_pos": "accepted_per_slot",
    }
    for metric in llm.get_metrics():
        key = names.get(metric.name)
        if key is not None:
            found[key] = list(metric.values) if hasattr(metric, "values") else metric.value
    return found


def difference(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Counter increments."""
    slots = before["accepted_per_slot"] or [0] * len(after["accepted_per_slot"])
    per_slot = [a - b for a, b in zip(after["accepted_per_slot"], slots, strict=True)]
    return {key: after[key] - before[key] for key in ("drafts", "drafted", "accepted")} | {
        "accepted_per_slot": per_slot
    }


def serve(run: dict[str, Any]) -> dict[str, Any]:
    """One run: start an engine, generate, count, stop it."""
    from vllm import LLM, SamplingParams

    started = time.perf_counter()
    llm = LLM(
        model=run["model"],
        skip_tokenizer_init=True,
        dtype=run.get("dtype", "auto"),
        max_model_len=run["max_model_len"],
        revision=run.get("revision"),
        trust_remote_code=run.get("trust_remote_code", False),
        max_num_seqs=run.get("max_num_seqs", 1),
        speculative_config=run.get("speculative"),
        enforce_eager=run.get("enforce_eager", True),
        enable_prefix_caching=False,
        disable_log_stats=False,
    )
    try:
        ready = time.perf_counter()
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=run["max_tokens"],
            stop_token_ids=run.get("stop_token_ids") or None,
            ignore_eos=run.get("ignore_eos", False),
            detokenize=False,
        )
        prompts = [{"prompt_token_ids": ids} for ids in run["prompts"]]
        if run.get("warmup"):
            llm.generate(prompts[:1], sampling, use_tqdm=False)
        before, begun = counters(llm), time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begun
        return {
            "name": run["name"],
            "outputs": [list(output.outputs[0].token_ids) for output in outputs],
            "seconds": seconds,
            "start_seconds": ready - started,
            **difference(counters(llm), before),
        }
    finally:
        llm.llm_engine.engine_core.shutdown()


def clean_up() -> None:
    """Forget what an engine, or a failed start, left in this process, so that the next can start."""
    from vllm.distributed import cleanup_dist_env_and_memory

    gc.collect()
    cleanup_dist_env_and_memory()


def main() -> None:
    """Do every run of the job; write the result after each, so that a crash leaves what was done."""
    import vllm

    with open(sys.argv[1], encoding="utf-8") as handle:
        job = json.load(handle)
    result: dict[str, Any] = {"engine": "vllm", "version": vllm.__version__, "runs": []}
    for run in job["runs"]:
        try:
            result["runs"].append(serve(run))
        except Exception as error:
            traceback.print_exc()
            result["runs"].append({"name": run["name"], "error": f"{type(error).__name__}: {error}"})
        clean_up()
        with open(sys.argv[2] + ".tmp", "w", encoding="utf-8") as handle:
            json.dump(result, handle)
        os.replace(sys.argv[2] + ".tmp", sys.argv[2])


if __name__ == "__main__":
    main()
