#!/usr/bin/env bash
# Compute the frozen encoder's features on all cards of this machine (or of several).
#
#   bash scripts/cache_features.sh CONFIG [options of tools/cache_features.py]
#
# It reads the environment variables of scripts/start_8card_training.sh. With several machines, the
# cache's folder must be on storage that they share. On one device: python tools/cache_features.py
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/_launch.sh"

if [ $# -lt 1 ]; then
    echo "error: expected CONFIG [options of tools/cache_features.py]" >&2
    exit 2
fi
config=$(find_config "$1")
shift
launch cache_features.py "$config" "$@"
