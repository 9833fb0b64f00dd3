"""Lengths that drift or jump, seen over a while, as they would be now.

A short window knows lengths of now from few requests; a long one knows them well, but as they were
half a window ago. So a long window's lengths are fitted with a straight line over time, and each
length is scaled along it to now. A slope that chance explains counts as none, which leaves steady
traffic its full window and no noise from the fit. Where one jump between two levels explains the
window clearly better than any line, what was before the jump is left out.

The line is of lengths, not of their logarithms: with caches, many increments are next to nothing,
and their share moves the mean of logarithms without moving the work.
"""

from __future__ import annotations

import numpy as np

from workloads.lengths import FloatArray

#: Parts of a window whose means say how much lengths that come together are alike.
_STRETCHES = 16
#: Of the window's mean: a line is not followed below.
_LEAST_LEVEL = 0.1


def as_of(
    now_s: float, times_s: FloatArray, tokens: FloatArray, least_s: float, significance: float
) -> FloatArray:
    """What the last of `tokens` (n,), seen at `times_s` (n,) ascending, would be at `now_s`.

    They are scaled along the line through them if its slope is at least `significance` standard
    errors; none becomes longer than the longest of them. After a jump that explains more than a
    line by twice `significance`, squared, of the variance of one length, only those since then
    count, or of the last `least_s` where that is more; these are taken as they are.
    """
    if not len(tokens) or now_s - float(times_s[0]) <= least_s:
        return tokens
    recent = tokens[int(np.searchsorted(times_s, now_s - least_s)) :]
    ages_s = times_s - now_s
    offsets = ages_s - ages_s.mean()
    spread = float(offsets @ offsets)
    mean = float(tokens.mean())
    if len(tokens) < 3 or spread <= 0.0 or mean <= 0.0:
        return recent
    about = tokens / mean - 1.0
    slope = float(offsets @ about) / spread
    by_line = slope * slope * spread
    n = len(tokens)
    before = np.arange(1, n)
    by_jump = np.cumsum(about)[:-1] ** 2 * n / (before * (n - before))
    jump = int(np.argmax(by_jump))
    total = float(about @ about)
    if by_jump[jump] > by_line:
        levels = float(about[: jump + 1].mean()), float(about[jump + 1 :].mean())
        unexplained = about - np.repeat(levels, (jump + 1, n - jump - 1))
    else:
        unexplained = about - slope * offsets
    variance = _clumped_variance(unexplained)
    if by_jump[jump] - by_line > (2 * significance) ** 2 * variance + 1e-9 * total:
        since = tokens[jump + 1 :]
        return since if len(since) > len(recent) else recent
    if by_line < significance**2 * variance or by_line <= 0.0:
        return tokens
    # The line at the mean age is 1; where it runs out of the window's lengths it says nothing.
    now = max(_LEAST_LEVEL, 1.0 - slope * float(ages_s.mean()))
    then = np.maximum(_LEAST_LEVEL, now + slope * ages_s)
    moved: FloatArray = np.minimum(tokens * now / then, tokens.max())
    return moved


def _clumped_variance(unexplained: FloatArray) -> float:
    """Variance of one of n independent lengths whose mean is as uncertain as that of these (n,).

    Lengths that come together are alike (a document's questions, a session's turns), so the means
    of stretches scatter more than as many independent lengths would make them.
    """
    n = len(unexplained)
    variance = float(unexplained @ unexplained) / n
    if n < 2 * _STRETCHES:
        return variance
    edges = np.linspace(0, n, _STRETCHES, endpoint=False).astype(int)
    sums = np.add.reduceat(unexplained, edges)
    # Two numbers were fitted.
    return max(variance, float(sums @ sums) / n * _STRETCHES / (_STRETCHES - 2))
