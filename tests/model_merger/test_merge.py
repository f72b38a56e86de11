"""Merging a role's folder: the result is the model, and nothing is lost, invented or overwritten on the way."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from verl.core.checkpoint_engine.disk import save_hf_side, save_sharded
from verl.core.checkpoint_engine.store import CheckpointStore
from verl.errors import CheckpointError, ConfigError
from verl.model_merger.__main__ import main
from verl.model_merger.compare import compare
from verl.model_merger.merge import merge

SIZE = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
FAMILIES = {"qwen2": Qwen2Config, "llama": LlamaConfig}
IDS = torch.tensor([[1, 7, 3, 40, 22, 5]])


def build(family: str, tied: bool, head=AutoModelForCausalLM, dtype="float32", **extra):
    torch.manual_seed(0)
    config = FAMILIES[family](**SIZE, tie_word_embeddings=tied, dtype=dtype, **extra)
    return head.from_config(config).float().eval()


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {c: i for i, c in enumerate("?0123456789+-= ")}
    inner = Tokenizer(models.WordLevel(words, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?", pad_token="?")


def save(model, run: Path, role: str = "actor", step: int = 3, state=None) -> Path:
    with CheckpointStore(run).writing(step) as folder:
        save_sharded(state if state is not None else model.state_dict(), folder / role / "model")
        generation = getattr(model, "generation_config", None) or GenerationConfig()
        save_hf_side(folder / role, model.config, tokenizer(), generation)
    return run / f"global_step_{step}" / role


def without_alias(model) -> dict:
    return {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_merged_model_is_the_trained_model(tmp_path, family, tied):
    model = build(family, tied)
    merged = merge(save(model, tmp_path / "run"), tmp_path / "out")
    weights = load_file(tmp_path / "out/model.safetensors")
    assert ("lm_head.weight" in weights) is not tied
    assert merged.parameters == sum(p.numel() for p in model.parameters())
    assert merged.bytes == (tmp_path / "out/model.safetensors").stat().st_size
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(again) is type(model)
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, again(IDS).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("12+3")["input_ids"] == [2, 3, 11, 4]
    assert (tmp_path / "out/generation_config.json").exists()


def test_a_tied_weight_saved_once_is_enough(tmp_path):
    model = build("qwen2", True)
    merge(save(model, tmp_path / "run", state=without_alias(model)), tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


def test_tied_weights_that_differ_are_refused(tmp_path):
    model = build("qwen2", True)
    state = {**model.state_dict(), "lm_head.weight": model.lm_head.weight.detach() + 1}
    with pytest.raises(CheckpointError, match=r"lm_head\.weight and model\.embed_tokens\.weight are tied"):
        merge(save(model, tmp_path / "run", state=state), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_dtype_is_the_original_models_unless_asked(tmp_path):
    model = build("llama", False)
    model.config.dtype = torch.bfloat16
    actor = save(model, tmp_path / "run")
    merge(actor, tmp_path / "out")
    weights = load_file(tmp_path / "out/model.safetensors")
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    assert all(torch.equal(weights[k], v.bfloat16()) for k, v in model.state_dict().items())
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    merge(actor, tmp_path / "full", dtype="float32")
    assert torch.equal(load_file(tmp_path / "full/model.safetensors")["lm_head.weight"], model.lm_head.weight)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "full").dtype == torch.float32
    with pytest.raises(ConfigError, match="int8"):
        merge(actor, tmp_path / "odd", dtype="int8")


def test_sharded_output(tmp_path):
    model = build("llama", False)
    actor = save(model, tmp_path / "run")
    merged = merge(actor, tmp_path / "out", shard_bytes=8000)
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) == merged.files > 2
    assert files[0] == f"model-00001-of-{merged.files:05d}.safetensors"
    for file in files:
        tensors = load_file(tmp_path / "out" / file)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 8000
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * merged.parameters
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, again(IDS).logits)


@pytest.mark.parametrize("head", [AutoModelForTokenClassification, AutoModelForSequenceClassification])
def test_value_model(tmp_path, head):
    """The names tell a value model from a language model, even under a config that speaks of neither."""
    value = build("qwen2", True, head=head, num_labels=1, pad_token_id=0)
    value.config.architectures = ["Qwen2ForCausalLM"]
    merge(save(value, tmp_path / "run", role="critic"), tmp_path / "out")
    again = head.from_pretrained(tmp_path / "out").eval()
    assert type(again) is type(value)
    assert again.config.num_labels == 1
    with torch.no_grad():
        assert torch.equal(value(IDS).logits, again(IDS).logits)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda s: s.update({"model.layers.0.q.lora_A.weight": torch.ones(2, 2)}), "lora_A.weight .* is not a weight"),
        (lambda s: s.update({"model.norm.weight": torch.ones(9)}), r"has shape \[9\] instead of \[16\]"),
        (lambda s: s.update({"model.norm.weight": torch.ones(16, dtype=torch.int64)}), "has dtype torch.int64"),
    ],
)
def test_weights_that_are_not_the_models_are_refused(tmp_path, change, words):
    model = build("qwen2", False)
    state = dict(model.state_dict())
    change(state)
    with pytest.raises(CheckpointError, match=words):
        merge(save(model, tmp_path / "run", state=state), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_target_is_overwritten_only_if_it_is_an_earlier_merge(tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    first, second = build("qwen2", True), build("qwen2", True)
    with torch.no_grad():
        second.model.norm.weight.fill_(3)
    merge(save(first, run, step=1), out, shard_bytes=4000)
    merge(save(second, run, step=2), out)
    assert torch.equal(load_file(out / "model.safetensors")["model.norm.weight"], torch.full((16,), 3.0))
    assert not list(out.glob("model-0*")), "files of the earlier merge are gone"
    (out / "results.json").write_text("mine")
    with pytest.raises(CheckpointError, match=r"files of other origin \(results.json\)"):
        merge(run / "global_step_1/actor", out)
    assert (out / "results.json").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    merge(run / "global_step_1/actor", tmp_path / "empty")


def test_half_written_checkpoints_are_refused(tmp_path):
    model = build("qwen2", True)
    actor = save(model, tmp_path / "run")
    shard = next((actor / "model").glob("*.distcp"))

    def refused(folder, words):
        with pytest.raises(CheckpointError, match=words):
            merge(folder, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    writing = tmp_path / "run/.writing_global_step_9"
    shutil.copytree(actor, writing / "actor")
    refused(writing / "actor", "not a whole checkpoint")
    copied = tmp_path / "copied"
    shutil.copytree(actor, copied)
    (copied / "model/.metadata").unlink()
    refused(copied, "no .metadata")
    shutil.copyfile(actor / "model/.metadata", copied / "model/.metadata")
    with open(copied / "model" / shard.name, "r+b") as file:
        file.truncate(1000)
    refused(copied, "has 1000 bytes of at least")
    shard.unlink()
    refused(actor, "not a whole checkpoint.*distcp is missing")
    refused(actor.parent, "name one role in it")
    refused(tmp_path / "nowhere", "no such folder")


def test_command_line_merge_and_test(tmp_path, capsys):
    model = build("qwen2", True)
    actor, out = save(model, tmp_path / "run"), tmp_path / "out"
    where = ["--backend", "fsdp", "--local_dir", str(actor)]
    assert main(["merge", *where, "--target_dir", str(out)]) == 0
    assert "Qwen2ForCausalLM" in capsys.readouterr().out
    assert main(["test", *where, "--test_hf_dir", str(out)]) == 0
    assert "max difference 0 " in capsys.readouterr().out
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] += 0.5
    model.save_pretrained(tmp_path / "other")
    assert main(["test", *where, "--test_hf_dir", str(tmp_path / "other")]) == 1
    shown = capsys.readouterr().out
    assert "max difference 0.5 in model.layers.1.mlp.up_proj.weight" in shown
    assert main(["merge", *where, "--target_dir", str(tmp_path)]) == 2
    assert "files of other origin" in capsys.readouterr().err


def small_dir(tmp_path, model) -> Path:
    model.save_pretrained(tmp_path / "small")
    return tmp_path / "small"


def test_compare_sees_names_shapes_and_nan(tmp_path):
    small = build("qwen2", True)
    actor = save(small, tmp_path / "run")
    build("llama", False).save_pretrained(tmp_path / "llama")
    difference = compare(actor, tmp_path / "llama")
    # Qwen2 has biases on q, k and v in both layers; the untied Llama stores a head of its own.
    assert sum("is not in" in p for p in difference.problems) == 6
    assert any(
        p.startswith("lm_head.weight and model.embed_tokens.weight are tied but differ") for p in difference.problems
    )
    reverse = compare(save(build("llama", False), tmp_path / "run2"), small_dir(tmp_path, small))
    assert "lm_head.weight is not in" in " ".join(reverse.problems)
    assert sum("is only in" in p for p in reverse.problems) == 6
    assert "q_proj.bias is only in" in " ".join(reverse.problems)
    with torch.no_grad():
        small.model.norm.weight[0] = float("nan")
    small.save_pretrained(tmp_path / "nan")
    assert not compare(actor, tmp_path / "nan").within(1.0)
    with pytest.raises(CheckpointError, match=r"no .*safetensors"):
        compare(actor, tmp_path / "run")


def test_weights_that_are_not_finite_are_refused(tmp_path):
    model = build("qwen2", True)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = torch.inf
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight holds numbers that are not finite"):
        merge(save(model, tmp_path / "run"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_target_below_a_file_is_refused(tmp_path):
    actor = save(build("qwen2", True), tmp_path / "run")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file is a file, so nothing can be below it"):
        merge(actor, tmp_path / "file" / "deep" / "out")


def test_a_target_that_cannot_be_written_is_one_message(tmp_path):
    actor = save(build("qwen2", True), tmp_path / "run")
    with pytest.raises(
        CheckpointError, match=r"^--target_dir .*xx cannot be written \(.*name too long.*\): name a directory"
    ):
        merge(actor, tmp_path / ("x" * 250))  # 255 bytes are the most, and what is being written has a longer name


def test_damaged_bytes_of_the_right_number_are_refused(tmp_path):
    actor = save(build("qwen2", True), tmp_path / "run")
    shard = next((actor / "model").glob("*.distcp"))
    shard.write_bytes(b"\0" * shard.stat().st_size)
    with pytest.raises(CheckpointError, match=rf"{shard.name} is damaged: .*its checksum differs"):
        merge(actor, tmp_path / "out")


def test_one_wrong_number_in_a_whole_shard_is_refused(tmp_path):
    actor = save(build("qwen2", True), tmp_path / "run")
    shard = next((actor / "model").glob("*.distcp"))
    contents = bytearray(shard.read_bytes())
    contents[len(contents) // 2] ^= 1
    shard.write_bytes(contents)
    with pytest.raises(CheckpointError, match=rf"{shard.name} is damaged: .*its checksum differs"):
        merge(actor, tmp_path / "out")
    # Copied out of its checkpoint it has no checksums, and its index is unharmed.
    (actor.parent / "actor").rename(tmp_path / "actor")
    assert merge(tmp_path / "actor", tmp_path / "out").folder == tmp_path / "out"
