# shellcheck shell=bash
# What the batch scripts share. They set MEGATRON_RL_HOME and read this file; site.sh holds what differs between clusters.
#
# A job's life: the recipe is checked once, for the job's number of processes, before anything large starts. Each start of a
# job is an attempt with a folder of logs of its own, <run_dir>/logs/attempt_<k>. Slurm's notice before the time limit
# (SIGUSR1 to this shell) is passed to all ranks, which save and end with 75. `answer` says which exit codes are answered
# with a requeue. The requeued job continues from the newest checkpoint, as every start does.

REQUEUE=75 # megatron_rl/runtime/exit_codes.py
STALLED=76
UNFIT=3

say() { echo "megatron-rl: $*" >&2; }
die() { # die MESSAGE [CODE]
  say "$1"
  exit "${2:-1}"
}

# ------------------------------------------------------------------------------------------------------------------ site
load_site() {
  local site="${MEGATRON_RL_SITE:-$MEGATRON_RL_HOME/slurm/site.sh}"
  [[ -r $site ]] || die "no $site; copy slurm/site.example.sh to it and edit the copy" 2
  SITE_SBATCH=() SITE_SRUN=() TASKS_PER_NODE=1 CPUS_PER_TASK='' LAUNCHER=srun VENV='' CONTAINER_IMAGE='' CONTAINER_MOUNTS=''
  MAX_REQUEUES_WITHOUT_PROGRESS=3 SERVER_WAIT_MINUTES=30 SERVER_LOOKS_EVERY=20
  # shellcheck disable=SC2317
  site_setup() { :; }
  # shellcheck source=slurm/site.example.sh
  source "$site" >&2 # what it prints is no answer of a script
  TASKS_PER_NODE=${MEGATRON_RL_TASKS_PER_NODE:-$TASKS_PER_NODE} # of one launch
  [[ $LAUNCHER == srun || $LAUNCHER == torchrun ]] || die "LAUNCHER=$LAUNCHER in $site: srun or torchrun" 2
  [[ $TASKS_PER_NODE =~ ^[1-9][0-9]*$ ]] || die "TASKS_PER_NODE=$TASKS_PER_NODE in $site: a number of processes" 2
  [[ $CPUS_PER_TASK =~ ^([1-9][0-9]*)?$ ]] || die "CPUS_PER_TASK=$CPUS_PER_TASK in $site: a number of cores" 2
}

