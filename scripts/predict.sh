#!/usr/bin/env bash
# Predict maps on all cards of a machine (or of several): the ranks share the scenes.
#
#   bash scripts/predict.sh CONFIG CHECKPOINT INPUT... --out DIR [options of tools/predict.py]
#
# Reads the environment variables of scripts/start_8card_training.sh, WORK_DIR apart; with several
# machines --out is on a storage they share. On one device: python tools/predict.py ...
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/_launch.sh"

if [ $# -lt 3 ]; then
    echo "error: expected CONFIG CHECKPOINT INPUT... --out DIR" >&2
    exit 2
fi
config=$(find_config "$1")
shift
unset WORK_DIR
launch predict.py "$config" "$@"
