#!/bin/bash
# Start a script's ranks: on the nodes of this batch job, or else on this machine.
#
#   bash sbatch/launch.sh scripts/train_ddp.py --steps 100
#
# RANKS is the number of ranks a node; by default one a GPU, or 2 where there is no GPU.
#
# A job file calls this with JOB_FILE=$0, which tells where it runs: Slurm starts its own copy of a
# batch job's file, and calls it slurm_script. A job's run has the folder runs/NAME-ID. When Slurm
# sends SIGUSR1 (--signal in the job file), the ranks save and the job queues again, to go on there.
#
# Number 4 of an array (sbatch --array=0-10) has the ID 17_4 and a run of its own, and gets the
# flags in ARRAY_FLAGS before all others.
set -euo pipefail
here=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")
job_file=${JOB_FILE:-} array_flags=() number=''
read -ra given <<<"${ARRAY_FLAGS:-}"
unset JOB_FILE ARRAY_FLAGS MANYHANDS_BATCH
# shellcheck source=sbatch/site.sh
. "$here/site.sh"
script=$1
[ ! -f "$root/$script" ] || script=$root/$script
flags=("${@:2}")

# Variables that were inherited, from a job that a JupyterHub session runs in or from the job that
# submitted this one, look like this job's own. srun asks the controller and sets them anew.
is_batch='' needed='^SLURM_CONF$'
if [[ $job_file == */slurm_script ]]; then
    is_batch=1 needed='^SLURM_(CONF|JOB_ID|JOB_NAME)$'
fi
nodes=${SLURM_JOB_NUM_NODES:-1} cpus=${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE:-1}}
hosts=${SLURM_JOB_NODELIST:-}
for name in "${!SLURM_@}" "${!SRUN_@}" "${!SBATCH_@}"; do
    [[ $name =~ $needed ]] || unset "$name"
done

if [ -z "$is_batch" ]; then
    exec "$python" "$root/scripts/launch.py" "$script" "${@:2}"
fi

# ---- a batch job -------------------------------------------------------------------------------

say() { echo "launch.sh: $*"; }
# What sbatch was told about this job beside its file, as far as Slurm shows it.
given_options() {
    local option key value lines
    lines=$(grep -s '^#SBATCH --' "$job_file" || true)
    while read -r option key; do
        value=''
        [[ $job =~ [[:space:]]$key=([^[:space:]]+) ]] && value=${BASH_REMATCH[1]#gres[:/]gpu[:=]}
        [ "$option" != job-name ] || value=$SLURM_JOB_NAME
        case $option=$value in
        *= | *=N/A | *'=(null)') continue ;;
        gpus-per-node=0) ;; # site.env of a cluster without GPUs says so
        *=0) continue ;;
        esac
        grep -qxF -- "#SBATCH --$option=$value" <<<"$lines" || printf ' --%s=%q' "$option" "$value"
    done <<<"$SHOWN"
    [[ $job != *" Requeue=0 "* ]] || printf ' --no-requeue'
}
SHOWN='job-name JobName
time TimeLimit
partition Partition
account Account
qos QOS
constraint Features
reservation Reservation
gpus-per-node TresPerNode
cpus-per-task CPUs/Task
mem MinMemoryNode
mem-per-cpu MinMemoryCPU'
# One number of an array also answers to the array's ID: Slurm shows and signals all of it then.
id=$SLURM_JOB_ID job=$'\n'$(scontrol show job "$SLURM_JOB_ID")
job=${job#*$'\n'"JobId=$id "} job=${job%%$'\n\n'*}
if [[ $job =~ ^ArrayJobId=([0-9]+)\ ArrayTaskId=([0-9]+)\  ]]; then
    number=${BASH_REMATCH[2]} id=${BASH_REMATCH[1]}_${BASH_REMATCH[2]} array_flags=("${given[@]}")
    say "job $SLURM_JOB_ID is number $number of array ${BASH_REMATCH[1]}"
fi
out=
for index in "${!flags[@]}"; do
    case ${flags[index]} in
    --out) out=${flags[index + 1]:-} ;;
    --out=*) out=${flags[index]#--out=} ;;
    esac
done
if [ -z "$out" ]; then
    out=runs/$SLURM_JOB_NAME-$id
    flags+=(--out "$out")
elif [[ -n $number && $out != *_"$number" ]]; then
    out+=_$number # of two flags the last one counts
    flags+=(--out "$out")
fi

[[ $job =~ Restarts=([0-9]+) ]] && export SLURM_RESTART_COUNT=${BASH_REMATCH[1]}
[[ $job =~ Command=([^$'\n']*) ]] && job_file=${BASH_REMATCH[1]%" ${*:2}"}
again="sbatch --nodes=$nodes${number:+ --array=$number}$(given_options)"
again+=$(printf ' %q' "${job_file#"$PWD/"}" "${flags[@]}")
[ -z "${PYTHON:-}" ] || again="PYTHON=$(printf %q "$PYTHON") $again"
again="${RANKS:+RANKS=$RANKS }$again"
[ "$PWD" = "$root" ] || again="cd $(printf %q "$PWD") && $again"
read -r HEAD_NODE < <(scontrol show hostnames "$hosts")
export HEAD_NODE=$HEAD_NODE${HEAD_SUFFIX:-} NODES=$nodes SRUN_CPUS_PER_TASK=$cpus
export MANYHANDS_BATCH=1 # the SLURM_ variables are this job's
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
# At the end one node leaves first, and the others would each tell of it with fifty lines of C++.
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}

status() { cat "$out/status.json" 2>/dev/null || true; }
before=$(status) saving='' passed_on='' ended=''
trap 'saving=1' USR1
trap 'ended=1; say "told to end; if the job does not queue again, go on with: $again"' TERM
srun --export=ALL --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --kill-on-bad-exit=1 \
    "$python" "$root/scripts/launch.py" "$script" "${array_flags[@]}" "${flags[@]}" &
step=$! code=0
while kill -0 "$step" 2>/dev/null; do
    # The signal would kill ranks that have not begun to train.
    if [[ -n $saving && -z $passed_on && $(status) == *'"state": "running"'* ]] &&
        [[ $(status) != "$before" ]]; then
        sleep 1
        scancel --signal=USR1 "$id" || true
        passed_on=1
    fi
    sleep 1 # in a longer command, as srun itself would be, bash would not act on a signal in time
done
wait "$step" || code=$?

state=$(status)
# A run that was refused at its start has no state of its own, and the same command would fail.
if [[ -z $state || $state == *'"state": "finished"'* ]] || [[ $code = 2 && $state = "$before" ]]; then
    exit "$code"
fi
[ "$code" != 0 ] || code=75 # as in a pod: not finished, so no job that waits for it may begin
[ -z "$ended" ] || exit "$code"
if [[ -n $saving && $state == *'"state": "stopped"'* ]]; then
    if refusal=$(scontrol requeue "$id" 2>&1); then
        say "job $id queues again, to go on in $out"
        exit
    fi
    say "job $id cannot queue again: ${refusal:-no reason given}"
fi
say "go on with: $again"
exit "$code"
