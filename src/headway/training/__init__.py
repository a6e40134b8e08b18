"""The second paper: gradient descent on multi-head attention, with its guarantees computed and checked.

A file for each result: constants.py (gradient and curvature of the loss; curvature.py measures it), convergence.py
(the training theorem), generalization.py (the generalization theorem), realizability.py (good starts), one_step.py
(the one on the token mixture). bounds.py sets both theorems side by side; afterwards.py is the bound in measured
quantities, ours; select.py is token selection, from the follow-up paper. What they are about: network.py (the
model), data.py, starts.py, descent.py. run.py is one run, grid.py many of them on any executor.
"""

from headway.training.data import Labelled, labelled, mixture, planted
from headway.training.generalization import leave_one_out
from headway.training.grid import Trial, sweep
from headway.training.run import Trained, train
from headway.training.starts import start

__all__ = ["Labelled", "Trained", "Trial", "labelled", "leave_one_out", "mixture", "planted", "start",
           "sweep", "train"]
