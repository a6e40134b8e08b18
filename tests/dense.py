"""Slow, obvious twins of the fast paths: plain loops over sequences, heads, queries and keys, in float64."""

import cmath
import itertools
import math

import torch

from headway.certificates import betting


def in_sight(a, b, mask, padded):
    """Whether query a may see key b; ``padded[b]`` says that b is filling. A filled query sees itself."""
    if mask == "causal" and b > a:
        return False
    return not padded[b] or a == b


def capital(z, m):
    """What bets against "the mean is m or more" have made of one unit of money: a loop over shares and examples."""
    return sum(money * math.prod(1 + share * (m - float(value)) / (1 - m) for value in z)
               for share, money in zip(betting.SHARES, betting.MONEY, strict=True))


def flags(X, padding):
    n, k, _ = X.shape
    return [[False] * k for _ in range(n)] if padding is None else padding.tolist()


def patterns(X, Theta, key_bias=None, mask="none", padding=None):
    """P[s][i][a][b], as nested lists of scalars (differentiable in Theta and key_bias)."""
    n, k, d = X.shape
    padded = flags(X, padding)
    P = []
    for s in range(n):
        heads = []
        for i in range(Theta.shape[0]):
            rows = []
            for a in range(k):
                weights = []
                for b in range(k):
                    score = torch.zeros((), dtype=torch.float64)
                    for p in range(d):
                        for q in range(d):
                            score = score + X[s, a, p] * Theta[i, p, q] * X[s, b, q]
                    if key_bias is not None:
                        for q in range(d):
                            score = score + key_bias[i, q] * X[s, b, q]
                    seen = in_sight(a, b, mask, padded[s])
                    weights.append(torch.exp(score) if seen else torch.zeros_like(score))
                total = sum(weights)
                rows.append([w / total for w in weights])
            heads.append(rows)
        P.append(heads)
    return P


def stack(nested):
    """Nested lists of scalars to one tensor."""
    return torch.stack([stack(item) if isinstance(item, list) else item for item in nested])


def forward(X, Theta, W, key_bias=None, offset=None, mask="none", padding=None):
    n, k, d = X.shape
    m, _, e = W.shape
    P = patterns(X, Theta, key_bias, mask, padding)
    Y = []
    for s in range(n):
        for a in range(k):
            row = torch.zeros(e, dtype=torch.float64)
            for i in range(m):
                for b in range(k):
                    for q in range(d):
                        row = row + P[s][i][a][b] * X[s, b, q] * W[i, q]
            Y.append(row if offset is None else row + offset)
    return torch.stack(Y).view(n, k, e)


def linear(X, Theta, W, offset=None, mask="none", padding=None, divided=False):
    """F without a softmax: y_a = Σ_i Σ_b (x_aᵀΘ_i x_b) W_iᵀx_b + c over the keys in sight, or over their number."""
    n, k, _ = X.shape
    m, _, e = W.shape
    padded = flags(X, padding)
    Y = []
    for s in range(n):
        for a in range(k):
            keys = [b for b in range(k) if in_sight(a, b, mask, padded[s])]
            row = torch.zeros(e, dtype=torch.float64)
            for i in range(m):
                for b in keys:
                    row = row + (X[s, a] @ Theta[i] @ X[s, b]) * (X[s, b] @ W[i])
            row = row / len(keys) if divided else row
            Y.append(row if offset is None else row + offset)
    return torch.stack(Y).view(n, k, e)


def operator(Theta, W):
    """Z̃[p, q, r, s] = Σ_i (Θ_i[p, q] W_i[r, s] + Θ_i[p, r] W_i[q, s])/2, number by number."""
    m, d, _ = Theta.shape
    Z = torch.zeros(d, d, d, W.shape[2], dtype=torch.float64)
    for p, q, r, s, i in itertools.product(range(d), range(d), range(d), range(W.shape[2]), range(m)):
        Z[p, q, r, s] += (Theta[i, p, q] * W[i, r, s] + Theta[i, p, r] * W[i, q, s]) / 2
    return Z


def jacobian(X, Theta, W, key_bias=None, offset=None, mask="none", padding=None):
    """dF/d(part) for each part the layer has, as a dict of matrices (n·k·e, entries of the part)."""
    parts = {"Theta": Theta, "W": W, "key_bias": key_bias, "offset": offset}
    parts = {name: value for name, value in parts.items() if value is not None}

    def outputs(*values):
        return forward(X, mask=mask, padding=padding, **dict(zip(parts, values, strict=True))).flatten()

    blocks = torch.autograd.functional.jacobian(outputs, tuple(parts.values()))
    return {name: J.reshape(J.shape[0], -1) for name, J in zip(parts, blocks, strict=True)}


