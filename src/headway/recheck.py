"""``python -m headway.recheck RUN FRESH …``: the held-out claims of a certificate once more, by other code.

Reads RUN/layer.safetensors, RUN/certificate.json, RUN/counted.safetensors and the shards of the folders FRESH, in
the order in which ``headway certify`` was given them, with numpy and nothing of Headway. It computes

    F(X, Z)_a = Σ_i g_ia ⊙ (Σ_b P_i(a, b) v_b) O_i + c,   e = ‖Y − F‖_F/√(entries)

sequence by sequence in float64, and with every number a bound on what rounding may have done to it, whatever the
order in which sums were taken (running error analysis: Higham, Accuracy and Stability of Numerical Algorithms,
3.3). The program that made the certificate rounds no worse, so its errors must agree to twice the bound; the
quantile must be the same order statistic, and the verdicts the same words. Terms of second order in eps are covered
by a factor of 2.

Rechecked: the layer's SHA-256, every error, the quantile claim, the mean of clipped errors. Not rechecked: whether
the learner had seen the sequences, and the mean where a bound on the teacher was given. Exit 0: all agrees; 1:
something does not; 2: it cannot be rechecked, in a sentence.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

Array = np.ndarray
EPS = float(np.finfo(np.float64).eps)
SAFE = 2.0  # for second orders, and for libraries whose exp, tanh and cos are a few units off in the last place
CHUNK = 1 << 22  # numbers in the patterns of the sequences computed at a time
FIRST, CLIP = 16, 5.0
SHARES = [1.0, 15 / 16, 7 / 8, 3 / 4, 1 / 2] + [0.5**k for k in range(2, 13)]
MONEY = [0.6, 0.08, 0.07, 0.06, 0.05] + [0.14 / 11] * 11


class RefusedError(Exception):
    """What cannot be rechecked, in a sentence."""


# -- numbers with what rounding may have done to them -----------------------------------------------------------


class Known:
    """Numbers and bounds on how far off they are."""

    def __init__(self, value: Array, off: Array | float = 0.0) -> None:
        self.value, self.off = value, np.broadcast_to(np.asarray(off, np.float64), value.shape)

    def __matmul__(self, other: Known) -> Known:
        a, b = np.abs(self.value), np.abs(other.value)
        terms = self.value.shape[-1]
        off = a @ other.off + self.off @ (b + other.off) + (terms + 1) * EPS * (a @ b)
        return Known(self.value @ other.value, off)

    def __add__(self, other: Known) -> Known:
        value = self.value + other.value
        return Known(value, self.off + other.off + EPS * np.abs(value))

    def __mul__(self, other: Known) -> Known:
        value = self.value * other.value
        off = np.abs(self.value) * other.off + self.off * (np.abs(other.value) + other.off)
        return Known(value, off + EPS * np.abs(value))

    def __neg__(self) -> Known:
        return Known(-self.value, self.off)

    def __getitem__(self, at: Any) -> Known:
        return Known(self.value[at], self.off[at])

    def smooth(self, value: Array) -> Known:
        """f of these numbers, for an f whose slope is at most 1."""
        return Known(value, self.off + 8 * EPS * np.abs(value))


def affine(X: Known, A: Array) -> Known:
    """A_iᵀ[x; 1]: (n, k, d) and (m, d + 1, q) to (n, m, k, q)."""
    return X[:, None] @ Known(A[:, :-1]) + Known(A[:, -1:])


def normed(x: Known, gain: Array, eps: float) -> Known:
    """gain ⊙ x/rms(x), rms² = mean(x²) + eps."""
    size = x.value.shape[-1]
    rms = np.sqrt((x.value**2).mean(-1, keepdims=True) + eps)
    moved = np.sqrt((x.off**2).mean(-1, keepdims=True)) + (size + 8) * EPS * rms
    if bool((moved > 0.1 * rms).any()):
        raise RefusedError("queries or keys are too short for their norms to be told from rounding")
    value = gain * x.value / rms
    return Known(value, 1.3 * (np.abs(gain) * x.off / rms + np.abs(value) * moved / rms) + 8 * EPS * np.abs(value))


def turned(x: Known, places: Array, rotary: dict[str, Any]) -> Known:
    """Planes of x (n, m, k, q) turned by place × ω_j, ω_j = base^(−2j/turned) unless given."""
    size = x.value.shape[-1]
    if rotary["frequencies"] is None:
        planes = (rotary["turned"] or size) // 2
        logs = -np.arange(planes) / planes * math.log(rotary["base"])
        omega, rough = np.exp(logs), 4 * EPS * (1 + np.abs(logs))
    else:
        omega = np.array(rotary["frequencies"], np.float64)
        planes, rough = len(omega), np.zeros(len(omega))
    angles = places[..., None] * omega if omega.ndim == 1 else places @ omega.T
    bulk = np.abs(places)[..., None] * np.abs(omega) if omega.ndim == 1 else np.abs(places) @ np.abs(omega).T
    off = (bulk * (rough + 4 * EPS) + 4 * EPS)[:, None]
    cos, sin = Known(np.cos(angles)[:, None], off), Known(np.sin(angles)[:, None], off)
    half = rotary["layout"] == "half"
    one, two = (x[..., :planes], x[..., planes : 2 * planes]) if half else (
        x[..., 0 : 2 * planes : 2], x[..., 1 : 2 * planes : 2])
    first, second = one * cos + -(two * sin), one * sin + two * cos
    value, bound = x.value.copy(), x.off.copy()
    spots = (slice(planes), slice(planes, 2 * planes)) if half else (
        slice(0, 2 * planes, 2), slice(1, 2 * planes, 2))
    for spot, part in zip(spots, (first, second), strict=True):
        value[..., spot], bound[..., spot] = part.value, part.off
    return Known(value, bound)


def softmax(S: Known, see: Array, sink: Array | None) -> Known:
    """Over the keys in sight: a change of at most s in the scores changes a pattern by a factor of at most
    e^(2s)."""
    S = Known(np.where(see, S.value, -np.inf), np.where(see, S.off, 0.0))
    top = S.value.max(-1, keepdims=True)
    if sink is not None:
        top = np.maximum(top, sink[:, None, None])
    raised = np.exp(S.value - top)
    total = raised.sum(-1, keepdims=True) + (0.0 if sink is None else np.exp(sink[:, None, None] - top))
    P = raised / total
    # exp turns what is subtracted, which may be large, into a relative error.
    lost = np.where(see, EPS * np.abs(S.value - top), 0.0)
    worst = 2 * (S.off + lost).max(-1, keepdims=True) + (S.value.shape[-1] + 16) * EPS
    return Known(P, P * np.expm1(worst))


# -- the layer --------------------------------------------------------------------------------------------------


class Layer:
    """What layer.safetensors holds, of either kind, as factors: plain matrices have keys and values of their
    own."""

    scores = "softmax"

    def __init__(self, path: Path) -> None:
        tensors, words = read(path)
        self.parts = {name: value.astype(np.float64) for name, value in tensors.items()}
        self.plain = words.get("kind") in ("headway-layer-1", "headway-linear-1")
        if words.get("kind") == "headway-linear-1":
            self.scores = str(words.get("scores"))
        if self.scores not in ("softmax", "linear", "linear/k"):
            raise RefusedError(f"{self.scores} scores are a kind this program does not know")
        sight = {"causal": words.get("mask") == "causal", "window": None, "prefix": 0}
        self.form: dict[str, Any] = {"sight": sight}
        self.cross = False
        if not self.plain:
            if words.get("kind") != "headway-factored-1":
                raise RefusedError(f"{path} is no layer that headway wrote")
            self.form, self.cross = json.loads(words["form"]), json.loads(words["cross"])
        strange = sorted(set(self.form) - {"sight", "rotary", "offsets", "cap", "sink", "normed", "gate"})
        if strange:
            raise RefusedError(f"scores with {strange[0]} are a form this program does not know")
        self.heads = len(self.parts["Theta" if self.plain else "query"])

    def rows(self, data: dict[str, Array]) -> Known:
        """F(X, Z), (n, k, e), for sequences with what they have beside X."""
        part, form = self.parts, self.form
        X = Known(data["X"])
        Z = Known(data["keys"]) if self.cross else X
        if self.plain:
            Q = X[:, None] @ Known(part["Theta"])
            Q = Q + Known(part["key_bias"][:, None]) if "key_bias" in part else Q
            K = V = Known(np.repeat(X.value[:, None], self.heads, 1))
            out = part["W"]
        else:
            share = self.heads // len(part["key"])
            Q, K, V = affine(X, part["query"]), affine(Z, part["key"]), affine(Z, part["value"])
            out = part["out"]
            if "normed" in form:
                Q = normed(Q, part["norm_query"], form["normed"]["eps"])
                K = normed(K, part["norm_key"], form["normed"]["eps"])
            K, V = (Known(np.repeat(F.value, share, 1), np.repeat(F.off, share, 1)) for F in (K, V))
        here = self._places(data, "positions", X.value)
        there = self._places(data, "key_positions", Z.value) if self.cross else here
        if "rotary" in form:
            Q, K = turned(Q, here, form["rotary"]), turned(K, there, form["rotary"])
        S = Q @ Known(np.swapaxes(K.value, 2, 3), np.swapaxes(K.off, 2, 3))
        if "offsets" in form:
            S = S + self._offsets(there[:, None, :] - here[:, :, None])
        if "cap" in form:
            cap = form["cap"]["value"]
            S = S.smooth(cap * np.tanh(S.value / cap))
        see = self._sight(data, X.value, Z.value)
        if self.scores == "softmax":
            P = softmax(S, see, part.get("sink") if "sink" in form else None)
        else:
            weight = see / see.sum(3, keepdims=True) if self.scores == "linear/k" else see.astype(np.float64)
            P = S * Known(weight, EPS * weight)
        H = P @ V
        if "gate" in form:
            G = affine(X, part["gate"])
            H = H * G.smooth(1.0 / (1.0 + np.exp(-G.value)))
        n, m, k, p = H.value.shape
        flat = Known(*(np.swapaxes(a, 1, 2).reshape(n, k, m * p) for a in (H.value, H.off)))
        Y = flat @ Known(out.reshape(m * p, -1))
        return Y + Known(part["offset"]) if "offset" in part else Y

    def _places(self, data: dict[str, Array], name: str, X: Array) -> Array:
        """(n, k) or (n, k, c)."""
        n, k = X.shape[:2]
        if name in data:
            return data[name]
        own = self.parts.get("positions") if name == "positions" else None
        places = np.arange(k, dtype=np.float64) if own is None else own[:k]
        return np.broadcast_to(places, (n, *places.shape))

    def _offsets(self, delta: Array) -> Known:
        """What is added for Δ = b − a, (n, m, k, l)."""
        given = self.form["offsets"]
        if given.get("kind") == "slope":
            return Known(self.parts["slope"][:, None, None]) * Known(delta[:, None])
        table, whole, both, far = self.parts["offsets"], np.rint(delta).astype(int), given["both"], given["far"]
        if given["kind"] == "clipped":
            bucket = np.clip(whole, -far, far) + far if both else np.clip(-whole, 0, far)
        else:
            side = table.shape[1] // 2 if both else table.shape[1]
            away = np.abs(whole) if both else np.maximum(-whole, 0)
            exact = side // 2
            wide = np.log(np.maximum(away, 1) / exact) / math.log(far / exact) * (side - exact)
            wide = exact + np.floor(wide + 1e-9).clip(0).astype(int)  # a whole power may come out a hair too small
            bucket = np.where(away < exact, away, np.minimum(wide, side - 1)) + side * (both & (whole > 0))
        return Known(np.moveaxis(table[:, bucket], 0, 1))

    def _sight(self, data: dict[str, Array], X: Array, Z: Array) -> Array:
        """Which key is seen, (n, 1, k, l)."""
        sight, (n, k), length = self.form["sight"], X.shape[:2], Z.shape[1]
        back = np.arange(k)[:, None] - np.arange(length)
        see = np.ones((k, length), bool)
        if sight["causal"]:
            see = (back >= 0) | (np.arange(length) < sight["prefix"])
        if sight["window"] is not None:
            see = see & ((back if sight["causal"] else np.abs(back)) < sight["window"])
        see = np.broadcast_to(see, (n, k, length))
        hidden = data.get("key_padding" if self.cross else "padding")
        if hidden is not None:
            see = see & ~hidden[:, None, :]
            if not self.cross:  # a filled query sees itself
                see = see | (np.eye(k, dtype=bool) & hidden[:, :, None])
        return see[:, None]


# -- files ------------------------------------------------------------------------------------------------------


def read(path: Path) -> tuple[dict[str, Array], dict[str, str]]:
    try:
        with safe_open(path, framework="np") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError, TypeError, AttributeError) as error:
        raise RefusedError(f"{path} cannot be read by numpy ({error}); bfloat16 is one thing it has no type for"
                           ) from None


def stated(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RefusedError(f"{path} cannot be read ({error}): headway certify RUN --examples FRESH writes it"
                           ) from None


def sequences(folder: Path) -> Iterator[dict[str, Array]]:
    """Every shard of a folder."""
    found = sorted(p for p in folder.glob("examples-*.safetensors") if re.search(r"-\d{5}-of-\d{5}\.", p.name))
    if not found or len(found) != int(found[0].name[-17:-12]):
        raise RefusedError(f"{folder} has {len(found)} shards like examples-00000-of-00001.safetensors, not all")
    for path in found:
        tensors, _ = read(path)
        yield {name: value.astype(bool if name.endswith("padding") else np.float64)
               for name, value in tensors.items()}


def measured(layer: Layer, folders: list[Path]) -> tuple[Array, Array, float, int]:
    """Every error and what rounding may have done to it; the deviation of the first labels, and of how many."""
    each: list[Array] = []
    off: list[Array] = []
    first: list[Array] = []
    count = 0
    for j, folder in enumerate(folders):
        for shard in sequences(folder):
            n, k = shard["X"].shape[:2]
            size = max(1, CHUNK // (layer.heads * k * shard.get("keys", shard["X"]).shape[1]))
            keep = ~shard["padding"] if "padding" in shard else np.ones((n, k), bool)
            if j == 0 and count < FIRST:
                first += [shard["Y"][i][keep[i]] for i in range(min(n, FIRST - count))]
                count += min(n, FIRST - count)
            for low in range(0, n, size):
                part = {name: value[low : low + size] for name, value in shard.items()}
                rows, real = layer.rows(part), keep[low : low + size, :, None]
                wrong = (rows.value - part["Y"]) * real
                entries = real.sum((1, 2)) * wrong.shape[2]
                error = np.sqrt((wrong**2).sum((1, 2)) / entries)
                moved = np.sqrt((((rows.off + EPS * np.abs(wrong)) * real) ** 2).sum((1, 2)) / entries)
                each.append(error)
                off.append(SAFE * (moved + (wrong[0].size + 4) * EPS * error))
    Y = np.concatenate(first)
    deviation = float(np.sqrt(((Y - Y.mean(0)) ** 2).mean()))
    return np.concatenate(each), np.concatenate(off), max(deviation, 1e-150), count


# -- the claims -------------------------------------------------------------------------------------------------


def won(z: Array, m: float) -> float:
    """ln of what the bets against a mean of m or more have made of one unit, by the z in [0, 1]."""
    with np.errstate(divide="ignore"):
        logs = [np.log(((1 - m) + c * (m - z)) / (1 - m) if c < 1 else (1 - z) / (1 - m)).sum() for c in SHARES]
    return float(np.logaddexp.reduce(np.array(logs) + np.log(MONEY)))


def counted(above: int, n: int, m: float) -> float:
    """``won`` where ``above`` of n are 1 and the others 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        lost = np.where(above > 0, above * np.log(1 - np.array(SHARES)), 0.0)
    logs = lost + (n - above) * np.log1p(np.array(SHARES) * m / (1 - m))
    return float(np.logaddexp.reduce(logs + np.log(MONEY)))


