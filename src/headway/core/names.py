"""Words people choose from, listed where nothing heavy is loaded: the command line shows them before any torch."""

from __future__ import annotations

BASELINES = ("adam", "descent", "lbfgs")  # learners told the head count, which use all their seconds
METHODS = ("auto", "moments", "factors", "starts", "sculpt", *BASELINES)  # of learn()
SCORES = ("softmax", "linear", "linear/k")  # of a layer; those of learn(form=...) are the last two
LINEAR = SCORES[1:]
SEARCHES = ("gauss-newton", "net")  # of method="sculpt"
# Parts of a form, as learn --form takes them.
FORMS = ("factors", "rotary", "slope", "table", "t5", "cap", "sink", "normed", "gated", "causal", "window")
STARTS = ("zero", "signs", "balanced", "gaussian")  # of train()
RULES = ("constant", "normalized", "polyak")
SECRETS = ("parity", "rounding")  # of headway hard, with the families
FAMILIES: tuple[str, ...] = ("equal", "cancelling", "weak", "quiet", "rank-one", "saturated", "crowded")
SUITES: tuple[str, ...] = ("zoo", "floor", "dials", "heads", "parity")
LEARNERS: tuple[str, ...] = ("moments", "starts", "sculpt", "adam", "lbfgs")