def jvp(J, directions):
    """Σ over parts of J_part v_part, flat (n·k·e)."""
    return sum(J[name] @ directions[name].flatten() for name in J)


def vjp(J, U):
    """J_partᵀ U for each part, flat."""
    return {name: J[name].T @ U.flatten() for name in J}


def covariance(P, X):
    """C[s][i][a] = Σ_b p_b (x_b − h)(x_b − h)ᵀ with h = Σ_b p_b x_b; P is (n, m, k, k)."""
    n, m, k, _ = P.shape
    d = X.shape[2]
    C = torch.zeros(n, m, k, d, d, dtype=torch.float64)
    for s in range(n):
        for i in range(m):
            for a in range(k):
                h = sum(P[s, i, a, b] * X[s, b] for b in range(k))
                for b in range(k):
                    C[s, i, a] += P[s, i, a, b] * torch.outer(X[s, b] - h, X[s, b] - h)
    return C


def uniform_response(X, T, mask="none", padding=None):
    """h_T(a) = mean over keys in sight of (x_b − x̄)(x_b − x̄)ᵀ Tᵀ x̃_a; T is (d, d), or (d + 1, d)."""
    n, k, d = X.shape
    padded = flags(X, padding)
    h = torch.zeros(n, k, d, dtype=torch.float64)
    for s in range(n):
        for a in range(k):
            keys = [X[s, b] for b in range(k) if in_sight(a, b, mask, padded[s])]
            mean = sum(keys) / len(keys)
            query = X[s, a] if T.shape[0] == d else torch.cat([X[s, a], torch.ones(1, dtype=torch.float64)])
            for x in keys:
                h[s, a] += (x - mean) * torch.dot(x - mean, T.T @ query) / len(keys)
    return h


def on_simplex(Z, y):
    """min over q in the simplex of ‖y − qᵀZ‖ for one row: every support in turn, the feasible best of them."""
    k = len(Z)
    best, found = float("inf"), None
    for size in range(1, k + 1):
        for support in itertools.combinations(range(k), size):
            base = Z[support[0]]
            D = torch.stack([Z[b] - base for b in support[1:]]) if size > 1 else Z.new_zeros(0, Z.shape[1])
            c = torch.linalg.lstsq(D.T, y - base).solution if size > 1 else Z.new_zeros(0)
            weights = [1.0 - float(c.sum()), *c.tolist()]
            if min(weights) < 0:
                continue
            q = Z.new_zeros(k)
            for b, weight in zip(support, weights, strict=True):
                q[b] = weight
            if float((y - q @ Z).norm()) < best:
                best, found = float((y - q @ Z).norm()), q
    return found, best


def layer(X, Theta, W, offset, see=None):
    """Σ_i softmax(X̃Θ_iXᵀ) X W_i + c with the key bias as last row of Θ_i, all at once and differentiable."""
    queries = torch.cat([X, torch.ones_like(X[..., :1])], dim=2)
    S = torch.einsum("nap,mpq,nbq->nmab", queries, Theta, X)
    if see is not None:
        S = S.masked_fill(~see.unsqueeze(1), float("-inf"))
    return torch.einsum("nmab,nbd,mde->nae", torch.softmax(S, dim=3), X, W) + offset