# ------------------------------------------------------------------------------------------------------------- the nodes
# The address of the job's first node as Slurm itself reaches it: node names need not resolve.
master_address() {
  local first address
  first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
  [[ -n $first ]] || die "scontrol names no node in $SLURM_JOB_NODELIST"
  address=$(scontrol show node --oneliner "$first" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
  echo "${address:-$first}"
}

# The same on all nodes, another for every job, array task and attempt; below the ports that systems hand out themselves.
master_port() { echo $((20000 + (SLURM_JOB_ID * 101 + ${SLURM_RESTART_COUNT:-0} * 7) % 12000)); }

# An array's last task has the number of the whole array for its SLURM_JOB_ID: requeueing that would requeue all of them.
job_name() {
  if [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then
    echo "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
  else
    echo "$SLURM_JOB_ID"
  fi
}

# job_field NAME: what Slurm says of this job; nothing where the controller, asked again, does not answer.
job_field() {
  local said
  for _ in 1 2 3; do
    if said=$(scontrol show job --oneliner "$(job_name)"); then
      sed -n "s/.* $1=\([^ ]*\).*/\1/p" <<< "$said"
      return 0
    fi
    sleep 2
  done
}

# --------------------------------------------------------------------------------------------------------------- servers
# A job of serve.sbatch keeps its address (`url`, while it answers) and the jobs that use it (`clients`) in a folder.
server_folder() { echo "$MEGATRON_RL_HOME/runs/.servers/$1"; }

# in_queue JOBS: whether one of them (separated by commas) waits or runs; yes where the controller does not answer.
in_queue() {
  local said
  if said=$(squeue --noheader --format=%i --jobs="$1" 2>&1); then
    [[ -n $said ]]
  else
    [[ $said != *"Invalid job id"* ]]
  fi
}

# MEGATRON_RL_SERVERS, of submit.sh --server: NAME=JOB/PATH, separated by spaces. Waits until each server answers, and sets the
# variable NAME to its address.
await_servers() {
  local pair name job path url waited=0 limit=$((SERVER_WAIT_MINUTES * 60))
  for pair in ${MEGATRON_RL_SERVERS:-}; do
    name=${pair%%=*} job=${pair#*=}
    path=${job#"${job%%/*}"} job=${job%%/*}
    url=$(server_folder "$job")/url
    echo "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}" >> "$(server_folder "$job")/clients"
    until [[ -s $url && -n $(squeue --noheader --states=R --jobs="$job" 2> /dev/null) ]]; do
      if [[ -n $NOTICE ]]; then # to be asked to stop ends the wait
        CODE=$REQUEUE
        finish_job
      fi
      in_queue "$job" || die "the server of $name, job $job, has left the queue; its output says why" "$UNFIT"
      ((waited < limit)) || die "the server of $name, job $job, does not answer after $SERVER_WAIT_MINUTES min" "$UNFIT"
      ((waited % 60)) || say "waiting for the server of $name, job $job (at most $SERVER_WAIT_MINUTES minutes)"
      sleep 5
      waited=$((waited + 5))
    done
    export "$name=$(< "$url")$path"
    say "$name=${!name} (job $job)"
  done
}

# ---------------------------------------------------------------------------------------------------------------- starting
# in_job TASKS_PER_NODE NODES COMMAND...: COMMAND by srun, in the site's container where it has one.
in_job() {
  local per_node=$1 nodes=$2
  shift 2
  local options=(--nodes="$nodes" --ntasks="$((nodes * per_node))" --ntasks-per-node="$per_node"
    --distribution=block --kill-on-bad-exit=1 --export=ALL --input=none # block: a node's ranks are neighbours
    --overlap) # a step that was lost with its node must not keep the next one waiting
  # srun does not take these over from the job by itself.
  if [[ -n $CPUS_PER_TASK ]]; then
    options+=(--cpus-per-task="$((per_node == TASKS_PER_NODE ? CPUS_PER_TASK : CPUS_PER_TASK * TASKS_PER_NODE))")
  fi
  # Every process sees all GPUs of its node: NCCL's shortcuts between them need it.
  [[ -z ${SLURM_GPUS_ON_NODE:-} ]] || options+=(--gpu-bind=none)
  if [[ -n $CONTAINER_IMAGE ]]; then
    # The name makes later steps use the container that the first has unpacked. Of this attempt: what a requeued job finds
    # under its old one may be half removed (NVIDIA/pyxis#161), and Pyxis would run it.
    options+=(--container-image="$CONTAINER_IMAGE" --container-name="megatron-rl-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
      --container-workdir="$MEGATRON_RL_HOME" --no-container-mount-home)
    [[ -z $CONTAINER_MOUNTS ]] || options+=(--container-mounts="$CONTAINER_MOUNTS")
  fi
  options+=(${SITE_SRUN[@]+"${SITE_SRUN[@]}"})
  # exec: the caller's process is then srun itself, which passes signals on to its tasks.
  exec srun "${options[@]}" "$@"
}

# launch ARGUMENTS OF megatron-rl...: one rank per process slot of the job.
launch() {
  local nodes=$SLURM_JOB_NUM_NODES
  MASTER_ADDR=$(master_address)
  MASTER_PORT=$(master_port)
  export MASTER_ADDR MASTER_PORT
  if [[ $LAUNCHER == srun ]]; then
    in_job "$TASKS_PER_NODE" "$nodes" python -m megatron_rl "$@"
  else
    in_job 1 "$nodes" bash "$MEGATRON_RL_HOME/slurm/torchrun.sh" "$nodes" "$TASKS_PER_NODE" "$@"
  fi
}

# package MODULE ARGUMENTS...: a module of the package, in the site's container where it has one.
package() {
  if [[ -n $CONTAINER_IMAGE ]]; then in_job 1 1 python -m "$@"; else python -m "$@"; fi
}

# The run_dir of a recipe in YAML, which folds a long one at its spaces, and doubles quotes in one that it puts in quotes.
run_dir_of() {
  sed -e ':more' -e '$!{N' -e 'b more' -e '}' -e 's/\n  */ /g' |
    sed -n "s/^run_dir: *//p" | sed "/^'.*'\$/{s/^'//;s/'\$//;s/''/'/g}"
}

# The recipe, resolved, for this job's number of processes; the job ends here where it cannot run.
check_recipe() {
  local world=$((SLURM_JOB_NUM_NODES * TASKS_PER_NODE)) checked
  if ! checked=$(
    export RANK=0 WORLD_SIZE=$world LOCAL_WORLD_SIZE=$TASKS_PER_NODE
    package megatron_rl "$@" --check
  ); then
    die "the recipe cannot run on $SLURM_JOB_NUM_NODES nodes x $TASKS_PER_NODE processes; nothing was started" 2
  fi
  RUN_DIR=$(run_dir_of <<< "$checked")
  [[ -n $RUN_DIR ]] || die "the checked recipe names no run_dir" 2
}

# The lines of a sweep that count.
sweep_lines() { sed -e 's/#.*//' -e 's/[[:space:]]*$//' -e 's/^[[:space:]]*//' -e '/^$/d' "$1"; }

# --------------------------------------------------------------------------------------------------------------- attempts
# last_number PREFIX: the largest n of the paths PREFIX<n>; nothing without one.
last_number() { printf '%s\n' "$1"* | sed -n 's/.*_\([0-9][0-9]*\)$/\1/p' | sort -n | tail -n 1; }

# The newest checkpoint's step; sft/<n> where only the warm-up before RL has one.
newest_step() {
  local stage step
  for stage in '' sft/; do
    step=$(last_number "$RUN_DIR/${stage}checkpoints/step_")
    [[ -z $step ]] || break
  done
  echo "${step:+$stage}${step:-none}"
}

# Makes logs/attempt_<k>, and a line in logs/starts: which job, where, from which step.
begin_attempt() {
  local number other
  mkdir -p "$RUN_DIR/logs"
  other=$(tail -n 1 "$RUN_DIR/logs/starts" 2> /dev/null | cut -d ' ' -f 3) || true
  if [[ -n $other && $other != "$(job_name)" && -n $(squeue --noheader --states=R --jobs="$other" 2> /dev/null) ]]; then
    die "job $other is running in $RUN_DIR; a run folder is for one job at a time" 2
  fi
  number=$(last_number "$RUN_DIR/logs/attempt_")
  number=$((${number:-0} + 1))
  MEGATRON_RL_ATTEMPT=$RUN_DIR/logs/attempt_$number
  mkdir "$MEGATRON_RL_ATTEMPT" || die "another job is starting in $RUN_DIR; a run folder is for one job at a time" 2
  export MEGATRON_RL_ATTEMPT
  # For `megatron-rl status`: the line that continues the run. Of a sweep, the one task.
  if [[ -n ${MEGATRON_RL_SUBMITTED:-} ]]; then
    echo "${MEGATRON_RL_SUBMITTED/ sweep / ${SLURM_ARRAY_TASK_ID:+--array=$SLURM_ARRAY_TASK_ID }sweep }" \
      > "$MEGATRON_RL_ATTEMPT/submitted"
  fi
  STEP_AT_START=$(newest_step)
  echo "$(date -Is) job $(job_name) restart ${SLURM_RESTART_COUNT:-0} attempt $number step $STEP_AT_START" \
    "nodes $SLURM_JOB_NODELIST" >> "$RUN_DIR/logs/starts"
  say "job $(job_name), attempt $number: $SLURM_JOB_NUM_NODES nodes ($SLURM_JOB_NODELIST) x $TASKS_PER_NODE," \
    "from step $STEP_AT_START; logs in $MEGATRON_RL_ATTEMPT"
}

# Ends the job where the last starts of it, more than $1 of them, have all found the newest checkpoint that there is now.
refuse_more_starts_than() {
  local step starts
  if [[ -z ${RUN_DIR:-} ]]; then # a conversion: each start writes more of it
    ((${SLURM_RESTART_COUNT:-0} < $1)) || die "job $(job_name) has been requeued ${SLURM_RESTART_COUNT:-0} times, and is not again"
    return 0
  fi
  step=$(newest_step)
  starts=$(awk -v job="$(job_name)" -v step="$step" \
    '$3 == job { count = ($9 == step) ? count + 1 : 0 } END { print count + 0 }' "$RUN_DIR/logs/starts")
  ((starts > $1)) || return 0
  say "job $(job_name) has started $starts times without getting past step $step, and is not requeued again;" \
    "the attempts are in $RUN_DIR/logs. Where a step does not fit between a start and the time limit, raise --time"
  record_end 1 "it has started $starts times without getting past step $step"
  exit 1
}

# ----------------------------------------------------------------------------------------------------------------- running
NOTICE=''  # the signal that asked this job to stop
RANKS=''   # process id of their srun
STOP_SIGNAL=USR1 # what srun passes on to its tasks; SIGTERM makes srun kill them
ABANDON='' # set when the ranks have not obeyed it in time

# Runs a function that becomes srun (`in_job`, `launch`) in the background and passes this shell's signals on to it; CODE is
# its exit code.
run_and_wait() {
  if [[ -n $NOTICE ]]; then # it came before there were ranks
    CODE=$REQUEUE
    return
  fi
  trap 'ABANDON=1' USR2
  ("$@") &
  RANKS=$!
  [[ -z $NOTICE ]] || kill -s "$STOP_SIGNAL" "$RANKS" 2> /dev/null || true # it came before RANKS was known
  # `wait` also returns, with 128 + n, when a trap has run; only the exit code of a srun that is gone is its own.
  until [[ -n $ABANDON ]] || ! kill -0 "$RANKS" 2> /dev/null; do wait "$RANKS" || true; done
  CODE=0
  [[ -n $ABANDON ]] || wait "$RANKS" || CODE=$?
  trap '' USR1 TERM USR2
}

notice() {
  [[ -z $NOTICE ]] || return 0
  NOTICE=$1
  if [[ -z $RANKS ]]; then
    say "SIG$1: the job stops before it has started its ranks"
    return
  fi
  say "SIG$1: asking the ranks to save and to stop"
  kill -s "$STOP_SIGNAL" "$RANKS" 2> /dev/null || true
  # A phase that takes longer than what is left is given up: the next attempt redoes it from the last checkpoint.
  local end left
  end=$(job_field EndTime)
  left=$(($(date -d "${end:-unknown}" +%s 2> /dev/null || echo 9999999999) - $(date +%s)))
  left=$((left < 180 ? left * 3 / 4 : left - 45)) # the rest is for the requeue
  (
    sleep "$((left > 1 ? left : 1))"
    kill -USR2 $$
  ) > /dev/null 2>&1 &
}

# The exit code of the first rank that failed; srun's own is only the largest of all ranks', and torchrun's is 1.
attempt_code() {
  local code=''
  [[ ! -r ${MEGATRON_RL_ATTEMPT:-}/end ]] || read -r code _ < "$MEGATRON_RL_ATTEMPT/end"
  [[ -z $ABANDON ]] || code=$REQUEUE
  echo "${code:-$CODE}"
}

# answer CODE: `requeue`, `look` (requeue where a node does not answer any more) or `end`. docs/slurm.md has the table.
answer() {
  case $1 in
    "$REQUEUE" | "$STALLED") echo requeue ;;
    # SIGHUP, SIGUSR1, SIGTERM: a preemption's notice, which goes to the steps only, to ranks that could not handle it yet,
    # or a node that shuts down. Where a person cancels the job, Slurm has set its state before (`leave_to_slurm`).
    129 | 138 | 143) echo requeue ;;
    130) echo end ;; # SIGINT, which only a person sends
    1 | 12[0-9] | 13? | 14?) echo look ;; # what ranks end with when another has vanished
    *) echo end ;;
  esac
}

