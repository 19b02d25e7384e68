"""How many blocks the running requests will come to want, from how long answers have been. Host side, numpy, no torch.

The length of one answer is anybody's guess, but the sum over hundreds is not. With S(a), the share of answers that are still
going on after a tokens, a running request of age a is alive t steps from now with p = S(a + t) / S(a): then it has taken t
tokens more, else it has given back all that it held alone. Mean and variance over the running set follow, and

    wanted = max over t of  mean(t) + SIGMAS * deviation(t),  and no less than SIGMAS * deviation(the first t)

S is estimated by the product of what survives each age (Kaplan and Meier 1958), in which a running request counts as one
that has lasted so far: else the first answers to end, the short ones, would speak for all. PRIOR answers of full length
make a young estimate a careful one. Ages are counted in blocks, back from the limit: a request that may still take `left`
blocks has the age num_ages - left, so that none is expected to take more than it can.
"""

from __future__ import annotations

import numpy as np

SIGMAS = 3.0
PRIOR = 16


class MemoryForecast:
    """Counts how far answers were from their limit when they ended; `running` and `candidate` forecast in blocks."""

    def __init__(self, max_tokens: int, block_size: int) -> None:
        self.num_ages = -(-max_tokens // block_size)
        self.ended = np.zeros(self.num_ages + 1, np.int64)  # answers by age at their end
        self._new = self._seen = 0  # answers since the last estimate, and in it
        steps = np.unique(np.geomspace(1, self.num_ages, 24).astype(np.int64))
        age = np.arange(self.num_ages + 1)
        self._later = np.minimum(age + steps[:, None], self.num_ages + 1)  # [H, ages] age at each time ahead
        self._growth = np.minimum(steps[:, None], self.num_ages - age).astype(np.float64)  # [H, ages] blocks taken by then
        self._estimate(np.zeros(0, np.int64))

    def end(self, left: int) -> None:
        """An answer has ended that could have taken so many blocks more."""
        self.ended[self.num_ages - left] += 1
        self._new += 1

    def _estimate(self, ages: np.ndarray) -> None:
        """ages: of the running requests, in blocks."""
        lasting = np.bincount(ages, minlength=self.num_ages + 1)
        # those who reached each age's end or ended in it; a running one is not counted for the age that it is in
        at_risk = (self.ended + lasting)[::-1].cumsum()[::-1] - lasting
        survival = np.ones(self.num_ages + 2)
        survival[1:-1] = np.cumprod(1 - self.ended[:-1] / (at_risk[:-1] + PRIOR))
        survival[-1] = 0  # past the limit
        self._alive = survival[self._later] / survival[: self.num_ages + 1]
        self._seen, self._new = self._seen + self._new, 0

    def running(self, left: np.ndarray, private_blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(mean, variance) [H] of the blocks that these requests will hold more than now, at H times ahead.

        left: [R] blocks that each may still take; private_blocks: [R] blocks that nobody else holds.
        """
        ages = self.num_ages - left
        if self._new * 16 > self._seen:
            self._estimate(ages)
        count, held, square = (
            np.bincount(ages, weights, self.num_ages + 1) for weights in (None, private_blocks, private_blocks**2.0)
        )
        alive, growth = self._alive, self._growth
        mean = (alive * (count * growth + held)).sum(1) - held.sum()
        variance = (alive * (1 - alive) * (square + 2 * growth * held + count * growth**2)).sum(1)
        return mean, variance

    def candidate(self, left: int, private_blocks: int, num_samples: int) -> tuple[np.ndarray, np.ndarray]:
        """The same for samples that are not in yet, beyond the blocks that they enter with."""
        age = self.num_ages - left
        alive, held = self._alive[:, age], self._growth[:, age] + private_blocks
        return num_samples * (alive * held - private_blocks), num_samples * alive * (1 - alive) * held**2


def wanted(mean: np.ndarray, variance: np.ndarray) -> int:
    """Blocks to keep free for a forecast."""
    noise = SIGMAS * np.sqrt(variance)
    return int(np.ceil(max(noise[0], (mean + noise).max())))
