#!/usr/bin/env bash
# All checks and tests; what CI runs. `scripts/check.sh --fast` leaves out everything that starts an engine.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin
unless="gpu"
case "${1:-}" in
  "") ;;
  --fast) unless="gpu or engine or slow" ;;
  *) echo "usage: scripts/check.sh [--fast]" >&2; exit 2 ;;
esac

step() { printf '\n== %s\n' "$1"; shift; "$@"; }
step "lint" $bin/ruff check .
step "format" $bin/ruff format --check .
step "types" $bin/mypy
step "import contracts" $bin/lint-imports
# A server's start keeps one core busy, so the tests around vLLM run beside all others; their report comes last.
tests="$bin/pytest -q --durations=10"
report=$(mktemp)
set -m # a process group of its own: an interrupt reaches it once, from the trap, and it stops its servers
$tests tests/vllm_plugin -m "not ($unless)" >"$report" 2>&1 </dev/null &
engines=$!
set +m
leave() {
  trap '' INT TERM HUP
  if kill -INT "$engines" 2>/dev/null; then
    wait "$engines" || true
    step "engines, broken off" cat "$report"
  fi
  rm -f "$report"
}
trap leave EXIT
trap 'exit 130' INT TERM HUP
failed=0
# Triton decides at its first import whether kernels run in its interpreter, so kernel tests have a process of their own.
step "kernels" env TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $tests tests/kernels tests/quants -m "not ($unless)" || failed=1
apart=(--ignore=tests/kernels --ignore=tests/quants --ignore=tests/vllm_plugin)
step "everything else" $tests tests "${apart[@]}" -m "not ($unless)" || failed=1
wait "$engines" || failed=1
step "engines" cat "$report"
exit $failed
