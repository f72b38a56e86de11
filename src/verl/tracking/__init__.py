"""What a run leaves to look at: console lines, metrics.jsonl, loggers, the HTML report."""

from verl.tracking.curve import learning_curve
from verl.tracking.report import write_report
from verl.tracking.tracker import Tracker

__all__ = ["Tracker", "learning_curve", "write_report"]
