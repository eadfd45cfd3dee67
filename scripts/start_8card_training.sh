#!/usr/bin/env bash
# Train on all cards of this machine (or of several), evaluate, and save a picture of predictions.
#
#   bash scripts/start_8card_training.sh [CONFIG] [options of tools/train.py]
#
# Without CONFIG it trains the demo config. In a checkout it sets up its environment itself;
# installed, it runs in the environment of the command mapsage. For the configs in configs/demo that come with
# MapSage it makes the demo data, and at the end a map of the demo's scene in WORK_DIR/map.
#
#   NPROC_PER_NODE   number of ranks on this machine (default: one for each visible card; 8 where
#                    there is none)
#   NNODES           machines (default: what a scheduler says in PET_NNODES, SKYPILOT_NUM_NODES,
#                    WORLD_SIZE of a PyTorchJob or VC_*_HOSTS, else 1; docs/how-to/engines.md)
#                                              NODE_RANK     number of this one (default 0)
#   MASTER_ADDR      address of machine 0,     MASTER_PORT   its port (default 29500); neither has
#                    needed if NNODES > 1                    an effect on one machine
#   MAPSAGE_SECRET_FILE  file that proves machines to each other (docs/explanation/security.md;
#                    default: one in the home folder)
#                    NNODES=2:4: 2 to 4 machines, which come and go (docs/how-to/clusters.md). Then
#   RENDEZVOUS       HOST:PORT that tools/rendezvous.py prints, in place of the three above
#   ACCELERATOR      auto, cuda, gcu, gcu_t20, xla, cpu, or the device of a plugin of PyTorch, such as
#                    npu (default: the config's, else auto); sim: a rehearsal on simulated
#                    cards gcu:N, which needs only a C++ compiler
#   ENCODERS         number of ranks, out of all ranks, that compute the features of the frozen
#                    backbone; the others train the head (default 0; docs/how-to/feature-sources.md)
#   WORK_DIR         folder of logs, checkpoints and pictures (default work_dirs/<config name>)
#   MAPSAGE_PYTHON   Python to use instead
#   MAPSAGE_LEG      environment of a checkout: main, xla, t20 or cuda (default: that of
#                    ACCELERATOR, else main)
#
# Ctrl-C or a dead rank ends all ranks. The error of the first rank that failed is printed last, and
# the exit status is not 0.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/_launch.sh"

if [ $# -gt 0 ] && [[ "$1" != -* ]]; then
    config=$(find_config "$1")
    shift
else
    cd "$root"
    config=configs/demo/efficientnet_lite0_fpn_demo.py
fi
if is_demo "$config"; then
    if [ -z "${MAPSAGE_DEMO:-}" ]; then
        # The program that the launcher runs before it starts the ranks, an argument a line.
        MAPSAGE_FIRST=$(printf '%s\n' "$root/tools/demo.py" data data/demo)
        export MAPSAGE_FIRST
    fi
    work_dir=${WORK_DIR:-work_dirs/$(basename "$config" .py)}
    arguments=("$@")
    for index in "${!arguments[@]}"; do
        case ${arguments[$index]} in
            --work-dir) work_dir=${arguments[$((index + 1))]:-} ;;
            --work-dir=*) work_dir=${arguments[$index]#*=} ;;
        esac
    done
    # The program that the launcher of machine 0 runs once all ranks have ended successfully.
    MAPSAGE_THEN=$(printf '%s\n' "$root/tools/demo.py" map "$work_dir/$(basename "$config")" \
        "${MAPSAGE_DEMO:-data/demo}/scene.tif" ${ACCELERATOR:+--accelerator "$ACCELERATOR"})
    export MAPSAGE_THEN
fi
launch train.py "$config" ${ENCODERS:+--encoders "$ENCODERS"} "$@"
