"""`Generator`: a thread that draws prompts, lets the rollout engine answer them, and puts the samples into a queue.

It owns the rollout engine while it runs. Whoever wants the engine for something else (new weights, validation) pauses it.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from verl.core.rollout_engine.api import Completion, Feed, Request
from verl.core.transfer_queue.api import QueueClosed, TransferQueue
from verl.data.batch import Ragged
from verl.trainer import stages
from verl.trainer.arrivals import GENERATED, SCORED, generated, prompts_of
from verl.trainer.busy import Busy
from verl.trainer.run import Run
from verl.trainer.scoring import Scoring

SECONDS_TO_END = 60.0


@dataclass(frozen=True)
class Prompt:
    """A prompt that has been drawn. row: its place in the training data; order: how many were drawn before it."""

    uid: str
    row: int
    order: int
    token_ids: list[int] = field(repr=False)


@dataclass(frozen=True)
class Begun:
    """What a sample has so far. versions: of the policy that drew each token."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def plus(self, more: Completion) -> Begun:
        versions = [more.version] * len(more.token_ids)
        return Begun(self.token_ids + more.token_ids, self.log_probs + more.log_probs, self.versions + versions)


class Generator:
    """Keeps the queue filled, from `start` until `prompts` prompts have been drawn, or until `close`.

    partial: a pause stops what is in generation, which later goes on under the weights of then; without it, a pause waits
    until that is finished. samples: in generation at once, at most.

    An exception in the thread closes the queue with it, and whoever takes from the queue gets it.
    """

    def __init__(self, run: Run, queue: TransferQueue, *, prompts: int, samples: int, partial: bool):
        self.queue, self.busy = queue, Busy()
        self._run, self._engine, self._partial = run, run.roles.rollout, partial
        self._sampling = stages.training_sampling(run)
        longest = run.config.data.max_prompt_length + run.config.data.max_response_length
        self._feed = Feed(self._more, self._sampling, longest, samples)
        self._scoring = Scoring(run, queue)
        self._left = prompts  # to draw
        self._changed = threading.Condition()
        self._paused = self._closed = False
        self._quiet = True  # the thread does not touch the engine
        self._drawn: deque[Prompt] = deque()  # not in the queue yet
        self._added: deque[Prompt] = deque()  # in the queue, not in generation yet
        self._stopped: deque[tuple[Prompt, int]] = deque()  # (prompt, sample) that is to go on
        self._begun: dict[tuple[str, int], Begun] = {}
        self._unfinished: dict[str, tuple[Prompt, set[int]]] = {}  # drawn, by uid, with the samples still to come
        self._requests: list[tuple[Prompt, int]] = []  # of the stream in progress: prompt, number of its first sample
        self._in_flight = 0
        self._cuda = _own_cuda_stream(self._engine)
        self._thread = threading.Thread(target=self._work, name="generator", daemon=True)

    # ---- for the trainer's thread ----------------------------------------------------------------------------------

    def __enter__(self) -> Generator:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def pause(self) -> None:
        """Wait until the thread has let go of the engine; it stays so until `resume`."""
        with self._changed:
            self._paused = True
        self._stop_what_runs()
        with self._changed:
            self._changed.wait_for(lambda: self._quiet)

    def resume(self) -> None:
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread. What is in generation is given up."""
        with self._changed:
            self._closed, self._partial = True, True
            self._changed.notify_all()
        self.queue.close()
        self._stop_what_runs()
        self._thread.join(SECONDS_TO_END)

    def doing(self) -> str:
        """In words, for a watchdog."""
        scoring = f"{len(self._scoring)} rewards are under way"
        return f"{self._in_flight} samples are in generation, {scoring}" + (", paused" if self._paused else "")

    @property
    def stuck(self) -> bool:
        """Nothing is in generation or being scored, so that the queue gets nothing until someone else acts."""
        return self._quiet and not self._paused and len(self._scoring) == 0

    def state_dict(self) -> dict[str, Any]:
        """The queue's content and the prompts that are not finished, with what their samples have. Only while paused.

        torch.load reads it with weights_only.
        """
        return {
            "queue": self.queue.state_dict(),
            "prompts": [[p.uid, p.row, p.order] for p, _ in self._unfinished.values()],
            "begun": [[uid, i, b.token_ids, b.log_probs, b.versions] for (uid, i), b in self._begun.items()],
        }

    def load_state_dict(self, state: dict[str, Any], version: int, trained_since: int) -> None:
        """Go on where `state_dict` was called, before the thread starts. What it had drawn counts among the prompts to draw.

        version: of the policy, as the queue counts them; trained_since: prompts trained on since that version.
        """
        books = state["queue"]["books"]
        books = {**books, "version": version, "ahead": trained_since + len(books["groups"])}
        self.queue.load_state_dict({**state["queue"], "books": books})
        begun = {(uid, i): Begun(*map(list, parts)) for uid, i, *parts in state["begun"]}
        # Under a lower limit of today what is too long begins anew.
        self._begun = {key: b for key, b in begun.items() if len(b.token_ids) < self._sampling.max_tokens}
        held = {group.uid: group for group in self.queue.unfinished(GENERATED)}
        for prompt in self._prompts([known[0] for known in state["prompts"]], *zip(*[k[1:] for k in state["prompts"]])):
            missing = set(held[prompt.uid].missing) if prompt.uid in held else set(range(self._sampling.n))
            self._unfinished[prompt.uid] = prompt, missing
            if prompt.uid in held:
                self._stopped.extend((prompt, i) for i in sorted(missing))
            else:
                self._drawn.append(prompt)
        held_groups = int(self.queue.stats()["groups_held"])
        self._left -= held_groups + len(self._drawn)
        for group in self.queue.unfinished(SCORED):
            rows = [(i, row) for i, row in enumerate(self.queue.read(group.uid)) if set(GENERATED) <= set(row)]
            self._scoring.add(group.uid, [(i, row) for i, row in rows if i in group.missing])

    def on_engine(self) -> contextlib.AbstractContextManager:
        """Around whatever else uses the engine while this is paused: on a GPU it works on one stream alone."""
        return contextlib.nullcontext() if self._cuda is None else torch.cuda.stream(self._cuda)

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            with self.on_engine(), contextlib.suppress(QueueClosed):
                while self._wait_for_work():
                    self._requests = []
                    for number, index, completion in self._engine.stream([], self._feed):
                        self._take(number, index, completion)
                    self._scoring.submit()
                    _finish_cuda_work()
        except BaseException as error:
            self.queue.close(error)
        finally:
            with self._changed:
                self._quiet = True
                self._changed.notify_all()

    def _wait_for_work(self) -> bool:
        """Until something can be generated. False: never again."""
        while True:
            with self._changed:
                self._quiet = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed or not self._paused)
                if self._closed:
                    return False
                nothing_drawn = not self._draw()
                if self._added or self._stopped:
                    self._quiet = False
                    return True
            if nothing_drawn:
                self.queue.end()
                return False
            # A pause may come and go meanwhile: the engine is not in use.
            self._add(timeout=None)

    def _draw(self) -> bool:
        """Whether there is a prompt that is not in the queue."""
        if not self._drawn and self._left > 0:
            first, size = self._run.sampler.drawn, self._run.sampler.batch_size
            rows = self._run.sampler.next_batch()
            uids = self._run.prompts.batch(rows, step=first // size + 1)["uid"]
            count = min(self._left, len(rows))
            for prompt in self._prompts(uids[:count], rows, range(first, first + count)):
                self._drawn.append(prompt)
                self._unfinished[prompt.uid] = prompt, set(range(self._sampling.n))
            self._left -= count
        return bool(self._drawn)

    def _prompts(self, uids: list[str], rows: Any = (), orders: Any = ()) -> Iterator[Prompt]:
        if uids:
            ids: Ragged = prompts_of(self._run, uids, torch.tensor(rows[: len(uids)]))["prompt_ids"]
            for uid, row, order, tokens in zip(uids, rows, orders, ids.rows()):
                yield Prompt(uid, int(row), int(order), tokens.tolist())

    def _add(self, timeout: float | None) -> bool:
        """The next prompt into the queue, if there is room for it."""
        prompt = self._drawn[0]
        if not self.queue.add_group(prompt.uid, self._sampling.n, prompt.order, self._engine.version, timeout):
            return False
        with self._changed:
            self._added.append(self._drawn.popleft())
        return True

    def _more(self, idle: bool) -> list[Request] | None:
        """What the stream asks for between decode steps."""
        if self._paused or self._closed:
            self._stop_what_runs()
            return None
        self._scoring.submit()
        while self._draw() and self._add(timeout=0):
            pass
        requests = [*self._continued(), *self._begin()]
        if not requests and idle:
            return None  # and wait for room, without the engine
        if requests:
            self.busy.start()
        return requests

    def _begin(self) -> Iterator[Request]:
        while self._added:
            prompt = self._added.popleft()
            yield self._request(prompt, 0, self._sampling.n)

    def _continued(self) -> Iterator[Request]:
        """Samples that were stopped. Those of a prompt that have no tokens yet go together again."""
        while self._stopped:
            prompt, first = self._stopped.popleft()
            count = 1
            while (
                (prompt.uid, first) not in self._begun
                and self._stopped
                and self._stopped[0] == (prompt, first + count)
                and (prompt.uid, first + count) not in self._begun
            ):
                self._stopped.popleft()
                count += 1
            yield self._request(prompt, first, count)

    def _request(self, prompt: Prompt, first: int, count: int) -> Request:
        so_far = self._begun.get((prompt.uid, first), Begun()).token_ids
        sampling = replace(self._sampling, n=count, max_tokens=self._sampling.max_tokens - len(so_far))
        self._requests.append((prompt, first))
        self._in_flight += count
        return Request(prompt.token_ids + so_far, sampling, prompt.order, first)

    def _take(self, number: int, index: int, completion: Completion) -> None:
        """One sample of the stream: into the queue, or aside if a pause has stopped it."""
        prompt, first = self._requests[number]
        key = prompt.uid, first + index
        sample = self._begun.pop(key, Begun()).plus(completion)
        self._in_flight -= 1
        if self._in_flight == 0:
            self.busy.stop()
        if completion.finish_reason == "abort":
            self._stopped.append((prompt, key[1]))
            if sample.token_ids:
                self._begun[key] = sample
            return
        row = generated(prompt.row, sample.token_ids, sample.log_probs, sample.versions, completion.finish_reason)
        self.queue.put(*key, row)
        missing = self._unfinished[prompt.uid][1]
        missing.remove(key[1])
        if not missing:
            del self._unfinished[prompt.uid]
        self._scoring.add(prompt.uid, [(key[1], row)])

    def _stop_what_runs(self) -> None:
        if self._partial:
            self._engine.abort(range(len(self._requests)))


def _own_cuda_stream(engine: Any) -> torch.cuda.Stream | None:
    """One beside the trainer's, where the engine works in this process on a GPU."""
    device = getattr(engine, "device", None)
    return torch.cuda.Stream(device) if device is not None and torch.device(device).type == "cuda" else None


def _finish_cuda_work() -> None:
    """Whoever uses the engine next does so on another stream."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
