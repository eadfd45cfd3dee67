#!/usr/bin/env bash
# Train on all cards of a machine (or of several), evaluate, and leave a picture.
#
#   bash scripts/start_8card_training.sh [CONFIG] [options of tools/train.py]
#
# Without CONFIG: trains the demo config. Sets up its environment itself. For the configs of
# configs/demo it makes the demo data, and ends with a map of their scene in WORK_DIR/map.
#
#   NPROC_PER_NODE   ranks on this machine (default 8)
#   NNODES           machines (default 1)      NODE_RANK     which one this is (default 0)
#   MASTER_ADDR      address of machine 0      MASTER_PORT   its port (default: a free one;
#                    (needed if NNODES > 1)                  29500 with several machines)
#   ACCELERATOR      auto, cuda, gcu, gcu_t20, xla, cpu (default: what the config says, else auto),
#                    or sim: a rehearsal on simulated cards gcu:N, which needs a C++ compiler only
#   ENCODERS         so many of all ranks only compute the features of the frozen backbone, for the
#                    others, which train the head (default 0; docs/feature-sources.md)
#   WORK_DIR         where logs, checkpoints and pictures go (default work_dirs/<config name>)
#   MAPSAGE_PYTHON   use this Python instead of the environment of scripts/setup_env.sh
#   MAPSAGE_LEG      main, xla or t20: which environment (default: the one of ACCELERATOR, else main)
#
# Ctrl-C or a dead rank ends all ranks; the first failing rank's own error is the last thing
# printed, and the exit status is not 0.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/_launch.sh"

if [ $# -gt 0 ] && [[ "$1" != -* ]]; then
    config=$(find_config "$1")
    shift
else
    cd "$root"
    config=configs/demo/efficientnet_lite0_fpn_demo.py
fi
if [[ "$config" == */demo/* ]]; then
    if [ -z "${MAPSAGE_DEMO:-}" ] && [ -f "$config" ]; then  # else it is refused at once
        "$python" "$root/tools/make_demo_data.py" data/demo
    fi
    work_dir=${WORK_DIR:-work_dirs/$(basename "$config" .py)}
    arguments=("$@")
    for index in "${!arguments[@]}"; do
        case ${arguments[$index]} in
            --work-dir) work_dir=${arguments[$((index + 1))]:-} ;;
            --work-dir=*) work_dir=${arguments[$index]#*=} ;;
        esac
    done
    if [ "${NODE_RANK:-0}" -eq 0 ]; then
        # What the launcher becomes when all ranks have ended well.
        MAPSAGE_THEN=$(printf '%q ' env "MAPSAGE_PYTHON=$python" bash "$root/scripts/_demo_map.sh" \
            "$work_dir" "$(basename "$config")" "${MAPSAGE_DEMO:-data/demo}/scene.tif")
        export MAPSAGE_THEN
    fi
fi
launch train.py "$config" ${ENCODERS:+--encoders "$ENCODERS"} "$@"
