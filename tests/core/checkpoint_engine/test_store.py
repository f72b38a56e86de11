"""Checkpoint folders: whole or not there, whatever is killed, deleted or misspelled."""

import json
import os
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from verl.core.checkpoint_engine.store import CheckpointStore, defect, step_of, verify
from verl.errors import CheckpointError, ConfigError

TRACKER = "latest_checkpointed_iteration.txt"


def put(store: CheckpointStore, step: int, text: str = "weights") -> Path:
    with store.writing(step) as folder:
        (folder / "actor").mkdir()
        (folder / "actor" / "weights.bin").write_text(f"{text} {step}")
    return store.folder / f"global_step_{step}"


def steps(folder: Path) -> list[int]:
    return sorted(step_of(p) for p in folder.glob("global_step_*"))


@pytest.fixture
def store(tmp_path):
    notices: list[str] = []
    made = CheckpointStore(tmp_path / "run", notify=notices.append)
    made.notices = notices
    return made


def test_layout_and_tracker(store):
    path = put(store, 5)
    assert (path / "actor/weights.bin").read_text() == "weights 5"
    assert (store.folder / TRACKER).read_text() == "5"
    assert json.loads((path / "manifest.json").read_text()) == {
        "step": 5,
        "serial": 1,
        "files": {"actor/weights.bin": len("weights 5")},
        "crc32": {"actor/weights.bin": f"{zlib.crc32(zlib.crc32(b'weights 5').to_bytes(4, 'big')):08x}"},
    }
    assert sorted(p.name for p in store.folder.iterdir()) == ["global_step_5", TRACKER]
    assert store.find("auto") == path
    assert store.notices == []


def test_auto_in_an_empty_or_missing_folder_starts_from_scratch(store):
    assert store.find("auto") is None
    store.folder.mkdir()
    assert store.find("auto") is None


def test_retention_keeps_the_newest(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (5, 10, 15, 20):
        put(store, step)
    assert steps(tmp_path) == [15, 20]


def test_newest_is_the_last_written_not_the_highest_step(tmp_path):
    """After going back to step 5, steps 6 and 7 belong to the run that is alive; 100 is the branch left behind."""
    store = CheckpointStore(tmp_path, keep=2)
    for step in (5, 100, 6):
        put(store, step)
    assert steps(tmp_path) == [6, 100]
    assert store.find("auto").name == "global_step_6"
    put(store, 7)
    assert steps(tmp_path) == [6, 7]


def test_retention_does_not_count_broken_checkpoints(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    put(store, 5)
    broken = put(CheckpointStore(tmp_path), 9)
    (broken / "actor/weights.bin").unlink()
    put(CheckpointStore(tmp_path), 10)
    (tmp_path / "global_step_10/manifest.json").unlink()
    put(store, 11)
    assert steps(tmp_path) == [9, 10, 11]
    assert store.find("auto").name == "global_step_11"


def test_keep_below_one_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="max_actor_ckpt_to_keep is 0"):
        CheckpointStore(tmp_path, keep=0)


def test_same_step_again_replaces_it(store):
    put(store, 5, "old")
    path = put(store, 5, "new")
    assert (path / "actor/weights.bin").read_text() == "new 5"
    assert sorted(p.name for p in store.folder.iterdir()) == ["global_step_5", TRACKER]


def test_an_error_while_writing_leaves_nothing_behind(store):
    put(store, 5)

    def fail():
        with store.writing(10) as folder:
            (folder / "half").write_text("x")
            raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        fail()
    assert sorted(p.name for p in store.folder.iterdir()) == ["global_step_5", TRACKER]
    assert store.find("auto").name == "global_step_5"


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda p: (p / "manifest.json").unlink(), "no manifest.json"),
        (lambda p: (p / "manifest.json").write_text('{"files": '), "cannot be read"),
        (lambda p: (p / "manifest.json").write_text('{"files": {}}'), "cannot be read"),
        (lambda p: (p / "actor/weights.bin").unlink(), "actor/weights.bin is missing"),
        (lambda p: (p / "actor/weights.bin").write_text("w"), "has 1 bytes instead of 10"),
    ],
)
def test_auto_passes_over_a_broken_checkpoint_and_says_so(store, harm, words):
    put(store, 5)
    newest = put(store, 10)
    assert defect(newest) is None
    harm(newest)
    assert words in defect(newest)
    assert store.find("auto").name == "global_step_5"
    assert len(store.notices) == 1
    assert "names step 10" in store.notices[0]
    assert words in store.notices[0]
    assert "resuming from" in store.notices[0]


