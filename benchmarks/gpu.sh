#!/usr/bin/env bash
# What stillroom does on a GPU, a step at a time; what each step printed is in OUT.
#
#   benchmarks/gpu.sh OUT                          # all steps: tests kernels steps roofline compiled bertdistiller graphs serve paper
#   benchmarks/gpu.sh OUT kernels steps            # some
#   PYTHON=python3 benchmarks/gpu.sh OUT           # in this Python, which has torch with CUDA and onnxruntime-gpu
#
# Without PYTHON an environment with both is made in OUT/venv, from the package index that pip is set to (about 8 GB). A step that
# is finished is not run again; one that lasts longer than STEP_SECONDS (600) is stopped and counts as failed. Without a GPU each
# step is skipped, with the reason. CORPUS and TOKENIZER (a file of text, a transformers folder) and PEER (the Python of an
# environment with bertdistiller 0.1.2), whole paths, are for the step bertdistiller. The exit code is that of the worst step.
set -uo pipefail
ALL="tests kernels steps roofline compiled bertdistiller graphs serve paper"
: "${1:?Give a folder for the results, and perhaps steps: $ALL}"
mkdir -p "$1" && OUT=$(cd "$1" && pwd) || exit 2
shift
STEPS=${*:-$ALL}
for name in $STEPS; do
  case " $ALL " in *" $name "*) ;; *) echo "There is no step $name; the steps are: $ALL" >&2; exit 2 ;; esac
done
if [ -n "${PYTHON:-}" ]; then PYTHON=$(command -v "$PYTHON") && PYTHON=$(cd "$(dirname "$PYTHON")" && pwd)/$(basename "$PYTHON") || exit 2; fi
cd "$(dirname "$0")/.." || exit 2
WORST=0

if [ -z "${PYTHON:-}" ]; then
  if ! nvidia-smi > /dev/null 2>&1; then echo "nvidia-smi finds no GPU here; every step is skipped."; exit 0; fi
  PYTHON=$OUT/venv/bin/python
  if ! [ -e "$OUT/venv/.installed" ]; then
    python3 -m venv "$OUT/venv" || exit 2
    grep -v '^torch==\|^onnxruntime==' constraints.txt > "$OUT/constraints.txt"
    # onnxruntime-gpu holds the same module as onnxruntime, so that must go first.
    "$PYTHON" -m pip install --quiet --constraint "$OUT/constraints.txt" '.[build,dev]' \
      && "$PYTHON" -m pip uninstall --quiet --yes onnxruntime \
      && "$PYTHON" -m pip install --quiet 'onnxruntime-gpu[cuda,cudnn]==1.31.1' && touch "$OUT/venv/.installed" || exit 2
  fi
fi
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
TORCH_LACKS=$("$PYTHON" -c 'from latency.candidates.availability import missing; print(missing("torch-cuda-graphs", "cuda"))')
ORT_LACKS=$("$PYTHON" -c 'from latency.candidates.availability import missing; print(missing("onnxruntime", "cuda"))')
{ nvidia-smi || true; "$PYTHON" -m pip list; } > "$OUT/machine.txt" 2>&1

# step NAME LACKS COMMAND...: runs the command unless it is finished, or something is lacking.
step() {
  local name=$1 lacks=$2
  shift 2
  case " $STEPS " in *" $name "*) ;; *) return ;; esac
  if [ -e "$OUT/$name.done" ]; then echo "$name: finished earlier"; return; fi
  if [ -n "$lacks" ]; then echo "$name: skipped: $lacks"; return; fi
  local began=$SECONDS code=0
  timeout "${STEP_SECONDS:-600}" "$@" > "$OUT/$name.txt" 2>&1 || code=$?
  echo "$name: exit code $code after $((SECONDS - began)) s, in $OUT/$name.txt"
  if [ $code = 0 ]; then touch "$OUT/$name.done"; else tail -n 5 "$OUT/$name.txt"; fi
  [ $code -le $WORST ] || WORST=$code
}

# The papers' shapes with random weights: the bundles of 3x384, as it is and with joined kernels, and texts for them.
bundles() {
  [ -e "$OUT/fused/manifest.json" ] && [ -e "$OUT/plain/manifest.json" ] && return
  "$PYTHON" - "$OUT" <<'PY'
import sys
from pathlib import Path
from stillroom.verbs.profile.papers_table import make_models, random_texts
out = Path(sys.argv[1])
make_models(out / "models")
(out / "texts.txt").write_text("\n".join(random_texts(0)) + "\n")
PY
  for kind in plain fused; do
    "$PYTHON" -m stillroom export "$OUT/models/3x384" --variants fp32,fp16 --texts "$OUT/texts.txt" --gate 0 \
      --latency-seconds 0 $([ $kind = fused ] && echo --fuse) --out "$OUT/$kind"
  done
}
graphs() { bundles && "$PYTHON" benchmarks/export/on_gpu.py "$OUT/plain" "$OUT/fused" --out "$OUT/graphs.json"; }
served() { bundles && "$PYTHON" benchmarks/serve/on_gpu.py "$OUT/fused" "$OUT/texts.txt" --variant fp16 --out "$OUT/serve.json"; }
export -f bundles graphs served
export PYTHON OUT

LONG="--device cuda --precision bf16 --tokens 512 --tokens-per-step 32768"
tests() { "$PYTHON" -m pytest -m gpu -rs tests && "$PYTHON" -m pytest -rs tests/compress/losses/test_triton_kl.py; }
export -f tests
step tests "$TORCH_LACKS" bash -c tests
step kernels "$TORCH_LACKS" "$PYTHON" benchmarks/distill/gpu_kernels.py --out "$OUT/kernels.json"
step steps "$TORCH_LACKS" "$PYTHON" benchmarks/distill/steps.py $LONG --textbook-precision bf16 --turns 6
step roofline "$TORCH_LACKS" "$PYTHON" benchmarks/distill/roofline.py $LONG --turns 16
step compiled "$TORCH_LACKS" "$PYTHON" benchmarks/distill/compiled.py --device cuda --precision bf16 --batch 64 --tokens 512
if [ -z "$TORCH_LACKS" ] && [ -z "${PEER:-}" ]; then TORCH_LACKS="PEER, CORPUS and TOKENIZER are not given"; fi
step bertdistiller "$TORCH_LACKS" "$PYTHON" benchmarks/distill/against_bertdistiller.py --peer "${PEER:-}" --corpus "${CORPUS:-}" \
  --tokenizer "${TOKENIZER:-}" --device cuda --student 6x384 --tokens 512 --batch 64
step graphs "$ORT_LACKS" bash -c graphs
step serve "$ORT_LACKS" bash -c served
step paper "$ORT_LACKS" "$PYTHON" -m stillroom profile --paper --device cuda \
  --runtimes torch,torch-compile,torch-cuda-graphs,onnxruntime --lengths 128 --out "$OUT/paper"
exit $WORST