# run_recipe COMMAND RECIPE [key=value ...]: a whole job of `train`, `sft`, `reward-model` or `evaluate`.
run_recipe() {
  begin_job "$@"
  run_and_wait launch "${COMMAND[@]}"
  finish_job
}

# What comes before the ranks. COMMAND is what they are to run.
begin_job() {
  COMMAND=("$@" launch.processes=null) # Slurm says how many there are
  check_recipe "${COMMAND[@]}"
  begin_attempt
  refuse_more_starts_than "$((MAX_REQUEUES_WITHOUT_PROGRESS + 1))"
}

# What comes after them: the job's exit code, or a requeue.
finish_job() {
  local code
  code=$(attempt_code)
  ((code != 0)) || exit 0
  leave_to_slurm "$code"
  if [[ -n $ABANDON ]]; then
    record_end 143 "the ranks have not stopped in time"
    say "the ranks have not stopped in time; what this attempt has not saved is lost"
  fi
  record_end "$code" "no rank has recorded its end"
  case $(answer "$code") in
    requeue) requeue "$code" ;;
    look)
      say "ended with exit code $code$(see_logs)"
      if ! nodes_answer; then
        leave_to_slurm "$code"
        say "a node of this job does not answer any more"
        requeue "$code"
      fi
      ;;
    *) say "ended with exit code $code$(see_logs)" ;;
  esac
  exit "$code"
}

