# Read site.env, where there is one, and find the Python of the jobs. launch.sh and solution.sbatch
# source this file.
# shellcheck shell=bash
site_env=$(dirname "${BASH_SOURCE[0]}")/site.env
if [ -f "$site_env" ]; then
    strict=$-
    set +eu # a site's own lines, and its modules, need not be written with as much care
    for init in /etc/profile.d/*mod*.sh; do # a shell that is no login shell may lack `module`
        # shellcheck source=/dev/null
        type module >/dev/null 2>&1 || [ ! -r "$init" ] || . "$init"
    done
    # shellcheck source=/dev/null
    . "$site_env"
    [[ $strict != *e* ]] || set -e
    [[ $strict != *u* ]] || set -u
fi

python=${PYTHON:-$(dirname "${BASH_SOURCE[0]}")/../.venv/bin/python}
if ! command -v "$python" >/dev/null; then # another one need not have the course, or has an old one
    echo "${PYTHON:+PYTHON names what is not there: }no $python: run make install, or set PYTHON to" \
        "a Python that has the course" >&2
    exit 2
fi
