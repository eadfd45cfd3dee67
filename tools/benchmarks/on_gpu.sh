#!/usr/bin/env bash
# What is measured on a CUDA machine, in the order of worth: maps as a share of the bare model,
# training steps with each fast option, a real training, the host's time in a step, the contract of
# accelerators and a model split over the card and the CPU, the demo on all devices over NCCL, the
# nwpu config, DINOv3 against transformers, and a ViT-L encoder on the card: for heads on the CPU
# and on cards, and for a cache.
# Each stage runs to its end whatever the others do, and the exit status is 0 only if all passed.
# The tables are also in $WORK_DIR/ratios.md; write them into docs/benchmarks.md.
#
#   MAPSAGE_NWPU=<folder of the NWPU polygons> bash tools/benchmarks/on_gpu.sh [--seconds N] [--toy]
#
#   --seconds N      end after N seconds: a stage gets 60 s at most, what is left is left out, and a
#                    stage that was cut off counts as passed; its rows are in the tables
#   --toy            a few steps of small models, not compiled: shows that each stage runs, before
#                    hours are spent on it, and measures nothing
#   MAPSAGE_NWPU     without it the nwpu config is left out
#   MAPSAGE_PYTHON   Python to use instead
#   WORK_DIR         folder of the trainings (default: work_dirs/on_gpu)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
python=$(bash scripts/setup_env.sh main --dev) || exit 1
work=${WORK_DIR:-work_dirs/on_gpu}
unset WORK_DIR NPROC_PER_NODE
export ACCELERATOR=cuda MAPSAGE_PYTHON=$python

settings=(log_level=INFO)
overhead=(--steps 500)
dinov3=(--arch large)
segmentors=(--arch large)
features=(--arch large)
cache=(--arch large)
seconds=
toy=
while [ $# -gt 0 ]; do
    case "$1" in
        --toy) toy=1; shift ;;
        --seconds)
            seconds=${2:-}
            [[ $seconds =~ ^[1-9][0-9]*$ ]] ||
                { echo "error: --seconds '$seconds': expected a whole number from 1 on" >&2; exit 2; }
            shift 2 ;;
        *) echo "error: unknown argument '$1': expected --seconds N or --toy" >&2; exit 2 ;;
    esac
done
maps=()
first=('frozen UPerNet' 'ResNet-50 UPerNet')
later=(UPerNet EoMT SegFormer-B2 'EfficientNet-Lite0 FPN' 'frozen PMT')
if [ -n "$toy" ]; then
    maps=(--arch tiny --side 64 --batch 2 --batches 1)
    settings+=(train_cfg.max_iters=2 train_cfg.val_interval=2)
    overhead=(--steps 24 --cases eff-128-2)  # of three cases, which differ in the model
    dinov3=(--arch small --side 64 --batch 2 --steps 1 --matrix 64 --modes eager)
    segmentors=(--arch tiny --side 64 --batch 2 --steps 1 --matrix 64 --loops stock ours)
    first=('frozen UPerNet')
    later=(EoMT)
    features=(--arch small --tiles 8 --rounds 1)
    cache=(--arch small --tiles 4 --rounds 1)
fi

failed=()
mkdir -p "$work"
: >"$work/ratios.md"
# Run a command, with --seconds for as long as is left. Its tables go to ratios.md, too.
stage() {
    local start=$SECONDS left=0 status
    if [ -n "$seconds" ]; then
        # 5 s are for the end of the last stage.
        left=$((seconds - SECONDS - 5))
        [ $left -le 60 ] || left=60
        [ $left -ge 5 ] || { echo "=== left out, no time: $*"; return; }
    fi
    echo "=== $*"
    limited "$left" "$@" | tee "$work/stage.log"
    status=${PIPESTATUS[0]}
    grep '^|' "$work/stage.log" >"$work/rows.md" &&
        { echo "# $*"; echo; cat "$work/rows.md"; echo; } >>"$work/ratios.md"
    rm -f "$work/stage.log" "$work/rows.md"
    case $seconds,$status in
        *,0) ;;
        [1-9]*,124 | [1-9]*,137) echo "=== cut off" ;;
        *) failed+=("$*") ;;
    esac
    echo "=== took $((SECONDS - start)) s"
}
# Run a command for $1 seconds at most; 0: without a limit.
limited() {
    local left=$1
    shift
    if [ "$left" -eq 0 ]; then "$@"; else timeout --kill-after=3 "$left" "$@"; fi
}

# Train. $1: folder of the run, $2: config, and settings. NPROC_PER_NODE: by default a rank a device.
train() {
    local name=$1 config=$2
    shift 2
    stage bash scripts/start_8card_training.sh "$config" --work-dir "$work/$name" \
        --cfg-options "${settings[@]}" "$@"
}
train_on_one() {
    NPROC_PER_NODE=1 train "$@" optim_wrapper.type=AmpOptimWrapper optim_wrapper.dtype=bfloat16
}

# Time training steps of models, each in a stage.
steps() {
    local kind
    for kind in "$@"; do
        stage "$python" tools/benchmarks/segmentors_gpu.py "${segmentors[@]}" --models "$kind"
    done
}

devices=$("$python" - <<'EOF'
from mapsage.accelerator import resolve_accelerator

cuda = resolve_accelerator('cuda')
for index in range(cuda.device_count()):
    print(f'cuda:{index} is {cuda.card_model(index)}')
print(', '.join(f'{name} {version}' for name, version in cuda.software().items()))
EOF
) || exit 1
echo "$devices"
count=$(grep -c '^cuda:' <<<"$devices")

demo=configs/demo/efficientnet_lite0_fpn_demo.py
stage "$python" tools/benchmarks/card_maps.py ${maps[@]+"${maps[@]}"}
steps "${first[@]}"
# one device takes the demo's global batch of 16
train_on_one one_device $demo env_cfg.virtual_ranks=None train_dataloader.batch_size=16
stage "$python" tools/benchmarks/step_overhead.py "${overhead[@]}"
stage "$python" -m pytest -rs tests/contract -k cuda
stage "$python" -m pytest -rs tests/unit/distributed/wrappers -k cuda
steps "${later[@]}"
train all_devices $demo
if [ -n "${MAPSAGE_NWPU:-}" ]; then
    train_on_one nwpu configs/nwpu/efficientnet_lite0_fpn_nwpu.py
else
    echo "=== left out: the nwpu config (MAPSAGE_NWPU is not set)"
fi
stage "$python" tools/benchmarks/dinov3_training.py "${dinov3[@]}"
# heads on the CPU; and one head on a card of its own beside the encoder's
stage "$python" tools/benchmarks/feature_sources.py "${features[@]}" --encoder-accelerator cuda \
    --encoders 1
if [ "$count" -gt 1 ]; then
    stage "$python" tools/benchmarks/feature_sources.py "${features[@]}" --accelerator cuda \
        --heads 1 --encoders 1
fi
stage "$python" tools/benchmarks/feature_cache.py "${cache[@]}" --accelerator cuda

for name in ${failed[@]+"${failed[@]}"}; do echo "=== failed: $name" >&2; done
[ ${#failed[@]} -eq 0 ]
