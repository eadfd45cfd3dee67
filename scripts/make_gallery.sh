#!/usr/bin/env bash
# Make the pictures at the front of the pages again: train the demo, and take its pictures.
#
#   bash scripts/make_gallery.sh [--quick] [FOLDER]     default: docs/images/gallery
#
#   --quick     one short training with dynamic sampling gives all pictures, in a folder that is
#               removed; CI makes the gallery of its site so
#   WORK_DIRS   folder with the work dirs of the demo and of its dynamic sampling; what is missing there
#               is trained (default: work_dirs)
#
# Needs Debian's Chromium (apt-get install chromium); playwright is in the environment `browser`.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
quick=
if [ "${1:-}" = --quick ]; then quick=1; shift; fi
folder=$(realpath -m "${1:-docs/images/gallery}")
work_dirs=$(realpath -m "${WORK_DIRS:-work_dirs}")
demo=efficientnet_lite0_fpn_demo
dynamic=${demo}_dynamic
python=${MAPSAGE_PYTHON:-$(bash scripts/setup_env.sh main)}
browser=$(bash scripts/setup_env.sh browser)

if [ -n "$quick" ]; then
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    steps=40
    demo=$dynamic
    work_dirs=$(mktemp -d)
    trap 'rm -r "$work_dirs"' EXIT
    cd "$work_dirs"  # the demo's data are made there, too
    "$python" "$root/tools/make_demo_data.py" data/demo --train-scenes 2 --val-scenes 1
    "$python" "$root/tools/train.py" "$root/configs/demo/$demo.py" --work-dir "$demo" --cfg-options \
        env_cfg.virtual_ranks=1 train_dataloader.batch_size=8 train_dataloader.num_workers=0 \
        train_dataloader.persistent_workers=False val_dataloader.num_workers=0 \
        val_dataloader.persistent_workers=False train_cfg.max_iters=$steps train_cfg.val_interval=$steps \
        param_scheduler.1.end=$steps default_hooks.logger.interval=5 default_hooks.checkpoint.interval=$steps
    "$python" "$root/tools/demo.py" map "$demo/$demo.py" data/demo/scene.tif
else
    for config in "$demo" "$dynamic"; do
        if [ ! -f "$work_dirs/$config/last_checkpoint" ]; then
            bash scripts/start_8card_training.sh "configs/demo/$config.py" --work-dir "$work_dirs/$config"
        fi
    done
fi
"$python" "$root/tools/plot_sampling.py" "$work_dirs/$dynamic"
"$browser" "$root/scripts/docs_site/take_pictures.py" "$work_dirs/$demo" "$work_dirs/$dynamic" "$folder"
