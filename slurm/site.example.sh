# shellcheck shell=bash disable=SC2034
# Everything that is particular to your cluster. Copy this file to slurm/site.sh and edit the copy; nothing else needs to
# be touched. It is read by slurm/submit.sh where you submit and by the job on its first node (never by sbatch itself).

# Options of sbatch that every job here needs. What is given to slurm/submit.sh comes after them, and so wins.
SITE_SBATCH=(
  --partition=gpu
  --account=my-project
  --time=12:00:00
  --gpus-per-node=8 # or --gres=gpu:8
  --exclusive
  --mem=0
)

# Processes per node: one per GPU. CPUS_PER_TASK: cores for each of them (cores of a node / processes per node).
TASKS_PER_NODE=8
CPUS_PER_TASK=14

# srun: Slurm starts one process per GPU. torchrun: Slurm starts one torchrun per node.
LAUNCHER=srun

# Where Python and the package are: a virtual environment on the shared file system (bare metal), or inside the image.
VENV="$MEGATRON_RL_HOME/.venv"

# Container (Pyxis/Enroot); empty for bare metal. Mount the folders of code, models, data and runs under their own names, and
# one on the node's own disk for MEGATRON_RL_CACHE.
CONTAINER_IMAGE=
CONTAINER_MOUNTS= # e.g. "/lustre:/lustre,$MEGATRON_RL_HOME:$MEGATRON_RL_HOME,/local:/local"

# What has to happen on a node before Python starts, outside the container: modules, limits. srun hands the environment on.
site_setup() {
  # A CUDA 13 toolkit, by your cluster's name for it: nvcc compiles kernels during a run (FlashInfer's, and all of
  # rollout.fp8), so it is needed where jobs run, not only where the package was installed. A container has its own.
  if [[ -z $CONTAINER_IMAGE ]] && command -v module > /dev/null; then module load cuda/13.0; fi
  ulimit -n 65536 2> /dev/null || true
}

# Where the recipes of recipes/ find model folders and prepared data, on the shared file system.
export MODELS="${MODELS:-$MEGATRON_RL_HOME/models}"
export DATA="${DATA:-$MEGATRON_RL_HOME/data}"

# Where compiled kernels are kept, on the node's own disk: without it <TMPDIR or /tmp>/megatron_rl-<uid>/cache. In a container
# it has to be a folder that is mounted; your home is not. Where /tmp is the job's alone, a requeue compiles again without it.
# export MEGATRON_RL_CACHE=/local/$USER/megatron_rl

# Variables for every process. Where the image sets one of them itself, its value wins: --container-env=NAME in SITE_SRUN.
# export HF_HUB_OFFLINE=1      # datasets that a recipe names on the hub: only from the cache (HF_HOME), no rank asks the hub
export NCCL_DEBUG=WARN
# export NCCL_SOCKET_IFNAME=bond0 NCCL_IB_HCA=mlx5   # the network between nodes, where NCCL does not find it by itself
# export GLOO_SOCKET_IFNAME=bond0                    # the same for the small messages between hosts
# export UCX_TLS=rc UCX_NET_DEVICES=mlx5_0:1

# A job whose requeues bring no further step is not requeued more often than this.
MAX_REQUEUES_WITHOUT_PROGRESS=3

# How long a job waits for the servers that it was given with submit.sh --server, in minutes.
SERVER_WAIT_MINUTES=30
# How often a server looks whether jobs that use it are left in the queue, in seconds.
SERVER_LOOKS_EVERY=20

# Extra options of srun, e.g. (--mpi=none --cpu-bind=cores).
SITE_SRUN=()
