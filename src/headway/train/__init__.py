"""The second paper: gradient descent on multi-head attention, with its guarantees computed and checked."""

from headway.train.data import Labelled, labelled, mixture, planted
from headway.train.run import Trained, leave_one_out, train
from headway.train.starts import start

__all__ = ["Labelled", "Trained", "labelled", "leave_one_out", "mixture", "planted", "start", "train"]
