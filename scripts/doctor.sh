#!/usr/bin/env bash
# Say whether a training would start on all cards of this machine (or of several), and test how they
# talk to each other. Trains nothing. The exit status is 0 when it would start.
#
#   bash scripts/doctor.sh [CONFIG] [options of tools/doctor.py]
#
# Reads the environment variables of scripts/start_8card_training.sh; on several machines start it
# on each of them, as that script. Without the launcher: python tools/doctor.py [CONFIG]
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/_launch.sh"

config=
if [ $# -gt 0 ] && [[ "$1" != -* ]]; then
    config=$(find_config "$1")
    shift
fi
launch doctor.py "$config" "$@"