def test_tracker_naming_a_deleted_folder_falls_back_with_a_notice(store):
    put(store, 5)
    (store.folder / TRACKER).write_text("40")
    assert store.find("auto").name == "global_step_5"
    assert "names step 40, that folder does not exist" in store.notices[0]


def test_tracker_lost_or_garbled(store):
    put(store, 5)
    (store.folder / TRACKER).unlink()
    assert store.find("auto").name == "global_step_5"
    (store.folder / TRACKER).write_text("what?")
    assert store.find("auto").name == "global_step_5"
    assert len(store.notices) == 2


def test_tracker_set_back_by_hand_is_pointed_to_resume_path(store):
    put(store, 5)
    put(store, 10)
    (store.folder / TRACKER).write_text("5")
    assert store.find("auto").name == "global_step_10"
    assert "trainer.resume_mode=resume_path" in store.notices[0]


def test_never_from_scratch_when_a_checkpoint_was_there(store):
    """A tracker without any folder, and a broken folder without a tracker: both are errors, not a fresh start."""
    path = put(store, 5)
    tracker = store.folder / TRACKER
    (path / "actor/weights.bin").unlink()
    with pytest.raises(CheckpointError, match=r"names step 5(.|\n)*weights.bin is missing(.|\n)*resume_mode=disable"):
        store.find("auto")
    tracker.unlink()
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        store.find("auto")
    (path / "manifest.json").unlink()
    (path / "actor").rmdir()
    path.rmdir()
    tracker.write_text("5")
    with pytest.raises(CheckpointError, match="There is no global_step_N folder"):
        store.find("auto")
    assert store.find("disable") is None


def test_unknown_mode(store):
    with pytest.raises(ConfigError, match="autoo"):
        store.find("autoo")


def test_resume_path(store, tmp_path, monkeypatch):
    path = put(store, 5)
    put(store, 10)
    assert store.find("resume_path", str(path)) == path
    assert store.find("resume_path", f"{path}/") == path
    monkeypatch.chdir(tmp_path)
    assert store.find("resume_path", "run/global_step_5/") == path
    assert store.find("resume_path", "./run/../run/global_step_5").name == "global_step_5"
    with pytest.raises(ConfigError, match=r"needs trainer\.resume_from_path"):
        store.find("resume_path", None)
    with pytest.raises(CheckpointError, match=r"no such folder.*looked for"):
        store.find("resume_path", "run/global_step_7")
    with pytest.raises(CheckpointError, match=r"should be global_step_N. Did you mean .*run/global_step_10\?"):
        store.find("resume_path", str(store.folder))
    with pytest.raises(CheckpointError, match=r"Did you mean .*run/global_step_5\?"):
        store.find("resume_path", str(path / "actor"))
    (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="not a whole checkpoint: it has no manifest"):
        store.find("resume_path", str(path))


# --- kills ---------------------------------------------------------------------------------------------------------


