#!/usr/bin/env bash
# The whole speed table on one H200 (or what GPU there is) in at most ten minutes.
#
#   benchmarks/h200.sh TARGET HEAD [HEAD ...]        folders of a target and of trained heads
#   benchmarks/h200.sh random:llama-3.1-8b random:eagle3 random:dflash random:dspark
#                                                    no weights at hand: real step times, tau about 1
#   benchmarks/h200.sh --dry-run                     tiny doubles on a CPU, to see that it runs
#
# Parts end on their own time and each writes what it has: our harness at batch 1, 8 and 32, `bench profile` and its
# prediction against what was measured, and an engine (ENGINE=vllm or sglang, where HEADSTART_ENGINE_PYTHON names its
# python). Variables: OUT (outputs/h200), MINUTES (9.5), PYTHON, ENGINE, PROMPTS, NEW_TOKENS.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
OUT=${OUT:-outputs/h200}
MINUTES=${MINUTES:-9.5}
WORDS=(--out "$OUT" --minutes "$MINUTES")
[ -n "${ENGINE:-}" ] && WORDS+=(--engine "$ENGINE")
[ -n "${PROMPTS:-}" ] && WORDS+=(--prompts "$PROMPTS")
[ -n "${NEW_TOKENS:-}" ] && WORDS+=(--max-new-tokens "$NEW_TOKENS")

mkdir -p "$OUT"
if command -v nvidia-smi >/dev/null; then
    nvidia-smi --query-gpu=name,memory.total,driver_version,clocks.sm --format=csv | tee "$OUT/gpu.csv"
fi
# The table stops itself; this only ends what no longer answers.
LIMIT=$("$PYTHON" -c "print(int(60 * $MINUTES + 25))")
PYTHONPATH=. timeout --kill-after=10 "$LIMIT" "$PYTHON" benchmarks/speed_table.py "$@" "${WORDS[@]}" 2>&1 | tee "$OUT/log.txt"
