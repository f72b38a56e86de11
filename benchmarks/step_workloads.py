"""The work that grpo_step.py times: model, prompts, rewards and settings, the same for this trainer and for TRL."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

HERE = Path(__file__).resolve().parent
CHARACTERS = "0123456789+-*= #?\nabcdefghijklmnopqrstuvwxyz"
W2_SHAPE = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3}
SMOKE_SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}


@dataclass
class Workload:
    """One kind of step. Batches count prompts; lengths are tokens.

    overrides: of this trainer beyond what the fields say. trl: further arguments of TRL's GRPOConfig.
    """

    model: str
    train_file: str
    reward_name: str
    prompts: int
    samples: int
    mini_batch: int
    max_prompt: int
    max_response: int
    learning_rate: float
    kl_coef: float
    device: str
    overrides: list[str] = field(default_factory=list)
    trl: dict = field(default_factory=dict)

    @property
    def reward_file(self) -> str:
        return str(HERE / "step_rewards.py")

    def our_overrides(self, output: Path) -> list[str]:
        """The command line of `verl.trainer.main_ppo` for this work."""
        actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
        return [
            f"data.train_files={self.train_file}",
            "data.val_files=null",
            f"data.train_batch_size={self.prompts}",
            f"data.max_prompt_length={self.max_prompt}",
            f"data.max_response_length={self.max_response}",
            f"actor_rollout_ref.model.path={self.model}",
            f"{rollout}.n={self.samples}",
            f"{rollout}.temperature=1.0",
            f"{actor}.ppo_mini_batch_size={self.mini_batch}",
            f"{actor}.optim.lr={self.learning_rate}",
            f"{actor}.use_kl_loss=True",
            f"{actor}.kl_loss_coef={self.kl_coef}",
            f"custom_reward_function.path={self.reward_file}",
            f"custom_reward_function.name={self.reward_name}",
            f"trainer.device={self.device}",
            f"trainer.default_local_dir={output}",
            "trainer.total_epochs=1000",
            "trainer.resume_mode=disable",
            *self.overrides,
        ]

    def trl_settings(self) -> dict:
        """Arguments of TRL's GRPOConfig for this work; `updates_per_step` is taken out by trl_reference.py."""
        update = self.mini_batch * self.samples
        micro = self.trl.get("per_device_train_batch_size", update)
        return {
            "per_device_train_batch_size": micro,
            "gradient_accumulation_steps": update // micro,
            "generation_batch_size": self.prompts * self.samples,
            "num_generations": self.samples,
            "max_completion_length": self.max_response,
            "learning_rate": self.learning_rate,
            "beta": self.kl_coef,
            "temperature": 1.0,
            "use_cpu": self.device == "cpu",
            "bf16": self.device != "cpu",
            "updates_per_step": self.prompts // self.mini_batch,
            **self.trl,
        }


def cpu_workload(folder: Path, smoke: bool) -> Workload:
    """W2: sums of two numbers for a random Qwen2 of 0.74M parameters, 64 prompts x 16 samples, one update, float32.

    smoke: a smaller model and 4 prompts x 2 samples, which only show that the benchmark runs.
    """
    model = _random_model(folder / "model", SMOKE_SHAPE if smoke else W2_SHAPE)
    train = _write_sums(folder / "train.parquet", 2000)
    prompts, samples = (4, 2) if smoke else (64, 16)
    shape = {"prompts": prompts, "samples": samples, "mini_batch": prompts, "max_prompt": 16, "max_response": 16}
    settings = {"learning_rate": 1e-4, "kl_coef": 0.001, "device": "cpu"}
    return Workload(model, train, "starts_with_answer", **shape, **settings, trl={"gradient_checkpointing": False})


def gpu_workload(folder: Path, model: str, gsm8k: str) -> Workload:
    """W1: GSM8K, 256 prompts x 5 samples, 512 + 512 tokens, four updates of 64 prompts, bf16.

    model: a Hugging Face folder. gsm8k: a folder with train.jsonl and test.jsonl, or with the train.parquet made of them.
    """
    train = Path(gsm8k, "train.parquet").resolve()
    if not train.is_file():
        script = HERE.parent / "examples/data_preprocess/gsm8k.py"
        command = [sys.executable, str(script), "--local_save_dir", str(folder), "--local_dataset_path", gsm8k]
        subprocess.run(command, check=True)
        train = folder / "train.parquet"
    vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.4}
    return Workload(
        str(Path(model).resolve()),
        str(train),
        "gsm8k_answer",
        prompts=256,
        samples=5,
        mini_batch=64,
        max_prompt=512,
        max_response=512,
        learning_rate=1e-6,
        kl_coef=0.001,
        device="cuda",
        overrides=[
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=65536",
            "actor_rollout_ref.rollout.max_num_seqs=1280",
        ],
        trl={"per_device_train_batch_size": 64, "gradient_checkpointing": False, **vllm},
    )


# On one 141 GB device the float32 state of 7.6B parameters has room for the optimizer's part while nothing else is there.
OFFLOAD = [
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
    "actor_rollout_ref.ref.fsdp_config.param_offload=True",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.7",
]


def with_random_shape(work: Workload, config, folder: Path, dtype: str = "bfloat16") -> None:
    """Give `work` a model of this shape with random weights, and its own model's tokenizer; written to `folder`.

    Raises:
        ValueError: the tokenizer has more tokens than the shape.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(work.model)
    if len(tokenizer) > config.vocab_size:
        raise ValueError(f"{work.model} has {len(tokenizer)} tokens, the shape {config.vocab_size}")
    torch.manual_seed(0)
    with torch.device("cuda" if work.device == "cuda" else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.config.eos_token_id, model.config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.save_pretrained(folder, max_shard_size="2GB")
    tokenizer.save_pretrained(folder)
    work.model = str(folder)


def _random_model(folder: Path, shape: dict[str, int]) -> str:
    """A random Qwen2 and a tokenizer of one token a character."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *CHARACTERS])}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        dtype="float32",
        **shape,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def _write_sums(path: Path, count: int) -> str:
    draw = random.Random(0)
    pairs = [(draw.randint(0, 99), draw.randint(0, 99)) for _ in range(count)]
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{a}+{b}="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"index": index},
        }
        for index, (a, b) in enumerate(pairs)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)
