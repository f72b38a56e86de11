"""What every transfer queue does: samples go in field by field, whole groups come out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # it brings torch, which the process that keeps a cluster's books does without
    from verl.data.batch import SampleBatch

Row = tuple[str, int, Mapping[str, Any]]
"""(uid of the group, number of the sample in it, fields)."""


class QueueError(Exception):
    """Nothing more will come of this queue."""


class QueueEnded(QueueError):
    """No groups will be added any more, and this consumer has had all there were."""


class QueueClosed(QueueError):
    """The queue was closed. error: what made its owner close it, None for an ordinary end."""

    def __init__(self, error: BaseException | None = None):
        super().__init__(error)
        self.error = error

    def __str__(self) -> str:
        why = "" if self.error is None else f" because of {type(self.error).__name__}: {self.error}"
        return f"the transfer queue was closed{why}"


@dataclass(frozen=True)
class Waiting:
    """One caller that is blocked.

    who: the consumer's name, or the producer's thread. kind: "room" (capacity), "staleness", "turn" (a lower order is
    waiting too), "fields" (samples lack some), or "groups" (too few were added). what: the same in words.
    """

    who: str
    kind: str
    what: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.who} has waited {self.seconds:.1f} s for {self.what}"


@dataclass(frozen=True)
class Unfinished:
    """A group with samples that lack fields. missing: {sample: the fields that it lacks}."""

    uid: str
    size: int
    order: int
    version: int
    missing: dict[int, tuple[str, ...]]


class TransferQueue(Protocol):
    """A bounded queue of groups, the samples of one prompt, between producers and consumers in any threads or processes.

    A group is held from `add_group` until `release` or `drop`. Two bounds keep producers back:

    - capacity: groups that are held, taken or not. Room for what is being trained on and for what is generated meanwhile.
    - staleness s >= 0, in batches of `groups_per_version` groups g: a group is added only while
      (groups ever added) < (version + 1 + s) * g, dropped ones not counted. With s = 0 no group is added before the
      policy that it is for, which is synchronous training. The rule is that of AReaL (Fu et al. 2025).

    With in_order, groups are added by ascending order and no group is given before those below it, however late its
    fields come; without it, whole groups overtake unfinished ones.
    """

    def add_group(self, uid: str, size: int, order: int, version: int, timeout: float | None = None) -> bool:
        """Reserve room for a group of `size` samples before it is generated; blocks until both bounds allow it.

        order: number of the prompt drawn; consumers get lowest first. version: of the policy that starts it. timeout: seconds,
        None for ever, 0 to ask only. Of callers that wait, the lowest order comes first.

        Returns: False when the time has passed.
        Raises:
            ValueError: a group of this uid is held, or (in_order) the order is not above all before it.
            QueueEnded, QueueClosed: there will be no room.
        """

    def put(self, uid: str, index: int, fields: Mapping[str, Any]) -> None:
        """Fields of one sample: tensors, numbers, or plain data. They are kept, not copied; do not change them afterwards.

        Raises:
            ValueError: no such group or sample, or a field that the sample has.
            TypeError: a value that a checkpoint could not hold.
            QueueClosed: it was closed.
        """

    def put_many(self, rows: Sequence[Row]) -> None:
        """`put` for many samples in one go, all of them or, on an error, none."""

    def register(self, consumer: str, needs: Sequence[str], gives: Sequence[str] = ()) -> None:
        """Name a consumer that takes groups in which every sample has `needs`. Once more with the same arguments is fine.

        gives: fields that the consumer puts into the groups that it takes. It is what tells a checkpoint whether the
        consumer is done with a group; see `state_dict`.
        """

    def take(self, consumer: str, groups: int, timeout: float | None = None) -> SampleBatch | None:
        """`groups` whole groups, lowest order first, the samples of a group side by side; blocks until there are as many.

        Each consumer gets each group once. After `end` the last batch may have fewer groups. Columns: `uid`, and each
        field that all these samples have; tensors of one dimension become Ragged, tensors of none and numbers a tensor
        [B], anything else a list.

        Returns: None when `timeout` seconds have passed.
        Raises:
            ValueError: an unknown consumer, or more groups than the capacity.
            QueueEnded: this consumer has had all groups. QueueClosed: it was closed.
        """

    def release(self, uids: Iterable[str]) -> None:
        """The groups are consumed for good: their rows are freed, and there is room for others. Works after `close`.

        Raises:
            ValueError: a group that is not held; none is released.
        """

    def drop(self, uid: str) -> None:
        """Give up a group, taken or not, such as one that failed or was filtered out. It is counted, and its place within both
        bounds is free again, so that another prompt can stand in for it. Works after `close`.
        """

    def advance(self, version: int) -> None:
        """The policy is now `version`: wakes producers that staleness held back. Works after `close`."""

    def end(self) -> None:
        """No groups will be added any more; fields still may."""

    def close(self, error: BaseException | None = None) -> None:
        """Wake everybody: whoever waits, adds, puts or takes gets QueueClosed with `error` as its cause. The first error stays.

        What a run needs to end in order still works: release, drop, advance, stats, waiting, unfinished, read, state_dict.
        """

    def waiting(self) -> list[Waiting]:
        """Who is blocked, for what, and for how long, the longest first: what a watchdog reports."""

    def stats(self) -> dict[str, float]:
        """groups_held, groups_complete (of those, with all fields that any consumer needs), groups_taken (of those, by any
        consumer), tokens_held (prompt_ids and response_ids), bytes_held (tensors and texts); and since the start groups_added,
        groups_released, groups_dropped, puts (samples), takes, producer_wait_seconds, consumer_wait_seconds.
        """

    def unfinished(self, needs: Sequence[str]) -> list[Unfinished]:
        """Groups with samples that lack some of these fields, lowest order first: what to take up again after a resume."""

    def read(self, uid: str) -> list[dict[str, Any]]:
        """What has been put into each sample of a group, whoever has taken it."""

    def state_dict(self) -> dict[str, Any]:
        """Every group that is not released, partly filled ones too, and the counts of the bounds.

        torch.save takes it, torch.load with weights_only reads it, and each implementation loads the other's. Taken groups
        are in it as not taken, for what had been made of them is gone with the consumer. A consumer with `gives` is
        done with the groups in which every sample has them; in others what it gave so far is left out.
        """

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state. Works with other bounds than those it was saved under.

        Raises:
            ValueError: the queue has been used, or this is no such state.
        """