see_logs() { [[ -z ${MEGATRON_RL_ATTEMPT:-} ]] || echo "; see $MEGATRON_RL_ATTEMPT"; }

# record_end CODE WHY: how the attempt ended, where no rank has written it down.
record_end() {
  [[ -d ${MEGATRON_RL_ATTEMPT:-} && ! -e $MEGATRON_RL_ATTEMPT/end ]] || return 0
  echo "$1 job $(job_name) on $(hostname): $2" > "$MEGATRON_RL_ATTEMPT/end"
}

# Waits for Slurm to end this script, at the latest after its KillWait, where Slurm has decided the job's fate: cancelled, past
# its limit, or requeued for a lost node. This script's exit must not become the job's end then.
leave_to_slurm() {
  local state restarts
  state=$(job_field JobState)
  case $state in
    RUNNING | "") return 0 ;; # 0: a plain return is not one in an EXIT trap
  esac
  restarts=$(job_field Restarts)
  if ((${restarts:-0} > ${SLURM_RESTART_COUNT:-0})); then
    record_end 143 "Slurm has requeued it"
    note_requeue
  else
    record_end 143 "Slurm has ended it: cancelled, or past its time limit"
  fi
  say "stopped; Slurm has decided whether the job runs again"
  sleep 300
  exit "$1"
}

