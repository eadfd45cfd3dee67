#!/usr/bin/env bash
# What is measured on a CUDA machine: the demo and nwpu configs on one card with AMP in bfloat16, the
# overhead over MMEngine's Runner, the contract of accelerators, a model split over the card and the
# CPU, training steps of DINOv3, PMT, EoMT and UPerNet, and a ViT-L encoder on the card for heads on
# the CPU and on the card.
# Each stage runs to its end whatever the others do, and the exit status is 0 only if all passed.
# Write what it prints into docs/benchmarks.md.
#
#   MAPSAGE_NWPU=<folder of the NWPU polygons> bash tools/benchmarks/on_gpu.sh
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
python=$(bash scripts/setup_env.sh main --dev) || exit 1
export NPROC_PER_NODE=1 ACCELERATOR=cuda
amp=(--amp --cfg-options optim_wrapper.dtype=bfloat16)

failed=()
stage() {
    local start=$SECONDS
    echo "=== $*"
    "$@" || failed+=("$*")
    echo "=== took $((SECONDS - start)) s"
}

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
# the contract first: what fails there explains the rest
stage "$python" -m pytest -rs tests/contract -k cuda
stage "$python" -m pytest -rs tests/unit/wrappers -k cuda
# one card takes the demo's global batch of 16
stage bash scripts/start_8card_training.sh "${amp[@]}" train_dataloader.batch_size=16
stage bash scripts/start_8card_training.sh configs/nwpu/efficientnet_lite0_fpn_nwpu.py "${amp[@]}"
stage "$python" tools/benchmarks/step_overhead.py --steps 500
stage "$python" tools/benchmarks/dinov3_training.py
stage "$python" tools/benchmarks/segmentors_gpu.py
# heads on the CPU; and one head on the card beside the encoder, which is refused on a machine with one
stage "$python" tools/benchmarks/feature_sources.py --arch large --encoder-accelerator cuda --encoders 1
if [ "$(nvidia-smi --list-gpus | wc -l)" -gt 1 ]; then
    stage "$python" tools/benchmarks/feature_sources.py --arch large --accelerator cuda --heads 1 \
        --encoders 1
fi
stage "$python" tools/benchmarks/feature_cache.py --arch large

for name in ${failed[@]+"${failed[@]}"}; do echo "=== failed: $name" >&2; done
[ ${#failed[@]} -eq 0 ]
