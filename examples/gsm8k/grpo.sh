#!/usr/bin/env bash
# GRPO on GSM8K with a 0.5B model on one GPU, with the settings of the learning curve in docs/benchmarks.md.
#   MODEL=Qwen/Qwen2.5-Coder-0.5B-Instruct DATA=~/data/gsm8k bash examples/gsm8k/grpo.sh [overrides]
# DATA is made by examples/data_preprocess/gsm8k.py --local_save_dir DATA. Stop with Ctrl-C; the same command goes on.
set -euo pipefail
model="${MODEL:-Qwen/Qwen2.5-Coder-0.5B-Instruct}"
data="${DATA:-$HOME/data/gsm8k}"
exec python3 -m verl.trainer.main_ppo \
    data.train_files="$data/train.parquet" \
    data.val_files="$data/test.parquet" \
    data.train_batch_size=160 \
    data.max_prompt_length=512 \
    data.max_response_length=512 \
    actor_rollout_ref.model.path="$model" \
    actor_rollout_ref.actor.optim.lr=4e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=5 \
    actor_rollout_ref.actor.ppo_mini_batch_size=40 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=65536 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.max_num_seqs=1280 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
    trainer.project_name=gsm8k \
    trainer.experiment_name=grpo \
    trainer.test_freq=10 \
    "$@"