def write_and_die(folder: Path, step: int, fatal: int) -> int:
    """Write a checkpoint in a forked process that stops itself with SIGKILL, which no handler can soften, at the call
    number `fatal` of the operating system's primitives that the store uses: every gap between two of them can be hit.

    Returns the number of calls of a process that got to the end, else minus the signal.
    """
    child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    seen = 0

    def fragile(call):
        def wrapped(*args, **kwargs):
            nonlocal seen
            seen += 1
            if seen == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return wrapped

    try:
        for name in ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir"):
            setattr(os, name, fragile(getattr(os, name)))
        with CheckpointStore(folder, keep=1, notify=lambda text: None).writing(step) as path:
            (path / "actor").mkdir()
            for i in range(2):
                (path / "actor" / f"{i}.bin").write_text(f"new {step}")
                os.fsync(os.open(path / "actor", os.O_RDONLY))
        os._exit(seen)
    finally:
        os._exit(255)


@pytest.mark.parametrize("step", [10, 5], ids=["a-new-step", "the-same-step-again"])
def test_a_kill_anywhere_leaves_a_whole_checkpoint(tmp_path, step):
    clean = tmp_path / "clean"
    put(CheckpointStore(clean), 5, "old")
    calls = write_and_die(clean, step, -1)
    assert 10 < calls < 100
    outcomes = set()
    for fatal in range(1, calls + 1):
        folder = tmp_path / f"kill{fatal}"
        put(CheckpointStore(folder), 5, "old")
        assert write_and_die(folder, step, fatal) == -signal.SIGKILL
        notices = []
        store = CheckpointStore(folder, keep=1, notify=notices.append)
        found = store.find("auto")
        texts = {p.read_text() for p in (found / "actor").glob("*.bin")}
        assert texts in ({"old 5"}, {f"new {step}"}), f"killed at call {fatal}: {texts}"
        outcomes |= texts
        leftovers = [p.name for p in folder.iterdir() if p.name.startswith(".")]
        assert leftovers == [], f"killed at call {fatal}"
        # The run goes on from there and saves again.
        put(store, 15)
        assert store.find("auto").name == "global_step_15"
        assert steps(folder) == [15]
    assert outcomes == {"old 5", f"new {step}"}


def test_a_kill_from_outside_while_a_large_file_is_written(tmp_path):
    put(CheckpointStore(tmp_path), 5)
    code = (
        "import pathlib, sys, time\n"
        "from verl.core.checkpoint_engine.store import CheckpointStore\n"
        "with CheckpointStore(pathlib.Path(sys.argv[1])).writing(10) as path:\n"
        "    with open(path / 'big.bin', 'wb') as file:\n"
        "        while True:\n"
        "            file.write(b'x' * 65536); file.flush(); print('.', flush=True); time.sleep(0.01)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        for _ in range(3):
            assert child.stdout.readline() == b".\n"
        assert (tmp_path / ".writing_global_step_10/big.bin").stat().st_size > 0
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait(timeout=30)
        child.stdout.close()
    notices = []
    assert CheckpointStore(tmp_path, notify=notices.append).find("auto").name == "global_step_5"
    assert len(notices) == 1
    assert "not written to the end" in notices[0]
    assert not (tmp_path / ".writing_global_step_10").exists()


def test_killed_in_the_first_checkpoint_starts_from_scratch_with_a_notice(tmp_path):
    assert write_and_die(tmp_path, 5, 4) == -signal.SIGKILL
    notices = []
    assert CheckpointStore(tmp_path, notify=notices.append).find("auto") is None
    assert len(notices) == 1


def test_wrong_contents_of_the_right_size_are_named(store):
    path = put(store, 5)
    verify(path)
    file = path / "actor" / "weights.bin"
    file.write_bytes(file.read_bytes().replace(b"5", b"6"))
    assert store.find("auto") == path  # sizes alone are looked at here, of every checkpoint
    with pytest.raises(
        CheckpointError, match=r"actor/weights\.bin is damaged: .*its checksum differs.*resume_from_path"
    ):
        verify(path)
    verify(path, "critic/")


def test_a_checkpoint_without_checksums_is_still_one(store):
    path = put(store, 5)
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["crc32"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    verify(path)
    assert store.find("auto") == path
