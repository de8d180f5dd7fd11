#!/usr/bin/env bash
# A real Slurm cluster on this one machine, made for a test and thrown away after it.
#
#   up [-n NODES] [-g GPUS] [-c CORES] [--mode MODE] [--owner PID]    start it; prints its folder
#   run FOLDER COMMAND...          run a command on the login node
#   on FOLDER NODE COMMAND...      run a command on a node
#   wait FOLDER JOB [SECONDS]      wait until a job is over; prints its state
#   crash|boot FOLDER NODE         cut a node's power; switch the node on again
#   nodes|logs|down FOLDER         names of the nodes; errors of the daemons; end everything
#   probe                          the best mode that this machine allows
#
# With --owner the cluster ends when that process does, however it ends. A node has 4 GPUs (links to
# /dev/null) and 32 cores, whatever the machine has. Partition debug takes everybody; batch takes
# jobs of the account "course", the only one there is.
#
# Modes:
#   netns   root. A private network, the "rack", holds the login node, and in it each node has
#           its own network, host name and processes: localhost on one node is not localhost on
#           another. The machine's own network and files are not touched.
#   userns  the same for a plain user, where the kernel allows user namespaces.
#   ports   no privilege at all. The nodes' daemons run side by side, told apart by their ports.
#           The nodes are named 127.0.77.1, 127.0.77.2, ..., which every resolver knows, and share
#           one loopback.
set -euo pipefail
SELF=$(readlink -f "${BASH_SOURCE[0]}")
PATH=$PATH:/usr/sbin:/sbin
NET=10.77.0 # in the rack node1 has 10.77.0.1
OWN_SPACES=(unshare --net --uts --mount --pid --fork --kill-child --mount-proc)

die() {
    echo "cluster: $*" >&2
    exit 1
}

within() { # SECONDS CONDITION...: wait until the condition holds
    local end=$((SECONDS + $1))
    shift
    until "$@" 2>/dev/null; do
        ((SECONDS < end)) || return 1
        sleep 0.05
    done
}

# ---- the mode ------------------------------------------------------------------------------------

try_rack() { # in namespaces that end with it: all that a rack needs
    hostname probe
    mount --bind /dev/null /etc/hosts
    ip link add br0 type bridge
    "${OWN_SPACES[@]}" sleep 5 &
    sleep 0.1
    ip link add v0 type veth peer name eth0 netns $!
    ip link set v0 master br0
}

best_mode() {
    local mode=netns as_root=() why
    if [ "$(id -u)" != 0 ]; then mode=userns as_root=(--user --map-root-user); fi
    if why=$("${OWN_SPACES[@]}" "${as_root[@]}" bash "$SELF" _try 2>&1 >/dev/null); then
        echo $mode
    else
        echo "cluster: mode ports, since $mode failed: ${why%%$'\n'*}" >&2
        echo ports
    fi
}

# ---- inside the cluster --------------------------------------------------------------------------

load() { # FOLDER: know the cluster in it
    D=$1
    [ -f "$D/cluster.env" ] || die "no cluster in '$D'"
    # shellcheck source=/dev/null
    . "$D/cluster.env" # MODE, NODES, IDS
    export SLURM_CONF=$D/slurm.conf
    # Slurm's daemons end when root may not call setgroups, as in a user namespace. There they run
    # under the user's own number, in one more namespace; only the network is made as "root".
    AS_USER=()
    if [ "$MODE" = userns ]; then
        AS_USER=(unshare --user --map-user="${IDS% *}" --map-group="${IDS#* }" --)
    fi
}

in_rack() {
    local pid as_root=()
    pid=$(cat "$D/rack.pid")
    if [ "$MODE" = userns ]; then as_root=(--user --preserve-credentials); fi
    nsenter -t "$pid" "${as_root[@]}" -m -u -n --pid="/proc/$pid/ns/pid_for_children" -- \
        env -C "$PWD" "$@"
}

login() {
    if [ "$MODE" = ports ]; then "$@"; else in_rack "${AS_USER[@]}" "$@"; fi
}

on_node() { # NODE COMMAND...
    local node=$1
    shift
    if [ "$MODE" = ports ]; then
        "$@"
    else # the number in the file is one of the rack's /proc
        # shellcheck disable=SC2016
        in_rack bash -c 'pid=$(cat "$1"); shift
            exec nsenter -t $pid -m -u -n --pid=/proc/$pid/ns/pid_for_children -- \
                env -C "$PWD" "$@"' _ "$D/$node.pid" "${AS_USER[@]}" "$@"
    fi
}

# ---- the configuration ---------------------------------------------------------------------------

