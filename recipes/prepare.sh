#!/usr/bin/env bash
# recipes/prepare.sh NAME...    downloads datasets and writes them as the recipes read them, to $DATA/<name>/<split>.jsonl
#
# On a machine with a network, in the environment of the package. Where there is none, copy $DATA. One name is:
#   toolrl awpo_steps dapo_math_17k deepscaler eurus2_code gsm8k aime24 aime25 amc23 math500 maze rlhf_prompts geometry3k
#   arena_hard_v01 arena_hard_v2 creative_writing
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
DATA=${DATA:-data}
PYTHON=${PYTHON:-python}

# prepare FORMAT INPUT OUTPUT [options of tools/prepare_data.py]: INPUT is a file or the name of a dataset on the hub.
prepare() {
  local format=$1 input=$2 output=$3
  shift 3
  "$PYTHON" tools/prepare_data.py "$format" --input "$input" --output "$DATA/$output" "$@"
}

# fetch ADDRESS FILE: once
fetch() {
  mkdir -p "$(dirname "$DATA/$2")"
  [[ -s $DATA/$2 ]] || curl --fail --location --silent --show-error --output "$DATA/$2" "$1"
}

# arena_hard NAME VERSION BASELINE [options]: questions with that model's answers, as the authors publish them.
arena_hard() {
  local name=$1 address=$ARENA_HARD/arena-hard-$2 baseline=$3
  shift 3
  fetch "$address/question.jsonl" "$name/source/question.jsonl"
  fetch "$address/model_answer/$baseline.jsonl" "$name/source/$baseline.jsonl"
  prepare arena_hard "$DATA/$name/source/question.jsonl" "$name/test.jsonl" --baseline "$DATA/$name/source/$baseline.jsonl" "$@"
}

ARENA_HARD=https://huggingface.co/datasets/lmarena-ai/arena-hard-auto/resolve/main/data
TOOLRL=https://github.com/qiancheng0/ToolRL/raw/main/dataset/rlla_4k
GEOMETRY3K=https://huggingface.co/datasets/hiyouga/geometry3k/resolve/main/data
QWEN_MATH=https://github.com/QwenLM/Qwen2.5-Math/raw/main/evaluation/data

dataset() {
  case $1 in
    toolrl) # 4,000 prompts from ToolACE, Hammer and xLAM
      for split in train test; do
        fetch "$TOOLRL/$split.parquet" "toolrl/source/$split.parquet"
        prepare toolrl "$DATA/toolrl/source/$split.parquet" "toolrl/$split.jsonl"
      done
      ;;
    awpo_steps) # every turn of ToolACE's, Hammer's (xLAM's with random names) and xLAM's dialogues; xLAM wants an account on the hub
      prepare toolace Team-ACE/ToolACE awpo_steps/toolace.jsonl --system recipes/_data/toolrl_system.txt
      for format in hammer xlam; do
        prepare "$format" Salesforce/xlam-function-calling-60k "awpo_steps/$format.jsonl" --system recipes/_data/toolrl_system.txt
      done
      ;;
    dapo_math_17k) prepare dapo_math BytedTsinghua-SIA/DAPO-Math-17k dapo_math_17k/train.jsonl ;; # repeated rows are dropped
    deepscaler) prepare deepscaler agentica-org/DeepScaleR-Preview-Dataset deepscaler/train.jsonl ;;
    eurus2_code)
      prepare eurus PRIME-RL/Eurus-2-RL-Data eurus2_code/train.jsonl --ability code
      prepare eurus PRIME-RL/Eurus-2-RL-Data eurus2_code/test.jsonl --ability code --split validation
      ;;
    gsm8k)
      for split in train test; do
        prepare gsm8k openai/gsm8k "gsm8k/$split.jsonl" --subset main --split "$split"
      done
      ;;
    aime24 | amc23) # columns problem and answer, as DeepScaleR has them
      fetch "$QWEN_MATH/$1/test.jsonl" "$1/source/test.jsonl"
      prepare deepscaler "$DATA/$1/source/test.jsonl" "$1/test.jsonl"
      ;;
    aime25) prepare deepscaler math-ai/aime25 aime25/test.jsonl --split test ;;
    math500) prepare deepscaler HuggingFaceH4/MATH-500 math500/test.jsonl --split test ;;
    rlhf_prompts) prepare prompts OpenRLHF/prompt-collection-v0.1 rlhf_prompts/train.jsonl ;;
    geometry3k) # read as Parquet, with the images in it
      for split in train test; do fetch "$GEOMETRY3K/$split-00000-of-00001.parquet" "geometry3k/$split.parquet"; done
      ;;
    arena_hard_v01) arena_hard arena_hard_v01 v0.1 gpt-4-0314 ;;
    arena_hard_v2) arena_hard arena_hard_v2 v2.0 o3-mini-2025-01-31 --category hard_prompt ;;
    creative_writing) arena_hard creative_writing v2.0 gemini-2.0-flash-001 --category creative_writing ;;
    maze) "$PYTHON" recipes/shrinkage/maze.py "$DATA/maze" ;; # generated, no download
    *)
      echo "recipes/prepare.sh: no dataset $1" >&2
      sed -n '5,6s/^# *//p' "${BASH_SOURCE[0]}" >&2
      exit 2
      ;;
  esac
}

(($#)) || { sed -n '2,5s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2; }
for name in "$@"; do dataset "$name"; done
