"""The second paper: gradient descent on multi-head attention, with its guarantees computed and checked."""

from headway.training.data import Labelled, labelled, mixture, planted
from headway.training.run import Trained, leave_one_out, train
from headway.training.starts import start

__all__ = ["Labelled", "Trained", "labelled", "leave_one_out", "mixture", "planted", "start", "train"]
