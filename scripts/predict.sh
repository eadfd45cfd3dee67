#!/usr/bin/env bash
# Predict maps on all cards of this machine (or of several), whose ranks share the maps.
#
#   bash scripts/predict.sh CONFIG CHECKPOINT INPUT... --out DIR [options of tools/predict.py]
#
# It reads the environment variables of scripts/start_8card_training.sh, except WORK_DIR. With
# several machines, --out must be on storage that they share. On one device: python tools/predict.py
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/_launch.sh"

if [ $# -lt 3 ]; then
    echo "error: expected CONFIG CHECKPOINT INPUT... --out DIR" >&2
    exit 2
fi
if [[ "$1" == --model* ]]; then
    echo "error: an exported model runs in one process: python tools/predict.py $*" \
        "(several of them share their maps)" >&2
    exit 2
fi
config=$(find_config "$1")
shift
unset WORK_DIR
launch predict.py "$config" "$@"
