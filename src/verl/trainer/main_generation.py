"""`python3 -m verl.trainer.main_generation data.path=FILE data.output_path=FILE`: responses to a file of prompts."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from verl.config.command import handle_flags, run_main
from verl.config.compose import compose, print_notice
from verl.config.schema import GenerationConfig, RolloutConfig

if TYPE_CHECKING:
    from pathlib import Path

    from verl.core.rollout_engine.api import RolloutEngine, SamplingParams

USAGE = """usage: python3 -m verl.trainer.main_generation data.path=FILE data.output_path=FILE model.path=MODEL [key=value ...]

Writes the rows of data.path with a column `responses`, a list of data.n_samples texts; main_eval scores such a file.
"""


def main(argv: list[str]) -> int:
    """Generate and write; nothing is written unless every prompt has its responses."""
    config: GenerationConfig = compose(handle_flags(argv, GenerationConfig, USAGE), GenerationConfig)
    import pyarrow as pa

    from verl.core.model_engine.loading import load_tokenizer, resolve_model_path
    from verl.data.tables import check_output, read_table, with_column, write_table

    path, table = read_table(config.data.path, "data.path")
    output = check_output(config.data.output_path, "data.output_path")
    model_path = resolve_model_path(config.model.path, "model.path")
    tokenizer = load_tokenizer(
        config.model.tokenizer_path or model_path, trust_remote_code=config.model.trust_remote_code, key="model.path"
    )
    prompts = tokenized_prompts(path, config, tokenizer)
    engine, stops = build_engine(config, model_path, tokenizer)
    try:
        texts = generate(engine, prompts, sampling(config, stops), config.data.batch_size, tokenizer)
    finally:
        engine.close()
    write_table(with_column(table, "responses", pa.array(texts, pa.list_(pa.string()))), output)
    print(f"{output}: {len(texts)} prompts with {config.data.n_samples} responses each")
    return 0


def tokenized_prompts(path: Path, config: GenerationConfig, tokenizer) -> list[list[int]]:
    """Token ids of each prompt, at most rollout.prompt_length long. Raises DataError as training does."""
    from verl.data.reading import read_rows
    from verl.data.schema import check_rows
    from verl.data.tokenizing import tokenize_rows, truncate
    from verl.errors import DataError

    data, limit = config.data, config.rollout.prompt_length
    rows = check_rows(
        read_rows(path, [data.prompt_key], {"data.prompt_key": data.prompt_key}), data.prompt_key, "data_source", False
    )
    ids = tokenize_rows(rows, tokenizer, data.apply_chat_template_kwargs)
    long = [i for i, row in enumerate(ids) if len(row) > limit]
    if long and data.truncation == "error":
        raise DataError(
            f"{rows[long[0]].where}: {len(ids[long[0]])} tokens are more than rollout.prompt_length={limit} (as are "
            f"{len(long)} of {len(ids)} prompts). Raise it, or cut them with data.truncation=left, right or middle."
        )
    if long:
        print_notice(
            f"{len(long)} of {len(ids)} prompts are longer than {limit} tokens and were cut ({data.truncation})."
        )
    return [truncate(row, limit, data.truncation) for row in ids]


def build_engine(config: GenerationConfig, model_path: str, tokenizer) -> tuple[RolloutEngine, tuple[int, ...]]:
    """The engine with the model's weights, and the tokens that end a response."""
    import torch

    from verl.core.controller.roles import choose_device
    from verl.core.model_engine.loading import load_config, load_policy
    from verl.core.rollout_engine.factory import DTYPES, make_rollout_engine

    rollout, code = config.rollout, config.model.trust_remote_code
    device = choose_device(config.trainer.device)
    dtype = DTYPES[rollout.dtype] if rollout.dtype else (torch.bfloat16 if device.type == "cuda" else torch.float32)
    hf_config = load_config(model_path, trust_remote_code=code, key="model.path")
    model = load_policy(model_path, hf_config, dtype, trust_remote_code=code, key="model.path").requires_grad_(False)
    weights = dict(model.named_parameters())
    engine, notice = make_rollout_engine(
        engine_config(config),
        model_path=model_path,
        hf_config=hf_config,
        device=device,
        trainer_weights=weights,
        trainer_dtype=dtype,
        max_prompt_length=rollout.prompt_length,
        max_response_length=rollout.response_length,
        pad_token_id=tokenizer.pad_token_id,
    )
    if notice:
        print_notice(notice)
    engine.wake()
    engine.load_weights(weights.items(), version=0)
    more = getattr(model.generation_config, "eos_token_id", None)
    stops = {tokenizer.eos_token_id, *([more] if isinstance(more, int) else more or [])}
    return engine, tuple(sorted(stops))


def engine_config(config: GenerationConfig) -> RolloutConfig:
    """What the engines read, in the form in which the trainer gives it to them."""
    rollout = config.rollout
    return RolloutConfig(
        name=rollout.name,
        dtype=rollout.dtype,
        seed=rollout.seed,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        enforce_eager=rollout.enforce_eager,
        tensor_model_parallel_size=rollout.tensor_model_parallel_size,
    )


def sampling(config: GenerationConfig, stops: tuple[int, ...]) -> SamplingParams:
    """Greedy with rollout.do_sample=False."""
    from verl.core.rollout_engine.api import SamplingParams

    rollout = config.rollout
    return SamplingParams(
        max_tokens=rollout.response_length,
        n=config.data.n_samples,
        temperature=rollout.temperature if rollout.do_sample else 0.0,
        top_k=rollout.top_k if rollout.do_sample else -1,
        top_p=rollout.top_p if rollout.do_sample else 1.0,
        stop_token_ids=stops,
        seed=rollout.seed,
    )


def generate(
    engine: RolloutEngine, prompts: list[list[int]], how: SamplingParams, batch_size: int, tokenizer
) -> list[list[str]]:
    """`how.n` texts for each prompt. Prompt number i has random stream i, so batches do not change what is drawn."""
    from rich.progress import track

    from verl.core.rollout_engine.api import Request

    texts: list[list[str]] = []
    starts = range(0, len(prompts), batch_size)
    for start in track(starts, "generating", disable=not sys.stderr.isatty()):
        requests = [Request(ids, how, start + i) for i, ids in enumerate(prompts[start : start + batch_size])]
        for completions in engine.generate(requests):
            texts.append(tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True))
    return texts


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
