"""Recommendations and sweeps as nested dicts: bytes, seconds, FLOP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qwen_edit_zero.planning.advice.recommend import Recommendation, arguments_of
from qwen_edit_zero.planning.advice.sweep import Row
from qwen_edit_zero.planning.as_json import as_json, sample_json
from qwen_edit_zero.planning.jobs.wish import Wish


def recommendation_json(wish: Wish, found: Recommendation) -> dict[str, Any]:
    """What `recommendation_text` says; the plan of each is that of `as_json`."""
    return {
        "cluster": wish.gpus.name,
        "sample": sample_json(wish.sample) | {"from": wish.sample_is_from},
        "best": [
            {
                "family": option.family.name,
                "why": list(option.why),
                "arguments": arguments_of(wish, option),
                "plan": as_json(option.plan),
            }
            for option in found.best
        ],
        "others": list(found.others),
    }


def sweep_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The points in order; `plan` is None where there is none, for the reason `why`."""
    return [
        {"point": dict(row.point), "plan": None if row.plan is None else as_json(row.plan), "why": row.why or None}
        for row in rows
    ]
