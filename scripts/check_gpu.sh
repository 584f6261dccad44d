#!/usr/bin/env bash
# What only a machine with a GPU can show, in order of worth: tests marked `gpu`, benchmarks, load, one rank at full depth.
#
#   scripts/check_gpu.sh [OUT [STEP...]]     default: gpu-check, every step
#   scripts/check_gpu.sh --list              the steps, the seconds each may take, whether it needs vLLM
#
# Every step has a log OUT/STEP.log, written as it goes, its figures beside it, and a line in OUT/summary.txt (name, exit
# status, seconds; 124: out of time) as soon as it ends. A step that fails or takes too long does not keep the next from
# running; the exit status is 1 then. OUT/machine.txt says what it ran on. Two calls with different steps and
# CUDA_VISIBLE_DEVICES may share OUT.
#
# PYTHON names the interpreter (default: .venv's, else python3); SECONDS_SCALE=2 doubles all limits.
set -uo pipefail
here=$PWD
cd "$(dirname "$0")/.."

# name, seconds, "vllm" or "-" where torch and triton suffice, description
steps() {
  cat <<'STEPS'
kernels 540 - kernels and products: graphs, nothing compiled after the warm-up, addresses beyond 2^31
products 300 - GGML products beside cuBLAS and, where vLLM and vllm-gguf-plugin are installed, the plugin
types 780 - products of every GGML type, as the interpreter's tests have them
sparse 150 - sparse MLA; beside FlashMLA and vLLM's XPU kernel where vLLM is installed
indexer 150 - scores and selection; beside DeepGEMM and vLLM's where vLLM is installed
engine 840 vllm served numbers: prompts, decoding, side by side, preempted, MTP, packed cache, late compilations
stack 480 vllm one of eight ranks at full depth: loading, milliseconds a token, kernels
soak 1020 vllm ten minutes of mixed load on a server of its own
loading 150 - what bounds loading: reading, copying, rearranging, alone and together
tune 720 - launch parameters measured for both caches, then random steps with them
install 400 vllm install --tune from end to end, and a server that launches what it measured
quantised 600 vllm products as the engine calls them, loading; two ranks, which share the GPU where there is but one
long 600 vllm contexts of 2,047 to 131,072 tokens, beside vLLM's own attention
unfused 480 vllm the stack with vLLM's own launches wherever ours can stand in for them
norms 480 vllm the stack with vLLM's own launches around experts, behind attention and before index scores
launches 180 - single launches of a layer, each beside those it stands for
decode 400 - a decoded token's products with other launches
selection 400 - every way of selecting the top k
sweep 600 - the products again with other launch parameters
STEPS
}

usage() { sed -n '2,13s/^# \{0,1\}//p' "$0"; }
case "${1:-}" in
  --list)
    steps | while read -r words; do
      read -r name seconds needs what <<<"$words"
      printf '%-10s %5s s  %-4s  %s\n' "$name" "$seconds" "$needs" "$what"
    done
    exit 0 ;;
  -h | --help) usage; exit 0 ;;
  -*) usage >&2; exit 2 ;;
