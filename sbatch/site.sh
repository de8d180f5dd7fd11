# Read site.env, where there is one. launch.sh and solution.sbatch source this file.
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
