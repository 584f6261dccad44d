#!/usr/bin/env bash
# Make .venv with the engine and everything the checks need.
#
#   scripts/setup.sh [--cpu | --gpu] [--python PYTHON]
#
# Without a flag an NVIDIA driver decides. The CPU engine is real vLLM and serves small models; it is what the demo and
# the tests use. Running it again brings an existing .venv up to date.
set -euo pipefail
cd "$(dirname "$0")/.."

engine="" python=""
while [ $# -gt 0 ]; do
  case "$1" in
    --cpu) engine=cpu ;;
    --gpu) engine=gpu ;;
    --python) python=${2:?--python needs a path or name}; shift ;;
    -h | --help) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "error: unknown option $1 (see --help)" >&2; exit 2 ;;
  esac
  shift
done

if [ -z "$engine" ]; then
  if [ -e /dev/nvidiactl ] || (command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1); then engine=gpu; else engine=cpu; fi
fi

supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; }
if [ -z "$python" ]; then
  for candidate in python3.12 python3.11 python3 python; do
    if command -v "$candidate" >/dev/null && supported "$candidate"; then python=$candidate; break; fi
  done
fi
if [ -z "$python" ] || ! supported "$python"; then
  echo "error: Python 3.11 or 3.12 is needed${python:+; $python is neither}" >&2
  echo "hint: install one and name it: scripts/setup.sh --python /path/to/python3.12" >&2
  exit 1
fi

echo "engine: $engine, Python: $("$python" --version 2>&1)"
if [ ! -x .venv/bin/python ] || ! supported .venv/bin/python; then "$python" -m venv --clear .venv; fi
.venv/bin/python -m pip install --quiet --upgrade 'pip>=24'
.venv/bin/python -m pip install --quiet --editable ".[$engine,test,dev]"

# vLLM pulls torchvision, torchaudio and torchcodec in whatever build the index has. Where they do not fit the installed
# torch, importing vLLM fails in them ("operator torchvision::nms does not exist"); it runs without all three.
for package in torchvision torchaudio torchcodec; do
  if .venv/bin/python -m pip show --quiet "$package" 2>/dev/null && ! .venv/bin/python -c "import $package" 2>/dev/null; then
    echo "removing $package: it does not fit the installed torch, and vLLM runs without it"
    .venv/bin/python -m pip uninstall --quiet --yes "$package"
  fi
done
.venv/bin/python -c 'import vllm; print("vLLM", vllm.__version__)' 2>/dev/null || {
  echo "error: vLLM was installed but cannot be imported:" >&2
  .venv/bin/python -c 'import vllm' 2>&1 | tail -n 3 >&2
  exit 1
}
echo "ready: .venv/bin/glm5deploy demo"
