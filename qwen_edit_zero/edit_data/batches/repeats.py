"""How often samples come in an epoch: balance between categories, and weights that mean repetition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from qwen_edit_zero.edit_data.wording import nearest, shown
from qwen_edit_zero.errors import DataError

Balance = Literal["none", "sqrt", "uniform"] | Mapping[str, float]
_WEIGHT_STEPS = 256  # a weight that is repeated counts to within 1 / 512 of itself: few different ones are left


@dataclass(frozen=True)
class Repeats:
    """Groups of samples that come equally often.

    Attributes:
        groups: (n,) int32; the group of each sample.
        categories: (groups,) the category of each group.
        rates: (groups,) float64 over 0; how often a sample of the group comes in an epoch, on average over epochs.
    """

    groups: npt.NDArray[np.int32]
    categories: npt.NDArray[np.int64]
    rates: npt.NDArray[np.float64]


def repeats(
    category_codes: npt.NDArray[np.int32],
    categories: Sequence[str],
    *,
    balance: Balance = "none",
    weights: npt.NDArray[np.float32] | None = None,
) -> Repeats | None:
    """How often each sample comes; None if each comes once an epoch, which needs no groups.

    With W_c the number of a category's samples, or the sum of their weights if weights are given, a category gets this
    share of an epoch's draws: W_c ("none"), sqrt(W_c) ("sqrt"), 1 ("uniform"), or f_c W_c where a mapping gives f_c (1
    for categories that it does not name), divided by the sum over categories. Inside of a category the share is divided
    evenly, or in proportion to the weights. Rates are scaled so that an epoch has as many draws as there are samples.

    Args:
        category_codes: (n,) category of each sample, as index in `categories`.
        categories: names; "" is that of samples without one.
        weights: (n,) over 0, if `data.weights` is "repeat". They are rounded to 8 significant bits.

    Raises:
        DataError: a mapping names a category that no sample has.
    """
    present = np.bincount(category_codes, minlength=len(categories))
    if isinstance(balance, Mapping):
        _check_names(balance, [name for name, count in zip(categories, present, strict=True) if count])
    if weights is None:
        if balance == "none":
            return None
        groups, of_group = category_codes, np.arange(len(categories))
        weight_of_group, members = np.ones(len(categories)), present
    else:
        values, which = np.unique(_rounded(weights), return_inverse=True)
        codes, groups = np.unique(category_codes.astype(np.int64) * len(values) + which, return_inverse=True)
        of_group, weight_of_group, members = codes // len(values), values[codes % len(values)], np.bincount(groups)
        groups = groups.astype(np.int32)
    total = np.bincount(of_group, weight_of_group * members, len(categories)).astype(np.float64)  # W_c
    share = _shares(balance, categories, total)
    with np.errstate(divide="ignore", invalid="ignore"):  # of categories without samples, which nobody looks at
        rates = share[of_group] * len(category_codes) / total[of_group] * weight_of_group
    rates = np.where(members > 0, rates, 1.0)
    return None if np.allclose(rates, 1.0, rtol=0.0, atol=1e-9) else Repeats(groups, of_group, rates)


def _shares(balance: Balance, categories: Sequence[str], total: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    if isinstance(balance, Mapping):
        share = total * [balance.get(name, 1.0) for name in categories]
    else:
        share = {"none": total, "sqrt": np.sqrt(total), "uniform": (total > 0).astype(np.float64)}[balance]
    scaled: npt.NDArray[np.float64] = share / share.sum()
    return scaled


def _check_names(balance: Mapping[str, float], present: Sequence[str]) -> None:
    unknown = [name for name in balance if name not in present]
    if not unknown:
        return
    known = ", ".join(shown(name) if name else '"" (samples without a category)' for name in present)
    near = nearest(unknown[0], present)
    raise DataError(
        f"data.balance names the category {shown(unknown[0])}, but no sample of the training set has it"
        f"{f'; did you mean {shown(near)}?' if near else ''}. Categories there: {known}"
    )


def _rounded(weights: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    fraction, exponent = np.frexp(weights.astype(np.float64))
    rounded: npt.NDArray[np.float64] = np.ldexp(np.round(fraction * _WEIGHT_STEPS) / _WEIGHT_STEPS, exponent)
    return rounded
