#!/usr/bin/env bash
# GRPO on the tiny arithmetic task. Further overrides come last and win:
#
#   bash examples/tiny/grpo.sh actor_rollout_ref.actor.optim.lr=5e-4 trainer.total_training_steps=20
#
# TINY_OUT=folder names the folder for checkpoints, metrics.jsonl and report.html; a run killed there is resumed by the
# same command. Without it each run gets a new folder under outputs/tiny. TINY_DATA=folder has train.parquet and
# test.parquet; they are made where they are missing. Paths among the overrides start at the repository's root.
set -euo pipefail
absolute() { case "$1" in /*) echo "$1" ;; *) echo "$PWD/$1" ;; esac; }
if [ -n "${TINY_OUT:-}" ]; then TINY_OUT="$(absolute "$TINY_OUT")"; fi
if [ -n "${TINY_DATA:-}" ]; then TINY_DATA="$(absolute "$TINY_DATA")"; fi
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

if [ -d .venv/bin ]; then PATH="$PWD/.venv/bin:$PATH"; fi
out="${TINY_OUT:-outputs/tiny/$(date +%Y%m%d-%H%M%S)-$$}"
data="${TINY_DATA:-outputs/tiny/data}"

if [ ! -f "$data/train.parquet" ] || [ ! -f "$data/test.parquet" ]; then
    python3 examples/tiny/make_data.py --out "$data"
fi
echo "output: $out"
exec python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$data/train.parquet" \
    data.val_files="$data/test.parquet" \
    data.train_batch_size=64 \
    data.max_prompt_length=8 \
    data.max_response_length=5 \
    actor_rollout_ref.model.path=examples/tiny/model \
    actor_rollout_ref.model.enable_gradient_checkpointing=False \
    actor_rollout_ref.actor.optim.lr=1e-3 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.rollout.name=native \
    actor_rollout_ref.rollout.n=16 \
    trainer.project_name=tiny \
    trainer.experiment_name=grpo \
    trainer.default_local_dir="$out" \
    trainer.total_training_steps=40 \
    trainer.test_freq=10 \
    "$@"