def flat_directions(X, heads, offset, see=None, valid=None):
    """For each head the dimension of what the null space of the Jacobian moves of it: of Θ_i, and of the columns of
    W_i away from those it has where W_i = V_iO_i is of low rank.

    ``heads`` holds (Θ, W), (A, B, W) or (A, B, V, O), each with the heads first. A change of factors that leaves
    Θ_i and W_i as they are moves nothing and is not counted.
    """

    def outputs(*values):
        Theta = values[0] if len(heads) == 2 else values[0] @ values[1].mT
        W = values[2] @ values[3] if len(heads) == 4 else values[len(heads) - 1]
        Y = layer(X, Theta, W, values[-1], see)
        return (Y if valid is None else Y * valid).flatten()

    parts = (*heads, offset)
    sizes = [part.numel() for part in parts]
    blocks = torch.autograd.functional.jacobian(outputs, parts, vectorize=True)
    J = torch.cat([block.reshape(len(block), -1) for block in blocks], dim=1)
    _, s, Vh = torch.linalg.svd(J, full_matrices=J.shape[0] < J.shape[1])
    rank = int((s > 1e-8 * s[0]).sum())
    moved = [[] for _ in heads[0]]
    for v in Vh[rank:]:
        change = [piece.view_as(part) for piece, part in zip(v.split(sizes), parts, strict=True)]
        for i, found in enumerate(moved):
            if len(heads) == 2:
                found.append(change[0][i].flatten())
                continue
            dTheta = change[0][i] @ heads[1][i].T + heads[0][i] @ change[1][i].T
            away = torch.zeros(0, dtype=v.dtype)
            if len(heads) == 4:
                Q = torch.linalg.qr(heads[2][i])[0]
                away = (change[2][i] - Q @ (Q.T @ change[2][i])) @ heads[3][i]
            found.append(torch.cat([dTheta.flatten(), away.flatten()]))
    return tuple(int((torch.linalg.svdvals(torch.stack(found)) > 1e-4).sum()) if found else 0 for found in moved)


# Forms of scores, one number at a time. Every number may be complex, so that derivatives come from a step along i.


def t5_bucket(delta, buckets, both, far):
    """T5's bucket of Δ = b − a in whole numbers: ⌊log(r/e)/log(far/e)·s⌋ ≥ t says r^s e^t ≥ far^t e^s."""
    side = buckets // 2 if both else buckets
    start = side if both and delta > 0 else 0
    away = abs(delta) if both else max(-delta, 0)
    exact = side // 2
    if away < exact:
        return start + away
    steps, t = side - exact, 0
    while t + 1 < steps and away**steps * exact ** (t + 1) >= far ** (t + 1) * exact**steps:
        t += 1
    return start + exact + t


def clipped_bucket(delta, buckets, both):
    if both:
        reach = (buckets - 1) // 2
        return max(-reach, min(reach, delta)) + reach
    return max(0, min(buckets - 1, -delta))


def seen(a, b, sight):
    """Whether key b is in sight of query a, padding aside."""
    if not sight.causal:
        return sight.window is None or abs(a - b) < sight.window
    return (b <= a or b < sight.prefix) and (sight.window is None or a - b < sight.window)


