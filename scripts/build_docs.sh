#!/usr/bin/env bash
# Build the site of docs/ into a folder, and check it: links, anchors, navigation, no other host.
#
#   bash scripts/build_docs.sh [FOLDER]     default: site
#   bash scripts/build_docs.sh --serve      show it at http://127.0.0.1:8000 and follow changes
#
# The environment `docs` is made once a machine (scripts/setup_env.sh). After that nothing is fetched.
# The folder can be copied to any web server; `python -m http.server -d site` shows it here.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$(bash "$root/scripts/setup_env.sh" docs)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} NO_MKDOCS_2_WARNING=1
if [ "${1:-}" = --serve ]; then
    exec "$python" -m mkdocs serve --quiet --config-file "$root/mkdocs.yml"
fi
site=$(realpath -m "${1:-$root/site}")
"$python" -m mkdocs build --quiet --strict --config-file "$root/mkdocs.yml" --site-dir "$site"
"$python" "$root/scripts/docs_site/check_site.py" "$site"
