#!/usr/bin/env bash
# Three steps of GRPO on real GSM8K text with the reward function of examples/custom_reward.py, on a CPU. The model is tiny
# and random, with one token a byte, so its score stays 0: this shows the data's way through every stage, in a minute.
#
#   GSM8K=folder-with-train.jsonl-and-test.jsonl bash examples/tiny/gsm8k_random.sh [overrides]
#
# Without GSM8K the dataset is downloaded. TINY_OUT=folder names the output folder.
set -euo pipefail
absolute() { case "$1" in /*) echo "$1" ;; *) echo "$PWD/$1" ;; esac; }
out="$(absolute "${TINY_OUT:-outputs/gsm8k_random}")"
source_folder=()
if [ -n "${GSM8K:-}" ]; then source_folder=(--local_dataset_path "$(absolute "$GSM8K")"); fi
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

if [ -d .venv/bin ]; then PATH="$PWD/.venv/bin:$PATH"; fi
python3 examples/data_preprocess/gsm8k.py --local_save_dir "$out/data" ${source_folder[@]+"${source_folder[@]}"}
python3 examples/tiny/make_model.py --bytes --out "$out/model"
exec python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$out/data/train.parquet" \
    data.val_files="$out/data/test.parquet" \
    data.train_batch_size=8 \
    data.val_max_samples=16 \
    data.max_prompt_length=1024 \
    data.max_response_length=64 \
    actor_rollout_ref.model.path="$out/model" \
    actor_rollout_ref.actor.ppo_mini_batch_size=8 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.rollout.n=4 \
    custom_reward_function.path=examples/custom_reward.py \
    custom_reward_function.name=compute_reward \
    trainer.project_name=tiny \
    trainer.experiment_name=gsm8k_random \
    trainer.default_local_dir="$out/run" \
    trainer.resume_mode=disable \
    trainer.total_training_steps=3 \
    "$@"