esac
out=${1:-gpu-check}
[ $# -eq 0 ] || shift
mapfile -t names < <(steps | cut -d' ' -f1)
for step in "$@"; do
  [[ " ${names[*]} " == *" $step "* ]] || { echo "error: no step $step; there are: ${names[*]}" >&2; exit 2; }
done
[ $# -gt 0 ] || set -- "${names[@]}"
[[ $out == /* ]] || out=$here/$out
[[ ${SECONDS_SCALE:-1} =~ ^[1-9][0-9]*(/[1-9][0-9]*)?$ ]] || {
  echo "error: SECONDS_SCALE is a whole number, or a fraction as 1/2, not ${SECONDS_SCALE:-}" >&2
  exit 2
}
mkdir -p "$out" || exit 1

python=${PYTHON:-}
[[ $python != */* || $python == /* ]] || python=$here/$python
if [ -z "$python" ]; then
  python=python3
  if [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
fi
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

# A script of the step, for at most its seconds; one that goes on for a minute more is killed.
script() { exec timeout --kill-after=60 "$seconds" "$python" "scripts/$1" "${@:2}"; }

stack() { script bench_layer_stack.py --out "$out/$name" --budget "$((seconds - 20))" "$@"; }

# Tests of the step: each result and figure as it comes. Told to stop as by Ctrl-C, for only so servers are stopped too;
# they have three quarters of the time, and what they have answered until then is judged.
tests() {
  export GPU_SERVERS_LOGS=$out GPU_SERVERS_SECONDS=$((seconds * 3 / 4))
  exec timeout --signal=INT --kill-after=60 "$seconds" "$python" -m pytest -v -s -rfEs --tb=short --durations=5 -m gpu \
    -o timeout="$seconds" -p no:cacheprovider --junitxml="$out/$name.xml" "$@"
}

run() {
  case $name in
    kernels) tests tests/kernels tests/quants ;;
    products) script bench_quants.py --out "$out/products.json" --jobs "$(nproc)" ;;
    types) tests -m "" tests/quants/test_products.py ;; # most of them run anywhere and are not marked
    sparse) script bench_sparse_mla.py --json "$out/sparse.json" ;;
    indexer) script bench_indexer.py --json "$out/indexer.json" ;;
    engine) tests tests/vllm_plugin/test_gpu.py ;;
    stack) stack ;;
    unfused) stack --vllm=--additional-config --vllm='{"glm5_fusion": "off"}' ;;
    norms) stack --vllm=--additional-config --vllm='{"glm5_fusion": "norms"}' ;;
    launches)
      tests tests/quants/test_gpu_sum.py tests/quants/test_gpu_one_token.py \
        tests/kernels/test_gpu_step_launches.py tests/kernels/test_gpu_layer_input.py \
        tests/kernels/test_gpu_add_norm.py tests/kernels/test_gpu_row_product.py tests/kernels/test_gpu_step_tokens.py ;;
    soak)
      script soak.py --gguf tests/data/tiny-glm5/GLM-tiny-A-GGUF/UD-Q4_K_XL --preemptions 1 --out "$out/soak" \
        --json "$out/soak.json" ;;
    loading) script bench_loading.py --out "$out/loading.json" ;;
    tune) tests tests/stages/test_gpu_tune.py ;;
    install) tests tests/stages/test_gpu_install.py ;;
    quantised) tests tests/vllm_plugin/test_gpu_quantised.py tests/vllm_plugin/test_gpu_choice.py \
      tests/vllm_plugin/test_rank_reader.py ;;
    long) tests tests/vllm_plugin/test_gpu_long.py ;;
    decode) script bench_quants.py --sweep decode --out "$out/decode.json" --jobs "$(nproc)" ;;
    selection) script bench_indexer.py --sweep --json "$out/selection.json" ;;
    sweep) script bench_quants.py --sweep --out "$out/sweep.json" --jobs "$(nproc)" ;;
  esac
}

# What the figures are of.
{
  date; git log -1 --format=%H; nproc; free -g; nvidia-smi
  "$python" -m pip list | grep -iE '^(torch|triton|vllm)'
} >"$out/machine.txt" 2>&1

# A step's `timeout` leaves the terminal's process group: an interrupt is passed on to it from here, and waited for.
job=
stop() {
  trap '' INT TERM HUP
  if [ -n "$job" ]; then
    kill -INT "$job" 2>/dev/null
    wait "$job"
    echo "$name: stopped, $((SECONDS - began)) s" | tee -a "$out/summary.txt"
  fi
  exit 130
}
trap stop INT TERM HUP

failed=0
for name in "$@"; do
  seconds=$(($(steps | sed -n "s/^$name \([0-9]*\) .*/\1/p") * ${SECONDS_SCALE:-1}))
  echo "$name, at most $seconds s, log in $out/$name.log"
  began=$SECONDS
  set -m # without a process group of its own a step in the background would ignore interrupts
  run >"$out/$name.log" 2>&1 </dev/null &
  job=$!
  set +m
  wait "$job"
  code=$?
  job=
  line="$name: exit $code, $((SECONDS - began)) s"
  echo "$line" | tee -a "$out/summary.txt"
  [ "$code" -eq 0 ] || failed=1
done
exit "$failed"