def most(n: int, share: float, goal: float) -> int:
    """The largest count of n with which the bets against ``share`` or more are won; −1 if there is none."""
    low, high = -1, n + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if counted(middle, n, share) >= goal else (low, middle)
    return low


def bound(z: Array, goal: float) -> float:
    """The least mean against which the bets are won."""
    low, high = float(z.mean()), 1 - EPS
    if low >= high or won(z, high) < goal:
        return 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if won(z, middle) >= goal else (middle, high)
    return high


def verdict(upper: float, lower: float, goal: float) -> str:
    return "yes" if upper <= goal else "no" if lower > goal else "undecided"


def quantile(e: Array, goal: float, settings: dict[str, Any], stake: float) -> tuple[str, float, int | None]:
    """The verdict, the error that bounds the quantile, and how many are smaller."""
    n, f = len(e), settings["fraction"]
    ordered = np.sort(e)
    few, many = most(n, f, stake), most(n, 1 - f, stake)
    missing = max(0, round(settings["outliers"] * n) - int((e > goal).sum()))
    place = None if few < missing else n - 1 - few + missing
    upper = math.inf if place is None else float(ordered[place])
    lower = 0.0 if many < 0 else float(ordered[many])
    return ("undecided" if few < 0 else verdict(upper, lower, goal)), upper, place


