#!/usr/bin/env bash
# Make the Python environment of a leg, once per machine, and print the path of its Python.
#
#   bash scripts/setup_env.sh [main|xla|t20|ort117|ort19|browser|docs|cuda|trl|engines] [--dev]
#
#   ort117, ort19    the oldest runtimes that exported models are meant for, and nothing else
#   browser          playwright on top of the environment of main, which is made with --dev
#   docs             MkDocs and its theme on top of the same environment
#   cuda             PyTorch's CUDA build on top of the same environment, over a double of the CUDA
#                    runtime (tests/doubles/cuda). Exit status 5: that cannot be had on this machine.
#   trl              TRL and accelerate, which the examples use, on top of the same environment, whose
#                    torch they share
#   engines          Ray, a local S3 server and the schemas of Kubeflow on top of the same environment
#   --dev            also install requirements/dev.txt (tests and checks)
#   MAPSAGE_ENVS     folder of the environments (default: ~/.cache/mapsage/envs); clones share it
#   MAPSAGE_PYTHON   Python to use instead, with the packages that it has; no environment is made
#
# The name of an environment has a hash of its requirement file, so that a changed file gives a new
# environment.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
say() { echo "[setup_env] $*" >&2; }

leg=main
dev=
for argument in "$@"; do
    case "$argument" in
        main|xla|t20|ort117|ort19|browser|docs|cuda|trl|engines) leg=$argument ;;
        --dev) dev=1 ;;
        *) say "unknown argument '$argument': expected main, xla, t20, ort117, ort19, browser, docs, cuda, trl or engines, and --dev"; exit 2 ;;
    esac
done

if [ -n "${MAPSAGE_PYTHON:-}" ]; then
    command -v "$MAPSAGE_PYTHON" >/dev/null || { say "MAPSAGE_PYTHON=$MAPSAGE_PYTHON is not a program"; exit 2; }
    command -v "$MAPSAGE_PYTHON"
    exit
fi

case "$leg" in
    main) requirements=$root/requirements.txt; version=3.11 ;;
    xla) requirements=$root/requirements/xla.txt; version=3.11 ;;
    t20) requirements=$root/requirements/t20.txt; version=3.8 ;;
    ort117) requirements=$root/requirements/ort117.txt; version=3.11 ;;
    ort19) requirements=$root/requirements/ort19.txt; version=3.8 ;;
    browser) requirements=$root/requirements/browser.txt; version=3.11 ;;
    docs) requirements=$root/requirements/docs.txt; version=3.11 ;;
    cuda) requirements=$root/requirements/cuda.txt; version=3.11 ;;
    trl) requirements=$root/requirements/trl.txt; version=3.11 ;;
    engines) requirements=$root/requirements/engines.txt; version=3.11 ;;
esac

# Print the path of a Python of version $1, from PATH or from pyenv.
find_python() {
    local candidate
    for candidate in "python$1" python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python; do
        if "$candidate" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    return 1
}

if ! python=$(find_python "$version"); then
    say "leg '$leg' needs Python $version and none was found (looked for python$version, python3, pyenv)."
    say "Install it, for example: pyenv install $version   (or: conda create -n py$version python=$version)"
    exit 3
fi

# Print the first 16 characters of a hash of the files in $@.
hash_of() { cat "$@" | "$python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest()[:16])'; }

home=${MAPSAGE_ENVS:-${XDG_CACHE_HOME:-$HOME/.cache}/mapsage/envs}
if [ "$leg" = browser ] || [ "$leg" = docs ] || [ "$leg" = cuda ] ||
    [ "$leg" = trl ] || [ "$leg" = engines ]; then
    below=$(bash "${BASH_SOURCE[0]}" main --dev)
    dev=  # they are in the environment below
    env=$home/$leg-$(hash_of "$requirements" "$root/requirements.txt")
else
    below=
    env=$home/$leg-$(hash_of "$requirements")
fi
dev_mark=$env/.dev-$(hash_of "$root/requirements/dev.txt")

# Install with pip. Its output goes into $log, whose end is shown if pip fails.
no_deps=
if [ "$leg" = cuda ]; then no_deps=--no-deps; fi  # 4 GB of NVIDIA's libraries, which the double replaces
install() {
    if ! MMCV_WITH_OPS=0 "$env/bin/python" -m pip install --disable-pip-version-check --no-compile "$@" >>"$log" 2>&1; then
        tail -n 30 "$log" >&2
        say "installing failed; the whole log: $log"
        if [ "$leg" = cuda ]; then
            say "PyTorch's CUDA build cannot be had here (no network, or none for this machine and Python)."
            exit 5
        fi
        exit 4
    fi
    # pip compiles with one core. A file for another Python version is an error that does not matter.
    "$env/bin/python" -m compileall -q -j 0 -x '/tests?/' "$env/lib" >>"$log" 2>&1 || true
}

if [ ! -f "$env/.complete" ] || { [ -n "$dev" ] && [ ! -f "$dev_mark" ]; }; then
    mkdir -p "$home"
    # Only one process at a time makes an environment. Others wait here and then find it complete.
    exec 9>"$env.lock"
    if command -v flock >/dev/null; then flock 9; fi
    log=$env.log
    if [ ! -f "$env/.complete" ]; then
        say "making the '$leg' environment (Python $version) in $env; log: $log"
        rm -rf "$env"
        "$python" -m venv "$env"
        if [ -n "$below" ]; then  # a .pth file names a folder in which Python looks as well
            "$below" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
                >"$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth"
        fi
        install $no_deps -r "$requirements"
        touch "$env/.complete"
    fi
    if [ -n "$dev" ] && [ ! -f "$dev_mark" ]; then
        say "adding the test requirements to $env"
        install -r "$requirements" -r "$root/requirements/dev.txt"
        touch "$dev_mark"
    fi
fi
if [ "$leg" = cuda ]; then  # the double lies in an environment on top, named after its sources
    "$env/bin/python" "$root/tests/doubles/cuda/build.py"
else
    echo "$env/bin/python"
fi
