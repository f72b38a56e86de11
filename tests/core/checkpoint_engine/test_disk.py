"""Sharded state on disk: the same numbers back on any number of ranks, and a clear error for anything else."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from verl.core.checkpoint_engine.disk import (
    check_role_folder,
    check_sharded,
    describe,
    load_sharded,
    read_full,
    save_hf_side,
    save_sharded,
)
from verl.core.checkpoint_engine.store import CheckpointStore
from verl.errors import CheckpointError


def weights() -> dict[str, torch.Tensor]:
    return {
        "model.embed.weight": torch.arange(35.0).reshape(7, 5),
        "model.norm.weight": torch.linspace(-1, 1, 5).bfloat16(),
        "steps": torch.tensor(12, dtype=torch.int64),
    }


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in weights().items()}


def test_round_trip_without_a_process_group(tmp_path, recwarn):
    save_sharded(weights(), tmp_path / "model")
    info = describe(tmp_path / "model")
    assert {name: (i.shape, i.dtype) for name, i in info.items()} == {
        "model.embed.weight": ((7, 5), torch.float32),
        "model.norm.weight": ((5,), torch.bfloat16),
        "steps": ((), torch.int64),
    }
    assert info["model.norm.weight"].bytes == 10
    template = zeros()
    storage = template["model.embed.weight"].data_ptr()
    loaded = load_sharded(template, tmp_path / "model")
    assert loaded["model.embed.weight"].data_ptr() == storage, "read in place"
    for read in (loaded, read_full(tmp_path / "model")):
        assert read.keys() == weights().keys()
        assert all(torch.equal(read[name], tensor) for name, tensor in weights().items())
    assert list(read_full(tmp_path / "model", ["steps"])) == ["steps"]
    assert not [w for w in recwarn if "torch.distributed" in str(w.message)]


def test_a_template_that_does_not_fit_is_refused_before_anything_is_read(tmp_path):
    save_sharded(weights(), tmp_path)
    template = zeros()
    template["model.embed.weight"] = torch.zeros(7, 6)
    template["new"] = torch.zeros(1)
    del template["steps"]
    with pytest.raises(CheckpointError) as caught:
        load_sharded(template, tmp_path)
    assert "new is not in it" in str(caught.value)
    assert "it holds steps" in str(caught.value)
    assert "model.embed.weight has shape [7, 5], this run needs [7, 6]" in str(caught.value)
    assert not template["model.norm.weight"].any()
    with pytest.raises(CheckpointError, match="lacks other"):
        read_full(tmp_path, ["other"])


def test_optimizer_state_comes_back_and_is_never_left_out(tmp_path):
    def make():
        torch.manual_seed(1)
        model = torch.nn.Linear(3, 2)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model, optimizer):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = make()
    step(model, optimizer)
    save_sharded(get_optimizer_state_dict(model, optimizer), tmp_path)

    other_model, other = make()
    other_model.load_state_dict(model.state_dict())
    state = load_sharded(get_optimizer_state_dict(other_model, other), tmp_path)
    set_optimizer_state_dict(other_model, other, state)
    step(model, optimizer)
    step(other_model, other)
    assert torch.equal(model.weight, other_model.weight)

    # A template without room for the moments would resume with none, and say nothing.
    with pytest.raises(CheckpointError, match=r"it holds state\.weight\.step"):
        load_sharded({"param_groups": state["param_groups"], "state": {}}, tmp_path)


def test_damage_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        check_sharded(tmp_path / "nowhere")
    save_sharded(weights(), tmp_path)
    assert check_sharded(tmp_path) == tmp_path
    shard = next(tmp_path.glob("*.distcp"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-300])
    with pytest.raises(CheckpointError, match=f"{shard.name} has {len(whole) - 300} bytes of at least"):
        load_sharded(zeros(), tmp_path)
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name} is missing"):
        read_full(tmp_path)
    (tmp_path / ".metadata").write_bytes(b"\x80junk")
    with pytest.raises(CheckpointError, match="cannot be read"):
        describe(tmp_path)
    (tmp_path / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"no \.metadata"):
        describe(tmp_path)


def _rank(rank: int, world: int, action: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}.{action}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    full = weights()
    sharded = {
        "model.embed.weight": distribute_tensor(full["model.embed.weight"], mesh, [Shard(0)]),
        "model.norm.weight": distribute_tensor(full["model.norm.weight"], mesh, [Shard(0)]),
        "steps": full["steps"],
    }
    if action == "save":
        save_sharded(sharded, folder)
    else:
        template = {name: torch.zeros_like(tensor) for name, tensor in sharded.items()}
        load_sharded(template, folder)
        for name, tensor in template.items():
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            if not torch.equal(whole, full[name]):
                raise AssertionError(f"rank {rank}: {name}")
    dist.destroy_process_group()


def _run_ranks(world: int, action: str, folder) -> None:
    # Forked, for a spawned process would import torch anew. It inherits this process's group, which tests before this one
    # may have left, and could not have one of its own.
    if dist.is_initialized():
        dist.destroy_process_group()
    mp.start_processes(_rank, (world, action, str(folder)), nprocs=world, start_method="fork")


def test_saved_by_two_ranks_read_by_one_and_by_three(tmp_path):
    tmp_path = tmp_path / "model"
    _run_ranks(2, "save", tmp_path)
    assert len(list(tmp_path.glob("*.distcp"))) == 2
    read = read_full(tmp_path)
    assert all(torch.equal(read[name], tensor) for name, tensor in weights().items())
    loaded = load_sharded(zeros(), tmp_path)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights().items())
    _run_ranks(3, "load", tmp_path)


def test_hf_side(tmp_path):
    from transformers import AutoConfig, GenerationConfig, Qwen2Config

    folder = save_hf_side(tmp_path, Qwen2Config(hidden_size=64), None, GenerationConfig(max_new_tokens=7))
    assert folder == tmp_path / "huggingface"
    assert AutoConfig.from_pretrained(folder).hidden_size == 64
    assert GenerationConfig.from_pretrained(folder).max_new_tokens == 7


def test_a_folder_that_is_no_role_leads_to_the_newest(tmp_path):
    for step in (9, 14):
        with CheckpointStore(tmp_path).writing(step) as folder:
            (folder / "actor" / "model").mkdir(parents=True)
    mend = f"Did you mean {tmp_path / 'global_step_14' / 'actor'}?"
    for wrong in (tmp_path, tmp_path / "global_step_99" / "actor", tmp_path / "global_step_99" / "critic"):
        with pytest.raises(CheckpointError) as error:
            check_role_folder(wrong)
        assert str(error.value).endswith(mend)
    with pytest.raises(CheckpointError, match=r"there is no such folder\.$"):
        check_role_folder(tmp_path / "global_step_14" / "nosuch" / "model")
