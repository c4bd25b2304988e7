"""Memory of the worst rank by kind, at the peak of each phase of a run."""

from __future__ import annotations

from enum import StrEnum


class Kind(StrEnum):
    """What memory is for."""

    PARAMETERS = "parameters"
    MASTERS = "fp32 masters"
    GRADIENTS = "gradients"
    MOMENTS = "moments"
    EMA = "weight average"
    GATHERED = "gathered parameters"
    BUCKETS = "buckets"
    ACTIVATIONS = "activations"
    INPUTS = "inputs"
    WEIGHTS_OF_OTHERS = "text encoder and VAE"
    CONTEXT = "CUDA context and libraries"
    FRAGMENTATION = "fragmentation"
    SAVE = "copy for a checkpoint"


class Phase(StrEnum):
    """Parts of a run that have peaks of their own."""

    ENCODE = "filling the cache"
    LOAD = "loading"
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "optimizer step"
    SAVE = "saving"
    SAMPLE = "sample pictures"
