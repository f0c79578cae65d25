"""The prefill fit: what computing prompt tokens takes, learned from steps that have ended.

    step = start + token * tokens + pair * pairs

`pairs` counts, for each token, the tokens before it: attention looks at all of them, so that long
prompts take more than their length. The fit is one of weighted least squares in which a step weighs
a little less than the next one, and counts by its relative error: short and long steps alike. No
part is negative. Adding a step takes constant time.

A step that is far off (the engine was stopped, another process ran) weighs little. Some in a row
that are off in one direction are an engine that has changed: what was before is forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass

KEPT = 0.98
"""The weight of a step compared with the next one: some fifty of them count."""
STEPS_MIN = 4
"""Fewer steps tell nothing: the first ones compile, or fill caches."""
SOLVED_EVERY = 2
"""Solving takes longer than adding, and one step changes little."""
FAR = 3.0
"""The multiple of the usual error from which on a step is far off."""
CHANGED = 0.15
"""… if it is this share of the step at least."""
CHANGED_AFTER = 5
"""Steps in a row, far off in one direction, after which what was before is forgotten."""
FORGOTTEN = 1e-6
"""The factor by which steps from before a change are weighed: little even where later steps are a
hundred times longer."""
ERROR_FIRST = 0.3
ERROR_LEAST = 0.02
"""The least error of a step, as a part of it: any two steps differ by so much."""
ERROR_KEPT = 0.9
TOKENS_UNIT = 1_024.0
PAIRS_UNIT = TOKENS_UNIT * TOKENS_UNIT
"""The unit of pairs, which keeps all sums of one size."""
START_RIDGE = 3e-4
PAIR_RIDGE = 3e-4
"""Steps that are all alike do not tell the parts apart: then all of it is put on tokens."""


@dataclass(frozen=True, slots=True)
class Coefficients:
    """The parts of a step, in µs; none is negative."""

    start_us: float
    token_us: float
    pair_us: float

    def us(self, tokens: float, pairs: float) -> float:
        """Return what a step takes."""
        return self.start_us + self.token_us * tokens + self.pair_us * pairs


@dataclass(slots=True)
class PrefillFit:
    """Decaying sums over the steps; `s` start, `t` tokens, `p` pairs, `y` time in µs."""

    steps: int = 0
    ss: float = 0.0
    st: float = 0.0
    sp: float = 0.0
    tt: float = 0.0
    tp: float = 0.0
    pp: float = 0.0
    sy: float = 0.0
    ty: float = 0.0
    py: float = 0.0
    error: float = ERROR_FIRST
    """The usual error of late, as a share of a step."""
    off: int = 0
    """Steps in a row that were far off: positive where slower, negative where faster."""
    known: Coefficients | None = None
    """The coefficients of the last step or the one before."""

    def add(self, tokens: float, pairs: float, took_us: float) -> None:
        """Add a step that has ended."""
        assert tokens > 0, f"a step of {tokens} tokens"
        assert pairs >= 0, f"a step of {pairs} pairs"
        assert took_us > 0, f"a step of {took_us} µs"
        known = self.known
        weight = (
            1 / (took_us * took_us)
            if known is None
            else self._weight(took_us, max(known.us(tokens, pairs), 1.0))
        )
        t, p = tokens / TOKENS_UNIT, pairs / PAIRS_UNIT
        wt, wp, wy = weight * t, weight * p, weight * took_us
        self.ss = self.ss * KEPT + weight
        self.st = self.st * KEPT + wt
        self.sp = self.sp * KEPT + wp
        self.tt = self.tt * KEPT + wt * t
        self.tp = self.tp * KEPT + wt * p
        self.pp = self.pp * KEPT + wp * p
        self.sy = self.sy * KEPT + wy
        self.ty = self.ty * KEPT + wy * t
        self.py = self.py * KEPT + wy * p
        self.steps += 1
        if self.steps % SOLVED_EVERY == 0 and self.steps >= STEPS_MIN:
            self.known = self._solved()

    def _weight(self, took_us: float, expected_us: float) -> float:
        """Return the weight of a step, and learn the usual error of the expectation.
        A step that is far off weighs less, unless the engine has changed."""
        error = (took_us - expected_us) / expected_us
        size, far = abs(error), FAR * self.error
        self.error = max(ERROR_LEAST, self.error * ERROR_KEPT + min(size, far) * (1 - ERROR_KEPT))
        if size <= max(far, CHANGED):
            self.off = 0
        else:
            way = 1 if error > 0 else -1
            self.off = self.off + way if self.off * way >= 0 else way
            if abs(self.off) >= CHANGED_AFTER:
                self._forget()
                return 1 / (took_us * took_us)
        return min(1.0, far / size if size else 1.0) / (expected_us * expected_us)

    def _forget(self) -> None:
        """Forget nearly all that was before this step: the engine has changed."""
        for name in ("ss", "st", "sp", "tt", "tp", "pp", "sy", "ty", "py"):
            setattr(self, name, getattr(self, name) * FORGOTTEN)
        self.error, self.off = ERROR_FIRST, 0

    def _solved(self) -> Coefficients:
        """Return the non-negative parts that fit best: all three, else those that are left when
        one that would be negative is taken away. Tokens are never taken away."""
        ss, tt, pp = self.ss * (1 + START_RIDGE), self.tt, self.pp * (1 + PAIR_RIDGE)
        st, sp, tp, sy, ty, py = self.st, self.sp, self.tp, self.sy, self.ty, self.py
        a, b, c = tt * pp - tp * tp, sp * tp - st * pp, st * tp - sp * tt
        determinant = ss * a + st * b + sp * c
        if determinant > 0:
            start = (sy * a + ty * b + py * c) / determinant
            token = (sy * b + ty * (ss * pp - sp * sp) + py * (sp * st - ss * tp)) / determinant
            pair = (sy * c + ty * (sp * st - ss * tp) + py * (ss * tt - st * st)) / determinant
            if start >= 0 and token >= 0 and pair >= 0:
                return Coefficients(start, token / TOKENS_UNIT, pair / PAIRS_UNIT)
        best, explained = Coefficients(0.0, ty / tt / TOKENS_UNIT, 0.0), ty * ty / tt
        determinant = ss * tt - st * st
        if determinant > 0:
            start, token = (sy * tt - ty * st) / determinant, (ty * ss - sy * st) / determinant
            if start >= 0 and token >= 0 and start * sy + token * ty > explained:
                explained = start * sy + token * ty
                best = Coefficients(start, token / TOKENS_UNIT, 0.0)
        determinant = tt * pp - tp * tp
        if determinant > 0:
            token, pair = (ty * pp - py * tp) / determinant, (py * tt - ty * tp) / determinant
            if token >= 0 and pair >= 0 and token * ty + pair * py > explained:
                best = Coefficients(0.0, token / TOKENS_UNIT, pair / PAIRS_UNIT)
        return best
