#!/usr/bin/env bash
# torchrun.sh NODES PROCESSES ARGUMENTS OF megatron-rl...: one torchrun on this node, for LAUNCHER=torchrun in site.sh.
#
# torchrun answers any signal by killing its workers within 30 seconds. They need longer to save, so the signals go past it,
# from this shell to the workers.
set -euo pipefail
nodes=$1 processes=$2
shift 2

(
  trap '' USR1 TERM
  export TORCHELASTIC_SIGNALS_TO_HANDLE=SIGINT
  exec python -m torch.distributed.run --nnodes="$nodes" --nproc-per-node="$processes" --node-rank="$SLURM_NODEID" \
    --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" --max-restarts=0 -m megatron_rl "$@"
) &
torchrun=$!

pass_on() {
  local children
  children=$(cat /proc/"$torchrun"/task/*/children 2> /dev/null) || return 0
  # shellcheck disable=SC2086
  kill -s "$1" $children 2> /dev/null || true
}
trap 'pass_on USR1' USR1
trap 'pass_on TERM' TERM
while true; do
  code=0
  wait "$torchrun" || code=$?
  kill -0 "$torchrun" 2> /dev/null || exit "$code"
done
