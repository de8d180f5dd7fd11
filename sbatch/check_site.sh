#!/bin/bash
# Say what is wrong with sbatch/site.env and the job files on this site. Nothing is submitted.
#
#   bash sbatch/check_site.sh                       all job files
#   bash sbatch/check_site.sh sbatch/ddp.sbatch     this one
#
# Run it where you submit, on a login node. A compute node may differ from that: what only a job can
# find out is not in here. Exit code 0: nothing is wrong; 2: something is, a line each.
set -o pipefail
here=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")
settings=$here/site.env
if [ $# = 0 ]; then set -- "$here"/*.sbatch; fi
# A JupyterHub session can be a job, and a shell may have read an older site.env.
for name in "${!SLURM_@}" "${!SBATCH_@}"; do [ "$name" = SLURM_CONF ] || unset "$name"; done
unset HEAD_SUFFIX NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
num_problems=0

ok() { echo "ok: $*"; }
problem() {
    echo "problem: $*"
    num_problems=$((num_problems + 1))
}
listed() { sort -u | paste -sd ' '; } # lines -> words

# ---- site.env ------------------------------------------------------------------------------------

load_modules() { # what `module` is while site.env is read: it also says what cannot be loaded
    if ! declare -F site_module >/dev/null; then
        problem "site.env calls 'module $*', but there is no module command here: delete the" \
            "line, or ask the site how modules are switched on"
        return 1
    fi
    site_module "$@" 2>"$scratch/said" && ! grep -qiE 'error|unknown|unable' "$scratch/said" && {
        ok "module $*"
        return
    }
    local last=${*: -1} there
    there=$(site_module -t avail "${last%%/*}" 2>&1 | grep -vE ':$|^$|No module' | listed)
    problem "'module $*' fails ($(grep -v '^ *$' "$scratch/said" | head -n 1)): there is" \
        "${there:-nothing called ${last%%/*}}; module avail lists all, correct the line in site.env"
}

read_settings() {
    local said name init
    if [ ! -f "$settings" ]; then
        problem "there is no sbatch/site.env: cp sbatch/site.env.example sbatch/site.env, and" \
            "fill it in"
        return
    fi
    if grep -q $'\r' "$settings"; then
        problem "site.env has the line ends of Windows: sed -i 's/\\r//' sbatch/site.env"
        return
    fi
    if ! said=$(bash -n "$settings" 2>&1); then
        problem "site.env is no shell text: ${said%%$'\n'*}"
        return
    fi
    for init in /etc/profile.d/*mod*.sh; do # as site.sh does
        # shellcheck source=/dev/null
        type module >/dev/null 2>&1 || [ ! -r "$init" ] || . "$init" >/dev/null 2>&1
    done
    declare -F module >/dev/null && eval "site_$(declare -f module)"
    module() { load_modules "$@"; }
    # shellcheck source=/dev/null
    . "$settings" 2>"$scratch/errors"
    if [ -s "$scratch/errors" ]; then
        problem "site.env: $(head -n 1 "$scratch/errors") (no spaces around = in a shell)"
    fi
    for name in "${!SBATCH_@}"; do
        [ -n "${!name}" ] || problem "site.env leaves $name empty: give a value, or delete the line"
        [[ $(declare -p "$name") == "declare -x"* ]] ||
            problem "site.env sets $name, but sbatch will not see it: write export $name=${!name}"
        [ -n "${!name}" ] || unset "$name"
    done
    ((num_problems)) || ok "sbatch/site.env"
}

# ---- Slurm ---------------------------------------------------------------------------------------

ask() { timeout 20 "$@" 2>"$scratch/error"; }
plain() { # Slurm's own words without the programs' names
    sed -E 's/^(sbatch: )?(error: |allocation failure: )//; /^ *$/d' "$scratch/error" | tail -n 1
}

check_slurm() { # returns 1 where there is no Slurm to ask
    if ! command -v sbatch >/dev/null; then
        problem "there is no sbatch on this machine: run this on a login node of the cluster." \
            "Without Slurm, bash sbatch/ddp.sbatch runs a job on this machine"
        return 1
    fi
    if ! ask scontrol ping | grep -q 'is UP'; then
        problem "Slurm's controller does not answer: try again later, or ask the site"
        return 1
    fi
    ok "Slurm $(sbatch --version | awk '{print $2}') answers"
}

check_partition() {
    local there one wrong=''
    there=$(ask sinfo -h -a -o %R | listed)
    for one in ${SBATCH_PARTITION//,/ }; do
        [[ " $there " == *" $one "* ]] || wrong=$one
    done
    if [ -n "$wrong" ]; then
        problem "there is no partition $wrong: there are $there; correct SBATCH_PARTITION in" \
            "site.env"
        unset SBATCH_PARTITION
    elif [ -n "${SBATCH_PARTITION:-}" ]; then
        ok "partition $SBATCH_PARTITION"
    elif ! ask sinfo -h -o %P | grep -q '\*$'; then
        problem "this Slurm has no default partition: set SBATCH_PARTITION in site.env to one of" \
            "$there"
    fi
}

check_account() {
    local allowed
    printf '#!/bin/bash\n' >"$scratch/nothing"
    ask sbatch --test-only --nodes=1 --time=1 "$scratch/nothing" && {
        ok "account ${SBATCH_ACCOUNT:-(your default)}"
        return
    }
    grep -qi account "$scratch/error" || return # the job files will tell
    allowed=$(ask sacctmgr -nP show associations user="$(id -un)" format=account | listed)
    problem "the account ${SBATCH_ACCOUNT:-(none is set)} is refused on partition" \
        "${SBATCH_PARTITION:-(the default)}: ${allowed:+yours are $allowed; }correct" \
        "SBATCH_ACCOUNT in site.env (sacctmgr show associations, or the site, says which you have)"
    unset SBATCH_ACCOUNT
    account_refused=1
}

in_plain_words() { # of what sbatch says about a job file
    local said=$1 partition=${SBATCH_PARTITION:-} offer
    partition=${partition:-$(sinfo -h -o %P | sed -n 's/\*$//p')}
    offer=$(sinfo -h -p "$partition" -o '%D nodes of %c cores, %m MB and %G, at most %l' | listed)
    case $said in
    *"time limit"*) said="--time is longer than partition $partition allows" ;;
    *"configuration is not available"* | *gres* | *processors* | *"Node count"* | *memory*)
        said="partition $partition has no such nodes ($said)" ;;
    esac
    echo "$said; it offers: $offer"
}

option_of() { # the value that a job file's #SBATCH lines give an option last
    sed -nE "s/^#SBATCH +(--$2[= ]|-$3 *)([^ ]+).*/\\2/p" "$1" | tail -n 1
}

check_log() { # Slurm makes no folder for a log, and a job that cannot open its log ends unseen
    local file=$1 name=${1##*/} job folder
    job=${SBATCH_JOB_NAME:-$(option_of "$file" job-name J)}
    folder=${SBATCH_OUTPUT:-$(option_of "$file" output o)}
    if [[ $job == */* ]]; then
        problem "$name: the job name $job has a slash, and Slurm would look for its log in a folder" \
            "of that name: take one without"
    elif [[ $folder == */* && ${folder%/*} != *%* && ! -d ${folder%/*} ]]; then
        problem "$name: the log goes to $folder, but there is no folder ${folder%/*} here, and Slurm" \
            "makes none: the job would end without a word; mkdir -p ${folder%/*}"
    fi
}

check_job_file() {
    local file=$1 name=${1##*/} line
    if [ ! -f "$file" ]; then
        problem "there is no job file $file; there are: $(cd "$here" && echo *.sbatch)"
        return
    fi
    while read -r line; do
        problem "$name: Slurm does not read the line '$line': it must begin with #SBATCH and" \
            "stand before the first command"
    done < <(awk '/^[^#]/ {code = 1} /^[ \t]*#[ \t]*SBATCH/ && (code || !/^#SBATCH /)' "$file")
    check_log "$file"
    if ask sbatch --test-only "$file"; then
        ok "$name would be accepted"
    elif [ -z "$account_refused" ] || ! grep -qi account "$scratch/error"; then
        refused[$(plain)]+=" $name"
    fi
}

tell_refused() { # one line for all job files that are refused for the same reason
    local said
    for said in "${!refused[@]}"; do
        problem "Slurm would refuse${refused[$said]}: $(in_plain_words "$said"). Change #SBATCH" \
            "lines, or SBATCH_PARTITION and SBATCH_GPUS_PER_NODE in site.env"
    done
}

# ---- Python and network --------------------------------------------------------------------------

check_python() {
    local python=${PYTHON:-$root/.venv/bin/python} said
    if ! command -v "$python" >/dev/null; then
        if [ -n "${PYTHON:-}" ]; then
            problem "PYTHON is $PYTHON, which is not there: correct or delete that line in site.env"
        else
            problem "there is no $python: run make install, or set PYTHON in site.env to a Python" \
                "that has the course"
        fi
        return
    fi
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        problem "$python is $("$python" --version 2>&1), and the course needs 3.11 or newer: load" \
            "another module in site.env, or set PYTHON"
        return
    fi
    said=$("$python" - "$root/pyproject.toml" "${SBATCH_GPUS_PER_NODE:-1}" 2>&1 <<'PYTHON'
import importlib.metadata, re, sys, tomllib

with open(sys.argv[1], "rb") as file:
    needed = tomllib.load(file)["project"]["dependencies"]
names = [re.match(r"[\w-]+", line)[0] for line in needed]
missing = [name for name in names if not list(importlib.metadata.distributions(name=name))]
if missing:
    print(f"problem: {sys.executable} lacks {', '.join(missing)}: in the course's folder run "
          f"{sys.executable} -m pip install -e .")
if "torch" not in missing:
    import torch

    cuda = torch.version.cuda or torch.version.hip
    if sys.argv[2] != "0" and not cuda:
        print(f"problem: torch {torch.__version__} of {sys.executable} is made for CPUs, and the "
              "jobs ask for GPUs: install torch for CUDA (pytorch.org/get-started/locally)")
    print(f"ok: Python {sys.version.split()[0]}, torch {torch.__version__}, CUDA {cuda}")
PYTHON
    )
    echo "$said"
    num_problems=$((num_problems + $(grep -c '^problem: ' <<<"$said")))
    grep -qE '^(ok|problem): ' <<<"$said" || problem "$python cannot import torch: ${said##*$'\n'}"
}

check_network() {
    local there name one node
    there=$(sed -n 's/^ *\([^ :]*\):.*/\1/p' /proc/net/dev 2>/dev/null | listed)
    for name in GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME; do
        one=${!name:-}
        if [ -z "$one" ] || [ -z "$there" ]; then continue; fi
        # gloo takes one name; NCCL several names or their beginnings, and ^ or = before them.
        if [ "$name" = NCCL_SOCKET_IFNAME ]; then one=${one%%,*} one=${one#[=^]}; else one+=' '; fi
        if [[ " $there " != *" $one"* ]]; then
            problem "$name is ${!name}, and this machine has no such network interface: it has" \
                "$there; 'srun ip -brief address' lists those of a compute node"
        else
            ok "network interface ${one% }"
        fi
    done
    if [ -n "${HEAD_SUFFIX:-}" ] && command -v scontrol >/dev/null; then
        node=$(ask sinfo -h -N -o %N | head -n 1)
        if getent hosts "$node$HEAD_SUFFIX" >/dev/null; then
            ok "head node's name in the network, as $node$HEAD_SUFFIX"
        else
            problem "HEAD_SUFFIX is $HEAD_SUFFIX, but no $node$HEAD_SUFFIX is known here:" \
                "the node's own name is $node; correct or delete HEAD_SUFFIX in site.env"
        fi
    fi
}

account_refused=''
read_settings
if check_slurm; then
    check_partition
    check_account
    declare -A refused
    for file; do check_job_file "$file"; done
    tell_refused
fi
check_python
check_network
if ((num_problems)); then
    echo "$num_problems problem(s): correct them and run bash sbatch/check_site.sh again"
    exit 2
fi
echo "all is well: source sbatch/site.env, then sbatch sbatch/ddp.sbatch"
