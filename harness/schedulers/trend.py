"""Lengths that drift or jump, seen over a while, as they would be now.

A short window knows lengths of now from few requests; a long one knows them well, but as they were
half a window ago. So the logarithms of a long window's lengths are fitted with a straight line over
time, and each length is moved along it to now. A slope that chance explains counts as none, which
leaves steady traffic its full window and no noise from the fit. Where one jump between two levels
explains the window clearly better than any line, what was before the jump is left out.
"""

from __future__ import annotations

import numpy as np

from workloads.lengths import FloatArray


def as_of(
    now_s: float, times_s: FloatArray, tokens: FloatArray, least_s: float, significance: float
) -> FloatArray:
    """What the last of `tokens` (n,), seen at `times_s` (n,) ascending, would be at `now_s`.

    They are moved along the line through their logarithms if its slope is at least `significance`
    standard errors; none becomes longer than the longest of them. After a jump that explains more
    than a line by twice `significance`, squared, of the variance of one length, only those since
    then count, or of the last `least_s` where that is more; these are taken as they are.
    """
    if not len(tokens) or now_s - float(times_s[0]) <= least_s:
        return tokens
    recent = tokens[int(np.searchsorted(times_s, now_s - least_s)) :]
    ages_s = times_s - now_s
    offsets = ages_s - ages_s.mean()
    spread = float(offsets @ offsets)
    logs = np.log(np.maximum(tokens, 1.0))
    about = logs - logs.mean()
    if len(tokens) < 3 or spread <= 0.0:
        return recent
    slope = float(offsets @ about) / spread
    by_line = slope * slope * spread
    n = len(tokens)
    before = np.arange(1, n)
    by_jump = np.cumsum(about)[:-1] ** 2 * n / (before * (n - before))
    jump = int(np.argmax(by_jump))
    total = float(about @ about)
    variance = max(0.0, total - max(by_line, float(by_jump[jump]))) / n
    if by_jump[jump] - by_line > (2 * significance) ** 2 * variance + 1e-9 * total:
        since = tokens[jump + 1 :]
        return since if len(since) > len(recent) else recent
    if by_line < significance**2 * variance or by_line <= 0.0:
        return tokens
    moved: FloatArray = np.minimum(tokens * np.exp(-slope * ages_s), tokens.max())
    return moved
