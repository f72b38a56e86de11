"""`python3 -m verl.trainer.main_generation data.path=FILE data.output_path=FILE`: responses to a file of prompts."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from verl.config.command import handle_flags, run_main
from verl.config.compose import compose, print_notice
from verl.config.schema import GenerationConfig

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

    from verl.core.controller.roles import choose_device
    from verl.core.model_engine.loading import load_tokenizer, resolve_model_path
    from verl.core.rollout_engine.standalone import build_engine, sampling_params
    from verl.data.tables import check_output, read_table, with_column, write_table

    path, table = read_table(config.data.path, "data.path")
    output = check_output(config.data.output_path, "data.output_path")
    model_path = resolve_model_path(config.model.path, "model.path")
    tokenizer = load_tokenizer(
        config.model.tokenizer_path or model_path, trust_remote_code=config.model.trust_remote_code, key="model.path"
    )
    prompts = tokenized_prompts(path, config, tokenizer)
    placing = {"model_path": model_path, "device": choose_device(config.trainer.device), "tokenizer": tokenizer}
    engine, stops, notice = build_engine(config.model, config.rollout, **placing, key="model.path")
    if notice:
        print_notice(notice)
    try:
        how = sampling_params(config.rollout, stops, config.data.n_samples)
        texts = generate(engine, prompts, how, config.data.batch_size, tokenizer)
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