# For batch scripts that bring their own srun, with a `--signal` that goes to the ranks: NeMo-Run's (megatron_rl/launch).
around_srun() {
  begin_job "$@"
  MASTER_ADDR=$(master_address)
  MASTER_PORT=$(master_port)
  export MASTER_ADDR MASTER_PORT
  # Every process sees all GPUs of its node, as in in_job; srun reads this where it is given no --gpu-bind.
  [[ -z ${SLURM_GPUS_ON_NODE:-} ]] || export SLURM_GPU_BIND=none
  answer_end
}

# The same for a conversion, which has neither recipe nor attempts: only its end is answered.
answer_end() {
  trap - USR1 TERM # the srun that follows is not this file's: a signal to this shell ends the script, and so comes here
  trap 'CODE=$?; trap - EXIT ERR; finish_job' EXIT
}

# Where the job's next start begins.
next_start() {
  local step
  if [[ -z ${RUN_DIR:-} ]]; then
    echo "starts again"
    return
  fi
  step=$(newest_step)
  case $step in
    none) echo "starts over: there is no checkpoint" ;;
    sft/*) echo "continues after step ${step#sft/} of the warm-up" ;;
    *) echo "continues after step $step" ;;
  esac
}

# Long before Slurm gives a node up (SlurmdTimeout, minutes), the ranks have noticed.
nodes_answer() {
  timeout 120 srun --overlap --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
    --input=none true
}

note_requeue() { # for `megatron-rl status`
  [[ -z ${MEGATRON_RL_ATTEMPT:-} ]] || job_name > "$MEGATRON_RL_ATTEMPT/requeued"
}

requeue() {
  refuse_more_starts_than "$MAX_REQUEUES_WITHOUT_PROGRESS"
  say "exit code $1: job $(job_name) is requeued, and $(next_start)"
  note_requeue
  scontrol requeue "$(job_name)" || {
    rm -f "${MEGATRON_RL_ATTEMPT:-/nowhere}/requeued"
    say "Slurm did not requeue it; the same submission continues the run"
    return 0
  }
  sleep 300 # Slurm kills this script KillWait seconds from now; if it ended by itself, at SIGTERM too, the job would be over
}

# ------------------------------------------------------------------------------------------------------------------- setup
# A shell that is a rank of something else must not make ranks of what is started here.
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT MEGATRON_RL_ATTEMPT

enter_home() {
  set -E
  trap 'notice USR1' USR1 # from here on, a signal ends the job by way of `finish_job`
  trap 'notice TERM' TERM
  trap 'say "line $LINENO of ${BASH_SOURCE[0]} failed: $BASH_COMMAND"' ERR # set -e alone says nothing
  cd "$MEGATRON_RL_HOME" || die "no folder $MEGATRON_RL_HOME on $(hostname)"
  load_site
  if [[ -z ${MEGATRON_RL_TASKS_PER_NODE:-} ]]; then # else Slurm's tasks may be launchers of several
    # What sbatch was told last beats the site: `submit.sh --ntasks-per-node=1 --cpus-per-task=4 ...`.
    TASKS_PER_NODE=${SLURM_NTASKS_PER_NODE:-$TASKS_PER_NODE}
    CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-$CPUS_PER_TASK}
  fi
  if [[ -z $CONTAINER_IMAGE && -n $VENV ]]; then
    [[ -x $VENV/bin/python ]] || die "no $VENV/bin/python on $(hostname) (VENV in site.sh); is it on a shared file system?"
    PATH=$VENV/bin:$PATH
  fi
  site_setup
  await_servers
}
