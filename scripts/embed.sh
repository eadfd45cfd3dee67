#!/usr/bin/env bash
# Write embeddings of scenes on all cards of this machine (or of several). The ranks divide each
# scene among themselves.
#
#   bash scripts/embed.sh CONFIG [CHECKPOINT] INPUT... --out DIR [options of tools/embed.py]
#
# It reads the environment variables of scripts/start_8card_training.sh, except WORK_DIR. With
# several machines, --out must be on storage that they share. On one device: python tools/embed.py
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/_launch.sh"

if [ $# -lt 2 ]; then
    echo "error: expected CONFIG [CHECKPOINT] INPUT... --out DIR" >&2
    exit 2
fi
config=$(find_config "$1")
shift
unset WORK_DIR
launch embed.py "$config" "$@"