def mean(e: Array, first: int, goal: float, settings: dict[str, Any], stake: float) -> tuple[str, float, None]:
    """The verdict, and the bound on the root mean square of min(e, b)."""
    later, b = e[first:], CLIP * goal
    if not len(later):
        return "undecided", math.inf, None
    z = np.minimum(later / b, 1.0) ** 2
    missing = max(0, round(settings["outliers"] * len(later)) - int((later > b).sum()))
    upper = bound(np.concatenate([np.sort(z)[missing:], np.ones(missing)]), stake)
    root = b * math.sqrt(upper)
    return verdict(root, b * math.sqrt(1 - bound(1 - z, stake)), goal), root, None


def recheck(run: Path, folders: list[Path]) -> dict[str, Any]:
    """What was found, and ``differs``: a sentence for whatever does not agree."""
    said, differs = stated(run / "certificate.json"), []
    settings, claims = said["settings"], {claim["name"]: claim for claim in said["claims"]}
    if not {"counted", "outliers"} <= set(settings):
        raise RefusedError(f"{run / 'certificate.json'} is of an older headway: certify again")
    if hashlib.sha256((run / "layer.safetensors").read_bytes()).hexdigest() != said["layer_sha256"]:
        differs.append("the layer is not the one certified (SHA-256)")
    e, off, deviation, first = measured(Layer(run / "layer.safetensors"), folders)
    kept = read(run / "counted.safetensors")[0]["errors"]
    if len(e) != settings["counted"] or len(e) != len(kept):
        raise RefusedError(f"{len(e)} sequences are given and {settings['counted']} were counted: give the same "
                           "folders, in the same order")
    apart = np.abs(e - kept) / np.maximum(2 * off, 1e-300)
    if not bool((apart <= 1).all()):
        differs.append(f"the error of sequence {int(apart.argmax())} is {e[apart.argmax()]!r}, not "
                       f"{kept[apart.argmax()]!r}")
    stake = -math.log1p(-said["confidence"])
    found: dict[str, Any] = {"sequences": len(e), "largest_error": float(e.max()), "rounding": float(off.max()),
                             "apart": float(apart.max())}
    own: dict[str, tuple[str, float, int | None]] = {
        "held-out quantile": quantile(e, settings["tolerance"] * deviation, settings, stake)}
    if "min(error" in claims["held-out mean"]["statement"]:
        own["held-out mean"] = mean(e, first, settings["mean_tolerance"] * deviation, settings, stake)
    for name, (holds, upper, place) in own.items():
        theirs = claims[name]["numbers"].get("bound", math.inf)
        found[name] = {"holds": holds, "bound": upper if upper < math.inf else None}
        slack = 2 * float(off.max()) + 1e-8 * upper * (name == "held-out mean")
        if holds != claims[name]["holds"]:
            differs.append(f"{name} is {holds}, not {claims[name]['holds']}")
        if place is not None and np.sort(kept)[place] != theirs:
            differs.append(f"the bound of {name} is not the {place + 1}-th smallest of the errors counted")
        elif upper != theirs and not abs(upper - theirs) <= slack:
            differs.append(f"the bound of {name} is {upper!r}, not {theirs!r}")
    return {**found, "differs": differs}


