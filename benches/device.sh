#!/usr/bin/env bash
# Measures on a CUDA device, beside other allocators, and prints one table: benches/device.sh [OUT] [words for `device`]
#
#   OUT                      folder for the JSON lines and the table (default: a temporary one)
#   EVERGRAPH_DEVICE_BENCH   a built `device`; otherwise cargo builds it
#   EVERGRAPH_RMM_WHEELS     folder with wheels of librmm-cu13 and rapids-logger (see benches/RESULTS.md); without it no RMM
#   CUDA_HOME                CUDA's headers and runtime; otherwise where nvcc is
#
# Rivals that can not be built here are said and left out. Exit 1: something of ours failed.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-$(mktemp -d)}
[ $# -gt 0 ] && shift
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

bench=${EVERGRAPH_DEVICE_BENCH:-}
if [ -z "$bench" ]; then
  (cd "$here/.." && cargo build --quiet --profile bench -p evergraph-benches --features gpu --bin device) || exit 1
  bench=${CARGO_TARGET_DIR:-$here/../target}/release/device
fi

facts() {
  echo "date: $(date -u +%FT%TZ)"
  echo "gpu: $(nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.max.sm --format=csv,noheader 2>/dev/null || echo none)"
  echo "cpu: $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1), $(nproc) cores"
  echo "kernel: $(uname -sr)"
  echo "nvcc: $(nvcc --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p')"
  echo "compiler: $(g++ --version 2>/dev/null | head -1)"
  python3 -c 'import torch; print("torch:", torch.__version__)' 2>/dev/null
}
facts | tee "$out/facts.txt"

# ---- rivals

cuda_include() {
  local nvcc candidate
  nvcc=$(readlink -f "$(command -v nvcc 2>/dev/null || echo /usr/local/cuda/bin/nvcc)")
  for candidate in "${CUDA_HOME:-}" "$(dirname "$(dirname "$nvcc")")" /usr/local/cuda \
    "$(python3 -c 'import nvidia, os; print(os.path.join(list(nvidia.__path__)[0], "cu13"))' 2>/dev/null)"; do
    for sub in include targets/x86_64-linux/include; do
      [ -n "$candidate" ] && [ -f "$candidate/$sub/cuda_runtime_api.h" ] && { echo "$candidate/$sub"; return; }
    done
  done
}
include=$(cuda_include)
cudart=$(
  {
    for folder in "${CUDA_HOME:-/usr/local/cuda}" "${include%/include}"; do
      find -L "$folder" -name 'libcudart.so*' 2>/dev/null
    done
    python3 -c 'import nvidia, glob; [print(f) for p in nvidia.__path__ for f in glob.glob(p + "/cu13/lib/libcudart.so*")]' 2>/dev/null
  } | grep -v stubs | head -1
)
echo "cuda headers: ${include:-none}; runtime: ${cudart:-none}"

rival() { # name, then flags of the compiler and linker; the libraries' folders in $libraries
  local name=$1; shift
  if ! g++ -std=c++20 -O2 -w "$@" "$here/rivals/rivals.cpp" -isystem "$include" -o "$work/$name" \
    $link "$cudart" -Wl,-rpath,"$(dirname "$cudart")" 2>"$out/$name.build.log"; then
    echo "not measured: $name does not build ($out/$name.build.log): $(grep -m1 error "$out/$name.build.log")"
    return 1
  fi
}
measure() { # program, file, words
  local program=$1 file=$2; shift 2
  if ! timeout 240 "$work/$program" "$@" >"$out/$file.jsonl" 2>"$out/$file.log"; then
    echo "failed: $file: $(tail -1 "$out/$file.log")"
  fi
}

if [ -z "$include" ] || [ -z "$cudart" ]; then
  echo "not measured: rivals, for want of CUDA's headers or runtime"
elif ! nvidia-smi >/dev/null 2>&1; then
  echo "not measured: rivals, for want of a device"
else
  link=
  rival cuda && measure cuda cuda

  torch=$(python3 -c 'import torch, os; print(os.path.dirname(torch.__file__))' 2>/dev/null)
  if [ -n "$torch" ]; then
    link="-L$torch/lib -Wl,-rpath,$torch/lib -Wl,--no-as-needed -lc10 -lc10_cuda"
    if rival torch -DWITH_TORCH -isystem "$torch/include"; then
      measure torch torch PyTorch
      PYTORCH_ALLOC_CONF=expandable_segments:True PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True \
        measure torch torch-expandable "PyTorch, expandable segments"
    fi
  else
    echo "not measured: PyTorch, for want of torch"
  fi

  if [ -n "${EVERGRAPH_RMM_WHEELS:-}" ]; then
    site=$work/site
    for wheel in "$EVERGRAPH_RMM_WHEELS"/*.whl; do python3 -m zipfile -e "$wheel" "$site"; done
    link="-L$site/librmm/lib64 -L$site/rapids_logger/lib64 -Wl,-rpath,$site/librmm/lib64:$site/rapids_logger/lib64 -lrmm -lrapids_logger"
    rival rmm -DWITH_RMM -isystem "$site/librmm/include/rapids" -isystem "$site/librmm/include" \
      -isystem "$site/rapids_logger/include" && measure rmm rmm
  else
    echo "not measured: RMM, for want of its wheels (EVERGRAPH_RMM_WHEELS)"
  fi
fi

# ---- ours, last: the rivals' processes are gone by now

"$bench" "$@" >"$out/evergraph.jsonl" 2>"$out/evergraph.log"
code=$?
cat "$out/evergraph.log"
# Everything but the lines of JSON and the table of our rows alone: the repair table and the constants.
grep -v '^{' "$out/evergraph.jsonl" | sed '/^| what | case | who /,$d'
echo
"$bench" --table $(ls "$out"/*.jsonl) | tee "$out/table.md"
exit $code
