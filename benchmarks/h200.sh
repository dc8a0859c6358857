#!/usr/bin/env bash
# The checks that need a GPU, and the speed tables, on one H200 (or what GPU there is) in at most ten minutes.
#
#   benchmarks/h200.sh TARGET HEAD [HEAD ...]        folders of a target and of trained heads
#   benchmarks/h200.sh random:llama-3.1-8b random:eagle3 random:dflash random:dspark
#                                                    no weights at hand: real step times, tau about 1
#   benchmarks/h200.sh --dry-run                     tiny doubles on a CPU, to see that it runs
#
# PARTS, in order (all three by default), each within its own time and each leaving what it has:
#   checks   tests/numerics/test_on_a_gpu.py: compiled attention against dense, captured rounds against eager ones
#   train    headstart bench train: a training step of DRAFTERS beside its naive twin, at SHAPE's sizes
#   table    our harness at batch 1, 8 and 32, `bench profile` and its prediction against what was measured, the harness
#            by CUDA graphs, and an engine (ENGINE=vllm or sglang, where HEADSTART_ENGINE_PYTHON names its python)
# Variables: OUT (outputs/h200; what is left there is few small files), WORK (all that was written), MINUTES (9.5, of
# all parts), PARTS, PYTHON, PYTHONPATH (searched after the checkout), DRAFTERS, ENGINE, PROMPTS, NEW_TOKENS.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
OUT=${OUT:-outputs/h200}
WORK=${WORK:-outputs/h200-work}
MINUTES=${MINUTES:-9.5}
PARTS=${PARTS:-checks train table}
DRAFTERS=${DRAFTERS:-eagle3,dflash,dspark}
# Said at once, not by three parts that fail.
NEEDED="accelerate httpx hydra jinja2 lightning omegaconf rich safetensors torch transformers"
MISSING=$("$PYTHON" -c "import sys; from importlib.util import find_spec
print(*[one for one in sys.argv[1:] if find_spec(one) is None])" $NEEDED)
[ -z "$MISSING" ] || { echo "$PYTHON lacks $MISSING: install them, or put them on PYTHONPATH" >&2; exit 2; }
END=$(($(date +%s) + $("$PYTHON" -c "print(int(60 * $MINUTES))")))
SHAPE=(hidden_size=4096 intermediate_size=14336 num_attention_heads=32 num_key_value_heads=8 num_hidden_layers=32
    vocab_size=128256)
# A look for a GPU must not start CUDA in a process that forks its measurements (training.bench).
export PYTORCH_NVML_BASED_CUDA_CHECK=1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
# Kernels are compiled one by one: a pool of compilers takes longer to start than the few kernels of a process.
export TORCHINDUCTOR_COMPILE_THREADS=1
if [ "${1:-}" = --dry-run ]; then
    SHAPE=(hidden_size=32 intermediate_size=48 num_attention_heads=4 num_key_value_heads=2 num_hidden_layers=12
        vocab_size=500)
    TOKENS=24
fi

mkdir -p "$OUT" "$WORK"
OUT=$(realpath "$OUT") WORK=$(realpath "$WORK")
if command -v nvidia-smi >/dev/null; then
    nvidia-smi --query-gpu=name,memory.total,driver_version,clocks.sm --format=csv | tee "$OUT/gpu.csv" || true
fi

left() { echo $((END - $(date +%s))); }

# within SECONDS NAME COMMAND ...: at most so long, and no longer than is left; what it says also goes to NAME.txt.
within() {
    local seconds=$1 name=$2 status=0
    shift 2
    [ "$seconds" -lt "$(left)" ] || seconds=$(left)
    [ "$seconds" -ge 10 ] || { echo "$name: no time left" | tee "$OUT/$name.txt"; return 0; }
    # INT: pytest still says what failed.
    timeout --signal=INT --kill-after=10 "$seconds" "$@" 2>&1 | tee "$OUT/$name.txt" || status=$?
    echo "== $name: status $status, $(left) s left"
}

# Few files, so that they come back from a machine that sends few: tables as they are, details in one archive.
leave() {
    cp -f "$WORK"/table.md "$WORK"/table.json "$WORK"/train/train.json "$OUT" 2>/dev/null || true
    (cd "$WORK" && find . -name '*.json' -size -2M | tar czf "$OUT/details.tar.gz" -T -) || true
}
trap leave EXIT

for part in $PARTS; do
    case $part in
    checks)
        # Compiling is most of it: several processes share what they compile, and the GPU.
        JOBS=$("$PYTHON" -c "import os, xdist; print('-n', min(8, len(os.sched_getaffinity(0))))" 2>/dev/null || true)
        # Nothing but the checkout is known of such a machine: its own packages' warnings and names do not count.
        # shellcheck disable=SC2086
        OMP_NUM_THREADS=2 HF_HUB_OFFLINE=1 within 170 checks \
            "$PYTHON" -m pytest -v -rf --tb=short -W default --noconftest $JOBS tests/numerics/test_on_a_gpu.py
        ;;
    train)
        within 150 train "$PYTHON" -m headstart bench train "train.drafters=[$DRAFTERS]" train.num_slots=5 \
            "train.tokens=${TOKENS:-4096}" train.repeats=3 "${SHAPE[@]/#/train.shape.}" "hydra.run.dir=$WORK/train"
        ;;
    table)
        # Imports, and what is under way when its minutes end, come on top.
        WORDS=(--out "$WORK" --minutes "$("$PYTHON" -c "print(max(0.5, ($(left) - 20) / 60))")")
        [ -z "${ENGINE:-}" ] || WORDS+=(--engine "$ENGINE")
        [ -z "${PROMPTS:-}" ] || WORDS+=(--prompts "$PROMPTS")
        [ -z "${NEW_TOKENS:-}" ] || WORDS+=(--max-new-tokens "$NEW_TOKENS")
        within "$(left)" table "$PYTHON" benchmarks/speed_table.py "$@" "${WORDS[@]}"
        ;;
    *)
        echo "PARTS holds checks, train and table, got $part" >&2
        exit 2
        ;;
    esac
done