def main(words: list[str] | None = None) -> int:
    reader = argparse.ArgumentParser("python -m headway.recheck", description="Recompute the held-out claims of a "
                                     "run's certificate with numpy alone. Exit 0: they agree; 1: they do not.")
    reader.add_argument("run", type=Path, metavar="RUN", help="a run folder with a certificate")
    reader.add_argument("fresh", type=Path, metavar="FRESH", nargs="+", help="the folders it was certified with")
    reader.add_argument("--json", action="store_true", help="one line of JSON on stdout")
    given = reader.parse_args(words)
    try:
        found = recheck(given.run, given.fresh)
    except (RefusedError, OSError) as wrong:
        sys.stderr.write(f"headway.recheck: {wrong}.\n")
        return 2
    except (LookupError, TypeError, ValueError, AttributeError) as wrong:
        sys.stderr.write(f"headway.recheck: these files are not as headway writes them ({wrong!r}).\n")
        return 2
    if given.json:
        sys.stdout.write(json.dumps(found) + "\n")
    told = "; ".join(f"{name}: {found[name]['holds']}" for name in ("held-out quantile", "held-out mean")
                     if name in found)
    sys.stderr.write(f"{found['sequences']} errors computed again with numpy, the largest "
                     f"{found['largest_error']:.3e}, each known to {found['rounding']:.1e} or better; those "
                     f"counted are apart by at most {found['apart']:.2g} of what rounding allows. {told}.\n")
    sys.stderr.write("".join(f"It does not agree: {one}.\n" for one in found["differs"])
                     or "The certificate agrees.\n")
    return 1 if found["differs"] else 0


if __name__ == "__main__":
    sys.exit(main())
