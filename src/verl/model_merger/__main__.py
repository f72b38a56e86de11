"""`python3 -m verl.model_merger merge|test …`: from a checkpoint to a Hugging Face directory."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from verl.errors import UserError

DTYPES = ("float32", "bfloat16", "float16")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python3 -m verl.model_merger", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--backend", choices=("fsdp",), default="fsdp", help="training backend that wrote it")
    common.add_argument(
        "--local_dir", type=Path, required=True, help="a role's folder: .../global_step_N/actor or .../critic"
    )
    common.add_argument(
        "--trust_remote_code",
        "--trust-remote-code",
        action="store_true",
        help="run Python code that comes with the model",
    )
    common.add_argument(
        "--base_model", help="LoRA: the model that the adapter was trained on (default: as it names it)"
    )
    merge = commands.add_parser("merge", parents=[common], help="write a directory that from_pretrained loads")
    merge.add_argument("--target_dir", type=Path, required=True, help="new or empty directory, or an earlier merge")
    merge.add_argument(
        "--adapter_only", action="store_true", help="LoRA: write the adapter as peft reads it, without the model"
    )
    merge.add_argument("--dtype", choices=DTYPES, help="precision to write (default: the original model's)")
    test = commands.add_parser("test", parents=[common], help="compare with a Hugging Face directory")
    test.add_argument("--test_hf_dir", type=Path, required=True, help="directory with safetensors files")
    test.add_argument(
        "--atol", type=float, default=1e-6, help="largest absolute difference that passes (default: %(default)s)"
    )
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 the weights differ, 2 something is wrong that the message explains."""
    options = parser().parse_args(arguments)
    # Imported here so that --help and a mistyped option answer at once.
    from verl.model_merger.adapter import export_adapter
    from verl.model_merger.compare import compare
    from verl.model_merger.merge import merge

    try:
        if options.command == "merge":
            if options.adapter_only:
                print(f"adapter: {export_adapter(options.local_dir, options.target_dir)}")
                return 0
            settings = {"dtype": options.dtype, "trust_remote_code": options.trust_remote_code}
            merged = merge(options.local_dir, options.target_dir, base_model=options.base_model, **settings)
            print(merged.summary())
            return 0
        difference = compare(options.local_dir, options.test_hf_dir, options.trust_remote_code, options.base_model)
        print(difference.summary(options.atol))
        return 0 if difference.within(options.atol) else 1
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
