#!/usr/bin/env bash
# Evaluate a checkpoint on all cards of this machine (or of several). The ranks divide the images of
# the test split among themselves.
#
#   bash scripts/test.sh CONFIG CHECKPOINT [options of tools/test.py]
#
# It reads the environment variables of scripts/start_8card_training.sh, except WORK_DIR, which is
# that of a training. With several machines, the checkpoint must be on storage that they share. On
# one device: python tools/test.py
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/_launch.sh"

if [ $# -lt 2 ]; then
    echo "error: expected CONFIG CHECKPOINT [options of tools/test.py]" >&2
    exit 2
fi
config=$(find_config "$1")
shift
unset WORK_DIR
launch test.py "$config" "$@"
