#!/usr/bin/env bash
# slurm/submit.sh [sbatch options] train|sft|reward-model|evaluate|convert|preflight ARGUMENTS...
# slurm/submit.sh [sbatch options] sweep FILE RECIPE [key=value ...]
# slurm/submit.sh [sbatch options] chain RECIPE [key=value ...]     convert, train, evaluate, export
# slurm/submit.sh [sbatch options] serve MODEL [options of vLLM's server]
# slurm/submit.sh --server=NAME=JOB/PATH ... train|sweep|... : the variable NAME is http://HOST:PORT/PATH of the server of JOB
#
# sbatch with the site's options (slurm/site.sh), then yours, which win. A recipe that cannot run is refused here already,
# where there is a Python to check it with. What sbatch prints is printed; with --parsable, only the job's number.
set -euo pipefail
MEGATRON_RL_HOME=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export MEGATRON_RL_HOME
cd "$MEGATRON_RL_HOME" # recipes and other paths are those that the job sees
# shellcheck source=slurm/lib.sh
source "$MEGATRON_RL_HOME/slurm/lib.sh"

usage() {
  sed -n '2,6s/^# //p' "${BASH_SOURCE[0]}"
  exit "$1"
}

COMMANDS=' train sft reward-model evaluate convert preflight sweep chain serve '
is_command() { [[ -n $1 && $COMMANDS == *" $1 "* ]]; }

given=("$@")
# as_typed WORDS...: a line for a shell. Relative paths are seen from the folder that all jobs start in.
as_typed() {
  local line
  printf -v line ' %q' "$@"
  printf 'cd %q && slurm/submit.sh%s' "$MEGATRON_RL_HOME" "$line"
}

# sbatch's options, up to the command. A short one takes the next word as its value, but for those that have none; a long
# one has its value behind `=`.
options=() servers=()
while [[ ${1:-} == -* ]]; do
  case $1 in
    -h | --help) usage 0 ;;
    --server=*) servers+=("${1#*=}") ;;
    -[HIkOQsvVW]) options+=("$1") ;;
    -?)
      options+=("$1" "${2:?$1 needs a value}")
      shift
      ;;
    *=* | -[!-]*) options+=("$1") ;;
    *)
      [[ ${2:-} == -* ]] || is_command "${2:-}" || die "write $1 and its value as one word: $1=${2:-}" 2
      options+=("$1")
      ;;
  esac
  shift
done
command=${1:-}
is_command "$command" || usage 2 >&2
(($# >= 2)) || usage 2 >&2
shift
load_site
if [[ -n $VENV && -x $VENV/bin/python ]]; then PATH=$VENV/bin:$PATH; fi

# The servers that the job uses: it may start once they have, and finds their addresses itself.
placeholders=() server_jobs=()
for server in ${servers[@]+"${servers[@]}"}; do
  [[ $server =~ ^([A-Za-z_][A-Za-z0-9_]*)=([0-9]+)(/[^[:space:]]*)?$ ]] ||
    die "--server=$server: write the variable, the number of a job of \`slurm/submit.sh serve\`, and a path: --server=JUDGE_URL=12/v1" 2
  job=${BASH_REMATCH[2]}
  [[ -d $(server_folder "$job") ]] || die "--server=$server: job $job was not submitted with \`slurm/submit.sh serve\` here" 2
  in_queue "$job" || die "--server=$server: job $job is not in the queue any more" 2
  placeholders+=("${BASH_REMATCH[1]}=http://server-of-job-$job${BASH_REMATCH[3]}")
  server_jobs+=("$job")
done
if ((${#servers[@]})); then
  [[ $command != serve && $command != convert ]] || die "--server has no effect on $command" 2
  export MEGATRON_RL_SERVERS="${servers[*]}"
  after=$(IFS=:; echo "after:${server_jobs[*]}")
fi

# depend_on CONDITION: adds it to the job's dependencies, those that were given included.
depend_on() {
  local i
  for i in "${!options[@]}"; do
    case ${options[i]} in
      --dependency=*) options[i]+=",$1"; return ;;
      -d) options[i + 1]+=",$1"; return ;;
    esac
  done
  options+=("--dependency=$1")
}

# submit COMMAND ARGUMENTS...: prints what sbatch prints, and notes a server's new job, or a server's new client.
tasks=(--ntasks-per-node="$TASKS_PER_NODE")
[[ -z $CPUS_PER_TASK ]] || tasks+=(--cpus-per-task="$CPUS_PER_TASK")
submit() {
  local command=$1 script=$1 said number job
  case $command in
    train | sft | reward-model | evaluate) script=recipe ;; # which takes the command too
    *) shift ;;
  esac
  said=$(MEGATRON_RL_SUBMITTED=$typed sbatch --chdir="$MEGATRON_RL_HOME" --job-name="megatron-rl-$command" \
    ${SITE_SBATCH[@]+"${SITE_SBATCH[@]}"} "${tasks[@]}" ${options[@]+"${options[@]}"} \
    "$MEGATRON_RL_HOME/slurm/$script.sbatch" "$@")
  [[ -z $said ]] || echo "$said"
  [[ $said =~ [0-9]+ ]] || return 0 # --test-only
  number=${BASH_REMATCH[0]}
  if [[ $command == serve ]]; then
    mkdir -p "$(server_folder "$number")"
    rm -f "$(server_folder "$number")/clients" # of an earlier job with that number
  fi
  [[ $command != convert ]] || return 0
  for job in ${server_jobs[@]+"${server_jobs[@]}"}; do echo "$number" >> "$(server_folder "$job")/clients"; done
}

# processes_of OPTIONS...: the job's number of ranks; `unknown` where Slurm may choose the number of nodes (--nodes=2-4).
processes_of() {
  local nodes=1 per_node=$TASKS_PER_NODE # 1: as in the batch scripts
  while (($#)); do
    case $1 in
      --nodes=* | --ntasks-per-node=*) ;;
      -N) set -- "--nodes=${2:-}" "${@:3}" ;;
      -N*) set -- "--nodes=${1#-N}" "${@:2}" ;;
    esac
    case $1 in
      --nodes=*) nodes=${1#*=} ;;
      --ntasks-per-node=*) per_node=${1#*=} ;;
    esac
    shift
  done
  if [[ $nodes =~ ^[0-9]+$ && $per_node =~ ^[0-9]+$ ]]; then echo $((nodes * per_node)); else echo unknown; fi
}
typed=$(as_typed "${given[@]}")
world=$(processes_of ${SITE_SBATCH[@]+"${SITE_SBATCH[@]}"} "${tasks[@]}" ${options[@]+"${options[@]}"})
[[ $world != unknown ]] || say "the number of nodes is Slurm's choice, so the job checks at its start whether the recipe fits it"

