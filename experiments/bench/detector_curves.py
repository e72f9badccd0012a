"""The stability figure's four curves, rebuilt from its description.

Not measured data: the published figure (MERT, stability of 24-layer acoustic masked language models, loss on
codebook 0 in bits) describes three curves that fall from about 9.5 and one, Post-Norm DeepNorm with clip 1, that falls
to 5.9, jumps to 9.2 at 20 000 steps and needs 10 000 steps to come back to 5.7. The shapes between those points and
the noise are ours.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

JUMP, BACK, STEPS = 20_000, 30_000, 100_000
NOISES = (0.02, 0.05, 0.2, 0.4)  # bits
INTERVALS = (1, 100)  # steps per logged row
CURVES = {  # name -> (start, end, steps to fall by 1/e)
    "pre-norm, clip 10": (9.6, 5.3, 6_000.0),
    "pre-norm, clip 1": (9.5, 5.2, 7_000.0),
    "post-norm DeepNorm, clip 1": (9.5, 5.3, 5_000.0),
    "pre-norm, relaxed attention, clip 1": (9.5, 5.1, 8_000.0),
}
SPIKED = "post-norm DeepNorm, clip 1"

FloatN = npt.NDArray[np.float64]


def curve(name: str) -> FloatN:
    """Return one curve without noise: bits on codebook 0 per step, shape [STEPS]."""
    step = np.arange(STEPS, dtype=np.float64)
    start, end, fall = CURVES[name]
    if name != SPIKED:
        return end + (start - end) * np.exp(-step / fall)
    before = 5.9 + (start - 5.9) * np.exp(-step / 3_000.0)  # 5.9 at the jump
    recovery = 9.2 + (5.7 - 9.2) * (step - JUMP) / (BACK - JUMP)
    after = end + (5.7 - end) * np.exp(-(step - BACK) / 40_000.0)
    return np.where(step < JUMP, before, np.where(step < BACK, recovery, after))


def traces(noise: float, interval: int, seed: int = 0) -> Iterator[tuple[str, FloatN, FloatN]]:
    """Yield (name, steps, bits) for each curve, with white noise of `noise` bits, logged every `interval` steps."""
    draw = np.random.default_rng(seed)
    for name in CURVES:
        step = np.arange(0, STEPS, interval)
        yield name, step.astype(np.float64), curve(name)[step] + noise * draw.standard_normal(len(step))
