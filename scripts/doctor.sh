#!/usr/bin/env bash
# Say whether a training would start on all cards of this machine (or of several), and test the
# communication between them. Nothing is trained. The exit status is 0 if a training would start.
#
#   bash scripts/doctor.sh [CONFIG] [options of tools/doctor.py]
#
# It reads the environment variables of scripts/start_8card_training.sh. With several machines, run
# it on each of them, like that script. Without the launcher: python tools/doctor.py [CONFIG]
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/_launch.sh"

config=
if [ $# -gt 0 ] && [[ "$1" != -* ]]; then
    config=$(find_config "$1")
    shift
fi
launch doctor.py "$config" "$@"