if [[ $command == chain ]]; then
  plan=$(env ${placeholders[@]+"${placeholders[@]}"} python -m megatron_rl.launch chain "$MEGATRON_RL_HOME" "$world" "$@") || die "nothing was submitted" 2
  chained=(${options[@]+"${options[@]}"}) previous=''
  while read -r line; do
    eval "words=($line)" # quoted by Python's shlex
    options=(${chained[@]+"${chained[@]}"} --parsable --kill-on-invalid-dep=yes)
    # shellcheck disable=SC2154
    typed=$(as_typed ${chained[@]+"${chained[@]}"} ${servers[@]+"${servers[@]/#/--server=}"} "${words[@]}")
    if [[ ${words[0]} == convert ]]; then options+=(--nodes=1 --ntasks-per-node=1); fi
    [[ -z $previous ]] || depend_on "afterok:$previous"
    [[ ${words[0]} == convert || ${#servers[@]} == 0 ]] || depend_on "$after"
    previous=$(submit "${words[@]}")
    previous=${previous%%;*} # of several clusters sbatch adds the name
    echo "$previous ${words[0]}"
  done <<< "$plan"
  exit
fi

# The words that the job is to run, checked here.
case $command in
  train | sft | reward-model | evaluate)
    checked=(megatron_rl "$command" "$@" launch.processes=null --check)
    [[ $world == unknown ]] || checked+=(--processes "$world")
    ;;
  sweep) checked=(megatron_rl.launch sweep "$MEGATRON_RL_HOME" "$world" "$@") ;;
  *) checked=() ;;
esac
if ((${#checked[@]})); then
  if python -c 'import omegaconf' 2> /dev/null; then
    env ${placeholders[@]+"${placeholders[@]}"} python -m "${checked[@]}" > /dev/null || die "nothing was submitted" 2
  else
    say "no Python with omegaconf here, so the recipe is checked when the job starts"
  fi
fi

if [[ $command == sweep ]]; then
  file=$1
  shift
  count=$(sweep_lines "$file" | wc -l)
  ((count > 0)) || die "$file has no line to run" 2
  # The tasks read a copy: the file may be edited while they wait.
  mkdir -p "$MEGATRON_RL_HOME/runs/.sweeps"
  copy=$(mktemp "$MEGATRON_RL_HOME/runs/.sweeps/$(basename "$file").XXXXXX")
  sweep_lines "$file" > "$copy"
  set -- "$copy" "$@"
  options=("--array=0-$((count - 1))" ${options[@]+"${options[@]}"})
fi
((${#servers[@]} == 0)) || depend_on "$after"
submit "$command" "$@"
