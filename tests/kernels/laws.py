"""Does a sample follow a law?"""

from scipy import stats
from torch import Tensor


def chi_square(samples: Tensor, law: Tensor) -> float:
    """p-value of samples of 0 .. law.numel() - 1 under the law; 0 if one is impossible."""
    law = law.flatten().double()
    observed, possible = samples.bincount(minlength=law.numel()), law > 0
    if bool(observed[~possible].any()):
        return 0.0
    expected = law[possible] / law.sum() * len(samples)
    return float(stats.chisquare(observed[possible].double(), expected).pvalue)