def turned(x, position, rotary):
    """x with every plane turned, as complex numbers: (x_one + i x_two)·exp(iθ) where x is real."""
    x = list(x)
    count = rotary.turned or (len(x) if rotary.frequencies is None else 2 * len(rotary.frequencies))
    for j in range(count // 2):
        one, two = (j, j + count // 2) if rotary.layout == "half" else (2 * j, 2 * j + 1)
        if rotary.frequencies is None:
            angle = position * rotary.base ** (-2 * j / count)
        elif rotary.frequencies.ndim == 1:
            angle = position * float(rotary.frequencies[j])
        else:
            angle = sum(float(w) * float(p) for w, p in zip(rotary.frequencies[j], position, strict=True))
        c, s = cmath.cos(angle).real, cmath.sin(angle).real
        x[one], x[two] = c * x[one] - s * x[two], s * x[one] + c * x[two]
    return x


def rows(x, A):
    """Aᵀ[x; 1] as a list of numbers; A has one row more than x has entries."""
    return [sum(x[r] * A[r][j] for r in range(len(x))) + A[len(x)][j] for j in range(len(A[0]))]


def root_mean_square(x, gain, eps):
    size = (sum(v * v for v in x) / len(x) + eps) ** 0.5
    return [g * v / size for g, v in zip(gain, x, strict=True)]


def formed(X, Z, t, form, padding=None, key_padding=None, positions=None, key_positions=None):
    """F(X, Z) and patterns of a form, (n, k, e) and (n, m, k, l), by loops over queries, keys, heads and planes.

    t: the layer's tensors by name; form: its parts, of which only settings are read.
    """
    cross, Z = Z is not None, X if Z is None else Z
    t = {name: value.tolist() for name, value in t.items()}
    m, g = len(t["query"]), len(t["key"])
    vectors = form.rotary is not None and form.rotary.frequencies is not None and form.rotary.frequencies.ndim == 2

    def place(given, s, a):
        if given is None:
            return a
        each = given.ndim == (3 if vectors else 2)
        found = given[s][a] if each else given[a]
        return found.tolist() if vectors else float(found)

    Y, P = [], []
    for s, (queries, keys) in enumerate(zip(X.tolist(), Z.tolist(), strict=True)):
        hidden = [False] * len(keys)
        if not cross and padding is not None:
            hidden = padding[s].tolist()
        if cross and key_padding is not None:
            hidden = key_padding[s].tolist()
        outputs = [list(t["offset"]) if "offset" in t else [0.0] * len(t["out"][0][0]) for _ in queries]
        patterns = []
        for i in range(m):
            j = i // (m // g)
            grid = []
            for a, x in enumerate(queries):
                q = rows(x, t["query"][i])
                here = place(positions, s, a)
                weights, values = [], []
                for b, z in enumerate(keys):
                    there = place(key_positions if cross else positions, s, b)
                    k = rows(z, t["key"][j])
                    left, right = q, k
                    if form.normed is not None:
                        left = root_mean_square(left, t["norm_query"], form.normed.eps)
                        right = root_mean_square(right, t["norm_key"], form.normed.eps)
                    if form.rotary is not None:
                        left, right = turned(left, here, form.rotary), turned(right, there, form.rotary)
                    score = sum(u * v for u, v in zip(left, right, strict=True))
                    if "slope" in t:
                        score = score + t["slope"][i] * (there - here)
                    if "offsets" in t:
                        count, delta = len(t["offsets"][i]), round(there - here)
                        table = form.offsets
                        bucket = (t5_bucket(delta, count, table.both, table.far) if table.kind == "t5"
                                  else clipped_bucket(delta, count, table.both))
                        score = score + t["offsets"][i][bucket]
                    if form.cap is not None:
                        score = form.cap.value * cmath.tanh(score / form.cap.value)
                    filled = not cross and padding is not None and bool(padding[s][a])
                    visible = (seen(a, b, form.sight) and not hidden[b]) or (filled and a == b)
                    weights.append(cmath.exp(score) if visible else 0.0)
                    values.append(rows(z, t["value"][j]))
                total = sum(weights) + (cmath.exp(t["sink"][i]) if "sink" in t else 0.0)
                grid.append([w / total for w in weights])
                head = [sum(p * v[c] for p, v in zip(grid[-1], values, strict=True)) for c in range(len(values[0]))]
                if "gate" in t:
                    gates = rows(x, t["gate"][i])
                    head = [h / (1 + cmath.exp(-u)) for h, u in zip(head, gates, strict=True)]
                for e in range(len(outputs[a])):
                    outputs[a][e] = outputs[a][e] + sum(h * t["out"][i][c][e] for c, h in enumerate(head))
            patterns.append(grid)
        Y.append(outputs)
        P.append(patterns)
    return torch.tensor(Y, dtype=torch.complex128), torch.tensor(P, dtype=torch.complex128)



def tangent_step(J, r, basis, left, right):
    """The least-squares step of r in (Θ, B) where left⁻¹ Θ_i right_i⁻¹ moves in the span of ``basis``."""
    m, rows, d = len(right), len(left), right.shape[2]
    size = m * rows * d
    ways = [left @ column.view(m, rows, d) @ right for column in basis.T]
    K = torch.cat([torch.stack([J[:, :size] @ way.flatten() for way in ways], dim=1), J[:, size:]], dim=1)
    U, s, Vh = torch.linalg.svd(K, full_matrices=False)
    live = s > 1e-10 * s[0]
    solution = Vh[live].T @ ((U[:, live].T @ r) / s[live])
    Theta = sum(a * way for a, way in zip(solution[: len(ways)], ways, strict=True))
    return Theta, solution[len(ways) :]


def answer_on_a_line(layer, b, delta, t):
    """F at x_j = b + t_jδ, row by row: Σ_i (mean of t under weights exp(t_jℓ_i)) W_iᵀδ + (ΣW_i)ᵀb + c."""
    rows = []
    for t_a in t.tolist():
        row = layer.W.sum(0).T @ b + layer.offset
        for Theta, u, W in zip(layer.Theta, layer.key_bias, layer.W, strict=True):
            logit = float((b + t_a * delta) @ Theta @ delta + u @ delta)
            weights = [math.exp(t_j * logit) for t_j in t.tolist()]
            mean = sum(w * t_j for w, t_j in zip(weights, t.tolist(), strict=True)) / sum(weights)
            row = row + mean * (W.T @ delta)
        rows.append(row)
    return torch.stack(rows)
