#!/usr/bin/env bash
# Make the pictures at the front of the pages again: train the demo, and take its pictures.
#
#   bash scripts/make_gallery.sh [FOLDER]     default: docs/images/gallery
#
#   WORK_DIRS   folder with the work dirs of the demo and of its dynamic sampling; what is missing there
#               is trained (default: work_dirs)
#   STEPS       steps of a training, for a try (default: the config's)
#
# Needs Debian's Chromium (apt-get install chromium); playwright is in the environment `browser`.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
folder=${1:-docs/images/gallery}
work_dirs=${WORK_DIRS:-work_dirs}
demo=efficientnet_lite0_fpn_demo
options=()
if [ -n "${STEPS:-}" ]; then
    options=(--cfg-options "train_cfg.max_iters=$STEPS" "train_cfg.val_interval=$STEPS"
             "default_hooks.checkpoint.interval=$STEPS")
fi
for config in "$demo" "${demo}_dynamic"; do
    if [ ! -f "$work_dirs/$config/last_checkpoint" ]; then
        bash scripts/start_8card_training.sh "configs/demo/$config.py" \
            --work-dir "$work_dirs/$config" ${options[@]+"${options[@]}"}
    fi
done
python=${MAPSAGE_PYTHON:-$(bash scripts/setup_env.sh main)}
"$python" tools/plot_sampling.py "$work_dirs/${demo}_dynamic"
browser=$(bash scripts/setup_env.sh browser)
"$browser" scripts/docs_site/take_pictures.py "$work_dirs/$demo" "$work_dirs/${demo}_dynamic" "$folder"