free_ports() { # COUNT: print the first of so many free ports in a row
    local base port
    for _ in {1..50}; do
        # Above what systems give to clients, and above the ports where jobs meet.
        base=$((61000 + RANDOM % 4000))
        for ((port = base; port < base + $1; port++)); do
            if (: <>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then continue 2; fi
        done
        echo $base
        return
    done
    die "no free ports"
}

write_files() { # NUM_NODES GPUS CORES
    local i name names="" line host=login address=$NET.254 port=6817
    if [ "$MODE" = ports ]; then
        port=$(free_ports $(($1 + 1))) host=$(hostname -s) address=127.0.0.1
    fi
    mkdir "$D/log" "$D/state"
    chmod 755 "$D" # munged wants its socket to be in reach of all
    (umask 077 && head -c 1024 /dev/urandom >"$D/munge.key")
    echo "127.0.0.1 localhost"$'\n'"$address login" >"$D/hosts"
    for ((i = 1; i <= $1; i++)); do
        name=node$i line=""
        if [ "$MODE" = ports ]; then
            name=127.0.77.$i
            line="NodeHostname=$host NodeAddr=$name Port=$((port + i))"
        fi
        names+="$name "
        echo "NodeName=$name CPUs=$3 RealMemory=512000 Gres=gpu:h100:$2 $line" >>"$D/nodes.conf"
        echo "$NET.$i $name" >>"$D/hosts"
    done
    # Slurm wants a GPU's file to be a device; a link to one will do.
    for ((i = 0; i < $2; i++)); do
        ln -s /dev/null "$D/nvidia$i"
        echo "Name=gpu Type=h100 File=$D/nvidia$i" >>"$D/gres.conf"
    done
    # Names come from the hosts file alone: no waiting for a name server that is out of reach.
    { grep -v '^hosts:' /etc/nsswitch.conf || :; } >"$D/nsswitch.conf" 2>/dev/null
    echo "hosts: files" >>"$D/nsswitch.conf"
    # Jobs of clusters that share a network meet at different ports.
    sed -e "s|@D@|$D|; s|@HOST@|$host|; s|@ADDRESS@|$address|; s|@PORT@|$port|" \
        -e "s|@USER_ID@|$(id -u)|; s|@FIRST_JOB@|$((1 + RANDOM % 19000))|" \
        "$(dirname "$SELF")/slurm.conf.in" >"$D/slurm.conf"
    echo "CgroupPlugin=$(cgroup_plugin)" >"$D/cgroup.conf"
    write_account_rule
    echo "MODE=$MODE NODES='${names% }' IDS='$(id -u) $(id -g)'" >"$D/cluster.env"
}

cgroup_plugin() { # one that looks for no cgroups: a container's may be odd, or not be there
    local version
    version=$(slurmctld -V) # as "slurm-wlm 22.05.8"
    version=${version##* } version=${version//./}
    if ((${version:0:4} < 2405)); then echo cgroup/v1; else echo disabled; fi
}

write_account_rule() {
    cat >"$D/job_submit.lua" <<'LUA'
function slurm_job_submit(job)
    local given = job.account or ""
    if given ~= "course" and (given ~= "" or job.partition == "batch") then
        return slurm.ESLURM_INVALID_ACCOUNT
    end
    return slurm.SUCCESS
end

function slurm_job_modify()
    return slurm.SUCCESS
end
LUA
}

# ---- starting ------------------------------------------------------------------------------------

# All output goes to files: a daemon that held the caller's would keep a test waiting for ever.
daemon() { # NAME COMMAND...
    setsid "${AS_USER[@]}" "${@:2}" </dev/null >>"$D/log/$1.out" 2>&1 &
}

start_controller() {
    # In a user namespace nobody owns /, which munged would take for unsafe.
    local force=()
    if [ "$MODE" = userns ]; then force=(--force); fi
    daemon munged munged --foreground "${force[@]}" --num-threads=4 \
        --key-file="$D/munge.key" --socket="$D/munge.socket" --pid-file="$D/munge.own_pid" \
        --log-file="$D/log/munged.log" --seed-file="$D/munge.seed"
    within 10 test -S "$D/munge.socket" || die "no munged: $(tail -n 1 "$D/log/munged.out")"
    start_slurmctld
}

start_slurmctld() {
    daemon slurmctld slurmctld -D
}

stay() { # as the first process of a namespace, and its undertaker
    while :; do sleep 3600 || :; done
}

rack() { # the rack's first process
    hostname login
    mount --bind "$D/hosts" /etc/hosts
    mount --bind "$D/nsswitch.conf" /etc/nsswitch.conf
    ip link set lo up
    ip link add br0 type bridge
    ip address add "$NET.254/24" dev br0
    ip link set br0 up
    start_controller
    touch "$D/rack.up"
    stay
}

has_own_net() { # PID
    [ "$(readlink "/proc/$1/ns/net")" != "$(readlink /proc/self/ns/net)" ]
}

plug_in() { # NODE, in the rack: give it a network of its own and switch it on
    local pid i=${1#node}
    "${OWN_SPACES[@]}" bash "$SELF" _node "$D" "$1" </dev/null >>"$D/log/$1.out" 2>&1 &
    pid=$!
    within 10 has_own_net $pid || die "$1 has no network"
    echo "$pid" >"$D/$1.pid"
    # The same address at every start; else the others would send to the old card for seconds.
    ip link add "v$i" type veth peer name eth0 address "02:77:00:00:00:$(printf %02x "$i")" \
        netns "$pid"
    ip link set "v$i" master br0 up
}

node() { # NODE: its first process
    hostname "$1"
    mount -t tmpfs tmpfs /dev/shm
    ip link set lo up
    within 10 ip link show eth0 >/dev/null || die "$1 has no eth0"
    ip address add "$NET.${1#node}/24" dev eth0
    ip link set eth0 up
    daemon "slurmd.$1" slurmd -D -N "$1"
    stay
}

unplug() { # NODE, in the rack. The wire goes first, so that nobody sees an orderly end
    ip link del "v${1#node}"
    kill -9 "$(cat "$D/$1.pid")"
}

boot() { # NODE
    if [ "$MODE" = ports ]; then
        daemon "slurmd.$1" slurmd -D -N "$1"
    else
        in_rack bash "$SELF" _plug_in "$D" "$1"
    fi
}

up() { # NUM_NODES GPUS CORES OWNER
    local program node
    for program in munged slurmctld slurmd sbatch unshare nsenter ip; do
        command -v $program >/dev/null || die "there is no program $program here"
    done
    D=$(mktemp -d /tmp/slurm.XXXXXX) # short: a socket's path has 108 characters at most
    write_files "$@"
    load "$D"
    trap 'logs >&2; down' EXIT # whatever goes wrong from here on
    if [ -n "$4" ]; then
        setsid bash "$SELF" _watch "$D" "$4" </dev/null >/dev/null 2>&1 &
        echo $! >"$D/watch.pid"
    fi
    if [ "$MODE" = ports ]; then
        start_controller
    else
        start_rack
    fi
    for node in $NODES; do boot "$node"; done
    within 40 all_idle "$1" || die "the nodes did not come up within 40 s"
    trap - EXIT
    echo "$D"
}

rack_is_decided() { # PID
    [ -e "$D/rack.up" ] || ! kill -0 "$1"
}

start_rack() {
    local as_root=() pid
    if [ "$MODE" = userns ]; then as_root=(--user --map-root-user); fi
    setsid "${OWN_SPACES[@]}" "${as_root[@]}" bash "$SELF" _rack "$D" \
        </dev/null >"$D/log/rack.out" 2>&1 &
    pid=$!
    echo $pid >"$D/rack.pid"
    within 30 rack_is_decided $pid || :
    [ -e "$D/rack.up" ] || die "the rack did not start: $(tail -n 3 "$D/log/rack.out")"
}

all_idle() { # NUM_NODES. Without a controller sinfo would wait for ever
    [ "$(login timeout 5 sinfo -h -p debug -t idle -o %D)" = "$1" ]
}

# ---- using ---------------------------------------------------------------------------------------

wait_for() { # JOB SECONDS. (`sbatch --wait` looks only after 2, 10, 42 s ...)
    local states="" over="COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL|BOOT_FAIL|OUT_OF_MEMORY"
    local end=$((SECONDS + $2))
    while ((SECONDS < end)) && [ -e "$D/cluster.env" ]; do
        states=$(login timeout 10 squeue -h -t all -j "$1" -o %T 2>/dev/null | sort -u) || :
        if [ -n "$states" ] && ! grep -qvxE "$over" <<<"$states"; then
            echo "${states//$'\n'/ }"
            return
        fi
        sleep 0.2
    done
    die "job $1 is not over after $2 s: ${states//$'\n'/ }"
}

logs() { # without what every fresh start says
    grep -hE "error|fatal" "$D"/log/*.out |
        grep -vE "pmix|ould not open .* state file|Trying backup state" |
        grep -vE "Domain socket directory|hwloc_topo_load" |
        sort -u | tail -n 40 || :
}

# ---- ending --------------------------------------------------------------------------------------

processes() { # [NODE], in mode ports: daemons, told by their open log, and jobs, by their
    # environment. Never a shell that merely knows the cluster.
    local pid
    find /proc/[0-9]*/fd -lname "$D/log/${1:+slurmd.$1.}*" 2>/dev/null | cut -d/ -f3 | sort -u |
        while read -r pid; do
            case $(cat "/proc/$pid/comm") in munged | slurm*) echo "$pid" ;; esac
        done
    grep -lzxF "SLURM_CONF=$SLURM_CONF" /proc/[0-9]*/environ | cut -d/ -f3 |
        while read -r pid; do
            grep -qzE "^SLURMD_NODENAME=${1:-}" "/proc/$pid/environ" && echo "$pid"
        done
} 2>/dev/null

kill_processes() { # [NODE]: true when there is none left
    local pids
    pids=$(processes "$@")
    # shellcheck disable=SC2086
    [ -z "$pids" ] || { kill -9 $pids; false; }
}

crash() { # NODE
    if [ "$MODE" = ports ]; then
        within 10 kill_processes "$1"
    else
        in_rack bash "$SELF" _unplug "$D" "$1"
    fi
}

controller() { # its process, told by its open log. Other processes come and go while find looks
    { find /proc/[0-9]*/fd -lname "$D/log/slurmctld.*" || :; } | cut -d/ -f3 | sort -u |
        while read -r pid; do
            if [ "$(cat "/proc/$pid/comm")" = slurmctld ]; then echo "$pid"; fi
        done
} 2>/dev/null

no_controller() {
    [ -z "$(controller)" ]
}

kill_slurmctld() { # where it runs. Killed, not asked to end: it writes nothing down any more
    local pids
    pids=$(controller)
    [ -n "$pids" ] || die "there is no controller"
    # shellcheck disable=SC2086
    kill -9 $pids
    within 10 no_controller || die "the controller does not end"
}

kill_controller() {
    if [ "$MODE" = ports ]; then
        kill_slurmctld
    else
        in_rack bash "$SELF" _kill_slurmctld "$D"
    fi
}

restart_controller() {
    if [ "$MODE" = ports ]; then
        start_slurmctld
    else
        in_rack bash "$SELF" _start_slurmctld "$D"
    fi
}

is_ours() { # PID: it has this cluster's folder in its command line
    tr '\0' ' ' <"/proc/$1/cmdline" | grep -qF -- " $D"
} 2>/dev/null

is_gone() { # PID
    ! is_ours "$1"
}

no_jobs() {
    [ -z "$(timeout 5 squeue -h)" ]
}

down() {
    local pid
    pid=$(cat "$D/watch.pid" 2>/dev/null || :)
    if [ "$pid" != $$ ] && is_ours "$pid"; then kill -- "-$pid"; fi
    if [ "$MODE" = ports ]; then
        timeout 10 scancel -f -s KILL --me 2>/dev/null || :
        within 10 no_jobs || :
        within 10 kill_processes || :
    elif pid=$(cat "$D/rack.pid" 2>/dev/null) && is_ours "$pid"; then
        # The rack's first process takes all others with it, and the one above waits for them.
        kill -9 "$(cat "/proc/$pid/task/$pid/children")" || :
        within 10 is_gone "$pid" || die "the rack $pid does not end"
    fi
    rm -rf "$D"
}

watch() { # OWNER
    tail --pid="$1" -f /dev/null
    down
}

# ---- the command ---------------------------------------------------------------------------------

[ $# -gt 0 ] || die "say what to do: up, run, on, wait, crash, boot, nodes, logs, down, probe"
action=$1
shift
case $action in
up)
    NUM_NODES=2 GPUS=4 CORES=32 MODE=auto OWNER=""
    while [ $# -gt 0 ]; do
        case $1 in
        -n) NUM_NODES=$2 ;;
        -g) GPUS=$2 ;;
        -c) CORES=$2 ;;
        --mode) MODE=$2 ;;
        --owner) OWNER=$2 ;;
        *) die "up does not know $1" ;;
        esac
        shift 2
    done
    [ "$MODE" != auto ] || MODE=$(best_mode)
    up "$NUM_NODES" "$GPUS" "$CORES" "$OWNER"
    ;;
probe) best_mode ;;
_try) try_rack ;;
run | on | wait | crash | boot | nodes | logs | down | _*)
    load "${1-}"
    shift
    case $action in
    run) login "$@" ;;
    on) on_node "$@" ;;
    wait) wait_for "$1" "${2:-120}" ;;
    nodes) echo "$NODES" ;;
    *) "${action#_}" "$@" ;;
    esac
    ;;
*) die "unknown command $action" ;;
esac
